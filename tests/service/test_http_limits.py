"""What hostile or broken clients may not do: a real server, bytes on sockets."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from select import select

import pytest

from apportion.service.http.api.bodies import Patience
from apportion.service.http.connection import MAX_HEAD, RESERVE
from apportion.service.limits import Limits
from tests.service.attacks import nested_documents
from tests.service.engines import JOB, LocalPool
from tests.service.servers import KEY, Live, begin, live, make_job, plan_path, ready, submit, until

BODY = 1 << 16
PUT = f"PUT /v1/jobs/run/epochs/1/iterations/9 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
JSON = "Content-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    limits = Limits(body_bytes=BODY, drain_s=2.0)
    with live(limits=limits, patience=Patience(head_s=1.0, body_s=1.0)) as found:
        make_job(found.caller)
        begin(found.caller)
        submit(found.caller, 0)
        ready(found.caller, 0)
        yield found


def talk(server: Live, *parts: bytes, wait_s: float = 0.0) -> bytes:
    """All that the server answers until it closes the connection."""
    with closing(server.connect()) as client:
        for part in parts:
            client.sendall(part)
            time.sleep(wait_s)
        return read(client)


def read(client: socket.socket) -> bytes:
    found = b""
    while True:
        try:
            part = client.recv(1 << 16)
        except ConnectionResetError:
            return found
        if not part:
            return found
        found += part


def problem(answer: bytes) -> tuple[int, str]:
    """(status, type) of an answer, once it was seen to be a whole problem."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head.split()[1])
    assert b"application/problem+json" in head
    told = json.loads(body)
    assert told["status"] == status
    return status, told["type"].removeprefix("urn:apportion:problem:")


# ---------------------------------------------------------------------------------------------- bodies


def test_a_body_too_large_is_refused_unread(server: Live) -> None:
    answer = talk(server, f"{PUT}{JSON}Content-Length: {BODY + 1}\r\n\r\n".encode())
    assert problem(answer) == (413, "too-large")
    assert b"connection: close" in answer


