"""An engine from start to end: what it holds, whom a free worker serves next, what is no longer kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from apportion.service.engine.admission import Admission
from apportion.service.engine.kept.journal import Journal
from apportion.service.engine.kept.library import Entry, Library
from apportion.service.engine.kept.records import JobKey
from apportion.service.engine.kept.restore import restore
from apportion.service.engine.kept.state import Epoch, Iteration, Job
from apportion.service.engine.planning import Planning
from apportion.service.engine.schedule import choose
from apportion.service.engine.watch import failed_in
from apportion.service.errors import (
    DamagedJobError,
    NotFoundError,
    ServiceError,
    StoppingError,
    StoreError,
    StoreGoneError,
)
from apportion.service.limits import Limits
from apportion.service.store import Store
from apportion.service.workers.supervisor import Supervisor

T = TypeVar("T")

_STORE_RETRY_S = 1.0
_HOUSE_S = 30.0  # between looks for what is no longer kept


class Life:
    """What the engine is made of, on a store, with workers. Arguments and errors: as of `Engine`."""

    def __init__(
        self,
        store: Store,
        supervisor: Supervisor,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
        spare: int = 0,
    ) -> None:
        self.limits = Limits() if limits is None else limits
        self._clock = clock
        self._supervisor = supervisor
        self._journal = Journal(store)
        self._library = Library(self.limits)
        self._planning = Planning(
            supervisor, self._journal, self._library, self, self.limits.deadline_s, clock, spare
        )
        self._counters = self._planning.counters
        self._admission = Admission(self.limits, self._library, self._counters)
        self._jobs: dict[str, Job] = {}
        self._past: dict[str, int] = {}  # last epochs of deleted jobs
        self._leaving = set[str]()  # deleted jobs, of which the store still knows
        self._aside: dict[str, str] = {}  # why a job cannot go on: what the store has of it is damaged
        self._former: dict[
            str, tuple[JobKey, ...]
        ] = {}  # keys of jobs set aside or deleted: who may hear of that
        self._control = asyncio.Lock()
        self._turn = 0
        self.draining = False
        self._started = False

    # ---- life

    @property
    def ready(self) -> bool:
        """Whether it takes requests."""
        return self._started and not self.draining

    @property
    def lost(self) -> str:
        """Why the store is another's now, "" while it is ours."""
        return self._journal.store.lost

    async def trouble(self) -> str:
        """Why the store cannot be used, "" where it can. Asks it; takes as long as it does."""
        return await self._journal.probe()

    async def start(self) -> None:
        """Goes on where the last server on this store was; jobs with damaged records are set aside. Raises
        StoreError."""
        try:
            found = await self._journal.call(restore, self._journal.store, self._library, self._clock())
        except BaseException:
            self._journal.close()
            raise
        self._jobs, self._past, self._aside = found.jobs, found.past, found.aside
        self._former, self._born = found.former, found.born.epoch
        self._journal.later(found.news, found.stale)
        await self._journal.call(self._journal.store.keep_room)
        self._planning.tasks.spawn(self._journal.try_to_write())
        self._started = True
        self._housekeeping = asyncio.create_task(self._keep_house())
        for entry in failed_in(self._jobs.values()):
            self._planning.failures.add(entry)
        self._trim()
        self._supervisor.pool.resized = self.on_free
        self.on_free()

    async def stop(self, drain_s: float | None = None) -> None:
        """Takes nothing more and waits so long (`limits.drain_s`) for what is at workers; the rest is for the next
        server. Readers of anything else are told "not yet" at once."""
        self.draining = True
        self._housekeeping.cancel()
        self._wake_all()
        await self._planning.tasks.finish(self.limits.drain_s if drain_s is None else drain_s)
        self._wake_all()
        with suppress(StoreError):
            await self._journal.flush()
        self._journal.close()

    def _wake_all(self) -> None:
        for epoch in self._epochs():
            epoch.wake_all()

    def _epochs(self) -> Iterator[Epoch]:
        """All that go on."""
        return (epoch for job in self._jobs.values() for epoch in job.open.values())

    # ---- planning

    def on_free(self) -> None:
        """Gives free workers what is needed next."""
        if not self._started or self.draining:
            return
        while self._planning.free and (found := self._next()) is not None:
            self._turn += 1
            found.epoch.served = self._turn
            self._planning.start(found)

    def _next(self) -> Iteration | None:
        return choose(list(self._jobs.values()), self._clock(), self._planning.only_spare)

    def on_news(self, entry: Entry) -> None:
        """Tells those who need it."""
        for held in tuple(entry.users):
            self._place(held, entry.ready_at)
        self._trim()
        self.on_free()

    def _place(self, held: Iteration, ready_at: float | None) -> None:
        """In the queue where it waits for a worker; else its readers are told."""
        if held.waits:
            held.epoch.enqueue(held.number)
        elif held.entry.task is None:
            held.ready_at = held.ready_at or ready_at
            held.epoch.wake(held.number)

    async def _keep_house(self) -> None:
        while True:
            with suppress(ServiceError, StoreError):
                await self.tidy()
            await asyncio.sleep(_HOUSE_S)

    async def tidy(self) -> None:
        """No longer keeps plans that are too old, and asks the store how much it holds. Raises StoreError."""
        store, limits = self._journal.store, self.limits
        self._library.record_bytes = await self._journal.call(store.record_bytes)
        if limits.store_s:
            old = await self._journal.call(store.packs_before, time.time() - limits.store_s)
            await self._drop_packs(self._library.discard(old))
        self._trim()

    def _trim(self) -> None:
        excess = self._library.excess()
        if excess:
            self._planning.tasks.spawn(self._drop_packs(excess))

    async def _drop_packs(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            await self._journal.insist(partial(self._drop_pack, key))

    async def _drop_pack(self, key: bytes) -> None:
        if self._library.may_drop(key):
            await self._journal.call(self._journal.store.drop_pack, key)

    # ---- checks

    def _job(self, name: str) -> Job:
        job = self._jobs.get(name)
        if job is None:
            self._check_whole(name)
            raise self._no_job(name)
        job.used_s = self._clock()
        return job

    def _check_whole(self, name: str) -> None:
        if name in self._aside:
            raise DamagedJobError(
                f"job {name} is set aside ({self._aside[name]}): delete it, create it anew and begin a new epoch",
                field="job",
            )

    def _no_job(self, name: str) -> NotFoundError:
        return NotFoundError(f"there is no job {name[:64]!r}", field="job")

    def _check_running(self) -> None:
        if self.draining:
            raise StoppingError("the server is shutting down: ask the next one", retry_after=_STORE_RETRY_S)

    # ---- the store

    async def _commit(self, key: str, record: bytes) -> None:
        """A new record. Where this fails nobody knows whether it is there, so with the next commit it is not: a
        restarted server shall not know more than was answered."""
        try:
            await self._guarded(self._journal.commit({key: record}))
        except StoreGoneError:
            self._journal.later({}, [key])
            raise

    async def in_store(self, function: Callable[..., T], *args: object) -> T:
        """What the function returns, called where the store is called. Raises StoreGoneError."""
        return await self._guarded(self._journal.call(function, *args))

    async def _guarded(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except StoreError as error:
            self._counters.overload += 1
            raise StoreGoneError(f"the store does not answer: {error}", retry_after=_STORE_RETRY_S) from None
