"""Jobs as the engine holds them: each has streams, of each goes one epoch on, and that has iterations.

Job ── open ── Epoch, one a stream ── iterations by number; of these, `queue`: what waits for a worker
                                   ├─ front, floor: how far ranks have come; what is no longer kept
                                   └─ gates: who waits for an iteration, be it submitted or not
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from apportion.ir.bytes.job import Job as Spec
from apportion.service.engine.kept.build import build
from apportion.service.engine.kept.library import Entry
from apportion.service.engine.kept.records import (
    EpochRecord,
    IterationRecord,
    JobKey,
    JobRecord,
    ProblemRecord,
    encode,
    epoch_key,
    iteration_key,
)
from apportion.service.errors import GoneError, NotFoundError, ServiceError
from apportion.service.protocol import EpochState

_FIRST_STEP_S = 1.0  # until two deliveries tell how long the job's steps take
_SMOOTHING = 0.25
_LATELY_S = 60.0  # how long seconds of workers are held against a job


@dataclass(frozen=True)
class JobState:
    """A job. spec: what it plans; lookahead: iterations planned ahead of its ranks; keys: that open it; epoch: the
    newest, of any stream, 0 before the first; past: epochs up to this one were of a deleted job; streams: of each the
    epoch that goes on."""

    name: str
    spec: Spec
    lookahead: int
    keys: tuple[JobKey, ...]
    epoch: int = 0
    past: int = 0
    streams: Mapping[str, int] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """No epoch above it has begun."""
        return max(self.epoch, self.past)

    def record(self) -> bytes:
        """Encoded."""
        return encode(
            JobRecord(
                self.spec.to_data(), self.lookahead, self.keys[0].digest if self.keys else b"", self.keys
            )
        )


@dataclass(frozen=True)
class IterationState:
    """An iteration now. state: queued, planning, ready, refused or quarantined; id: 32 bytes, of the plan; problem: why
    it cannot be planned. planned_ms: at the worker; ready_at: when ranks could have it, seconds since 1970; both None
    where an earlier server did it."""

    state: str
    id: bytes | None = None
    problem: ServiceError | None = None
    planned_ms: float | None = None
    ready_at: float | None = None


class Iteration:
    """A submitted iteration. asked: digest of its request. recording: while its record is on its way to the store; its
    result is the error, if any."""

    __slots__ = ("asked", "entry", "epoch", "number", "ready_at", "recording", "submitted_s")

    def __init__(self, epoch: Epoch, number: int, asked: bytes, submitted_s: float) -> None:
        self.epoch, self.number, self.asked, self.submitted_s = epoch, number, asked, submitted_s
        self.entry: Entry
        self.ready_at: float | None = None
        self.recording: asyncio.Future[ServiceError | None] | None = None

    @property
    def waits(self) -> bool:
        """For a worker."""
        return self.recording is None and self.entry.state == "queued"

    @property
    def key(self) -> str:
        """Of its record."""
        return iteration_key(self.epoch.job.name, self.epoch.number, self.number)

    def record(self, request: bytes, problem: ProblemRecord | None) -> bytes:
        """Encoded."""
        return encode(IterationRecord(self.entry.key, self.asked, b"" if problem else request, problem))


class Gate:
    """Where readers of one iteration wait, all at one event."""

    __slots__ = ("event", "readers", "since_s")

    def __init__(self, since_s: float) -> None:
        self.event, self.readers, self.since_s = asyncio.Event(), 0, since_s


class Epoch:
    """One pass of one run of a stream. step_s: between its iterations, as ranks take them; served: turn in which it
    last was; over: what readers get once it is."""

    def __init__(self, job: Job, number: int, record: EpochRecord, now_s: float) -> None:
        self.job, self.number, self.stream, self.run = job, number, record.stream, record.run
        self.delivered, self.floor = record.front - 1, record.floor
        self.iterations: dict[int, Iteration] = {}
        self.numbers: list[int] = []  # of `iterations`, rising
        self.queue: list[int] = []  # rising; may still have some that no longer wait
        self.gates: dict[int, Gate] = {}
        self.moved_s = now_s  # when the front last moved
        before = job.current(record.stream)
        self.step_s: float = _FIRST_STEP_S if before is None else before.step_s
        self.served = 0
        self.over: ServiceError | None = None

    @property
    def front(self) -> int:
        if self.delivered >= 0 or not self.numbers:
            return self.delivered + 1
        return self.numbers[0]

    @property
    def pending(self) -> int:
        """Iterations that no rank has been given yet, nor a later one."""
        return len(self.numbers) - bisect_left(self.numbers, self.delivered + 1)

    @property
    def key(self) -> str:
        """Of its record."""
        return epoch_key(self.job.name, self.number)

    def record(self) -> bytes:
        """Encoded."""
        return encode(EpochRecord(self.run, self.delivered + 1, self.floor, self.stream, build()))

    def state(self) -> EpochState:
        queued = sum(self.iterations[number].waits for number in self.queue)
        return EpochState(
            self.number, self.stream, self.run, self.front, self.floor, len(self.numbers), queued
        )

    def check(self, iteration: int) -> None:
        """Raises GoneError, or NotFoundError where the job was deleted."""
        if self.over is not None:
            raise type(self.over)(self.over.detail)
        if iteration < self.floor:
            raise GoneError(
                f"iteration {iteration} of epoch {self.number} is no longer kept, the ranks are at {self.front}; "
                f"those from {self.floor} on are"
            )

    def known(self, number: int) -> Iteration | None:
        """The iteration, once its record lasts: what a rank is given before then, a killed server would not know."""
        held = self.iterations.get(number)
        return None if held is None or held.recording is not None else held

    def add(self, iteration: Iteration) -> None:
        self.iterations[iteration.number] = iteration
        insort(self.numbers, iteration.number)

    def remove(self, number: int) -> Iteration:
        del self.numbers[bisect_left(self.numbers, number)]
        if (
            self.queue
            and (at := bisect_left(self.queue, number)) < len(self.queue)
            and self.queue[at] == number
        ):
            del self.queue[at]
        return self.iterations.pop(number)

    def enqueue(self, number: int) -> None:
        at = bisect_left(self.queue, number)
        if at == len(self.queue) or self.queue[at] != number:
            self.queue.insert(at, number)

    # ---- readers

    @contextmanager
    def waiting(self, number: int, now_s: float) -> Iterator[Gate]:
        """The gate that opens when there is news of the iteration."""
        gate = self.gates.get(number)
        if gate is None:
            gate = self.gates[number] = Gate(now_s)
        gate.readers += 1
        try:
            yield gate
        finally:
            gate.readers -= 1
            if not gate.readers and self.gates.get(number) is gate:
                del self.gates[number]

    def wake(self, number: int) -> None:
        if gate := self.gates.pop(number, None):
            gate.event.set()

    def wake_all(self) -> None:
        for number in tuple(self.gates):
            self.wake(number)

    def close(self, why: ServiceError) -> list[Iteration]:
        """It is over: who waits is told. What it had."""
        held = list(self.iterations.values())
        self.over = why
        self.iterations.clear()
        self.numbers.clear()
        self.queue.clear()
        self.wake_all()
        return held

    # ---- pace

    def advance(self, number: int, now_s: float) -> None:
        """A rank was given this iteration, the highest so far."""
        if self.delivered >= 0:
            step_s = (now_s - self.moved_s) / (number - self.delivered)
            self.step_s += _SMOOTHING * (step_s - self.step_s)
        self.delivered, self.moved_s = number, now_s

    def deadline_s(self, number: int) -> float:
        """When a rank will ask for the iteration, by the ranks' pace; since when one waits, if that is earlier."""
        steps = number - (self.delivered if self.delivered >= 0 else self.front)
        due_s = self.moved_s + max(steps, 0) * self.step_s
        gate = self.gates.get(number)
        return due_s if gate is None else min(due_s, gate.since_s)

    def candidate(self) -> Iteration | None:
        """What to plan next: the lowest that waits, within the look-ahead; beyond it only what a reader waits for."""
        while self.queue and not self.iterations[self.queue[0]].waits:
            del self.queue[0]
        if not self.queue:
            return None
        if self.queue[0] < self.front + self.job.state.lookahead:
            return self.iterations[self.queue[0]]
        asked = (self.iterations[number] for number in self.gates if number in self.iterations)
        return min((found for found in asked if found.waits), key=lambda found: found.number, default=None)