def test_a_body_of_unknown_length_is_cut_off(server: Live) -> None:
    chunk = b"%x\r\n%b\r\n" % (BODY // 4, b" " * (BODY // 4))
    answer = talk(
        server, f"{PUT}{JSON}Transfer-Encoding: chunked\r\n\r\n".encode(), *[chunk] * 5, b"0\r\n\r\n"
    )
    assert problem(answer) == (413, "too-large")


def test_an_endless_body_ends(server: Live) -> None:
    """Nobody reads for ever what nobody wants, not even to be polite."""
    chunk = b"%x\r\n%b\r\n" % (BODY, b" " * BODY)
    sent = 0
    with closing(server.connect()) as client:
        client.sendall(f"{PUT}{JSON}Transfer-Encoding: chunked\r\n\r\n".encode())
        try:
            while sent < 1 << 30:
                client.sendall(chunk)
                sent += len(chunk)
        except (ConnectionResetError, BrokenPipeError):
            pass
    assert sent < 64 << 20


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"2\r\n{}XX"])
def test_a_body_that_breaks_in_the_read_of_its_head_is_answered(server: Live, chunk: bytes) -> None:
    assert problem(talk(server, f"{PUT}{JSON}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk))[0] == 400


def test_a_body_of_the_largest_size_is_read(server: Live) -> None:
    body = b'{"batches": [{"lengths": [1, 1]}]'.ljust(BODY - 1) + b"}"
    answer = server.caller.using(KEY)("PUT", "/v1/jobs/run/epochs/1/iterations/1", body)
    assert answer.status == 201


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[" * 60000,
        b'{"batches": [' + b'{"lengths": ' + b"[" * 50000,
        b'{"batches": [{"lengths": [1], "mask": ' + b'{"a":' * 10000,
        b'{"batches": [{"lengths": [NaN]}]}',
        b'{"batches": [{"lengths": [1e999]}]}',
        b'{"batches": [{"lengths": [' + b"9" * 5000 + b"]}]}",
        b'{"batches": [{"lengths": [1.5]}]}',
        b'{"batches": [{"lengths": [true]}]}',
        b'{"batches": [{"lengths": "1"}]}',
        b'\xff\xfe{"batches"',
        '{"batches": [{"lengths": [1], "\U0001f600": 1}]}'.encode(),
        b'{"batches": [{"lengths": [1], "\\ud800": 1}]}',
        b'{"batches": [{"lengths": [1], "mask": "\\u0000"}]}',
        b'{"batches": [{"lengths": [1]}]} trailing',
        b'{"batches": [{"sequences": [{"length": 1, "home_ranks": [-1]}]}]}',
    ],
)
def test_garbage_is_refused(server: Live, body: bytes) -> None:
    answer = server.caller.using(KEY)("PUT", "/v1/jobs/run/epochs/1/iterations/2", body)
    assert answer.status == 422, answer
    assert answer.problem == "invalid"


def test_a_body_of_many_lists_holds_up_nobody() -> None:
    with live() as server:
        make_job(server.caller)
        begin(server.caller)
        body = b'{"batches": [{"lengths": [' + b"[]," * (5 << 20) + b"1]}]}"
        answer = server.caller.using(KEY)("PUT", "/v1/jobs/run/epochs/1/iterations/0", body)
        assert (answer.status, answer.problem, answer.json["field"]) == (422, "limit", "body")


def test_a_body_of_many_keys_is_refused() -> None:
    with live(limits=Limits(drain_s=2.0)) as server:
        make_job(server.caller)
        begin(server.caller)
        keys = b",".join(b'"%d":1' % i for i in range(1_000_000))
        body = b'{"batches": [{"lengths": [1], "mask": {' + keys + b"}}]}"
        answer = server.caller.using(KEY)("PUT", "/v1/jobs/run/epochs/1/iterations/1", body)
        assert (answer.status, answer.problem) == (422, "limit")
        assert "1000003 keys" in answer.json["detail"]


def test_documents_in_documents_are_counted_before_they_are_built(server: Live) -> None:
    body = json.dumps(nested_documents()).encode()
    answer = server.caller.using(KEY)("PUT", "/v1/jobs/run/epochs/1/iterations/1", body)
    assert (answer.status, answer.json["field"]) == (422, "batches[0].mask.one")
    assert "16777216" in answer.json["detail"]


def test_bodies_under_way_take_so_much_together() -> None:
    with live(limits=Limits(body_bytes=BODY, bodies_bytes=3000)) as server, ExitStack() as stack:
        make_job(server.caller)
        begin(server.caller)
        caller, body = server.caller.using(KEY), b'{"batches": [{"lengths": [3, 1]}]}'
        half = f"{PUT}{JSON}Content-Length: 2900\r\n\r\n".encode() + body.ljust(2500)
        path, large = "/v1/jobs/run/epochs/1/iterations/0", body.ljust(1000)
        sent = stack.enter_context(closing(server.connect()))
        sent.sendall(half)

        def refused() -> bool:
            """Or the half comes while the large one is read, is refused itself, and comes again."""
            nonlocal sent
            if select([sent], [], [], 0)[0]:
                sent = stack.enter_context(closing(server.connect()))
                sent.sendall(half)
            return bool(caller("PUT", path, large).status == 503)

        until(refused)
        answer = caller("PUT", path, large)
        assert (answer.problem, answer.headers["retry-after"]) == ("overload", "1")
        assert caller("PUT", path, body).status in (200, 201)
        stack.close()
        until(lambda: caller("PUT", path, large).status == 200)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content_type": "text/plain"}, 415),
        ({"content_type": "application/x-www-form-urlencoded"}, 415),
        ({"content_type": "application/json; charset=utf-8"}, 201),
        ({"content_encoding": "gzip"}, 415),
    ],
)
def test_only_plain_json_is_read(server: Live, headers: dict[str, str], status: int) -> None:
    path = f"/v1/jobs/run/epochs/1/iterations/{3 if status == 201 else 2}"
    answer = server.caller.using(KEY)("PUT", path, b'{"batches": [{"lengths": [3, 1]}]}', **headers)
    assert answer.status == status


