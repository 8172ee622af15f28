"""Measures a healthy server: hot reads, streams, start with many stored plans, memory over many requests."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import track

from apportion.service.client import Client
from apportion.service.frames import ALIVE, HEAD, SLICE
from apportion.service.http.serve import serving
from apportion.service.pack import Pack
from apportion.service.store import Folder
from benchmarks.serving.common import TOKEN, Request, cpu_s, job, memory_mb, quantile
from benchmarks.serving.kills import nginx

JOB = job()
HEADERS = f"Host: a\r\nAccept-Encoding: zstd\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
HOT, CONNECTIONS = 40_000, 16
STEPS, RANKS = 40, 256
STORED, MANY = 20_000, 100_000


async def _send_gets(url: str, path: str, count: int) -> None:
    """Sends `count` GET requests over one connection, one after another."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    request_bytes = f"GET {path} HTTP/1.1\r\n{HEADERS}".encode()
    for _ in range(count):
        writer.write(request_bytes)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        await reader.readexactly(int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
    writer.close()


async def _crowd(url: str, path: str, count: int) -> float:
    start_s = time.monotonic()
    await asyncio.gather(*(_send_gets(url, path, count // CONNECTIONS) for _ in range(CONNECTIONS)))
    return time.monotonic() - start_s


def hot() -> dict[str, Any]:
    """GETs one slice: requests per second of the server's processor time, of wall time, and through nginx's cache."""
    request = Request(JOB, 1)
    path = f"/v1/plans/{request.key.hex()}/ranks/3?wait_s=10"
    with tempfile.TemporaryDirectory() as folder, serving(None, token=TOKEN) as server:
        with closing(Client(server.url, TOKEN)) as client:
            client.submit(request.key, request.data)
            client.fetch(request.key, 3, 10.0)
        cpu_before = cpu_s(server.pid)
        seconds = asyncio.run(_crowd(server.url, path, HOT))
        cpu_time = cpu_s(server.pid) - cpu_before
        with nginx([server.url], Path(folder), cache_mb=64) as proxy:
            asyncio.run(_crowd(proxy, path, CONNECTIONS * 4))
            cpu_before = cpu_s(server.pid)
            cached = asyncio.run(_crowd(proxy, path, HOT))
            assert cpu_s(server.pid) - cpu_before < 0.1, "hits reach the server"
    return {
        "per_core_s": round(HOT / cpu_time),
        "per_s": round(HOT / seconds),
        "nginx_per_s": round(HOT / cached),
    }


async def _rank(url: str, rank: int, requests: list[Request], arrived: dict[int, list[float]]) -> None:
    """Reads one rank's stream for all steps; notes when each slice arrives."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    query = "&".join(f"key={request.key.hex()}" for request in requests)
    writer.write(f"GET /v1/ranks/{rank % JOB.ranks}/stream?wait_s=60&{query} HTTP/1.1\r\n{HEADERS}".encode())
    await reader.readuntil(b"\r\n\r\n")
    step, data = 0, b""
    while step < len(requests):
        size = int(await reader.readline(), 16)
        data += await reader.readexactly(size)
        await reader.readline()
        while len(data) >= HEAD.size and len(data) >= HEAD.size + HEAD.unpack_from(data)[1]:
            kind, length = HEAD.unpack_from(data)
            data = data[HEAD.size + length :]
            if kind != ALIVE:
                assert kind == SLICE, kind
                arrived[step].append(time.monotonic())
                step += 1
    writer.close()


async def _streamed(url: str) -> dict[str, Any]:
    requests = [Request(JOB, 100 + step) for step in range(STEPS)]
    arrived: dict[int, list[float]] = {step: [] for step in range(STEPS)}
    with closing(Client(url, TOKEN)) as client:
        for step, request in enumerate(requests):  # ahead of reading, like a loader
            await asyncio.to_thread(client.submit, request.key, request.data, step)
        await asyncio.gather(*(_rank(url, rank, requests, arrived) for rank in range(RANKS)))
    lags = [arrival - min(times) for times in arrived.values() for arrival in times]
    return {
        "p50_ms": round(1e3 * quantile(lags, 0.5), 1),
        "p99_ms": round(1e3 * quantile(lags, 0.99), 1),
        "slices": len(lags),
    }


def streams() -> dict[str, Any]:
    """Reads 256 streams: the lag of each rank's slice behind the first slice of the same step."""
    with serving(None, token=TOKEN) as server:
        return asyncio.run(_streamed(server.url))


def _write_packs(folder: Path, count: int) -> None:
    """Writes `count` packs under different keys."""
    store, pack = Folder(folder), _pack()
    for number in range(count):
        key = number.to_bytes(32)
        path = store.path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(Pack.encode(key, pack.head.id, {}, b"", [b"slice"] * 8).data)


def _pack() -> Pack:
    from apportion.service.workers import Completion, plan_pack

    completion = plan_pack(Request(JOB, 0).data)
    assert isinstance(completion, Completion)
    return Pack.decode(completion.data)


def start() -> dict[str, Any]:
    """Processor time until a server has planned its first request, with an empty folder and with 20,000 plans."""
    cpu_times = {}
    for name, count in (("empty_s", 0), ("full_s", STORED)):
        with tempfile.TemporaryDirectory() as folder:
            _write_packs(Path(folder), count)
            with serving(folder, options=["--store-gb", "1"], token=TOKEN) as server:
                with closing(Client(server.url, TOKEN)) as client:
                    client.submit(Request(JOB, 0).key, Request(JOB, 0).data)
                    client.fetch(Request(JOB, 0).key, 0, 30.0)
                time.sleep(1.0)
                cpu_times[name] = round(cpu_s(server.pid), 2)
    assert cpu_times["full_s"] - cpu_times["empty_s"] <= 1.0, cpu_times
    return cpu_times


def memory() -> dict[str, Any]:
    """Memory of a server as 100,000 requests are planned, read and forgotten."""
    sizes = []
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(folder, options=["--store-gb", "0.2"], token=TOKEN) as server,
        closing(Client(server.url, TOKEN, timeout_s=60.0)) as client,
    ):
        for number in track(range(MANY), "requests", console=Console(stderr=True)):
            request = Request(JOB, number)
            client.submit(request.key, request.data)
            client.fetch(request.key, number % JOB.ranks, 30.0)
            if number % (MANY // 10) == MANY // 10 - 1:
                sizes.append(round(memory_mb(server.pid), 1))
    assert sizes[-1] < sizes[4] * 1.1, sizes  # by then the limits on remembered requests are reached
    return {"memory_mb": sizes}


def cases() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields (name, function) for each case."""
    return ((run.__name__, partial(run)) for run in (hot, streams, start, memory))
