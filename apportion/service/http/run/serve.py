"""The server: store, workers, engine and HTTP, from start to end.

SIGTERM ──► no new connections ──► streams end, readers are told "not yet" ──► running plans are stored ──► exit 0
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, cast

import uvicorn
import uvloop

from apportion.ir.errors import ConfigError
from apportion.service.engine import Engine
from apportion.service.errors import StoreLostError
from apportion.service.http import audit
from apportion.service.http.api.bodies import Room
from apportion.service.http.auth import Keys
from apportion.service.http.calls import Parts
from apportion.service.http.connection import RESERVE, Connection, Crowd
from apportion.service.http.control import control
from apportion.service.http.delivery import Delivery
from apportion.service.http.edge import Edge
from apportion.service.http.export import Exports
from apportion.service.http.logs import log, logging_to
from apportion.service.http.metrics import Figures, Traffic
from apportion.service.http.run import standby
from apportion.service.http.run.door import Door
from apportion.service.http.run.options import Options, context_of
from apportion.service.http.watch.events import Watchers
from apportion.service.http.watch.reports import Reports
from apportion.service.http.watch.state import state_of
from apportion.service.limits import Limits
from apportion.service.private import Shown, shown
from apportion.service.store import Store, open_store
from apportion.service.workers import Supervisor, pool_of

_SPARE = 1  # worker that is kept for short plans
_IDLE_S = 75  # a connection without a request; trainers ask every few seconds
_SPARE_DESCRIPTORS = 128 + RESERVE  # for the store, workers and logs
_BACKLOG = 2048  # connections that wait to be taken
_TICK_S = 0.1  # between looks for a second signal
_BEAT_S = 0.02  # between looks at how late the event loop is
_SEND_BYTES = 256 << 10  # that the system keeps of what a client does not take; its own limit is some MB
_KEEP_TICKS = 6000  # of 0.1 s, between looks for the file that clients find the admin key in
_CUT_S = 0.5  # before the connections' drain ends
_CLOSING_S = 2.0  # of the drain: to close workers and store, and to end


@dataclass(frozen=True)
class Started:
    """What is there once the server listens. port: that the system chose, for port 0."""

    url: str
    pid: int
    store: str
    workers: int
    in_the_clear: bool


def serve(options: Options, announce: Callable[[Started], None]) -> None:
    """Serve until SIGTERM or SIGINT. announce: called once it listens.

    Raises ConfigError for an address beyond loopback without an admin key and for one that is taken, StoreError for a
    store that another server holds, StoreLostError where one takes it over, LaunchError where no worker starts.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to read anew
    most = _raise_descriptors()
    tls = context_of(options)
    with (
        logging_to(sys.stderr, options.log_format),
        closing(bind(options)) as listener,
        shown(listener, options.shown) as found,
        nullcontext() if options.folder is None else audit.auditing_in(options.folder),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(options, listener, most, announce, found, tls))


def bind(options: Options) -> socket.socket:
    """A socket that listens on the address; nobody answers yet. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            "--host", options.host, f"is no address ({error.strerror})", "write 127.0.0.1"
        ) from None
    if options.admin is None and not ip_address(address[0]).is_loopback:
        rule = "other machines reach this address, and there is no admin key: anyone could make jobs"
        raise ConfigError("--host", options.host, rule, "leave out --insecure, or name --admin-key-file FILE")
    with ExitStack() as opened:
        listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        try:
            listener.bind(address)
            listener.listen(
                _BACKLOG
            )  # now: of two servers that start at once, one is told that the port is taken
        except OSError as error:
            rule = f"cannot listen on {options.host}: {(error.strerror or str(error)).lower()}"
            raise ConfigError(
                "--port", options.port, rule, "choose another one; 0 takes a free one"
            ) from error
        opened.pop_all()
    return listener


def _raise_descriptors() -> int:
    """As many descriptors as the system allows; the connections that fit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard if hard != resource.RLIM_INFINITY else 1 << 16, 1 << 16)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(most - _SPARE_DESCRIPTORS, 16)


