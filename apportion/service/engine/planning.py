"""From an entry to its bodies: planned by a worker and stored; or read from the store, and lowered if compact."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from apportion.ir.bytes.job import with_job
from apportion.ir.errors import ApportionError, DecodeError
from apportion.service.engine.kept.journal import Journal
from apportion.service.engine.kept.library import Body, Entry, Library
from apportion.service.engine.kept.records import IterationRecord, ProblemRecord, decode
from apportion.service.engine.kept.state import Iteration, Job
from apportion.service.engine.metrics import Counters
from apportion.service.engine.schedule import LONG_S
from apportion.service.engine.tasks import LiveTasks, shared
from apportion.service.engine.watch import BusyView, Failures
from apportion.service.errors import OverloadError, QuarantinedError, RefusedBatchError
from apportion.service.packs import Pack, etag, pack_of
from apportion.service.store import Store
from apportion.service.workers.errors import DeadlineError, PoisonedError, RefusedError
from apportion.service.workers.supervisor import Supervisor
from apportion.service.workers.tasks import Done, Task

_CHANGED = ProblemRecord(
    RefusedBatchError.type,
    "its plan was lost, and this release plans it otherwise: ranks may have the first one; begin a new epoch",
    "batches",
)
_SPARE_S = 2.0  # that a plan may take on a worker that is kept for short ones
_PAUSE_S = 1.0  # after the pool failed, before the same task is given to it again

log = logging.getLogger(__name__)


class PlanSource(NamedTuple):
    """What the plans of an iteration are made from: the kind of a worker's task and its payload. id: 32 bytes, of the
    iteration plan."""

    kind: Literal["plan", "lower"]
    payload: bytes
    id: bytes


class Listener(Protocol):
    """Who hears of changes."""

    def on_free(self) -> None:
        """A worker has become free."""

    def on_news(self, entry: Entry) -> None:
        """The entry has another state."""


class Planning:
    """Gives tasks to workers, and what they make to the store. spare: workers of the pool that are kept for short
    plans, while all others are at long ones."""

    def __init__(
        self,
        supervisor: Supervisor,
        journal: Journal,
        library: Library,
        listener: Listener,
        deadline_s: float,
        clock: Callable[[], float],
        spare: int,
    ) -> None:
        self._spare = spare
        self._supervisor, self._journal, self._library, self._listener = (
            supervisor,
            journal,
            library,
            listener,
        )
        self._deadline_s, self._clock = deadline_s, clock
        self._entries = 0  # with a task
        self._busy: dict[Entry, tuple[Iteration, float]] = {}  # being planned, for whom first, since when
        self.failures = Failures()
        self._lowering = 0
        self._turn = asyncio.Condition()  # of who waits to have a stored plan lowered
        self.tasks, self.counters = LiveTasks(), Counters()

    @property
    def at_workers(self) -> int:
        return len(self._busy) + self._lowering

    @property
    def free(self) -> bool:
        """Whether another plan may be started; while the store is slow, results do not pile up."""
        size = self._supervisor.pool.size
        room = self.at_workers < size and self._entries < 2 * size + 2
        return room and (not self.only_spare or all(map(self._is_long, self._busy.values())))

    @property
    def busy(self) -> list[BusyView]:
        """What workers plan, longest first."""
        now_s = self._clock()
        return [
            BusyView(held.epoch.job.name, held.epoch.number, held.number, now_s - since_s)
            for held, since_s in self._busy.values()
        ]

    @property
    def only_spare(self) -> bool:
        """Whether no worker is free but those that are kept for short plans."""
        return self.at_workers >= max(self._supervisor.pool.size - self._spare, 1)

    def _is_long(self, busy: tuple[Iteration, float]) -> bool:
        held, since_s = busy
        return held.epoch.job.plan_s > LONG_S or self._clock() - since_s >= LONG_S

    def start(self, found: Iteration) -> None:
        """Has it planned, for all who need it."""
        entry, job = found.entry, found.epoch.job
        within_s = _SPARE_S if self.only_spare else None
        self._entries += 1
        self._busy[entry] = (found, self._clock())
        job.at_workers += 1
        entry.task = self.tasks.spawn(self._plan(entry, job, within_s))
        if self._spare:  # who waits for it may have a spare worker once it proves to be long
            asyncio.get_running_loop().call_later(LONG_S, self._listener.on_free)
        entry.task.add_done_callback(lambda _: self._ended(entry))

    def give_up(self, entry: Entry) -> None:
        """Frees its worker, where it is at one; what is made already is stored."""
        if entry in self._busy and entry.task is not None:
            entry.task.cancel()

    async def bodies(self, entry: Entry) -> tuple[Body, ...] | None:
        """Of a stored entry, all ranks; None where its pack is lost, then it is planned again. Raises StoreError, and
        OverloadError where no worker could lower it."""
        if entry.bodies is not None:
            return entry.bodies
        if entry.loading is None:
            entry.loading = self.tasks.spawn(self._loaded(entry))
        return await shared(entry.loading)

    async def id_of(self, entry: Entry) -> bytes | None:
        """Of a stored entry's plan; None where its pack is lost. Raises StoreError."""
        if entry.id is None:
            entry.id = await self._journal.call(_read_id, self._journal.store, entry.key)
        return entry.id

    async def source_of(self, held: Iteration) -> PlanSource | None:
        """What the plans of a stored iteration can be made from again: its compact form where the store has that, else
        the request. None where both are lost. Raises StoreError."""
        store = self._journal.store
        pack = await self._journal.call(_read_pack, store, held.entry.key)
        if pack is None:
            return None
        if pack.form == "assignment":
            return PlanSource("lower", pack.bodies[0], pack.id)
        request = await self._journal.call(_request, store, held.key)
        return (
            None
            if request is None
            else PlanSource("plan", with_job(held.epoch.job.state.spec, request), pack.id)
        )

    # ---- planning

    async def _plan(self, entry: Entry, job: Job, within_s: float | None) -> None:
        """within_s: after so long it leaves its worker, and waits for one that is not kept for short plans."""
        started_s = self._clock()
        try:
            task = _task(job, entry)
            async with asyncio.timeout(within_s):
                done = await self._supervisor.run(task, self._deadline_s)
        except (RefusedError, DeadlineError, PoisonedError) as error:
            self._leave(entry)
            await self._refuse(entry, _problem(error), for_good=not isinstance(error, DeadlineError))
        except TimeoutError:
            entry.long = True
            self._leave(entry)
        except Exception:
            log.exception("the pool failed; the batch is planned again in %g s", _PAUSE_S)
            self.counters.errors += 1
            self._leave(entry)
            await asyncio.sleep(_PAUSE_S)
        else:
            self.counters.plan_s.observe(self._clock() - started_s)
            self._leave(entry)
            await self._publish(entry, done)

    def _leave(self, entry: Entry) -> None:
        held = self._busy.pop(entry, None)
        if held is not None:
            job, since_s = held[0].epoch.job, held[1]
            job.at_workers -= 1
            job.spend(self._clock() - since_s, self._clock())
            self._listener.on_free()

    def _ended(self, entry: Entry) -> None:
        """Also where the task was cancelled before its first step."""
        self._entries -= 1
        self._leave(entry)
        self._library.finished(entry)
        self._listener.on_news(entry)

    async def _publish(self, entry: Entry, done: Done) -> None:
        if entry.id not in (None, done.id):  # ranks may have the plan that was lost
            await self._refuse(entry, _CHANGED, for_good=False)
            return
        came_s, store = self._clock(), self._journal.store
        size, bodies = await self._journal.insist(
            lambda: self._journal.call(_store_pack, store, entry.key, done)
        )
        entry.planned_ms, entry.ready_at = done.ms, time.time()
        self._library.stored(entry, size, bodies)
        now_s = self._clock()
        self.counters.publish_s.observe(now_s - came_s)
        for user in entry.users:
            self.counters.ready_s.observe(now_s - user.submitted_s)

    async def _refuse(self, entry: Entry, problem: ProblemRecord, for_good: bool) -> None:
        def records() -> dict[str, bytes]:  # anew at each attempt: only for whom the entry still is
            return {user.key: user.record(b"", problem) for user in entry.users if user.recording is None}

        await self._journal.insist(lambda: self._journal.commit(records()))
        self._library.given_up(entry, problem, for_good)
        self.failures.add(entry)

    # ---- reading

    async def _loaded(self, entry: Entry) -> tuple[Body, ...] | None:
        try:
            bodies = await self._read(entry)
            if bodies is None:
                await self._plan_again(entry)
            else:
                self._library.keep(entry, bodies, asked=True)
            return bodies
        finally:
            entry.loading = None

    async def _read(self, entry: Entry) -> tuple[Body, ...] | None:
        pack = await self._journal.call(_read_pack, self._journal.store, entry.key)
        if pack is None or pack.form == "slices":
            return None if pack is None else await self._journal.call(_bodies, pack.id, pack.bodies)
        async with self._turn:
            await self._turn.wait_for(self._may_lower)
            self._lowering += 1
        try:
            return await self._lower(entry, pack)
        finally:
            self._lowering -= 1
            self._listener.on_free()
            async with self._turn:
                self._turn.notify_all()

    def _may_lower(self) -> bool:
        """At half of the workers: who reads old plans must not keep those of others from being made."""
        return self._lowering < max(1, self._supervisor.pool.size // 2)

    async def _lower(self, entry: Entry, pack: Pack) -> tuple[Body, ...] | None:
        try:
            done = await self._supervisor.run(Task("lower", pack.bodies[0]), self._deadline_s)
        except RefusedError as error:
            log.error("the assignment of %s cannot be lowered: %s", pack.key.hex(), error)
            return None
        except ApportionError as error:
            raise OverloadError(f"no worker could lower the plan: {error}", retry_after=_PAUSE_S) from None
        if done.id == pack.id:
            return await self._journal.call(_bodies, done.id, done.bodies)
        entry.id = pack.id
        log.error("the plan of %s is lowered to another one than by whoever stored it", pack.key.hex())
        return None

    async def _plan_again(self, entry: Entry) -> None:
        """Its pack is damaged or gone; the request is in the record of any iteration that needs it."""
        store = self._journal.store
        user = next((user for user in entry.users if user.recording is None), None)
        if user is None:
            return
        log.error("the pack of %s is damaged or gone: it is planned again", entry.key.hex())
        record = await self._journal.call(_request, store, user.key)
        await self._journal.call(store.drop_pack, entry.key)
        self.counters.healed += 1
        self._library.lost(entry)
        if record is not None:
            self._library.expect(entry, record)
        self._listener.on_news(entry)


def _task(job: Job, entry: Entry) -> Task:
    """Raises RefusedError for a record that cannot be read."""
    try:
        return Task("plan", with_job(job.state.spec, entry.request))
    except ApportionError as error:
        raise RefusedError(type(error).__name__, str(error), "batches") from None


def _store_pack(store: Store, key: bytes, done: Done) -> tuple[int, tuple[Body, ...]]:
    """(bytes of the pack, bodies)"""
    pack = pack_of(done, key).encode()
    store.put_pack(key, pack)
    return len(pack), _bodies(done.id, done.bodies)


def _bodies(id: bytes, bodies: tuple[bytes, ...]) -> tuple[Body, ...]:
    return tuple(Body(data, etag(data), id) for data in bodies)


def _read_pack(store: Store, key: bytes) -> Pack | None:
    """None where it is not there, damaged or another one."""
    data = store.read_pack(key)
    try:
        found = None if data is None else Pack.decode(data)
    except DecodeError as error:
        log.error("the pack of %s: %s", key.hex(), error)
        return None
    return found if found is not None and found.key == key else None


def _read_id(store: Store, key: bytes) -> bytes | None:
    try:
        part = store.read_body(key, 0)
    except DecodeError:
        return None
    return None if part is None else part.id


def _request(store: Store, key: str) -> bytes | None:
    found = next(store.records(key, []), None)
    return None if found is None else decode(key, found[1], IterationRecord).request


def _problem(error: RefusedError | DeadlineError | PoisonedError) -> ProblemRecord:
    if isinstance(error, RefusedError):
        return ProblemRecord(RefusedBatchError.type, error.message, error.field)
    kind = QuarantinedError if isinstance(error, PoisonedError) else RefusedBatchError
    return ProblemRecord(kind.type, str(error), "batches")
