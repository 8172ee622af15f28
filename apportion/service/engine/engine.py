"""The service without HTTP: jobs, their epochs and iterations, who waits for what, and what is planned when.

    submit ──record──► queue ──schedule──► worker ──pack──► store ──► cache ──► fetch, peek
                         ▲                                    │ on a miss: read, lowered by a worker where compact
                         └──── after a restart, from records ─┘

What was answered is durable: a server that is killed at any moment and started again goes on where it was. All methods
belong to one event loop; the store's calls are made in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence

from apportion.ir.fields import integer
from apportion.ir.request.batch import Batch
from apportion.service.engine.admission import Asked, asked
from apportion.service.engine.jobs import Jobs
from apportion.service.engine.kept.library import Body
from apportion.service.engine.kept.records import MAX_ITERATION
from apportion.service.engine.kept.state import Epoch, Iteration, IterationState
from apportion.service.engine.metrics import Snapshot, StreamGauges
from apportion.service.engine.planning import PlanSource
from apportion.service.engine.watch import BusyView, FailedView, JobView, job_view
from apportion.service.errors import ConflictError, NotFoundError, ServiceError, StoppingError

_LOADING_S = 10.0  # that a reader waits for a plan that is there but not at hand, whatever it says


class Engine(Jobs):
    """store and supervisor's pool are opened and closed by their owner, around `start` and `stop`. clock: seconds.
    spare: workers of the pool that are kept for short plans while all others are at long ones.

    Unless another error is named, methods raise NotFoundError for a job, epoch or rank that there is not, GoneError for
    what is over, StoreGoneError where the store fails, StoppingError while draining, and ConfigError for a wrong value.
    """

    # ---- iterations

    async def submit(self, name: str, epoch: int, iteration: int, batches: Sequence[Batch]) -> bool:
        """Whether it was new; False where the same was submitted before. Durable when it returns.

        Raises ConflictError where another batch was submitted, QuotaError, OverloadError, LimitError, and CapacityError
        for batches that are no iteration of the job.
        """
        integer("iteration", iteration, 0, MAX_ITERATION)
        job = self._job(name)
        found = job.epoch(epoch)
        found.check(iteration)
        self._admission.check_batches(job.state.spec, batches)
        if iteration not in found.iterations:
            self._check_running()
            self._admission.check_room(found, iteration, 0)  # before any work
        wanted = await asked(job.state.spec, batches)
        while True:
            found.check(iteration)
            held = found.iterations.get(iteration)
            if held is None or held.recording is None:
                break
            await asyncio.shield(held.recording)
        if held is not None:
            _check_same_batch(held, wanted.digest)
            return False
        await self._record(found, iteration, wanted)
        return True

    async def _record(self, epoch: Epoch, number: int, wanted: Asked) -> None:
        self._check_running()
        self._admission.check_room(epoch, number, len(wanted.request))
        held = Iteration(epoch, number, wanted.digest, self._clock())
        held.recording = asyncio.get_running_loop().create_future()
        self._library.need(wanted.key, held, wanted.request)
        epoch.add(held)
        known = held.entry.stored_bytes > 0 or held.entry.problem is not None
        hit = known or len(held.entry.users) > 1
        written = self._journal.commit({held.key: held.record(wanted.request, held.entry.problem)})
        self._planning.tasks.spawn(self._recorded(held, written, hit))
        error = await asyncio.shield(held.recording)
        if error is not None:
            raise error

    async def _recorded(self, held: Iteration, written: Awaitable[None], hit: bool) -> None:
        recording = held.recording
        error: ServiceError | None = StoppingError("the server stopped before it was stored")
        try:
            await self._guarded(written)
            held.epoch.check(held.number)
            error = None
        except ServiceError as failed:
            error = failed
        finally:
            held.recording = None
            self._admitted(held, hit) if error is None else self._turned_away(held)
            if recording is not None:
                recording.set_result(error)

    def _admitted(self, held: Iteration, hit: bool) -> None:
        self._counters.submitted += 1
        self._counters.hits += hit
        self._counters.misses += not hit
        self._place(held, time.time())
        self.on_free()

    def _turned_away(self, held: Iteration) -> None:
        if held.epoch.iterations.get(held.number) is held:
            held.epoch.remove(held.number)
            self._library.release(held)
            self._trim()
            self._journal.later({}, [held.key])

    async def iteration_state(self, name: str, epoch: int, iteration: int) -> IterationState:
        """What became of a submitted iteration."""
        found = self._job(name).epoch(epoch)
        found.check(iteration)
        held = found.iterations.get(iteration)
        if held is None:
            raise NotFoundError(
                f"iteration {iteration} of epoch {epoch} was not submitted", field="iteration"
            )
        entry = held.entry
        if entry.problem is not None:
            return IterationState(entry.state, problem=entry.problem.error())
        if not entry.stored_bytes:
            return IterationState(entry.state)
        plan = await self._guarded(self._planning.id_of(entry))
        return IterationState(entry.state, plan, None, entry.planned_ms, held.ready_at)

    # ---- readers

    def peek(self, name: str, epoch: int, iteration: int, rank: int, takes: bool = True) -> Body | None:
        """The rank's body where it is at hand, else None: ask `fetch` for the reason. takes: whether the rank has it
        then. Raises nothing."""
        job = self._jobs.get(name)
        found = None if job is None else job.open.get(epoch)
        held = None if found is None else found.known(iteration)
        if held is None:
            return None
        bodies = held.entry.bodies
        if bodies is None or not 0 <= rank < len(bodies):
            return None
        return self._delivered(held, bodies[rank], takes)

    async def fetch(
        self, name: str, epoch: int, iteration: int, rank: int, wait_s: float, takes: bool = True
    ) -> Body | None:
        """The rank's body; waits for it, be it submitted or not, at most `wait_s` and `limits.wait_s`, then None.
        takes: as of `peek`.

        Raises RefusedBatchError and QuarantinedError where it cannot be planned.
        """
        body = self.peek(name, epoch, iteration, rank, takes)
        if body is not None:
            return body
        job = self._job(name)
        found = job.epoch(epoch)
        integer("iteration", iteration, 0, MAX_ITERATION)
        if not 0 <= rank < job.state.spec.ranks:
            raise NotFoundError(
                f"job {name} has no rank {rank}, it has {job.state.spec.ranks} from 0 on", field="rank"
            )
        try:
            async with asyncio.timeout(min(wait_s, self.limits.wait_s)) as patience:
                return await self._guarded(self._awaited(found, iteration, rank, patience, takes))
        except TimeoutError:
            return None

    async def _awaited(
        self, epoch: Epoch, number: int, rank: int, patience: asyncio.Timeout, takes: bool
    ) -> Body | None:
        while True:
            epoch.check(number)
            held = epoch.known(number)
            if held is not None and held.entry.problem is not None:
                raise held.entry.problem.error()
            if held is not None and held.entry.stored_bytes:
                if held.entry.bodies is None:
                    _extend(patience)
                bodies = await self._planning.bodies(held.entry)
                if bodies is not None:
                    epoch.check(number)
                    return self._delivered(held, bodies[rank], takes)
                continue
            if self.draining and (held is None or held.entry.task is None):
                return None
            with epoch.waiting(number, self._clock()) as gate:
                if gate.readers == 1:  # it is wanted now
                    self.on_free()
                await gate.event.wait()

    def _delivered(self, held: Iteration, body: Body, takes: bool) -> Body:
        if not takes:
            return body
        self._counters.deliveries += 1
        self._library.cache.touch(held.entry)
        if held.number > held.epoch.delivered:
            self._advance(held.epoch, held.number)
        return body

    def _advance(self, epoch: Epoch, number: int) -> None:
        epoch.advance(number, now_s := self._clock())
        epoch.job.used_s = now_s
        behind = epoch.iterations.get(number - epoch.job.state.lookahead)
        if behind is not None:  # no rank is likely to be so far behind
            self._library.cache.spend(behind.entry)
        drops = self._retire(epoch)
        self._journal.later({epoch.key: epoch.record()}, drops)
        self.on_free()

    def _retire(self, epoch: Epoch) -> list[str]:
        """No longer keeps what is far behind the front, some at a time; the keys of that."""
        floor = epoch.front - self.limits.keep
        if floor - epoch.floor < max(1, self.limits.keep // 16):
            return []
        epoch.floor = floor
        held = [epoch.iterations[number] for number in epoch.numbers if number < floor]
        for iteration in held:
            epoch.remove(iteration.number)
            self._library.release(iteration)
        for number in [number for number in epoch.gates if number < floor]:
            epoch.wake(number)
        self._trim()
        return [iteration.key for iteration in held]

    # ---- figures

    async def source(self, name: str, epoch: int, iteration: int) -> PlanSource:
        """What the iteration's plans are made from. Raises ConflictError where it is not planned."""
        found = self._job(name).epoch(epoch)
        found.check(iteration)
        held = found.known(iteration)
        if held is None:
            raise NotFoundError(
                f"iteration {iteration} of epoch {epoch} was not submitted", field="iteration"
            )
        if held.entry.problem is not None:
            raise held.entry.problem.error()
        source = await self._guarded(self._planning.source_of(held)) if held.entry.stored_bytes else None
        if source is None:
            raise ConflictError(
                f"iteration {iteration} of epoch {epoch} is not planned yet", field="iteration"
            )
        return source

    def job_views(self) -> list[JobView]:
        """Every job and where its streams are, by name."""
        return [job_view(self._jobs[name]) for name in sorted(self._jobs)]

    @property
    def busy(self) -> list[BusyView]:
        """What workers plan now."""
        return self._planning.busy

    @property
    def failures(self) -> list[FailedView]:
        """The latest batches that cannot be planned."""
        return self._planning.failures.views()

    @property
    def aside(self) -> dict[str, str]:
        """Jobs whose records are damaged, and why."""
        return dict(self._aside)

    def snapshot(self) -> Snapshot:
        """All there is to tell, now."""
        pool = self._supervisor.pool
        return Snapshot(
            counters=self._counters,
            tasks=self._supervisor.counters,
            workers=pool.size,
            alive=pool.alive,
            restarts=pool.restarts,
            jobs=tuple((job.name, job.at_workers) for job in self._jobs.values()),
            streams=tuple(map(_gauges, self._epochs())),
            unplanned=self._library.unplanned,
            unplanned_bytes=self._library.unplanned_bytes,
            at_workers=self._planning.at_workers,
            waiting=sum(gate.readers for epoch in self._epochs() for gate in epoch.gates.values()),
            packs=self._library.packs,
            pack_bytes=self._library.pack_bytes,
            record_bytes=self._library.record_bytes,
            cached=len(self._library.cache),
            cache_bytes=self._library.cache.bytes,
            store_errors=self._journal.errors,
        )


def _extend(patience: asyncio.Timeout) -> None:
    """A plan that is there is worth more than "not yet"."""
    least = asyncio.get_running_loop().time() + _LOADING_S
    patience.reschedule(max(patience.when() or 0.0, least))


def _check_same_batch(held: Iteration, asked: bytes) -> None:
    if held.asked != asked:
        raise ConflictError(
            f"iteration {held.number} of epoch {held.epoch.number} was submitted with another batch: all ranks must "
            "draw the same samples; begin a new epoch to plan it anew",
            field="batches",
        )


def _gauges(epoch: Epoch) -> StreamGauges:
    state = epoch.state()
    place = (epoch.job.name, state.stream, state.epoch)
    return StreamGauges(*place, state.front, state.held, state.queued, epoch.step_s)