async def _serve(
    options: Options,
    listener: socket.socket,
    most: int,
    announce: Callable[[Started], None],
    found: Shown | None,
    tls: ssl.SSLContext | None,
) -> None:
    async with AsyncExitStack() as opened:
        pool = pool_of(options.workers, options.worker_bytes, spare=_SPARE)
        opened.push_async_callback(pool.close)
        starting = asyncio.create_task(pool.start())
        opened.push_async_callback(_cancelled, starting)
        if options.standby or options.workers == "ray":
            await starting
        store = await _store_of(options, listener, tls)
        opened.push_async_callback(asyncio.to_thread, store.close)
        engine = Engine(store, Supervisor(pool), options.limits, spare=_SPARE)
        await engine.start()
        gc.freeze()  # 100,000 objects that stay: a full collection over them took 0.2 s, of every waiting rank
        server = server_of(engine, options, most, tls)
        server.shown = found
        starting.add_done_callback(server.end_where_failed)
        telling = asyncio.create_task(
            _tell(lambda: announce(_started(options, listener, pool.size)), starting, server.listening)
        )
        opened.push_async_callback(_cancelled, telling)
        await server.serve(sockets=[listener])
        if starting.done():
            starting.result()
        if engine.lost:
            raise StoreLostError(f"{engine.lost}: the server has ended; start it again")


async def _tell(announce: Callable[[], None], starting: asyncio.Task[None], listening: asyncio.Event) -> None:
    """Once it plans: what is stored is served before."""
    await asyncio.wait({starting})
    await listening.wait()
    if not starting.cancelled() and starting.exception() is None:
        announce()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def _store_of(options: Options, listener: socket.socket, tls: ssl.SSLContext | None) -> Store:
    if options.standby:
        return await standby.opened(options.store, options.redis_password, listener, tls)
    return await asyncio.to_thread(open_store, options.store, password=options.redis_password)


def _started(options: Options, listener: socket.socket, size: int) -> Started:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    is_local = ip_address(host).is_loopback
    return Started(
        f"{options.scheme}://{shown}:{port}",
        os.getpid(),
        _place(options.store),
        size if options.workers == "ray" else options.workers,
        in_the_clear=options.scheme == "http" and not is_local,
    )


def _place(store: Path | str) -> str:
    """The store as it may be shown: without user and password."""
    scheme, mark, rest = str(store).partition("://")
    return f"{scheme}{mark}{rest.split('@')[-1]}" if mark else str(store)


def server_of(
    engine: Engine, options: Options, most_connections: int = 1024, tls: ssl.SSLContext | None = None
) -> Server:
    """The server of an engine that has started; it stops the engine when it ends."""
    keys = Keys(options.admin, options.metrics)
    traffic, crowd = Traffic(), Crowd(most_connections)
    config = configuration(application(engine, options, keys, traffic), options, crowd)
    door = None if tls is None else Door(tls, crowd)
    return Server(engine, config, options.parent, partial(renew, options, keys, tls), traffic, door)


def application(engine: Engine, options: Options, keys: Keys, traffic: Traffic) -> Edge:
    """All of HTTP on an engine."""
    limits = options.limits
    folder = options.store if isinstance(options.store, Path) else None
    figures = Figures(engine, traffic, folder)
    watchers = Watchers(partial(state_of, engine, folder or _place(options.store)), lambda: engine.draining)
    room, url = Room(limits.bodies_bytes), options.public_url.rstrip("/")
    extras = (watchers, Reports(), Exports(engine))
    parts = Parts(engine, keys, limits, options.patience, room, figures, *extras, url)
    delivery = Delivery(engine, keys, limits, traffic)
    return Edge(delivery, control(parts, options.admin is not None), traffic, audit.Audit())


def renew(options: Options, keys: Keys, tls: ssl.SSLContext | None, found: Shown | None) -> None:
    """Reads certificate and keys anew, for connections and requests from now on; what cannot be read stays as it is.
    found: where clients of this user find the admin key."""
    try:
        if tls is not None and context_of(options) is not None and options.certfile is not None:
            tls.load_cert_chain(options.certfile, options.keyfile)
        if options.renew is not None:
            key, (keys.admin, keys.metrics) = options.renew()
            if found is not None and key is not None:
                found.rekey(key)
    except (ConfigError, OSError) as error:
        log("reload failed", logging.ERROR, reason=str(error))
    else:
        log("reloaded", certificate=str(options.certfile) if tls else None)


