"""Streams of frames from a real server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.service.frames import Frame, FrameReader, Kind
from apportion.service.limits import Limits
from tests.service.engines import LocalPool
from tests.service.servers import KEY, Live, begin, live, make_job, plan_path, ready, submit, thread, until

STREAM = "/v1/jobs/run/epochs/1/ranks/{rank}/stream?from={start}&window={window}"


class Reader:
    """A stream as its client sees it."""

    def __init__(
        self, server: Live, rank: int = 0, start: int = 0, window: int = 64, buffer: int = 0
    ) -> None:
        self._socket = socket.socket()
        if buffer:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self._socket.settimeout(60)
        self._socket.connect(server.address)
        path = STREAM.format(rank=rank, start=start, window=window)
        self._socket.sendall(f"GET {path} HTTP/1.0\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        self._frames = FrameReader()
        self.head = b""

    def __iter__(self) -> Iterator[Frame]:
        found = b""
        while b"\r\n\r\n" not in found:
            found += self._socket.recv(1 << 16)
        self.head, _, rest = found.partition(b"\r\n\r\n")
        assert self.head.startswith(b"HTTP/1.1 200")
        assert b"application/vnd.apportion.frames; version=2" in self.head
        yield from self._read(_unchunked(self.head, rest, self._socket))

    def _read(self, parts: Iterator[bytes]) -> Iterator[Frame]:
        for part in parts:
            yield from self._frames.feed(part)
        self._frames.close()

    def close(self) -> None:
        self._socket.close()


def _unchunked(head: bytes, held: bytes, source: socket.socket) -> Iterator[bytes]:
    """The parts of a chunked body. Raises EOFError where it does not end as one."""
    assert b"transfer-encoding: chunked" in head

    def more() -> bytes:
        part = source.recv(1 << 16)
        if not part:
            raise EOFError("the connection was closed within the body")
        return part

    while True:
        while b"\r\n" not in held:
            held += more()
        line, _, held = held.partition(b"\r\n")
        size = int(line, 16)
        while len(held) < size + 2:
            held += more()
        if size == 0:
            return
        yield held[:size]
        held = held[size + 2 :]


@contextmanager
def reading(server: Live, **options: int) -> Iterator[Reader]:
    reader = Reader(server, **options)
    try:
        yield reader
    finally:
        reader.close()


@contextmanager
def running(
    pool: LocalPool | None = None, iterations: int = 0, send_buffer: int = 0, **limits: float
) -> Iterator[Live]:
    chosen = Limits(**{"drain_s": 4.0, **limits})
    with live(pool, chosen, send_buffer=send_buffer) as server:
        make_job(server.caller)
        begin(server.caller)
        for iteration in range(iterations):
            submit(server.caller, iteration)
            ready(server.caller, iteration)
        yield server


def test_a_stream_has_the_plans_in_order_and_ends() -> None:
    with running(iterations=5) as server, reading(server, rank=1, start=1, window=3) as stream:
        frames = list(stream)
        assert [(frame.kind, frame.iteration) for frame in frames] == [
            (Kind.PLAN, 1),
            (Kind.PLAN, 2),
            (Kind.PLAN, 3),
            (Kind.END, 4),
        ]
        for frame in frames[:3]:
            answer = server.caller.using(KEY)("GET", plan_path(frame.iteration, 1))
            assert answer.body == frame.body
            assert answer.headers["etag"] == f'"{frame.digest.hex()}"'
            assert IterationSlice.decode(frame.body).rank == 1


def test_a_stream_waits_and_beats() -> None:
    with running(heartbeat_s=0.1) as server, reading(server, window=1) as stream:
        frames = iter(stream)
        assert [next(frames) for _ in range(2)] == [Frame(Kind.HEARTBEAT, 0, b"", _empty())] * 2
        assert b"apportion-heartbeat: 0.1" in stream.head
        submit(server.caller, 0)
        rest = [frame for frame in frames if frame.kind is not Kind.HEARTBEAT]
        assert [(frame.kind, frame.iteration) for frame in rest] == [(Kind.PLAN, 0), (Kind.END, 1)]


def test_a_batch_that_cannot_be_planned_ends_the_stream() -> None:
    pool = LocalPool()
    pool.deadly = {1}
    with running(pool, 1) as server, reading(server) as stream:
        submit(server.caller, 1)
        plan, problem = [frame for frame in stream if frame.kind is not Kind.HEARTBEAT]
        assert (plan.kind, problem.kind, problem.iteration) == (Kind.PLAN, Kind.PROBLEM, 1)
        assert json.loads(problem.body)["type"] == "urn:apportion:problem:quarantined"


def test_a_new_epoch_ends_the_streams_of_the_old_one() -> None:
    with running(heartbeat_s=0.2) as server, reading(server) as stream:
        frames = iter(stream)
        assert next(frames).kind is Kind.HEARTBEAT
        begin(server.caller, run="second")
        last = [frame for frame in frames if frame.kind is not Kind.HEARTBEAT]
        assert [frame.kind for frame in last] == [Kind.PROBLEM]
        assert json.loads(last[0].body)["type"] == "urn:apportion:problem:gone"


def test_streams_are_counted_and_limited() -> None:
    with running(streams=2, heartbeat_s=0.2) as server:
        with reading(server), reading(server):
            until(lambda: _metric(server, "apportion_streams") == 2)
            refused = server.caller.using(KEY)("GET", STREAM.format(rank=0, start=0, window=1))
            assert (refused.status, refused.problem) == (503, "overload")
            assert refused.headers["retry-after"] == "2"
        until(lambda: _metric(server, "apportion_streams") == 0)


def test_a_client_that_takes_nothing_is_dropped() -> None:
    """What the kernel buffers for it is all that it costs; the server neither holds more nor waits for ever."""
    slow = {"heartbeat_s": 0.001, "stall_s": 0.5}
    with running(send_buffer=4096, **slow) as server, reading(server, window=1, buffer=4096):
        until(lambda: _metric(server, "apportion_streams_stalled_total") == 1)
        until(lambda: _metric(server, "apportion_streams") == 0)


def test_a_stopping_server_ends_its_streams() -> None:
    with running() as server, reading(server, start=3) as stream:
        frames: list[Frame] = []
        reader = thread(lambda: frames.extend(stream))
        until(lambda: _metric(server, "apportion_streams") == 1)
        server.stop()
        reader.join(60)
        assert [(frame.kind, frame.iteration) for frame in frames] == [(Kind.END, 3)]


def test_what_runs_when_the_server_stops_is_still_delivered() -> None:
    pool = LocalPool(held=True)
    with running(pool) as server, reading(server) as stream:
        submit(server.caller, 0)
        frames: list[Frame] = []
        reader = thread(lambda: frames.extend(stream))
        until(lambda: bool(pool.begun) and _metric(server, "apportion_streams") == 1)
        server.stop()
        until(lambda: server.engine.draining)
        server.loop.call_soon_threadsafe(pool.let, 0)
        reader.join(60)
        assert [(frame.kind, frame.iteration) for frame in frames] == [(Kind.PLAN, 0), (Kind.END, 1)]


@pytest.mark.parametrize("clients", [32])
def test_many_streams_have_the_same_bytes(clients: int) -> None:
    with running() as server:
        readers = [Reader(server, rank=i % 2, window=10) for i in range(clients)]
        found: list[list[Frame]] = [[] for _ in readers]
        threads = [
            thread(lambda reader=reader, held=held: held.extend(reader))
            for reader, held in zip(readers, found, strict=True)
        ]
        for iteration in range(10):
            assert submit(server.caller, iteration).status == 201
        for running_thread, reader in zip(threads, readers, strict=True):
            running_thread.join(60)
            reader.close()
        plans = [[frame for frame in held if frame.kind is Kind.PLAN] for held in found]
        for i, held in enumerate(plans):
            assert [frame.iteration for frame in held] == list(range(10))
            assert held == plans[i % 2]


def _metric(server: Live, name: str) -> float:
    text = server.caller("GET", "/metrics").body.decode()
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " "))


def _empty() -> bytes:
    from apportion.ir.hashing import digest

    return digest(b"")
