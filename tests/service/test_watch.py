"""The server's page, the states that it reads, and reports of iterations, on a real server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from apportion.ir.bytes.job import encode_request
from apportion.service.engine import PlanSource
from apportion.service.errors import ConflictError, LimitError, OverloadError
from apportion.service.http.watch import events
from apportion.service.http.watch.reports import AT_ONCE, WAITING, Reports
from apportion.service.limits import Limits
from apportion.service.store.memory import MemoryStore
from tests.service.engines import JOB, LocalPool, batch
from tests.service.servers import ADMIN, KEY, Caller, Live, begin, live, make_job, ready, submit, until

REPORT = "/v1/jobs/run/epochs/1/iterations/{}/report"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as found:
        make_job(found.caller)
        begin(found.caller)
        for number in (0, 1):
            submit(found.caller, number)
            ready(found.caller, number)
        yield found


class Watcher:
    """A client of `/watch`."""

    def __init__(self, server: Live, key: str | None = ADMIN) -> None:
        self.socket = server.connect()
        self.file = self.socket.makefile("rb")
        sent = f"authorization: Bearer {key}\r\n" if key else ""
        self.socket.sendall(f"GET /watch HTTP/1.1\r\nhost: localhost\r\n{sent}\r\n".encode())
        self.status = int(self.file.readline().split()[1])
        while self.file.readline() != b"\r\n":
            pass
        self.lines = self._lines()

    def _lines(self) -> Iterator[str]:
        """Of the body, out of its chunks."""
        while size := int(self.file.readline(), 16):
            yield from self.file.read(size).decode().splitlines()
            self.file.readline()

    def states(self) -> Iterator[dict[str, Any]]:
        return (json.loads(line[6:]) for line in self.lines if line.startswith('data: {"version'))

    def close(self) -> None:
        self.file.close()
        self.socket.close()


def state(server: Live) -> dict[str, Any]:
    with closing(Watcher(server)) as watcher:
        return next(watcher.states())


def test_states_tell_where_each_stream_is(server: Live) -> None:
    found = state(server)
    (job,) = found["jobs"]
    (stream,) = job["streams"]
    assert (job["name"], job["recipe"], job["ranks"], job["lookahead"]) == ("run", "fcp", 2, 8)
    assert (stream["stream"], stream["epoch"], stream["front"], stream["ahead"]) == ("train", 1, 2, 0)
    assert (stream["first"], stream["states"][:2]) == (0, "rr")
    assert set(stream["states"][2:]) == {"."}
    assert found["state"] == "ready"
    assert found["workers"] == {"size": 1, "alive": 1, "restarts": 0, "at_workers": 0, "busy": []}
    assert found["planned"] == sum(found["planning"]["counts"]) == 2
    assert found["store"]["packs"] == 2
    assert found["failures"] == []


def test_states_follow_what_happens_and_end_with_the_server() -> None:
    pool = LocalPool(held=True)
    with live(pool) as server:
        make_job(server.caller)
        begin(server.caller)
        with closing(Watcher(server)) as watcher:
            states = watcher.states()
            assert next(states)["jobs"][0]["streams"][0]["states"] == "........"
            submit(server.caller, 0, number=3)
            until(lambda: server.engine.snapshot().at_workers == 1)
            busy = next(found for found in states if found["workers"]["busy"])
            assert {**busy["workers"]["busy"][0], "since_s": 0} == {
                "job": "run", "epoch": 1, "iteration": 0, "since_s": 0,
            }  # fmt: skip
            assert busy["jobs"][0]["streams"][0]["states"][0] == "p"
            server.loop.call_soon_threadsafe(pool.open)
            assert next(f for f in states if f["planned"])["jobs"][0]["streams"][0]["ahead"] == 1
            server.stop()
            assert "event: end" in list(watcher.lines)


def test_a_batch_without_a_plan_is_told_with_its_reason_also_after_a_restart() -> None:
    store, told = MemoryStore(), []
    for _ in range(2):
        pool = LocalPool()
        pool.deadly.add(5)
        with live(pool, store=store) as server:
            make_job(server.caller)
            begin(server.caller)
            submit(server.caller, 0, number=5)
            until(lambda server=server: bool(server.engine.failures))
            told.append(state(server))
    for found in told:
        (failure,) = found["failures"]
        assert (failure["job"], failure["iteration"], failure["type"]) == ("run", 0, "quarantined")
        assert failure["detail"]
        assert found["jobs"][0]["streams"][0]["states"][0] == "x"


def test_the_admin_key_alone_opens_states(server: Live) -> None:
    for key in (None, KEY, "another-key-0123456789"):
        with closing(Watcher(server, key)) as watcher:
            assert watcher.status == 401


def test_without_keys_a_server_trusts_its_machine_and_no_page_on_it() -> None:
    with live(admin=None) as server:
        near = Caller(server.url)
        make_job(near)
        begin(near)
        submit(near, 0)
        ready(near, 0)
        assert near("GET", REPORT.format(0)).status == 200
        for path in (REPORT.format(0), "/watch"):
            assert near("GET", path, host="evil.example").status == 401
        assert near.using("another-key-0123456789")("GET", REPORT.format(0)).status == 401


def test_so_many_pages_watch_and_one_that_is_closed_makes_room(server: Live) -> None:
    watchers = [Watcher(server) for _ in range(events.MOST)]
    assert {watcher.status for watcher in watchers} == {200}
    until(lambda: server.caller("GET", "/watch").status == 503)
    watchers.pop().close()

    def opens() -> bool:
        with closing(Watcher(server)) as watcher:
            return watcher.status == 200

    until(opens)
    for watcher in watchers:
        watcher.close()


def test_a_page_that_takes_nothing_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_STALL_S", 0.5)
    monkeypatch.setattr(events, "_EVERY_S", 0.001)
    with live(send_buffer=4096, limits=Limits(drain_s=4.0)) as server:
        for number in range(20):
            make_job(server.caller, f"job{number}")
        before = len(server.server.server_state.connections)
        connection = server.connect()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        request = f"GET /watch HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ADMIN}\r\n\r\n"
        connection.sendall(request.encode())
        until(lambda: len(server.server.server_state.connections) > before)
        until(lambda: len(server.server.server_state.connections) == before)
        connection.close()


def test_the_page_loads_nothing_from_elsewhere(server: Live) -> None:
    answer = server.caller.using(None)("GET", "/")
    policy = answer.headers["content-security-policy"]
    assert answer.status == 200
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["referrer-policy"] == "no-referrer"
    text = answer.body.decode()
    assert len(answer.body) < 64_000
    for word in ("http://", "https://", "localStorage", "sessionStorage", "document.cookie", "innerHTML"):
        assert word not in text, word


def test_reports_are_pages_of_the_delivered_plans(server: Live) -> None:
    answer = server.caller.using(KEY)("GET", REPORT.format(0))
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    id = server.caller.using(KEY)("GET", "/v1/jobs/run/epochs/1/iterations/0").json["id"]
    assert b"microbatch 0" in answer.body
    assert len(id) == 64


@pytest.mark.parametrize(
    ("key", "iteration", "status"), [(None, 0, 401), ("another-key-0123456789", 0, 401), (KEY, 7, 404)]
)
def test_reports_that_there_are_not(server: Live, key: str | None, iteration: int, status: int) -> None:
    assert server.caller.using(key)("GET", REPORT.format(iteration)).status == status


def test_an_iteration_that_is_not_planned_has_no_report() -> None:
    with live(LocalPool(held=True)) as server:
        make_job(server.caller)
        begin(server.caller)
        submit(server.caller, 0, number=3)
        answer = server.caller.using(KEY)("GET", REPORT.format(0))
        assert (answer.status, answer.problem) == (409, "conflict")
        assert "not planned yet" in answer.json["detail"]


# ---------------------------------------------------------------------------------------------- the process


def source() -> PlanSource:
    """Of a small batch, with another plan's id."""
    return PlanSource("plan", encode_request(JOB, batch(3)), bytes(32))


def test_another_plan_than_the_one_that_ranks_have_is_not_shown() -> None:
    with pytest.raises(ConflictError, match="another release planned it"):
        asyncio.run(Reports().make(source()))


def test_a_report_that_takes_too_long_or_too_much_is_refused_and_its_process_ends() -> None:
    with pytest.raises(LimitError, match=r"more than 0\.05 s"):
        asyncio.run(Reports(deadline_s=0.05).make(source()))
    with pytest.raises(LimitError, match="could not be made"):
        asyncio.run(Reports(memory_bytes=64 << 20).make(source()))


def test_so_many_reports_wait_and_no_more() -> None:
    async def crowd() -> list[BaseException | bytes]:
        reports = Reports(deadline_s=0.2)
        asked = [reports.make(source()) for _ in range(AT_ONCE + WAITING + 2)]
        return await asyncio.gather(*asked, return_exceptions=True)

    found = asyncio.run(crowd())
    assert sum(isinstance(one, OverloadError) for one in found) == 2
    assert sum(isinstance(one, LimitError) for one in found) == AT_ONCE + WAITING
