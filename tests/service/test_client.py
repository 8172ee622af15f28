"""The client: every call ends in time, whatever the server does; answers are checked; tokens stay secret."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path

import pytest

from apportion.ir.bytes.codec import decode
from apportion.ir.errors import ConfigError
from apportion.planner.iteration.jobs import plan_job
from apportion.service.client import PLAN, Client
from apportion.service.event_loop import event_loop
from apportion.service.frames import ALIVE, PROBLEM_FRAME, SLICE, frame
from apportion.service.http.serve import Server
from apportion.service.pack import Pack
from apportion.service.problems import (
    BadAnswerError,
    NotReadyError,
    ServiceError,
    UnknownPlanError,
    UnreachableError,
)
from tests.service.requests import JOB, RANKS, TOKEN, Request
from tests.service.small_server import Talk, answer, small_server
from tests.support.programs import run
from tests.support.sparse import sparse_product

Clients = Callable[..., Client]
TIMEOUT_S = 1.0
BUSY_S = 8.0  # delay allowed on a loaded machine; an idle one needs 0.3
KEY, REQUEST = bytes(range(32)), Request(1)


@pytest.fixture(scope="module")
def slices() -> list[bytes]:
    return REQUEST.slices()


@pytest.fixture
def client_of() -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def make(*urls: str, timeout_s: float = TIMEOUT_S) -> Client:
        clients.append(Client(urls, TOKEN, timeout_s=timeout_s))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


# ---- time


def send_slowly(*parts: bytes, pause_s: float = 0.02) -> Talk:
    """Sends the parts, then repeats the last one."""

    def respond(connection: socket.socket, _: bytes) -> None:
        for part in parts[:-1]:
            connection.sendall(part)
        for part in repeat(parts[-1]):
            connection.sendall(part)
            time.sleep(pause_s)

    return respond


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FAULTS: dict[str, Talk] = {
    "silence": lambda connection, _: time.sleep(30),
    "closed": lambda connection, _: None,
    "no http": send_slowly(b"SSH-2.0-OpenSSH_9.2\r\n"),
    "dripped status": send_slowly(b"H", b"T"),
    "dripped head": send_slowly(HEAD, b"A"),
    "endless heads": send_slowly(HEAD, b"A: b\r\n"),
    "endless continue": send_slowly(b"HTTP/1.1 100 Continue\r\n\r\n", pause_s=0),
    "dripped body": send_slowly(HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
    "endless body": send_slowly(HEAD + b"\r\n", b"x" * 65536, pause_s=0),
    "dripped chunk size": send_slowly(CHUNKED, b"0"),
    "endless trailers": send_slowly(CHUNKED + b"2\r\n{}\r\n0\r\n", b"A: b\r\n", pause_s=0),
    "large answer": send_slowly(HEAD + b"Content-Length: 9999999999999\r\n\r\n", b"x" * 65536, pause_s=0),
    "zstd bomb": lambda connection, _: connection.sendall(
        answer(b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little"), "200 OK", "Content-Encoding: zstd")
    ),
}
CALLS: dict[str, Callable[[Client], object]] = {
    "submit": lambda client: client.submit(KEY, REQUEST.data),
    "fetch": lambda client: client.fetch(KEY, 0, TIMEOUT_S),
    "stream": lambda client: next(client.stream([KEY], 0, TIMEOUT_S)),
}


@pytest.mark.parametrize(("fault", "call"), sparse_product(4, FAULTS, CALLS))
def test_a_call_ends_in_time(fault: str, call: str, client_of: Clients) -> None:
    with small_server(FAULTS[fault]) as server:
        client, began = client_of(server.url), time.monotonic()
        with pytest.raises((UnreachableError, ServiceError)):
            CALLS[call](client)
        assert time.monotonic() - began < TIMEOUT_S + BUSY_S


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_port_without_a_server_and_one_that_never_accepts(
    call: Callable[[Client], object], client_of: Clients
) -> None:
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        bound.bind(("127.0.0.1", 0))
        waiting = [socket.create_connection(full.getsockname())]
        for one in (bound, full):
            client, began = client_of("http://{}:{}".format(*one.getsockname())), time.monotonic()
            with pytest.raises(UnreachableError):
                call(client)
            assert time.monotonic() - began < TIMEOUT_S + BUSY_S
        waiting[0].close()


def test_slow_name_resolution_delays_neither_a_call_nor_the_exit() -> None:
    script = """
import socket, time
socket.getaddrinfo = lambda *_, **__: time.sleep(60)
from apportion.service.client import Client, UnreachableError
try:
    Client("http://planner", timeout_s=0.5).submit(bytes(32), b"")
except UnreachableError:
    print("unreachable")
