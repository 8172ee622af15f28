"""The order of requests: deadlines, tenants, light requests among heavy ones."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from apportion.service.engine.entry import Entry
from apportion.service.engine.schedule import Schedule
from apportion.service.workers import plan_pack


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def entry(name: str, due: float = 0.0, tenant: str = "a", job: str = "job") -> Entry:
    return Entry(name.encode(), plan_pack, b"", job.encode(), 4, tenant, due, 0.0)


def order(schedule: Schedule, seconds: float = 0.0) -> str:
    """Names in the order in which one worker takes them."""
    names = ""
    while (first := schedule.next([])) is not None:
        names += first.key.decode()
        schedule.record_time(first, seconds)
    return names


def test_the_nearest_deadline_comes_first(clock: Clock) -> None:
    schedule = Schedule(1, clock)
    for name, due in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        schedule.add(entry(name, due))
    assert len(schedule) == 3
    assert order(schedule) == "abc"
    assert len(schedule) == 0


def test_a_deadline_follows_the_steps_of_the_job(clock: Clock) -> None:
    schedule = Schedule(1, clock)
    assert schedule.due(b"slow", 2) == schedule.due(b"fast", 2) == 102.0  # no history yet
    for _ in range(40):
        clock.now += 0.2
        schedule.due(b"fast", 0)
    for _ in range(40):
        clock.now += 20.0
        schedule.due(b"slow", 0)
    assert schedule.due(b"slow", 2) - clock.now == pytest.approx(40.0, rel=0.1)
    assert schedule.due(b"fast", 2) - clock.now == pytest.approx(0.4, rel=0.3)  # also after a long pause


def test_tenants_share_worker_time_regardless_of_their_number_of_requests(clock: Clock) -> None:
    schedule = Schedule(1, clock)
    for number in range(50):
        schedule.add(entry("m", number, "many"))
    for number in range(5):
        schedule.add(entry("f", 1000.0 + number, "few"))
    assert order(schedule, 1.0)[:10].count("f") == 5


def test_a_tenant_without_waiting_requests_has_an_even_share_too(clock: Clock) -> None:
    schedule = Schedule(1, clock)
    schedule.add(entry("m", tenant="many"))
    assert schedule.share("few") == (0, 0, 1 / 2)
    assert schedule.share("many") == (1, 0, 1.0)


def test_past_worker_time_of_a_tenant_is_forgotten(clock: Clock) -> None:
    schedule = Schedule(1, clock)
    schedule.record_time(entry("x", tenant="a"), 100.0)
    clock.now += 3600.0
    schedule.record_time(entry("x", tenant="b"), 1.0)
    schedule.add(entry("b", 0.0, "b"))
    schedule.add(entry("a", 5.0, "a"))
    assert order(schedule) == "ab"


def test_one_lane_is_reserved_for_light_requests(clock: Clock) -> None:
    schedule = Schedule(1, clock)
    heavy, light = entry("h", 0.0, job="heavy"), entry("l", 9.0, job="light")
    schedule.record_time(heavy, 30.0)
    schedule.record_time(light, 0.01)
    for each in (heavy, entry("H", 1.0, job="heavy"), light):
        schedule.add(each)
    assert schedule.next([]) is heavy
    assert schedule.next([heavy]) is light
    assert schedule.next([heavy]) is None
    assert schedule.next([heavy, light]) is None
    assert schedule.next([]).key == b"H"


def test_a_new_job_gets_only_one_lane(clock: Clock) -> None:
    schedule = Schedule(1, clock)
    first, second = entry("n", 0.0, job="new"), entry("N", 1.0, job="new")
    other = entry("o", 9.0, job="other")
    for each in (first, second, other):
        schedule.add(each)
    assert schedule.next([]) is first
    assert schedule.next([first]) is other
    schedule.record_time(first, 0.01)
    assert schedule.next([other]) is second
