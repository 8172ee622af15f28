"""Streams: every iteration once, in order, whatever happens to them; plans one by one where they keep failing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice, pairwise

import pytest

from apportion.service import protocol
from apportion.service.client import (
    BadAnswerError,
    ChangedPlanError,
    Client,
    Pace,
    PlanTimeoutError,
    ServiceProblem,
)
from apportion.service.frames import Kind, encode_frame
from tests.service.small_server import KEY, Fault, Handler, Request, SmallServer, bodies, small_server

HELD = bodies(12)
FAST = Pace(backoff_s=0.01, backoff_most_s=0.05, wait_s=0.2, poll_s=0.3, poll_most_s=0.6)


@pytest.fixture
def server() -> Iterator[SmallServer]:
    with small_server(HELD) as running:
        yield running


@pytest.fixture
def client(server: SmallServer) -> Iterator[Client]:
    with Client(server.job_url, KEY, pace=FAST) as made:
        yield made


def received(client: Client, count: int = len(HELD), **how: float) -> list[int]:
    """The iterations that a stream of rank 0 gives, each with the right plan."""
    with closing(client.stream(1, 0, **how)) as plans:
        found = list(islice(plans, count))
    for iteration, piece in found:
        assert piece.encode() == HELD[iteration][0]
    return [iteration for iteration, _ in found]


def plan_frame(iteration: int, of: int | None = None) -> bytes:
    return encode_frame(Kind.PLAN, iteration, HELD[iteration if of is None else of][0])


def problem_frame(iteration: int, status: int) -> bytes:
    data = {"type": "urn:apportion:problem:refused", "status": status, "detail": "no", "field": "batches[0]"}
    return encode_frame(Kind.PROBLEM, iteration, json.dumps(data).encode())


def giving(*frames: bytes, whole: bool = True) -> Fault:
    """A stream of just these."""

    def fault(_: Request, handler: Handler) -> bool:
        handler.start_stream()
        for frame in frames:
            handler.chunk(frame)
        if not whole:
            return handler.cut()
        handler.end_stream()
        return True

    return fault


def starts(server: SmallServer) -> list[int]:
    return [int(request.query["from"]) for request in server.requests if request.streams]


def asked(server: SmallServer) -> list[str]:
    return [request.path.rsplit("/", 1)[1] for request in server.requests]


@pytest.mark.parametrize("window", [1, 5, 12, 64])
def test_windows_follow_one_another(server: SmallServer, client: Client, window: int) -> None:
    assert received(client, window=window) == list(range(12))
    assert starts(server) == list(range(0, 12, window))
    assert len({request.port for request in server.requests}) == 1


def test_it_begins_where_it_is_told(server: SmallServer, client: Client) -> None:
    assert received(client, 4, start=7) == [7, 8, 9, 10]


def test_plans_come_as_they_get_ready(server: SmallServer, client: Client) -> None:
    server.publish(0)
    with closing(client.stream(1, 0)) as plans:
        for iteration in range(5):
            server.publish(iteration + 1)
            assert next(plans)[0] == iteration
    assert starts(server) == [0]


END = encode_frame(Kind.END, 3)
FRAME = plan_frame(2)


@pytest.mark.parametrize(
    "third",
    [
        giving(FRAME[:30], whole=False),
        giving(FRAME[:30], END),
        giving(FRAME[:-1], whole=False),
        giving(FRAME[:-1] + b"\0"),
        giving(b"<html>" * 20),
        giving(whole=False),
        giving(),
        giving(END),
        giving(plan_frame(3), END),
        giving(problem_frame(2, 503)),
        lambda _, handler: handler.reset(),
        lambda _, handler: handler.reply(200, b"<html>", "text/html") or True,
        lambda _, handler: handler.problem(503, "overload", "busy") or True,
    ],
)
def test_it_resumes_after_the_last_plan(server: SmallServer, client: Client, third: Fault) -> None:
    server.faults.extend([giving(plan_frame(0), plan_frame(1), whole=False), third])
    assert received(client) == list(range(12))
    assert starts(server)[:3] == [0, 2, 2]


def test_nothing_is_doubled(server: SmallServer, client: Client) -> None:
    frames = [plan_frame(i) for i in (0, 1, 0, 1, 2, 1, 2, 3)]
    server.faults.extend(
        [giving(*frames, whole=False), giving(plan_frame(2), plan_frame(3), plan_frame(4), END)]
    )
    assert received(client) == list(range(12))
    assert starts(server) == [0, 4, 5]


@pytest.mark.parametrize(
    "frames", [(plan_frame(0), plan_frame(0, of=1)), (plan_frame(0), plan_frame(1, of=0))]
)
def test_another_plan_of_an_iteration_is_an_error(
    server: SmallServer, client: Client, frames: tuple[bytes, bytes]
) -> None:
    client.plan(1, 1, 0)
    server.faults.append(giving(*frames))
    with pytest.raises(ChangedPlanError):
        received(client)


def test_a_plan_of_another_rank_is_refused(server: SmallServer, client: Client) -> None:
    server.faults.append(giving(encode_frame(Kind.PLAN, 0, HELD[0][1])))
    with pytest.raises(BadAnswerError, match="the plan is of rank 1"):
        received(client)


def test_a_refused_batch_ends_it(server: SmallServer, client: Client) -> None:
    server.faults.append(giving(plan_frame(0), problem_frame(1, 409)))
    found = client.stream(1, 0)
    assert next(found)[0] == 0
    with pytest.raises(ServiceProblem, match=r"batches\[0\]: no; change the sequences") as caught:
        next(found)
    assert caught.value.type == "refused"


@pytest.mark.parametrize("status", [401, 404, 410])
def test_a_refused_stream_ends_it(server: SmallServer, client: Client, status: int) -> None:
    server.faults.append(lambda _, handler: handler.problem(status, "gone", "no") or True)
    with pytest.raises(ServiceProblem, match=f"{status} gone: no"):
        received(client)
    assert len(server.requests) == 1


def test_heartbeats_are_no_plans(server: SmallServer, client: Client) -> None:
    server.publish(2)
    with closing(client.stream(1, 0, patience_s=2)) as plans:
        assert [next(plans)[0] for _ in range(2)] == [0, 1]
        since = time.monotonic()
        with pytest.raises(PlanTimeoutError, match=r"iteration 2, rank 0: no plan within 2 s"):
            next(plans)
    assert 1.9 <= time.monotonic() - since < 30
    assert starts(server) == [0]  # it was alive


def test_a_slow_reader_does_not_use_up_its_patience(server: SmallServer, client: Client) -> None:
    with closing(client.stream(1, 0, window=2, patience_s=2)) as plans:
        for iteration in range(4):
            time.sleep((2.1, 0.1)[iteration % 2])
            assert next(plans)[0] == iteration


def test_a_silent_stream_is_left_after_three_heartbeats(server: SmallServer, client: Client) -> None:
    def silent(_: Request, handler: Handler) -> bool:
        handler.start_stream()
        handler.chunk(plan_frame(0))
        handler.rfile.read(1)  # until the client leaves
        return handler.cut()

    server.faults.append(silent)
    since = time.monotonic()
    assert received(client) == list(range(12))
    assert 3 * server.heartbeat_s <= time.monotonic() - since < 30


# ---- one by one


def no_streams(request: Request, handler: Handler) -> bool:
    return request.streams and handler.reset()


def test_it_asks_one_by_one_where_streams_fail(server: SmallServer, client: Client) -> None:
    server.faults.extend([no_streams] * 3)
    assert received(client) == list(range(12))
    assert asked(server)[:4] == ["stream"] * 3 + ["plan"]


def test_it_returns_to_streams(server: SmallServer, client: Client) -> None:
    server.faults.extend([no_streams] * 3)
    with closing(client.stream(1, 0)) as plans:
        assert next(plans)[0] == 0
        time.sleep(FAST.poll_s)
        assert [iteration for iteration, _ in islice(plans, 11)] == list(range(1, 12))
    kinds = asked(server)
    assert kinds[:4] == ["stream"] * 3 + ["plan"]
    assert kinds[-1] == "stream"


def test_while_streams_fail_they_are_tried_ever_less_often(server: SmallServer) -> None:
    server.faults.extend([no_streams] * 100)
    server.publish(0)
    pace = Pace(backoff_s=0.001, backoff_most_s=0.01, wait_s=0.02, poll_s=0.1, poll_most_s=0.4)
    with Client(server.job_url, KEY, pace=pace) as client, closing(client.stream(1, 0)) as plans:
        for iteration in range(12):
            server.publish(iteration + 1)
            assert next(plans)[0] == iteration
            time.sleep(0.1)
    tried = [request.at for request in server.requests if request.streams]
    gaps = [later - earlier for earlier, later in pairwise(tried)][2:]
    assert len(gaps) >= 2
    assert all(gap >= least for gap, least in zip(gaps, [0.1, 0.2, 0.4, 0.4], strict=False))


def test_a_server_that_is_gone_ends_its_patience(server: SmallServer) -> None:
    server.faults.extend([lambda _, handler: handler.reset()] * 10_000)
    since = time.monotonic()
    with (
        Client(server.job_url, KEY, pace=FAST) as client,
        pytest.raises(PlanTimeoutError, match=r"iteration 0, rank 0: no plan within 3 s"),
    ):
        received(client, patience_s=3)
    assert time.monotonic() - since < 30
    assert {"stream", "plan"} <= set(asked(server))


def test_what_it_asks_for(server: SmallServer, client: Client) -> None:
    received(client, 1, window=3)
    request = server.requests[0]
    assert request.path == f"/v1/jobs/run1{protocol.stream_path(1, 0)}"
    assert request.query == {"from": "0", "window": "3"}
    assert request.headers["accept"] == "application/vnd.apportion.frames; version=2"
