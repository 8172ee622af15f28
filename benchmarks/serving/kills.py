"""Kills the server, its workers and Redis (SIGKILL) at random moments, while ranks read and check every byte.

Case `failover` runs two servers behind nginx and repeatedly kills one of them.

On a busy machine servers take longer to start: kills are then proportionally rarer, and readers more patient, so that a
server is up before it is killed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from apportion.ir.bytes.iteration import encode_slices
from apportion.planner.iteration.jobs import plan_job
from apportion.service.client import Client
from apportion.service.http.serve import serving
from apportion.service.problems import ServiceError, UnknownPlanError, UnreachableError
from benchmarks.serving.common import TOKEN, Request, free_port, job

READERS, KEYS = 4, 200
PATIENCE_S = (
    60.0  # a rank's limit for one slice, restarts and planning included, if servers start within PAUSE_S
)
PAUSE_S = 6.0  # between two kills, on average
JOB = job()


@cache
def expected_slices(number: int) -> tuple[bytes, ...]:
    """The slices that ranks must receive for a request."""
    return tuple(encode_slices(plan_job(JOB, Request(JOB, number).batches)))


@dataclass
class Outcome:
    """Results of a case. slices: number of correct ones read; longest_s: longest wait for a slice; planning_s: longest
    time to plan in this process; start_s: longest start of a server; kills: victim -> number."""

    slices: int = 0
    longest_s: float = 0.0
    planning_s: float = 0.0
    start_s: float = 0.0
    kills: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        assert not self.failures, self.failures[:3]
        assert self.slices, "nothing was read"
        seconds = {name: round(getattr(self, name), 3) for name in ("longest_s", "planning_s", "start_s")}
        return {"slices": self.slices, **seconds, "kills": self.kills}

    @property
    def slowness(self) -> float:
        """The longest start of a server relative to PAUSE_S, at least 1."""
        return max(1.0, self.start_s / PAUSE_S)


def read(
    urls: Sequence[str], seed: int, outcome: Outcome, stop: threading.Event, numbers: Iterator[int]
) -> None:
    """Acts as a rank: submits and fetches old and new requests, like a loader."""
    rng = random.Random(seed)
    with closing(Client(urls, TOKEN, timeout_s=5.0)) as client:
        while not stop.is_set():
            number = rng.randrange(KEYS) if rng.random() < 0.5 else next(numbers)
            time.sleep(0.05)
            start = time.monotonic()
            patience_s = PATIENCE_S * outcome.slowness
            body = _fetch(client, Request(JOB, number), rank := rng.randrange(JOB.ranks), patience_s)
            waited_s = time.monotonic() - start
            if body is None:
                outcome.failures.append(f"request {number}: nothing within {patience_s:.0f} s")
            start = time.monotonic()
            if body not in (None, expected_slices(number)[rank]):
                outcome.failures.append(f"request {number}, rank {rank}: other bytes")
            outcome.planning_s = max(outcome.planning_s, time.monotonic() - start)
            outcome.slices += 1
            outcome.longest_s = max(outcome.longest_s, waited_s)


def _fetch(client: Client, request: Request, rank: int, patience_s: float) -> bytes | None:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            return client.fetch(request.key, rank, 2.0).encode()
        except UnknownPlanError:
            with suppress(TimeoutError, UnreachableError):
                client.submit(request.key, request.data)
        except (TimeoutError, UnreachableError):
            continue
        except ServiceError as error:
            if not error.is_transient:
                raise
    return None


def children(pid: int) -> list[int]:
    """The descendants of a process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    direct = [int(text) for task in tasks for text in task.read_text().split()]
    return direct + [below for child in direct for below in children(child)]


class Server:
    """A server on a fixed port, restarted after each kill."""

    def __init__(self, folder: str, stack: ExitStack, outcome: Outcome) -> None:
        self.port = free_port()
        self.url, self._folder, self._outcome = f"http://127.0.0.1:{self.port}", folder, outcome
        self._stack, self.lock = stack.enter_context(ExitStack()), threading.Lock()
        self.start()

    def start(self) -> None:
        self._stack.close()
        options, begin = ["--port", str(self.port), "--workers", "1"], time.monotonic()
        self.running = self._stack.enter_context(serving(self._folder, options=options, token=TOKEN))
        self._outcome.start_s = max(self._outcome.start_s, time.monotonic() - begin)

    def kill(self, rng: random.Random) -> str:
        """Kills the server or one of its descendants; returns the victim's name."""
        with suppress(OSError, IndexError):
            if rng.random() < 0.5:
                os.kill(rng.choice(children(self.running.pid)), signal.SIGKILL)
                return "worker"
        self.running.process.kill()
        self.running.process.wait()
        self.start()
        return "server"


