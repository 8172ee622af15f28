"""Real servers for tests, in a thread of this process over a pool that can be told what to do."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import urllib3
import uvloop

from apportion.service.engine import Engine
from apportion.service.http.auth import key_digest
from apportion.service.http.run.options import Options
from apportion.service.http.run.serve import Server, bind, server_of
from apportion.service.limits import Limits
from apportion.service.store import Store
from apportion.service.store.memory import MemoryStore
from apportion.service.workers.supervisor import Supervisor
from tests.service.engines import JOB, LocalPool, batch

ADMIN = "admin-key-of-the-server-0123"
KEY = "key-of-the-job-0123456789"
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Answer:
    """A response, read whole."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def problem(self) -> str:
        """The last part of the problem's type, once it was seen to be a whole problem."""
        assert self.headers["content-type"] == "application/problem+json", self
        assert self.json["status"] == self.status
        assert self.json["title"]
        assert self.json["detail"]
        return str(self.json["type"]).removeprefix("urn:apportion:problem:")


@dataclass
class Caller:
    """A client without any help: one request, one answer, no retries."""

    url: str
    key: str | None = None
    http: urllib3.PoolManager = field(
        default_factory=lambda: urllib3.PoolManager(maxsize=8, retries=False, timeout=TIMEOUT_S)
    )

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """body: bytes as they are, anything else as JSON. headers: with `_` for `-`."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.key is not None:
            sent.setdefault("authorization", f"Bearer {self.key}")
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            sent.setdefault("content-type", "application/json")
        found = self.http.request(method, self.url + path, body=body, headers=sent, redirect=False)
        return Answer(found.status, {k.lower(): v for k, v in found.headers.items()}, found.data)

    def using(self, key: str | None) -> Caller:
        return replace(self, key=key)


@dataclass
class Live:
    """A server in a thread of this process."""

    url: str
    engine: Engine
    pool: LocalPool
    server: Server
    loop: asyncio.AbstractEventLoop
    caller: Caller
    thread: threading.Thread | None = None

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.partition("://")[2].rsplit(":", 1)
        return host, int(port)

    def stop(self) -> None:
        """As SIGTERM does."""
        self.server.should_exit = True

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, TIMEOUT_S)


@contextmanager
def live(
    pool: LocalPool | None = None,
    limits: Limits | None = None,
    *,
    admin: str | None = ADMIN,
    store: Store | None = None,
    send_buffer: int = 0,
    folder: Path = Options.store,
    connections: int = 1024,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> Iterator[Live]:
    """A server that listens on a free port of loopback. send_buffer: bytes that the kernel holds for a client, 0 for
    its own choice. folder: whose disk is watched. connections: that it takes. options: further
    ones of `Options`."""
    chosen = Options(
        port=0,
        store=folder,
        admin=None if admin is None else key_digest(admin),
        limits=limits or Limits(drain_s=4.0),
        **options,
    )
    parts = _Parts(pool or LocalPool(), chosen, store or MemoryStore(), connections, tls)
    with closing(bind(chosen)) as listener:
        if send_buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        thread = threading.Thread(target=parts.run, args=(listener,), name="server")
        thread.start()
        try:
            found = parts.wait(thread)
            found.caller = Caller(found.url, admin)
            found.thread = thread
            yield found
        finally:
            parts.stop()
            thread.join(TIMEOUT_S)
            if parts.live is not None:
                parts.live.caller.http.clear()
    assert not thread.is_alive(), "the server does not end"
    if parts.error is not None:
        raise parts.error


@dataclass
class _Parts:
    pool: LocalPool
    options: Options
    store: Store
    connections: int
    tls: ssl.SSLContext | None = None
    live: Live | None = None
    error: BaseException | None = None
    listening: threading.Event = field(default_factory=threading.Event)

    def run(self, listener: socket.socket) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(listener))
        except BaseException as error:
            self.error = error
        finally:
            self.listening.set()

    async def _serve(self, listener: socket.socket) -> None:
        engine = Engine(self.store, Supervisor(self.pool), self.options.limits)
        await engine.start()
        server = server_of(engine, self.options, self.connections, self.tls)
        host, port = listener.getsockname()[:2]
        url = f"{'http' if self.tls is None else 'https'}://{host}:{port}"
        loop = asyncio.get_running_loop()
        self.live = Live(url, engine, self.pool, server, loop, Caller(url))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait(
            {serving, asyncio.create_task(server.listening.wait())}, return_when="FIRST_COMPLETED"
        )
        self.listening.set()
        await serving

    def wait(self, thread: threading.Thread) -> Live:
        assert self.listening.wait(TIMEOUT_S)
        if self.live is None or not thread.is_alive():
            raise RuntimeError("the server did not start") from self.error
        return self.live

    def stop(self) -> None:
        if self.live is not None:
            self.live.loop.call_soon_threadsafe(self.pool.open) if not self.live.loop.is_closed() else None
            self.live.stop()


def make_job(caller: Caller, name: str = "run", **more: Any) -> Answer:
    return caller("POST", "/v1/jobs", {"name": name, "job": JOB.to_data(), "key": KEY, **more})


def begin(caller: Caller, name: str = "run", run: str = "first") -> int:
    answer = caller.using(KEY)("POST", f"/v1/jobs/{name}/epochs", {"run": run})
    assert answer.status in (200, 201), answer
    return int(answer.json["epoch"])


def submit(
    caller: Caller, iteration: int, number: int | None = None, name: str = "run", epoch: int = 1
) -> Answer:
    """The batch of that number (of the iteration's, if None)."""
    data = [found.to_data() for found in batch(iteration if number is None else number)]
    path = f"/v1/jobs/{name}/epochs/{epoch}/iterations/{iteration}"
    return caller.using(KEY)("PUT", path, {"batches": data})


def plan_path(iteration: int, rank: int = 0, name: str = "run", epoch: int = 1) -> str:
    return f"/v1/jobs/{name}/epochs/{epoch}/iterations/{iteration}/ranks/{rank}/plan"


def ready(caller: Caller, iteration: int, rank: int = 0, name: str = "run", epoch: int = 1) -> Answer:
    """The plan, once it is there."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        answer = caller.using(KEY)("GET", plan_path(iteration, rank, name, epoch) + "?wait_s=5")
        if answer.status != 202:
            return answer
    raise TimeoutError(f"iteration {iteration} was not planned in time")


def until(done: Callable[[], bool]) -> None:
    """Waits until `done()`. Raises TimeoutError."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not done():
        if time.monotonic() > deadline_s:
            raise TimeoutError("not in time")
        time.sleep(0.005)


def thread(work: Callable[[], object]) -> threading.Thread:
    """Runs it beside the test."""
    found = threading.Thread(target=work)
    found.start()
    return found