def test_a_key_is_asked_for_before_the_body_is_read(server: Live) -> None:
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: 10\r\nConnection: close\r\n\r\n"
    assert problem(talk(server, head.encode())) == (401, "auth")


# ---------------------------------------------------------------------------------------------- slow clients


def test_a_slow_body_ends(server: Live) -> None:
    began_s = time.monotonic()
    answer = talk(server, f"{PUT}{JSON}Content-Length: 100\r\n\r\n".encode(), b"{", wait_s=0.2)
    assert problem(answer) == (408, "slow-body")
    assert time.monotonic() - began_s < 60


@pytest.mark.parametrize(
    "parts", [[], [b"GET /hea"], [b"GET /healthz HTTP/1.1\r\n", b"Host: x\r\n", b"X-A: b\r\n"]]
)
def test_a_slow_head_ends(server: Live, parts: list[bytes]) -> None:
    answer = talk(server, *parts, wait_s=0.2)
    assert problem(answer) == (408, "request-timeout")


def test_slow_clients_disturb_nobody(server: Live) -> None:
    """200 that say nothing, or stop in the middle: others are answered, and the slow ones are gone in time."""
    slow = [server.connect() for _ in range(200)]
    try:
        for i, client in enumerate(slow):
            client.sendall(PUT[: i % len(PUT)].encode())
        assert server.caller.using(KEY)("GET", plan_path(0)).status == 200
        until(lambda: len(server.server.server_state.connections) < 20)
    finally:
        for client in slow:
            client.close()


def test_empty_lines_do_not_hold_a_connection(server: Live) -> None:
    """They end the time of keep-alive, and must begin it again."""
    with closing(server.connect()) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" in client.recv(4096)
        (connection,) = [
            held
            for held in server.server.server_state.connections
            if held.client == client.getsockname()  # type: ignore[union-attr]
        ]
        client.sendall(b"\r\n\r\n")
        until(lambda: connection.timeout_keep_alive_task is not None)  # type: ignore[union-attr]