def _run(
    urls: Sequence[str], seconds: float, kill: Callable[[random.Random], str], outcome: Outcome
) -> dict[str, Any]:
    """Runs a case; returns its figures."""
    stop, rng = threading.Event(), random.Random(17)
    expected_slices(0)  # warms up before the first kill
    numbers = iter(range(KEYS, 1 << 30))
    readers = [
        threading.Thread(target=read, args=(urls, seed, outcome, stop, numbers)) for seed in range(READERS)
    ]
    for reader in readers:
        reader.start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not outcome.failures:
        time.sleep(rng.expovariate(1 / (PAUSE_S * outcome.slowness)))
        name = kill(rng)
        outcome.kills[name] = outcome.kills.get(name, 0) + 1
    stop.set()
    for reader in readers:
        reader.join(2 * PATIENCE_S * outcome.slowness)
        assert not reader.is_alive(), "a reader hangs"
    return outcome.figures()


def kills(seconds: float) -> dict[str, Any]:
    """Kills a server that stores plans in a folder, or its workers."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        server = Server(folder, stack, outcome := Outcome())
        return _run([server.url], seconds, server.kill, outcome)


def redis_kills(seconds: float) -> dict[str, Any]:
    """Kills a server that stores plans in Redis, or its workers, or Redis itself, which restarts empty."""
    with ExitStack() as stack:
        redis = Redis(stack)
        server = Server(redis.url, stack, outcome := Outcome())

        def kill(rng: random.Random) -> str:
            return redis.kill() if rng.random() < 0.3 else server.kill(rng)

        return _run([server.url], seconds, kill, outcome)


class Redis:
    """A redis-server on a free port, without persistence."""

    def __init__(self, stack: ExitStack) -> None:
        self._port = free_port()
        self.url = f"redis://127.0.0.1:{self._port}/0"
        stack.callback(lambda: self._process.kill())
        self._start()

    def _start(self) -> None:
        command = ["redis-server", "--port", str(self._port), "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(200):
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return
            time.sleep(0.05)

    def kill(self) -> str:
        self._process.kill()
        self._process.wait()
        time.sleep(0.5)
        self._start()
        return "redis"


def failover(seconds: float) -> dict[str, Any]:
    """Two servers behind nginx share a folder; kills one of them and restarts it after a while."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        outcome = Outcome()
        servers = [Server(folder, stack, outcome) for _ in range(2)]
        url = stack.enter_context(nginx([server.url for server in servers], Path(folder)))

        def kill(rng: random.Random) -> str:
            server = rng.choice(servers)
            server.running.process.kill()
            server.running.process.wait()
            time.sleep(2.0)
            server.start()
            return "server"

        figures = _run([url], seconds, kill, outcome)
        assert outcome.longest_s < 3.0 + outcome.planning_s, f"a rank waited too long: {figures}"
        return figures


@contextmanager
def nginx(urls: Sequence[str], folder: Path, cache_mb: int = 0) -> Iterator[str]:
    """Runs nginx in front of the servers, with failover. cache_mb: size of its own cache of slices; 0: no cache."""
    port = free_port()
    servers = "".join(f"server {url.removeprefix('http://')} max_fails=1 fail_timeout=1s; " for url in urls)
    cached = "proxy_cache plans; proxy_cache_valid 200 1h; proxy_cache_lock on;"
    (folder / "nginx.conf").write_text(f"""
        {"user root;" if os.geteuid() == 0 else ""} daemon off; worker_processes 1;
        pid {folder}/nginx.pid; error_log {folder}/nginx.log;
        events {{ worker_connections 1024; }}
        http {{
          access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
          fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
          proxy_cache_path {folder}/cache keys_zone=plans:8m max_size={max(cache_mb, 1)}m;
          map $uri $plan {{ ~^/v1/plans/(?<key>[0-9a-f]+) $key; default $uri; }}
          map $http_apportion_job $affinity {{ "" $plan; default $http_apportion_job; }}
          upstream planners {{ hash $affinity consistent; {servers} keepalive 64; }}
          server {{
            listen 127.0.0.1:{port} backlog=1024; keepalive_requests 1000000;
            location / {{
              proxy_pass http://planners; proxy_http_version 1.1; proxy_set_header Connection "";
              proxy_connect_timeout 1s; proxy_read_timeout 70s; proxy_buffering {"on" if cache_mb else "off"};
              proxy_next_upstream error timeout non_idempotent; {cached if cache_mb else ""}
            }}
          }}
        }}""")
    binary = shutil.which("nginx") or "/usr/sbin/nginx"
    process = subprocess.Popen(
        [binary, "-p", str(folder), "-c", str(folder / "nginx.conf")], stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(100):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def cases(seconds: float) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields (name, function) for each case."""
    named = {"kills": kills, "redis-kills": redis_kills, "failover": failover}
    return ((name, partial(run, seconds)) for name, run in named.items())
