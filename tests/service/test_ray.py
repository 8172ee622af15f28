"""The pool on a local Ray: the same results, loopback only, and what happens when parts of it are killed."""

import asyncio
import os
from pathlib import Path

import pytest

from apportion.ir.bytes.job import decode_request
from apportion.planner.iteration.jobs import plan_job
from apportion.service.workers import (
    ClosedError,
    DeadlineError,
    Done,
    LaunchError,
    PoisonedError,
    RefusedError,
    Supervisor,
    Task,
)
from apportion.service.workers.ray.pool import RayPool
from apportion.service.workers.ray.worker import work
from apportion.service.workers.tasks import encode, read_reply
from tests.service import ray_cases as cases
from tests.service.worker_cases import DEADLINE_S, launchers, plan_task, until

pytestmark = pytest.mark.slow  # starts Ray

#: 127.0.0.1, plain and within IPv6, as the kernel prints them
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}


def test_machines_join_and_leave() -> None:
    cases.joined(0)


def act(text: str) -> Task:
    return Task("plan", text.encode())


def test_what_it_does_on_ray(tmp_path: Path) -> None:
    """One start for all: it takes seconds."""
    asyncio.run(_what_it_does(tmp_path))


async def _what_it_does(folder: Path) -> None:
    pool = RayPool(2, address="local", runner="tests.service.worker_faults")
    await pool.start()
    try:
        supervisor = Supervisor(pool)
        await _results(supervisor)
        _loopback_only()
        await _failures(supervisor, folder)
    finally:
        await pool.close()
    with pytest.raises(ClosedError):
        await pool.run(plan_task(1), DEADLINE_S)
    assert launchers() == []


async def _results(supervisor: Supervisor) -> None:
    task = plan_task(1)
    planned = plan_job(*decode_request(task.payload))
    done = await supervisor.run(task, DEADLINE_S)
    assert done.bodies == tuple(planned.plan.slice_for(rank).encode() for rank in range(4))
    lowered = await supervisor.run(Task("lower", done.assignment), DEADLINE_S)
    assert lowered.bodies == done.bodies
    data = os.urandom(1 << 20) * 20
    assert (await supervisor.run(Task("plan", b"echo:" + data), DEADLINE_S)).bodies == (data,)
    with pytest.raises(RefusedError, match="not an Apportion iteration request"):
        await supervisor.run(act("nonsense"), DEADLINE_S)


def _loopback_only() -> None:
    pids = [pid for top in launchers() for pid in (top, *cases.descendants(top))]
    assert len(pids) >= 5
    found = cases.listening(pids)
    assert found
    assert found <= LOOPBACK


async def _failures(supervisor: Supervisor, folder: Path) -> None:
    note = folder / "pids"
    with pytest.raises(DeadlineError):
        await supervisor.run(act(f"spin:{note}"), 10.0)
    if note.exists():  # else Ray was still starting a process
        worker = int(note.read_text().split()[0])
        await until(lambda: not cases.alive(worker), "the worker is gone")
    assert (await supervisor.run(act(f"die once:{folder / 'died'}"), DEADLINE_S)).bodies == (b"alive",)
    with pytest.raises(PoisonedError):
        await supervisor.run(act("die:"), DEADLINE_S)
    echoes = await asyncio.gather(*(supervisor.run(act(f"echo:{i}"), DEADLINE_S) for i in range(10)))
    assert [each.bodies for each in echoes] == [(str(i).encode(),) for i in range(10)]


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_part_of_ray_loses_nothing(seed: int) -> None:
    cases.killed_ray(seed)


def test_a_cluster_that_is_not_there_is_an_error() -> None:
    pool = RayPool(1, address="127.0.0.1:1")
    with pytest.raises(LaunchError, match="ended before it was ready"):
        asyncio.run(pool.start())


def test_a_cluster_opens_to_its_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    asyncio.run(_opens_to_its_token(monkeypatch))


async def _opens_to_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)
    cluster = RayPool(1, address="local")
    await cluster.start()
    address = cases.head()
    guest, stranger = RayPool(address=address), RayPool(address=address)
    try:
        await guest.start()
        assert guest.size == 1
        assert (await guest.run(plan_task(1), DEADLINE_S)).bodies
        monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 64)
        with pytest.raises(LaunchError):
            await stranger.start()
    finally:
        for pool in (stranger, guest, cluster):
            await pool.close()


def test_a_worker_of_another_release_says_so() -> None:
    with pytest.raises(RefusedError, match="install one release everywhere") as caught:
        read_reply(work("0.0.0", "tests.service.worker_faults", b""))
    assert caught.value.field == "apportion"
    assert isinstance(read_reply(encode(Done((), None, b"", 0.0))), Done)
