"""The client's calls: what they ask, what they try again, what they refuse."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial

import pytest

from apportion.ir.errors import ConfigError
from apportion.ir.hashing import digest
from apportion.service import protocol
from apportion.service.client import (
    BadAnswerError,
    ChangedPlanError,
    Client,
    ClientError,
    ClosedError,
    Pace,
    PlanTimeoutError,
    ServiceProblem,
    UnreachableError,
    create_job,
    delete_job,
    revoke_key,
)
from apportion.service.client.waits import retry_after
from tests.service.small_server import (
    KEY,
    Fault,
    Handler,
    Request,
    SmallServer,
    batches,
    bodies,
    job,
    small_server,
)

FAST = Pace(backoff_s=0.01, backoff_most_s=0.05, wait_s=0.2)


@pytest.fixture
def server() -> Iterator[SmallServer]:
    with small_server(bodies(4)) as running:
        yield running


@pytest.fixture
def client(server: SmallServer) -> Iterator[Client]:
    with Client(server.job_url, KEY, pace=FAST) as made:
        yield made


def refusing(status: int, **headers: str) -> Fault:
    def fault(_: Request, handler: Handler) -> bool:
        handler.problem(status, "slug", "a sentence", "some.field", **headers)
        return True

    return fault


def sending(body: bytes, etag_of: bytes | None = None) -> Fault:
    """A plan that is not what was asked for."""

    def fault(_: Request, handler: Handler) -> bool:
        etag = protocol.etag(digest(body if etag_of is None else etag_of))
        handler.reply(200, body, protocol.PLAN_VERSION, ETag=etag)
        return True

    return fault


def breaking(data: bytes) -> Fault:
    """An answer of which only `data` comes."""

    def fault(_: Request, handler: Handler) -> bool:
        handler.wfile.write(data)
        return handler.cut()

    return fault


def reset(_: Request, handler: Handler) -> bool:
    return handler.reset()


# ---- what is asked


def test_calls_of_a_job(server: SmallServer, client: Client) -> None:
    assert client.job() == job()
    assert client.begin("run-1") == client.begin("run-1", "eval") == 1
    sent = [json.loads(request.body) for request in server.requests if request.method == "POST"]
    assert sent == [{"run": "run-1", "stream": "train"}, {"run": "run-1", "stream": "eval"}]
    assert not client.knows(1, 3)
    for _ in range(2):
        client.submit(1, 3, batches(3))
    assert client.knows(1, 3)
    assert client.plan(1, 3, 1).encode() == bodies(4)[3][1]
    assert len({request.port for request in server.requests}) == 1  # one connection is kept
    assert {request.headers["authorization"] for request in server.requests} == {f"Bearer {KEY}"}


def test_another_batch_is_refused_with_field_and_remedy(client: Client) -> None:
    client.submit(1, 0, batches(0))
    with pytest.raises(
        ServiceProblem, match="batches: another batch was submitted before; keep to"
    ) as caught:
        client.submit(1, 0, batches(1))
    problem = caught.value
    assert (problem.status, problem.type, problem.field) == (409, "conflict", "batches")
    assert problem.remedy.startswith("keep to what was there first")


def test_create_job_makes_the_key_so_that_it_may_be_sent_twice(server: SmallServer) -> None:
    sent: list[bytes] = []

    def create(request: Request, handler: Handler) -> bool:
        sent.append(request.body)
        assert request.headers["authorization"] == "Bearer admin"
        handler.reply(201, b'{"name": "run1", "key": "x", "url": "x"}') if len(sent) > 1 else handler.reset()
        return True

    server.faults.extend([create, create])
    with create_job(server.url, "run1", job(), admin_key="admin", pace=FAST) as made:
        assert made.url == server.job_url
    assert sent[0] == sent[1]
    assert b'"key":"' in sent[0]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://host/v1/jobs/a", "must be a url of http"),
        ("http:///v1/jobs/a", "with a host"),
        ("http://host:x/v1/jobs/a", "is not a url"),
        ("http://me:pw@host/v1/jobs/a", "has a user"),
        ("http://host/v1/jobs/a?b=c", "a query"),
        ("http://host/v1/jobs/", "is not of a job"),
        ("http://host/v1/jobs/a%2fb", "must be a name"),
    ],
)
def test_urls_are_checked_and_their_secrets_not_shown(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Client(url)
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize("key", ["", "a b", "a\r\nX: y", "é", 5])
def test_keys_are_checked_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError, match=r"^key = '\.\.\.'"):
        Client("http://host/v1/jobs/a", key)


@pytest.mark.parametrize("place", [(0, 0, 0), (1, -1, 0), (1, 0, -1), (1.0, 0, 0), (1, True, 0)])
def test_places_are_checked(client: Client, place: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        client.plan(*place)


# ---- what is tried again


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_statuses_that_pass_are_tried_again(server: SmallServer, client: Client, status: int) -> None:
    server.faults.extend([refusing(status), refusing(status)])
    client.submit(1, 0, batches(0))
    assert len(server.requests) == 3
    assert len({request.body for request in server.requests}) == 1


def test_a_deletion_whose_answer_was_lost_is_one(server: SmallServer) -> None:
    address = server.job_url.partition("/v1")[0]
    for change in (delete_job, partial(revoke_key, id="a1b2")):
        server.faults.extend([reset, refusing(404)])
        change(address, "run", admin_key=KEY)
        for faults in ([], [refusing(503)]):  # no answer was lost
            server.faults.extend([*faults, refusing(404)])
            with pytest.raises(ServiceProblem, match="404"):
                change(address, "run", admin_key=KEY)


@pytest.mark.parametrize("status", [304, 307, 400, 401, 403, 404, 405, 406, 409, 410, 413, 415, 422, 501])
def test_other_statuses_are_not(server: SmallServer, client: Client, status: int) -> None:
    server.faults.append(refusing(status))
    with pytest.raises(ServiceProblem, match=f"{status}") as caught:
        client.plan(1, 0, 0)
    assert caught.value.status == status
    assert len(server.requests) == 1


HEAD = b"HTTP/1.1 201 Created\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"


@pytest.mark.parametrize(
    "fault",
    [reset, *(breaking(HEAD[:size]) for size in (0, 9, 22, 54, 71, 75, 77)), breaking(HEAD + b'{"epoch"')],
)
def test_broken_connections_are_tried_again(server: SmallServer, client: Client, fault: Fault) -> None:
    server.faults.extend([fault, fault])
    assert client.begin("run-1") == 1
    assert len(server.requests) == 3


def test_retry_after_is_obeyed(server: SmallServer, client: Client) -> None:
    server.faults.append(refusing(429, Retry_After="1"))
    since = time.monotonic()
    client.submit(1, 0, batches(0))
    assert time.monotonic() - since >= 1


def test_retry_after_beyond_the_time_given_is_not_waited_for(server: SmallServer) -> None:
    server.faults.append(refusing(503, Retry_After="3600"))
    with Client(server.job_url, KEY, timeout_s=20) as client, pytest.raises(ServiceProblem, match="503 slug"):
        client.begin("run-1")
    assert len(server.requests) == 1


def test_retry_after_is_read_as_a_number_or_a_date() -> None:
    now = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
    date, later = format_datetime(now, usegmt=True), format_datetime(now + timedelta(seconds=90), usegmt=True)
    assert retry_after(" 7 ", None) == 7
    assert retry_after(later, date) == 90
    assert retry_after(date, later) == 0
    assert retry_after("Sun, 06 Nov 1994 08:49:37 GMT", None) == 0
    assert retry_after("9" * 400, None) is not None
    for unreadable in (None, "", "soon", "-1", "1.5", "²", "Sun, 99 Nov 1994"):
        assert retry_after(unreadable, date) is None


# ---- time


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = place.getsockname()[1]
    since = time.monotonic()
    with Client(f"http://127.0.0.1:{port}/v1/jobs/a", KEY, timeout_s=0.3, pace=FAST) as client:
        with pytest.raises(UnreachableError, match="Connection refused"):
            client.begin("run-1")
        with pytest.raises(PlanTimeoutError, match=r"no plan within 0.3 s .*Connection refused") as caught:
            client.plan(1, 0, 0)
    assert isinstance(caught.value.__cause__, UnreachableError)
    assert time.monotonic() - since < 30


def test_a_server_that_does_not_answer() -> None:
    since = time.monotonic()
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Client(f"http://127.0.0.1:{silent.getsockname()[1]}/v1/jobs/a", KEY, timeout_s=0.3) as client,
    ):
        with pytest.raises(UnreachableError, match="not a byte came in time"):
            client.begin("run-1")
        with pytest.raises(PlanTimeoutError):
            client.plan(1, 0, 0)
    assert time.monotonic() - since < 30


def test_plan_waits_for_what_is_not_planned_yet(server: SmallServer, client: Client) -> None:
    server.publish(0)
    with pytest.raises(
        PlanTimeoutError, match=r"iteration 2, rank 1: no plan within 2 s \(it is not planned"
    ):
        client.plan(1, 2, 1, 2)
    assert len(server.requests) >= 2  # each waits for no longer than the pace says
    assert all(0 < float(request.query["wait_s"]) <= 0.2 for request in server.requests)
    server.publish(4)
    assert client.plan(1, 2, 1).encode() == bodies(4)[2][1]


# ---- what is refused


def test_a_plan_that_was_changed_on_the_way_is_asked_for_again(server: SmallServer, client: Client) -> None:
    server.faults.append(sending(bodies(4)[1][0], etag_of=bodies(4)[0][0]))
    assert client.plan(1, 0, 0).encode() == bodies(4)[0][0]
    assert len(server.requests) == 2


def test_a_plan_that_is_always_changed_is_told(server: SmallServer, client: Client) -> None:
    server.faults.extend([sending(b"junk", etag_of=b"")] * 1000)
    with pytest.raises(PlanTimeoutError, match="it was changed on the way"):
        client.plan(1, 0, 0, 0.3)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (sending(bodies(4)[0][1]), "rank 0: the plan is of rank 1"),
        (sending(b"junk"), "rank 0: not an Apportion iteration slice"),
        (sending(bodies(4)[0][0][:-1]), "rank 0: not an Apportion iteration slice"),
        (
            lambda _, handler: handler.reply(200, b"<html>") or True,
            "asked for, the answer is application/json",
        ),
    ],
)
def test_what_is_not_the_plan_is_refused(
    server: SmallServer, client: Client, fault: Fault, message: str
) -> None:
    server.faults.append(fault)
    with pytest.raises(BadAnswerError, match=message):
        client.plan(1, 0, 0)
    assert len(server.requests) == 1


def test_an_iteration_with_another_plan_than_before_is_an_error(server: SmallServer, client: Client) -> None:
    client.plan(1, 0, 0)
    server.faults.append(sending(bodies(4)[1][0]))
    with pytest.raises(
        ChangedPlanError, match=r"iteration 0: the plan of rank 0 is [0-9a-f]{64}, before it was"
    ):
        client.plan(1, 0, 0)
    server.faults.append(sending(bodies(4)[1][1]))
    with pytest.raises(ChangedPlanError, match="iteration 0: the plan's id is"):
        client.plan(1, 0, 1)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"epoch": "1"}', b"\xff", b"[" * 100_000])
def test_data_that_is_not_of_the_protocol_is_refused(
    server: SmallServer, client: Client, body: bytes
) -> None:
    server.faults.append(lambda _, handler: handler.reply(201, body) or True)
    with pytest.raises(BadAnswerError, match="not the JSON"):
        client.begin("run-1")


def test_an_endless_answer_is_refused(server: SmallServer, client: Client) -> None:
    def endless(_: Request, handler: Handler) -> bool:
        handler.start_stream()
        while True:
            handler.chunk(bytes(1 << 20))

    server.faults.append(endless)
    with pytest.raises(BadAnswerError, match="an answer of more than"):
        client.begin("run-1")


@pytest.mark.parametrize(
    "body", [b"", b"oops", b"[]", b'{"detail": 5, "status": "x", "field": []}', b"\xff\x00"]
)
def test_problems_that_do_not_parse_keep_their_status(
    server: SmallServer, client: Client, body: bytes
) -> None:
    server.faults.append(lambda _, handler: handler.reply(410, body, protocol.PROBLEM) or True)
    with pytest.raises(ServiceProblem, match="begin a new epoch") as caught:
        client.begin("run-1")
    assert (caught.value.status, caught.value.field) == (410, None)


# ---- secrets and packages

FAILURES: list[Callable[[Client], object]] = [
    lambda client: client.begin("run-1"),
    lambda client: client.plan(1, 0, 0, 0.1),
    lambda client: next(client.stream(1, 0, patience_s=0.1)),
]


@pytest.mark.parametrize(
    "fault", [refusing(401), refusing(503), reset, sending(b"junk"), breaking(b"HTTP/1")]
)
@pytest.mark.parametrize("call", FAILURES)
def test_keys_are_in_no_log_and_no_error(
    server: SmallServer,
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    call: Callable[[Client], object],
) -> None:
    server.faults.extend([fault] * 1000)
    with (
        caplog.at_level(logging.DEBUG),
        Client(server.job_url, KEY, timeout_s=0.1, pace=FAST) as client,
        pytest.raises(ClientError) as caught,
    ):
        call(client)
    told = "".join(traceback.format_exception(caught.value)) + repr(caught.value.__dict__) + repr(client)
    assert KEY not in told + caplog.text


def test_a_closed_client_says_so(client: Client) -> None:
    client.close()
    client.close()
    for call in FAILURES:
        with pytest.raises(ClosedError):
            call(client)


def test_it_needs_neither_a_server_nor_torch() -> None:
    heavy = (
        "{'torch', 'fastapi', 'starlette', 'uvicorn', 'redis', 'ray', 'prometheus_client', 'typer', 'rich'}"
    )
    code = f"import sys, apportion.service.client; sys.exit(len({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