class Job:
    """A job, its runs, and the epochs of it that go on."""

    def __init__(self, state: JobState) -> None:
        self.state = state
        self.runs: dict[tuple[str, str], int] = {}  # (stream, run): epoch, rising
        self.open: dict[int, Epoch] = {}  # by number, rising; of each stream one
        self.ended: dict[int, str] = {}  # epochs that another release began, and what to say of them
        self.at_workers = 0
        self.used_s: float | None = None  # when somebody asked anything of it, where that is known
        self.plan_s = 0.0  # that a plan of it takes a worker, smoothed
        self._worked = 0.0, 0.0  # seconds of workers lately, and when that was so

    def worked_s(self, now_s: float) -> float:
        """Seconds of workers that it has had lately: those of a minute ago count for 1 / e."""
        worked_s, then_s = self._worked
        return worked_s * math.exp((then_s - now_s) / _LATELY_S)

    def spend(self, seconds: float, now_s: float) -> None:
        """A worker has been at a plan of it for so long."""
        self._worked = self.worked_s(now_s) + seconds, now_s
        self.plan_s += (seconds - self.plan_s) * (_SMOOTHING if self.plan_s else 1.0)

    @property
    def name(self) -> str:
        return self.state.name

    def current(self, stream: str) -> Epoch | None:
        """The epoch of the stream that goes on."""
        return next((epoch for epoch in self.open.values() if epoch.stream == stream), None)

    def switch(self, epoch: Epoch) -> Epoch | None:
        """Goes on with this epoch; the one before of its stream."""
        before = self.current(epoch.stream)
        if before is not None:
            del self.open[before.number]
        self.open[epoch.number] = epoch
        self.runs[epoch.stream, epoch.run] = epoch.number
        streams = {held.stream: held.number for held in self.open.values()}
        self.state = replace(self.state, epoch=epoch.number, streams=streams)
        return before

    def end(self, number: int, why: str) -> None:
        """The epoch goes on no more, though its stream has no later one."""
        del self.open[number]
        self.ended[number] = why
        self.state = replace(self.state, streams={held.stream: held.number for held in self.open.values()})

    def forget(self, most: int) -> list[int]:
        """No longer knows the oldest runs that are over, where there are more than `most` runs; their epochs."""
        excess = len(self.runs) - most
        over = [place for place, number in self.runs.items() if number not in self.open]
        return [self.runs.pop(place) for place in over[: max(excess, 0)]]

    def epoch(self, number: int) -> Epoch:
        """The epoch of that number, which has to go on. Raises GoneError, NotFoundError."""
        found = self.open.get(number)
        if found is not None:
            return found
        if number in self.ended:
            raise GoneError(self.ended[number], field="epoch")
        if 1 <= number <= self.state.last:
            raise GoneError(
                f"epoch {number} of job {self.name} is over: its stream has a later one, up to {self.state.last}"
            )
        raise NotFoundError(
            f"job {self.name} has no epoch {number}, it has begun {self.state.epoch}", field="epoch"
        )
