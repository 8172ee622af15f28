"""The engine: turns requests into packs and plans each once. Runs on one event loop.

submit ──► in the store? ──► queue ──► worker ──► memory ──► store
pack   ──► memory, store, or wait for the worker
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from logging import getLogger

from apportion.ir.errors import DecodeError
from apportion.service.engine.entry import Entry, PlanRequest, State
from apportion.service.engine.hour import Minute, Usage, minutes, usage
from apportion.service.engine.metrics import Metrics
from apportion.service.engine.schedule import Schedule
from apportion.service.pack import Pack
from apportion.service.problems import ServiceError, UnknownPlanError
from apportion.service.store import Store, StoreError
from apportion.service.workers import Completion, Refusal, WorkerDiedError, plan_pack
from apportion.service.workers.work import Work

DEATHS = 3  # worker deaths after which a request is quarantined
GRACE_S = 0.25  # wait for the submission of a key, before it is reported as unknown
LOOK_S = 0.05  # first interval of polling the store for another server's plan; doubles each time
LOG_S = 1.0  # minimum interval between logged store failures: every rank's lookup may fail
MAX_AWAITED = 1 << 14  # maximum number of unknown keys with waiting readers
LOG = getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """Limits of an engine. queued: number of waiting requests; queued_bytes: their bytes; cached_bytes: bytes of packs
    in memory; known: number of requests whose state is remembered."""

    queued: int = 8192
    queued_bytes: int = 64 << 20
    cached_bytes: int = 128 << 20
    known: int = 16384


class Engine:
    """The engine. executor: runs functions such as `plan_pack` in other processes; workers: number of these processes,
    see `Schedule`."""

    def __init__(
        self,
        executor: Executor,
        workers: int,
        store: Store | None,
        metrics: Metrics,
        limits: Limits | None = None,
    ) -> None:
        self.metrics, self.store = metrics, store
        self._limits, self._executor = limits or Limits(), executor
        self._schedule = Schedule(workers, asyncio.get_running_loop().time)
        self._entries = OrderedDict[bytes, Entry]()
        self._packs = OrderedDict[bytes, Pack]()
        self._running, self._arriving = set[Entry](), dict[bytes, asyncio.Event]()
        self._tasks = set[asyncio.Future[object]]()
        self._queued_bytes = self._cached_bytes = 0
        self._logged_at = -LOG_S

    # ---- interface of the handlers

    async def submit(self, request: PlanRequest, tenant: str, ahead: int = 0) -> Entry:
        """Submits a request, which is planned once however often it is submitted. Raises ServiceError if it was refused
        or the queue is full."""
        key, due = request.key, self._schedule.due(request.job, ahead)
        entry = self._entries.get(key) or self._restore_entry(await self._load_pack(key), request.job, tenant)
        entry = self._entries.get(key) or entry  # another call may have added it
        if entry is None:
            entry = self._queue(plan_pack, request, tenant, due)
            self._remember_entry(entry)
        entry.due = min(entry.due, due)
        if entry.problem is not None:
            raise entry.problem
        return entry

    def cached(self, key: bytes) -> Pack | None:
        """The pack of a key in memory; None if it is not there."""
        pack = self._packs.get(key)
        if pack is not None:
            self._packs.move_to_end(key)
        return pack

    async def pack(self, key: bytes, wait_s: float) -> Pack | None:
        """The pack of a key; None if it is not ready within `wait_s` seconds. Raises UnknownPlanError, and ServiceError
        if the request is refused."""
        pack, entry = self.cached(key), self._entries.get(key)
        if pack is None and (entry is None or entry.state is State.READY):
            self._entries.pop(key, None)  # its pack was evicted from memory
            pack = await self._find_pack(key, min(wait_s, GRACE_S))
            entry = self._entries.get(key)
        if pack is not None or entry is None:
            return pack
        if entry.state is State.QUEUED and wait_s:
            entry.due = min(entry.due, entry.since)
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await entry.done.wait()
        if entry.problem is not None:
            raise entry.problem
        return self.cached(key) or (await self._load_pack(key) if entry.state is State.READY else None)

    async def make(self, work: Work, request: PlanRequest, tenant: str) -> bytes:
        """The result of a worker's function for a request, which is neither cached nor listed. Raises ServiceError."""
        entry = self._queue(work, request, tenant, self._schedule.due(request.job, 0))
        await entry.done.wait()
        if entry.problem is not None:
            raise entry.problem
        return entry.data

    def entry(self, key: bytes) -> Entry | None:
        """The entry of a request received since the start; None if there is none."""
        return self._entries.get(key)

    def record_use(self, key: bytes) -> None:
        """Records that a rank requests a plan."""
        entry = self._entries.get(key)
        if entry is not None and entry.first_use is None:
            entry.first_use = asyncio.get_running_loop().time()

    async def hour(self) -> tuple[list[Minute], list[Usage]]:
        """The last hour, by minute and by tenant; computed in a thread, because many requests take a while."""
        entries, now = list(self._entries.values()), asyncio.get_running_loop().time()
        return await asyncio.to_thread(lambda: (minutes(entries, now), usage(entries, now)))

    def latest(self, count: int) -> Iterator[Entry]:
        """The latest requests, newest first."""
        return (entry for entry, _ in zip(reversed(self._entries.values()), range(count), strict=False))

    async def close(self) -> None:
        """Ends the workers and their tasks; finished packs are stored."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10.0)
        if self.store is not None:
            self.store.close()

    # ---- queue and workers

    def _queue(self, work: Work, request: PlanRequest, tenant: str, due: float) -> Entry:
        self._admit(tenant, len(request.data))
        now = asyncio.get_running_loop().time()
        entry = Entry(request.key, work, request.data, request.job, request.ranks, tenant, due, now)
        self._queued_bytes += len(request.data)
        self._schedule.add(entry)
        self._dispatch()
        return entry

    def _admit(self, tenant: str, size: int) -> None:
        """Raises ServiceError if the queue is full and the tenant already has an even share of it."""
        queued, max_queued, max_bytes = len(self._schedule), self._limits.queued, self._limits.queued_bytes
        if queued >= max_queued or self._queued_bytes + size > max_bytes:
            count, held_bytes, share = self._schedule.share(tenant)
            if count >= max_queued * share or held_bytes + size > max_bytes * share:
                raise ServiceError("queue-full", f"{queued} requests wait for a worker", retry_after=1.0)

    def _dispatch(self) -> None:
        now = asyncio.get_running_loop().time()
        while (entry := self._schedule.next(self._running)) is not None:
            self._running.add(entry)
            entry.state = State.PLANNING
            self._queued_bytes -= len(entry.request)
            planning = asyncio.wrap_future(self._executor.submit(entry.work, entry.request))
            planning.add_done_callback(partial(self._on_planning_end, entry, now))
        self.metrics.queued.set(len(self._schedule))
        self.metrics.running.set(len(self._running))

    def _on_planning_end(
        self, entry: Entry, start: float, planning: asyncio.Future[Completion | Refusal]
    ) -> None:
        self._running.discard(entry)
        self._schedule.record_time(entry, asyncio.get_running_loop().time() - start)  # also after a failure
        try:
            self._accept_outcome(entry, planning.result())
        except WorkerDiedError as error:
            self._on_worker_death(entry, error)
        except TimeoutError:
            self._refuse(
                entry, ServiceError("too-long", "planning did not end within this server's time limit")
            )
        except asyncio.CancelledError:
            self._refuse(entry, ServiceError("failed", "the server is stopping"))
        except Exception as error:
            LOG.exception("planning %s failed", entry.key.hex()[:16])
            self._refuse(entry, ServiceError("failed", f"{type(error).__name__}: {error}"))
        self._dispatch()

    def _accept_outcome(self, entry: Entry, outcome: Completion | Refusal) -> None:
        if isinstance(outcome, Refusal):
            self._refuse(entry, ServiceError(outcome.type, outcome.detail, field=outcome.field))
            return
        entry.seconds = outcome.seconds
        if entry.work is plan_pack:
            pack = Pack.decode(outcome.data, entry.key)
            entry.plan = pack.head.id
            self._cache(pack)
            self._start(self._put_in_store(pack))
            self.metrics.planning.observe(outcome.seconds)
            self.metrics.readiness.observe(asyncio.get_running_loop().time() - entry.since)
        else:
            entry.data = outcome.data
        self._finish(entry, State.READY)

    def _on_worker_death(self, entry: Entry, error: WorkerDiedError) -> None:
        self.metrics.deaths.inc()
        entry.deaths += 1
        if entry.deaths >= DEATHS:
            self._refuse(
                entry, ServiceError("quarantined", f"{DEATHS} workers died planning it, the last: {error}")
            )
            return
        LOG.warning("%s: %s; it is planned again", entry.key.hex()[:16], error)
        entry.state = State.QUEUED
        self._queued_bytes += len(entry.request)
        self._schedule.add(entry)

    def _refuse(self, entry: Entry, problem: ServiceError) -> None:
        entry.problem = problem
        if problem.is_transient or problem.status == 500:
            self._entries.pop(entry.key, None)  # the same request may be planned later
        self._finish(entry, State.REFUSED)

    def _finish(self, entry: Entry, state: State) -> None:
        if entry.work is plan_pack:
            self.metrics.plans.labels(state).inc()
        entry.finish(state)

    # ---- memory and store

    def _remember_entry(self, entry: Entry) -> None:
        self._entries[entry.key] = entry
        self._wake_waiters(entry.key)
        while len(self._entries) > self._limits.known and next(iter(self._entries.values())).done.is_set():
            self._entries.popitem(last=False)

    async def _find_pack(self, key: bytes, wait_s: float) -> Pack | None:
        """Waits for the pack of a key in the store, where another server may put it; returns None once the request is
        submitted here. Raises UnknownPlanError if neither happens in time."""
        loop = asyncio.get_running_loop()
        deadline, pause_s = loop.time() + wait_s, LOOK_S
        while (pack := self.cached(key) or await self._load_pack(key)) is None and key not in self._entries:
            left_s = deadline - loop.time()
            if left_s <= 0 or len(self._arriving) >= MAX_AWAITED:
                self._arriving.pop(key, None)
                raise UnknownPlanError(key)
            arrival = self._arriving.setdefault(key, asyncio.Event())
            with suppress(TimeoutError):
                async with asyncio.timeout(min(pause_s, left_s)):
                    await arrival.wait()
            pause_s *= 2
        self._wake_waiters(key)
        return pack

    def _wake_waiters(self, key: bytes) -> None:
        """Wakes the readers that wait for an unknown key."""
        arrival = self._arriving.pop(key, None)
        if arrival is not None:
            arrival.set()

    def _cache(self, pack: Pack) -> None:
        if pack.key in self._packs:
            return
        self._packs[pack.key] = pack
        self._cached_bytes += len(pack.data)
        while self._cached_bytes > self._limits.cached_bytes and len(self._packs) > 1:
            self._cached_bytes -= len(self._packs.popitem(last=False)[1].data)
        self.metrics.cached.set(self._cached_bytes)

    async def _load_pack(self, key: bytes) -> Pack | None:
        """The pack of a key in the store; None if the store fails."""
        pack = None
        if self.store is not None:
            with self._logged_store_errors():
                pack = await asyncio.to_thread(self.store.get, key)
        if pack is not None:
            self._cache(pack)
            self.metrics.stored.inc()
        return pack

    async def _put_in_store(self, pack: Pack) -> None:
        if self.store is not None:
            with self._logged_store_errors():
                await asyncio.to_thread(self.store.put, pack)

    @contextmanager
    def _logged_store_errors(self) -> Iterator[None]:
        try:
            yield
        except (StoreError, DecodeError) as error:
            self.metrics.store_errors.inc()
            now = asyncio.get_running_loop().time()
            if now - self._logged_at >= LOG_S:
                self._logged_at = now
                LOG.error("%s", error)

    def _restore_entry(self, pack: Pack | None, job: bytes, tenant: str) -> Entry | None:
        """The entry for a pack from the store; None if there is no pack."""
        if pack is None:
            return None
        now = asyncio.get_running_loop().time()
        entry = Entry(pack.key, plan_pack, b"", job, pack.ranks, tenant, now, now, plan=pack.head.id)
        entry.finish(State.READY)
        self._remember_entry(entry)
        return entry

    def _start(self, task: object) -> None:
        future = asyncio.ensure_future(task)  # type: ignore[call-overload]
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)