def test_who_takes_no_answer_is_cut_off() -> None:
    """Answers that nobody reads: one at a time is made, and after a while they have no server."""
    with (
        live(admin=None, patience=Patience(write_s=1.0), send_buffer=4096) as server,
        closing(socket.socket()) as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.address)
        client.setblocking(False)
        assert client.send(b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n" * 16)
        until(lambda: len(server.server.server_state.connections) == 1)
        until(lambda: not server.server.server_state.connections)


def test_health_is_answered_where_no_connection_is_left() -> None:
    with live(connections=8) as server, ExitStack() as held:
        full = [held.enter_context(closing(server.connect())) for _ in range(4)]  # half, from one address
        until(lambda: len(server.server.server_state.connections) == 4)
        head = b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        told = talk(server, head % b"/v1/jobs")
        assert problem(told)[0] == 503
        assert b"4 connections from 127.0.0.1" in told
        for path in (b"/healthz", b"/readyz"):
            assert talk(server, head % path).startswith(b"HTTP/1.1 200")
        full[0].close()
        until(lambda: len(server.server.server_state.connections) == 3)
        assert talk(server, head % b"/v1/jobs").startswith(b"HTTP/1.1 401")


def test_beyond_all_room_connections_are_refused_at_once() -> None:
    with live(connections=0) as server, ExitStack() as held:
        for _ in range(RESERVE):
            held.enter_context(closing(server.connect()))
        until(lambda: len(server.server.server_state.connections) == RESERVE)
        assert problem(talk(server))[0] == 503


# ---------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 TLS to a plain port\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/jobs/\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nBad Header\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_what_is_not_http_is_a_problem_too(server: Live, head: bytes) -> None:
    assert problem(talk(server, head)) == (400, "bad-request")


def test_a_head_is_bounded(server: Live) -> None:
    line = b"X-Filler: " + b"a" * 4000 + b"\r\n"
    answer = talk(server, b"GET /healthz HTTP/1.1\r\n", *[line] * (MAX_HEAD // len(line) + 2))
    assert answer == b"" or problem(answer)[0] == 431


def test_a_head_that_comes_in_one_read_is_bounded(server: Live) -> None:
    get = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
    filler = b"X-Filler: " + b"a" * (MAX_HEAD + (32 << 10)) + b"\r\n\r\n"
    answer = talk(server, get + filler)
    assert answer == b"" or problem(answer)[0] == 431
    with closing(server.connect()) as client:  # a later one of its connection
        client.sendall(get + b"\r\n")
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        client.sendall(get + filler)
        assert b"HTTP/1.1 200" not in read(client)


def test_trailers_are_bounded(server: Live) -> None:
    line = b"X-Filler: " + b"a" * 4000 + b"\r\n"
    start = f"{PUT}{JSON}Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n0\r\n".encode()
    with closing(server.connect()) as client:
        client.sendall(start)
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            client.sendall(line * 100_000)


def test_requests_may_come_at_once(server: Live) -> None:
    """Pipelined: answered one after another, in order."""
    get = f"GET {plan_path(0)} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    last = "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = talk(server, (f"{get}\r\n" * 3 + last).encode())
    assert answer.count(b"HTTP/1.1 200 OK") == 4
    assert answer.endswith(b'{"status":"ok","reason":""}')


def test_requests_that_come_at_once_are_bounded(server: Live) -> None:
    """Each takes some KB while it waits for the one before."""
    get = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    with closing(server.connect()) as client:
        client.sendall(get * 15)
        found = b""
        while found.count(b"200 OK") < 15:
            found += client.recv(1 << 16)
        with suppress(OSError):
            client.sendall(get * 20_000)
        assert read(client).count(b"200 OK") < 200
    assert server.caller("GET", "/healthz").status == 200


def test_a_drain_ends_whoever_takes_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    with (
        live(admin=None, limits=Limits(drain_s=3.0), send_buffer=4096) as server,
        closing(socket.socket()) as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(server.address)
        client.sendall(b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n" * 16)
        until(lambda: any(held.flow.write_paused for held in server.server.server_state.connections))  # type: ignore[union-attr]
        server.stop()
        assert server.thread is not None
        server.thread.join(10.0)
        assert not server.thread.is_alive()
    assert "Exception in ASGI application" not in caplog.text


def test_a_second_signal_does_not_wait() -> None:
    with live(LocalPool(held=True), Limits(drain_s=50.0)) as server:
        make_job(server.caller)
        begin(server.caller)
        submit(server.caller, 0)
        until(lambda: server.pool.begun == [0])
        server.server.should_exit = True
        until(lambda: server.engine.draining)
        server.server.force_exit = True
        assert server.thread is not None
        server.thread.join(25.0)
        assert not server.thread.is_alive()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8321", "127.0.0.1.evil.example", "localhost.evil"]
)
def test_pages_of_other_names_make_no_jobs_where_no_key_is_needed(host: str) -> None:
    """Browsers let a page talk to its own name, which may lead to this machine."""
    with live(admin=None, limits=Limits(drain_s=2.0)) as server:
        make_job(server.caller)
        body = {"name": "other", "job": JOB.to_data()}
        assert server.caller("POST", "/v1/jobs", body, host=host).problem == "auth"
        assert server.caller("GET", "/v1/jobs", host=host).status == 401
        assert server.caller("DELETE", "/v1/jobs/run", host=host).status == 401
        assert server.caller("GET", "/metrics", host=host).status == 401
        for own in ("localhost", "LOCALHOST:8321", "127.0.0.1:1", "[::1]:8321", "10.0.0.7"):
            assert server.caller("GET", "/v1/jobs", host=own).status == 200


def test_a_host_of_the_clients_choice_is_not_repeated(server: Live) -> None:
    for host in ("[", 'a"b', "evil.example/path", ""):
        answer = server.caller("GET", "/v1/jobs", host=host)
        assert answer.status == 200
        assert answer.json["jobs"][0]["url"] == "/v1/jobs/run"