"""
    assert run(sys.executable, "-c", script, timeout_s=30) == "unreachable\n"


def test_close_ends_a_call_of_another_thread(client_of: Clients) -> None:
    with small_server(FAULTS["silence"]) as server:
        client = client_of(server.url, timeout_s=20.0)
        threading.Timer(0.3, client.close).start()
        began = time.monotonic()
        with pytest.raises(UnreachableError, match="closed"):
            client.fetch(KEY, 0, 10.0)
        assert time.monotonic() - began < 8
        with pytest.raises(UnreachableError, match="closed"):
            client.state(KEY)


# ---- answers


def respond_in_turn(*answers: bytes) -> Talk:
    """Sends one answer per request; the last one repeatedly."""
    remaining = list(answers)
    return lambda connection, _: connection.sendall(remaining.pop(0) if len(remaining) > 1 else remaining[0])


def test_a_slice_is_requested_until_it_is_ready(slices: Sequence[bytes], client_of: Clients) -> None:
    with small_server(respond_in_turn(answer(b"", "202 Accepted"), answer(slices[1]))) as server:
        received = client_of(server.url).fetch(KEY, 1, 5.0, ranks=RANKS)
    assert (received.rank, received.ranks, received.encode()) == (1, RANKS, slices[1])
    assert len(server.requests) == 2


def test_a_plan_that_is_not_ready_in_time_is_an_error(client_of: Clients) -> None:
    with small_server(respond_in_turn(answer(b"", "202 Accepted"))) as server, pytest.raises(NotReadyError):
        client_of(server.url).fetch(KEY, 0, 0.3)


def test_a_server_is_asked_to_answer_within_half_of_the_timeout(
    slices: Sequence[bytes], client_of: Clients
) -> None:
    with small_server(respond_in_turn(answer(slices[0]))) as server:
        client_of(server.url, timeout_s=BUSY_S).fetch(KEY, 0, 5 * BUSY_S)
    wait_s = float(server.requests[0].split(b"wait_s=")[1].split()[0])
    assert BUSY_S / 4 < wait_s <= BUSY_S / 2


@pytest.mark.parametrize(
    ("rank", "ranks", "body"),
    [(0, None, None), (1, 3, None), (1, None, b"<html>"), (1, None, b"\x28\xb5\x2f\xfd")],
)
def test_a_wrong_answer_is_refused(
    rank: int, ranks: int | None, body: bytes | None, slices: Sequence[bytes], client_of: Clients
) -> None:
    with small_server(respond_in_turn(answer(body or slices[1]))) as server, pytest.raises(BadAnswerError):
        client_of(server.url).fetch(KEY, rank, 0.0, ranks=ranks)


def test_problems_are_raised_as_the_server_raised_them(client_of: Clients) -> None:
    body = b'{"type": "invalid", "detail": "cluster.nodes = 0", "field": "cluster.nodes", "status": 422}'
    with small_server(respond_in_turn(answer(body, "422 Unprocessable"))) as server:
        with pytest.raises(ServiceError, match="nodes = 0") as caught:
            client_of(server.url).submit(KEY, b"")
        error = caught.value
        assert (error.type, error.field, error.status) == ("invalid", "cluster.nodes", 422)
    with small_server(respond_in_turn(answer(b'{"type": "unknown-plan"}', "404 Not Found"))) as server:
        with pytest.raises(UnknownPlanError) as unknown:
            client_of(server.url).fetch(KEY, 0, 0.0)
        assert unknown.value.key == KEY


@pytest.mark.parametrize("status", ["301 Moved", "307 Temporary", "404 Not Found", "401 Unauthorized"])
def test_redirects_are_not_followed_and_refusals_not_repeated(status: str, client_of: Clients) -> None:
    with small_server(respond_in_turn(answer(b"<html>", status, "Location: http://127.0.0.1:1/"))) as server:
        with pytest.raises(ServiceError, match=status[:3]):
            client_of(server.url).fetch(KEY, 0, 0.0)
        assert len(server.requests) == 1


def test_temporary_failures_are_retried_after_the_servers_delay(client_of: Clients) -> None:
    busy = answer(b"", "503 Service Unavailable", "Retry-After: 1")
    with small_server(respond_in_turn(busy, answer())) as server:
        began = time.monotonic()
        client_of(server.url, timeout_s=5.0).submit(KEY, b"")
        assert 1 < time.monotonic() - began < 5
    with small_server(respond_in_turn(answer(b"", "429 Too Many", "Retry-After: 60"))) as server:
        began = time.monotonic()
        with pytest.raises(ServiceError, match="429"):
            client_of(server.url, timeout_s=5.0).submit(KEY, b"")
        assert time.monotonic() - began < 4.5, "a delay beyond the timeout is not waited for"


def test_the_next_server_is_used_and_stays_first(client_of: Clients) -> None:
    with small_server(FAULTS["closed"]) as dead, small_server(respond_in_turn(answer())) as alive:
        client = client_of(dead.url, alive.url)
        for _ in range(3):
            client.submit(KEY, b"")
    assert (len(dead.requests), len(alive.requests)) == (1, 3)


# ---- streams


def chunked(*parts: bytes) -> bytes:
    return CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def test_a_stream_yields_slices_and_problems_in_order(slices: Sequence[bytes], client_of: Clients) -> None:
    packed = Pack.encode(KEY, KEY, {}, b"", slices).slice(1)
    frames = frame(ALIVE, b"") + frame(SLICE, packed) + frame(PROBLEM_FRAME, b'{"type": "unknown-plan"}')
    with small_server(respond_in_turn(chunked(frames[:3], frames[3:]))) as server:
        stream = client_of(server.url).stream([KEY, bytes(32)], 1, 1.0)
        assert next(stream).encode() == slices[1]
        with pytest.raises(UnknownPlanError) as unknown:
            next(stream)
        assert unknown.value.key == bytes(32)


def test_slices_missing_from_a_stream_are_fetched(slices: Sequence[bytes], client_of: Clients) -> None:
    packed = Pack.encode(KEY, KEY, {}, b"", slices).slice(1)
    cut = chunked(frame(SLICE, packed) + frame(SLICE, packed)[:-1])

    def respond(connection: socket.socket, head: bytes) -> None:
        connection.sendall(cut if b"/stream?" in head else answer(slices[1]))

    with small_server(respond) as server:
        received = list(client_of(server.url).stream([KEY] * 3, 1, 1.0))
    assert [each.encode() for each in received] == [slices[1]] * 3


# ---- secrets and arguments


def test_a_token_is_in_a_header_and_in_no_error(client_of: Clients) -> None:
    def echo(connection: socket.socket, head: bytes) -> None:
        connection.sendall(answer(head, "400 Bad Request"))

    with small_server(echo) as server:
        client = client_of(server.url)
        with pytest.raises(ServiceError) as caught:
            client.fetch(KEY, 0, 0.0)
    assert f"Authorization: Bearer {TOKEN}".encode() in server.requests[0]
    assert TOKEN not in "".join(traceback.format_exception(caught.value)) + repr(client)
    with pytest.raises(ConfigError) as refused:
        Client("http://planner", "two\nlines")
    assert "lines" not in str(refused.value)


INVALID = (
    "",
    "planner:8321",
    "ftp://planner",
    "http://",
    "http://user:word@planner",
    "http://a:99999",
    "http://a?b",
)


@pytest.mark.parametrize("url", INVALID)
def test_invalid_server_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Client(url)
    assert "user" not in str(refused.value)


def test_unreadable_certificates_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", Path(__file__)):
        with pytest.raises(ConfigError, match="ca"):
            Client("https://planner", ca=path)


# ---- the real server


def test_every_client_call_works_on_a_real_server(
    server: Server, client_of: Clients, slices: Sequence[bytes]
) -> None:
    client, key, unknown = client_of(server.url, timeout_s=10.0), REQUEST.key, bytes(32)
    with pytest.raises(UnknownPlanError):
        client.fetch(key, 0, 0.0)
    client.submit(key, REQUEST.data, ahead=3)
    assert client.fetch(key, 1, 60.0, ranks=RANKS).encode() == slices[1]
    stream = client.stream([key, key, unknown], 0, 5.0)
    assert [next(stream).encode(), next(stream).encode()] == [slices[0]] * 2
    with pytest.raises(UnknownPlanError):
        next(stream)
    assert client.state(key)["state"] == "ready"
    assert b"fcp on 4 ranks" in client.page(key)
    assert json.loads(client.plan(JOB, REQUEST.batches))["key"] == key.hex()
    assert decode(client.plan(JOB, REQUEST.batches, PLAN)).id == plan_job(JOB, REQUEST.batches).plans[0].id
    with pytest.raises(ServiceError, match="wrong-key"):
        client.submit(unknown, REQUEST.data)
    with pytest.raises(ServiceError, match="unauthorized"):
        Client(server.url, "another-token-of-16").state(key)


def test_a_forked_process_opens_its_own_connections(server: Server, client_of: Clients) -> None:
    client, key = client_of(server.url, timeout_s=10.0), REQUEST.key
    client.submit(key, REQUEST.data)
    open_stream = client.stream([key] * 3, 0, 60.0)
    next(open_stream)
    child = os.fork()
    if child == 0:
        try:
            client.fetch(key, 1, 60.0)
            open_stream.close()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(open_stream)) == 2
    assert client.fetch(key, 1, 60.0).rank == 1


def test_a_fork_waits_until_the_event_loop_holds_no_lock() -> None:
    """Otherwise a lock that the loop's thread holds, such as an import lock, would stay locked in the child."""
    lock, locked = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            locked.set()
            time.sleep(0.3)

    event_loop().call_soon_threadsafe(hold)
    locked.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.acquire(timeout=5.0) else 1)
    assert os.waitpid(child, 0)[1] == 0