def configuration(app: Edge, options: Options, crowd: Crowd) -> uvicorn.Config:
    """uvicorn with nothing between the connection and the application."""
    most_bytes = 2 * options.limits.body_bytes + (1 << 20)  # twice: what comes too much is read for a moment
    protocol = partial(Connection, most_bytes=most_bytes, crowd=crowd, patience=options.patience)
    return uvicorn.Config(
        cast(Any, app),
        http=cast(type[asyncio.Protocol], protocol),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=int(_drain_s(options.limits)),
    )


def _drain_s(limits: Limits) -> float:
    """For connections and plans, each."""
    return max(limits.drain_s - _CLOSING_S, 1.0)


class Server(uvicorn.Server):
    """uvicorn's server, which ends the engine together with the connections."""

    def __init__(
        self,
        engine: Engine,
        config: uvicorn.Config,
        parent: int | None = None,
        renew: Callable[[Shown | None], None] = lambda found: None,
        traffic: Traffic | None = None,
        door: Door | None = None,
    ) -> None:
        super().__init__(config)
        self._door = door
        self._engine, self._parent, self._renew = engine, parent, renew
        self._traffic = Traffic() if traffic is None else traffic
        self.listening = asyncio.Event()
        self.shown: Shown | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._door is None:
            await super().startup(sockets)
        else:
            await super().startup([])  # nobody listens yet
            make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
            state = self.server_state
            self._door.open(
                sockets or [], partial(make, config=self.config, server_state=state, app_state={})
            )
        self._beating = asyncio.create_task(self._beat())
        self.listening.set()

    def end_where_failed(self, starting: asyncio.Task[None]) -> None:
        """No worker can be started: what was stored is served no longer either, for whoever started us to see it."""
        self.should_exit |= starting.cancelled() or starting.exception() is not None

    async def _beat(self) -> None:
        """Observes pauses of the event loop, in which nobody is served."""
        now_s = asyncio.get_running_loop().time
        while True:
            due_s = now_s() + _BEAT_S
            await asyncio.sleep(_BEAT_S)
            self._traffic.pause_s.observe(max(now_s() - due_s, 0.0))

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            now_s = asyncio.get_running_loop().time()
            for connection in tuple(self.server_state.connections):
                cast(Connection, connection).check_time(now_s)
            self.should_exit |= self._parent not in (None, os.getppid())
            if self._engine.lost and not self.should_exit:
                log("the store is lost", logging.ERROR, reason=self._engine.lost)
                self.should_exit = True
        if counter % _KEEP_TICKS == 0 and self.shown is not None:
            self.shown.refresh()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Readers wait for the engine, and the engine for what is at workers: both at once."""
        log("stopping", connections=len(self.server_state.connections))
        drain_s = 0.0 if self._engine.lost else _drain_s(self._engine.limits)
        stopping = asyncio.create_task(self._engine.stop(drain_s))
        if self._door is not None:
            await self._door.close()
        patience_s = float(self.config.timeout_graceful_shutdown or 0)
        cutting = asyncio.get_running_loop().call_later(patience_s - _CUT_S, self._cut)
        await super().shutdown(sockets)
        cutting.cancel()
        while not stopping.done():
            await asyncio.wait({stopping}, timeout=_TICK_S)
            if self.force_exit:
                await self._engine.stop(0.0)
        await stopping
        self._beating.cancel()
        log("stopped")

    def _cut(self) -> None:
        """Who has not taken an answer by now will not: uvicorn would end the application in the middle of it."""
        for connection in tuple(self.server_state.connections):
            cast(Connection, connection).transport.abort()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The first signal drains, a second one does not wait. uvicorn's own would raise them again at the end."""
        if threading.current_thread() is not threading.main_thread():  # no signal comes here
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._asked_to_stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._renew(self.shown))
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _asked_to_stop(self) -> None:
        self.force_exit, self.should_exit = self.should_exit, True
