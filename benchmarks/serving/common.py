"""Helpers for the cases: requests of one small job, raw connections, and a process's CPU time and memory."""

from __future__ import annotations

import http.client
import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from apportion.ir.bytes.job import Job, encode_request
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.recipe.recipes import find_recipe

TOKEN = "token-of-the-benchmark-0123456789"
TICK = os.sysconf("SC_CLK_TCK")


def job(ranks: int = 8, recipe: str = "fcp") -> Job:
    """A small job."""
    return Job(Cluster(1, ranks), Model(8, 2, 64), Policy(find_recipe(recipe)), 4096)


@dataclass(frozen=True)
class Request:
    """One request of a job, identified by its number."""

    job: Job
    number: int

    @property
    def batches(self) -> list[Batch]:
        return [Batch.from_lengths([3000 + self.number % 4000, 4000, 100, 700 + self.number // 4000])]

    @property
    def key(self) -> bytes:
        return self.job.request_key(self.batches)

    @property
    def data(self) -> bytes:
        return encode_request(self.job, self.batches)


def free_port() -> int:
    """A free loopback port below the ephemeral range, so that a server can be restarted on it."""
    while True:
        port = random.randrange(15000, 30000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def cpu_s(pid: int) -> float:
    """The processor seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def memory_mb(pid: int) -> float:
    """The resident memory of a process, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def connect(url: str) -> socket.socket:
    """Opens a TCP connection to the server at a URL."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10.0)


def health_s(url: str) -> float:
    """The seconds that `GET /healthz` takes on a new connection; infinity if it fails."""
    parts, start = urlsplit(url), time.monotonic()
    with suppress(OSError, http.client.HTTPException):
        line = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10.0)
        line.request("GET", "/healthz")
        assert line.getresponse().read()
        line.close()
        return time.monotonic() - start
    return float("inf")


@dataclass
class Watch:
    """Polls a server for its largest memory and its slowest answer."""

    url: str
    pid: int
    memory_mb: float = 0.0
    health_s: float = 0.0
    _over: threading.Event = field(default_factory=threading.Event)

    def _run(self) -> None:
        while not self._over.wait(0.1):
            self.memory_mb = max(self.memory_mb, memory_mb(self.pid))
            self.health_s = max(self.health_s, health_s(self.url))

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()


def run_in_threads(work: Callable[[], object], count: int) -> None:
    """Runs `work` in `count` threads of another process, until all have returned."""
    process = multiprocessing.get_context("fork").Process(target=_threads, args=(work, count))
    process.start()
    process.join()
    assert process.exitcode == 0


def _threads(work: Callable[[], object], count: int) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
