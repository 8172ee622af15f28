"""A network that fails: a TCP proxy that delays, slices, cuts, resets and stalls, drawn from a seed.

Every connection draws its own fate. What it does not do is to change a byte: TCP does not either.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from tempfile import TemporaryDirectory

from apportion.service.client import Client, Pace, create_job
from apportion.service.http.run.child import serving
from apportion.service.private import admin_key_of
from tests.service.small_server import KEY, Bodies, batches, bodies, job, small_server

#: a client whose patience fits the faults below
PACE = Pace(
    connect_s=2,
    read_s=0.6,
    wait_s=0.2,
    backoff_s=0.005,
    backoff_most_s=0.05,
    poll_s=0.1,
    poll_most_s=0.4,
)


SLICED = 4000


@dataclass(frozen=True)
class Fate:
    """Of one direction of a connection. slice: bytes of a write, at most, in the first SLICED bytes; latency_s: before
    a write, at most; after `bytes` bytes it comes to its `end`: "cut" (FIN), "reset" (RST), "stall" (silent)."""

    slice: int
    latency_s: float
    bytes: int
    end: str


def fate(rng: random.Random) -> Fate:
    """Half of the connections come to an end, most of them within a frame; the others are only slow."""
    end = rng.choice(("", "", "", "cut", "cut", "reset", "reset", "stall"))
    size = rng.choice((5, 40, 200, 1400, 1 << 16))
    latency = rng.choice((0.0, 0.0, 0.001, 0.01)) if size > 100 else 0.0001
    return Fate(size, latency, rng.choice((0, 30, 300, 3000, 3000, 10_000, 10_000, 30_000)), end)


def lively(rng: random.Random) -> Fate:
    """As `fate`, without stalls: a server whose heartbeat is 5 s is silent for 15 before anybody minds."""
    drawn = fate(rng)
    return replace(drawn, end="cut") if drawn.end == "stall" else drawn


class FaultyProxy:
    """Forwards to (host, port). connections: how many there were; broken: how many it broke."""

    def __init__(self, host: str, port: int, seed: int, draw: Callable[[random.Random], Fate] = fate) -> None:
        self._target, self._rng, self._draw = (host, port), random.Random(seed), draw
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = self.broken = 0
        self.port = 0

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        there, back = self._draw(self._rng), self._draw(self._rng)
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            _end(writer, reset=True)
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, far_writer, writer, there))
                group.create_task(self._forward(far_reader, writer, far_writer, back))
        except* (OSError, asyncio.CancelledError):  # cancelled: the proxy stops
            pass
        finally:
            _end(writer)
            _end(far_writer)

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        other: asyncio.StreamWriter,
        fate: Fate,
    ) -> None:
        rng, sent, end = random.Random(self._rng.random()), 0, fate.bytes if fate.end else sys.maxsize
        while sent < end:
            size = fate.slice if sent < SLICED else 1 << 16
            data = await reader.read(min(size, end - sent))
            if not data:
                raise ConnectionResetError  # the other direction ends too
            await asyncio.sleep(rng.uniform(0, fate.latency_s))
            writer.write(data)
            await writer.drain()
            sent += len(data)
        await self._break(fate, writer, other)

    async def _break(self, fate: Fate, writer: asyncio.StreamWriter, other: asyncio.StreamWriter) -> None:
        self.broken += 1
        if fate.end == "stall":
            await asyncio.sleep(3600)
        for end in (writer, other):
            _end(end, reset=fate.end == "reset")
        raise ConnectionResetError


def _end(writer: asyncio.StreamWriter, reset: bool = False) -> None:
    with suppress(OSError):
        if reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort() if reset else writer.close()


@contextmanager
def faulty_proxy(
    host: str, port: int, seed: int, draw: Callable[[random.Random], Fate] = fate
) -> Iterator[FaultyProxy]:
    """A proxy in a thread of its own."""
    proxy, started = FaultyProxy(host, port, seed, draw), threading.Event()
    ended: list[Callable[[], None]] = []

    async def serve() -> None:
        over, loop = asyncio.Event(), asyncio.get_running_loop()
        ended.append(lambda: loop.call_soon_threadsafe(over.set))
        async with await proxy.start():
            started.set()
            await over.wait()
            await proxy.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert started.wait(10)
        yield proxy
    finally:
        ended[0]()
        thread.join()


# ---- what must hold


def by_stream(client: Client, rank: int, held: Bodies, window: int) -> list[bytes]:
    plans = client.stream(1, rank, 0, window, patience_s=60)
    try:
        got = [(iteration, piece.encode()) for iteration, piece in islice(plans, len(held))]
    finally:
        plans.close()
    assert [iteration for iteration, _ in got] == list(range(len(held)))
    return [body for _, body in got]


def by_get(client: Client, rank: int, held: Bodies) -> list[bytes]:
    return [client.plan(1, iteration, rank, 60).encode() for iteration in range(len(held))]


def case(seed: int) -> dict[str, float]:
    """Through the proxy, one rank by stream and one by GET, while plans become ready: both receive every iteration, in
    order, once, and whole. How many connections that took, how many of them broke, and the seconds."""
    rng, held, since = random.Random(seed), bodies(24), time.monotonic()
    with (
        small_server(held, ready=rng.randrange(8), heartbeat_s=0.05) as server,
        faulty_proxy("127.0.0.1", server.server_address[1], seed) as proxy,
        Client(f"http://127.0.0.1:{proxy.port}/v1/jobs/run1", KEY, pace=PACE) as client,
    ):

        def publish() -> None:
            for ready in range(server.ready, len(held) + 1):
                time.sleep(rng.uniform(0, 0.01))
                server.publish(ready)

        check(client, held, rng.choice((1, 5, 64)), publish)
    return _figures(proxy, since)


def server_case(seed: int) -> dict[str, float]:
    """The same with a real server, which plans what comes through the proxy too."""
    with TemporaryDirectory() as folder, serving(folder) as server:
        return through_proxy(server.url, seed)


def through_proxy(server: str, seed: int) -> dict[str, float]:
    """`case` with the server at that url."""
    rng, held, since = random.Random(seed), bodies(24), time.monotonic()
    key = admin_key_of(server)
    with (
        faulty_proxy("127.0.0.1", int(server.rsplit(":", 1)[1]), seed, lively) as proxy,
        create_job(
            f"http://127.0.0.1:{proxy.port}", f"faulty{seed}", job(), admin_key=key, timeout_s=60, pace=PACE
        ) as client,
    ):
        epoch = client.begin("run")

        def submit() -> None:
            for iteration in range(len(held)):
                client.submit(epoch, iteration, batches(iteration))

        check(client, held, rng.choice((1, 5, 64)), submit)
    return _figures(proxy, since)


def check(client: Client, held: Bodies, window: int, publish: Callable[[], None]) -> None:
    """Both ranks receive all that is `held` while `publish` makes it ready."""
    with ThreadPoolExecutor(2) as threads:
        streamed = threads.submit(by_stream, client, 0, held, window)
        asked = threads.submit(by_get, client, 1, held)
        publish()
        received = [streamed.result(120), asked.result(120)]
    assert [list(ranks) for ranks in zip(*received, strict=True)] == [list(ranks) for ranks in held]


def _figures(proxy: FaultyProxy, since: float) -> dict[str, float]:
    seconds = round(time.monotonic() - since, 3)
    return {"connections": proxy.connections, "broken": proxy.broken, "seconds": seconds}
