"""Runs a server: in this process for `apportion serve`, or as a child process for demos and tests."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from apportion.ir.errors import ConfigError, ExecutionError
from apportion.service.engine import Engine, Metrics
from apportion.service.http.app import create_app
from apportion.service.http.tokens import Tokens
from apportion.service.store import open_store
from apportion.service.workers import executor_of
from apportion.service.workers.work import load

LOG = logging.getLogger("apportion.service")
LOOPBACK = ("127.0.0.1", "::1", "localhost")
GRACE_S = 5.0
LOADING_S = 30.0  # how long the server waits for workers to import the planner before it listens
BACKLOG = 2048
RECEIVE_BYTES = 16 << 10  # per read of a connection, so that parsing blocks others only briefly


@dataclass(frozen=True)
class Settings:
    """Settings of a server. store: a folder or redis://..., None: memory only; store_bytes, store_age_s: eviction
    limits; worker_bytes, plan_s: limits of a worker and of planning; token: for everyone; tenants: file of lines `name:
    token`; ray: address of a Ray cluster, "local" to start one; announce: print a line of JSON once it listens."""

    host: str = "127.0.0.1"
    port: int = 8321
    store: str | None = None
    store_bytes: int | None = None
    store_age_s: float | None = None
    workers: int = 0
    worker_bytes: int = 8 << 30
    plan_s: float = 600.0
    token: str | None = None
    tenants: Path | None = None
    ray: str | None = None
    announce: bool = False


def run(settings: Settings) -> None:
    """Serves until SIGTERM or Ctrl-C. Raises ConfigError, StoreError, MissingDependencyError."""
    metrics, tokens = Metrics(), Tokens.read(settings.token, settings.tenants)
    if not tokens.tenants and settings.host not in LOOPBACK:
        rule = "no token is set: anyone who can reach this port may submit"
        LOG.warning("%s; set --token-file or --tenants-file", rule)
    store = None
    if settings.store is not None:
        store = open_store(settings.store, settings.store_bytes, settings.store_age_s)
    _raise_file_limit()
    listener = _bind(settings.host, settings.port)

    @asynccontextmanager
    async def start() -> AsyncIterator[Engine]:
        executor, workers = executor_of(
            settings.workers, settings.plan_s, settings.worker_bytes, settings.ray, spare=1
        )
        engine = Engine(executor, workers, store, metrics)
        loading = [executor.submit(load, b"") for _ in range(workers + 1)]
        gc.freeze()  # imported objects are never freed
        try:
            await asyncio.wait(map(asyncio.wrap_future, loading), timeout=LOADING_S)
            listener.listen(BACKLOG)  # only now: until then a load balancer sends requests elsewhere
            url = _url(listener)
            if settings.announce:
                print(json.dumps({"url": url, "pid": os.getpid()}), flush=True)
            else:
                LOG.info("listening on %s, with a page and /docs; store: %s", url, settings.store or "memory")
            yield engine
        finally:
            await engine.close()

    config = uvicorn.Config(
        create_app(start, tokens, metrics),
        loop="uvloop",
        http="h11",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=int(GRACE_S),
    )
    with listener, suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    if not host:
        raise ConfigError("--host", host, "is not an address", "write 127.0.0.1, or 0.0.0.0 for all")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        rule = f"cannot listen there: {getattr(error, 'strerror', None) or error}"
        remedy = "name another port, or 0 for a free one"
        raise ConfigError("--host, --port", f"{host}:{port}", rule, remedy) from None
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _raise_file_limit() -> None:
    """Raises the limit of open files to 65,536, or to the hard limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@dataclass(frozen=True)
class Server:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid


@contextmanager
def serving(
    folder: Path | str | None,
    *,
    options: Sequence[str] = (),
    token: str | None = None,
    log: Path | None = None,
) -> Iterator[Server]:
    """Runs `apportion serve` on a free loopback port until the block ends. folder: its store, None: memory. options:
    more options of the command. log: file that its log is appended to. Raises ExecutionError if it does not start."""
    command = [sys.executable, "-m", "apportion", "serve", "--json", "--port", "0", *options]
    command += [] if folder is None else ["--store", str(folder)]
    environment = os.environ | ({} if token is None else {"APPORTION_TOKEN": token})
    with open(log or os.devnull, "ab") as errors:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line:
            raise ExecutionError(f"the server ended with status {process.wait()}: see its log")
        reply = json.loads(line)
        if "url" not in reply:
            raise ExecutionError(f"the server did not start: {line.decode()}")
        yield Server(reply["url"], process)
    finally:
        process.terminate()
        try:
            process.wait(3 * GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
