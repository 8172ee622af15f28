"""Stores for tests, and a Redis server of one's own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from apportion.service.packs import Pack
from apportion.service.store import Store, open_store

Place = str | Path


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def pack_bytes(number: int, size: int = 1000, ranks: int = 4) -> bytes:
    """A pack of about `size` bytes, which `number` decides."""
    bodies = tuple(bytes([number % 251, rank % 251]) * (size // ranks // 2) for rank in range(ranks))
    return Pack(key_of(number), key_of(~number & 0xFFFF), "slices", ranks, bodies).encode()


# ---------------------------------------------------------------------------------------------- Redis


@dataclass
class RedisServer:
    """A redis-server on loopback that keeps all it has answered, in a folder."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, timeout_s: float = 60.0) -> None:
        """Start it, and wait until it answers."""
        program = shutil.which("redis-server")
        if program is None:
            raise RuntimeError("these tests need redis-server: apt-get install redis-server")
        self.folder.mkdir(parents=True, exist_ok=True)
        told = {"port": self.port, "bind": "127.0.0.1", "dir": self.folder, "save": "", "appendonly": "yes"}
        told |= {"appendfsync": "always", "logfile": self.folder / "redis.log"}
        options = [str(word) for name, value in told.items() for word in (f"--{name}", value)]
        self.process = subprocess.Popen([program, *options])
        until(self._answers, timeout_s, f"redis-server on port {self.port} ({self.folder / 'redis.log'})")

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()

    def _answers(self) -> bool:
        import redis

        if self.process is None or self.process.poll() is not None:
            raise RuntimeError(f"redis-server ended: see {self.folder / 'redis.log'}")
        with suppress(redis.RedisError), redis.Redis(port=self.port, socket_timeout=5) as client:
            return bool(client.ping())
        return False


@contextmanager
def redis_server(folder: Path) -> Iterator[RedisServer]:
    """A running server on a free port of loopback; killed at the end. RuntimeError where redis-server is missing."""
    server = RedisServer(folder, free_port())
    try:
        server.start()
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(done: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait until `done()`. Raises TimeoutError."""
    end = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------- one row a store


@contextmanager
def _memory(folder: Path) -> Iterator[Place]:
    yield "memory:"


@contextmanager
def _sqlite(folder: Path) -> Iterator[Place]:
    yield folder / "store"


@contextmanager
def _redis(folder: Path) -> Iterator[Place]:
    with redis_server(folder / "redis") as server:
        yield server.url


#: what the conformance kit runs over: a place where the store is made, and whether it outlives its process
STORES = {"memory": (_memory, False), "sqlite": (_sqlite, True), "redis": (_redis, True)}
LASTING = [name for name, (_, lasts) in STORES.items() if lasts]


@contextmanager
def place_of(name: str, folder: Path) -> Iterator[Place]:
    """An empty place for a store of that name."""
    with STORES[name][0](folder) as place:
        yield place


@contextmanager
def opened(place: Place, read_only: bool = False) -> Iterator[Store]:
    store = open_store(place, read_only=read_only)
    try:
        yield store
    finally:
        store.close()


def contents(store: Store) -> tuple[dict[str, bytes], dict[bytes, bytes | None]]:
    """All records and packs."""
    return dict(store.records()), {key: store.read_pack(key) for key, _ in store.packs()}
