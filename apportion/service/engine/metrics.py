"""What the engine counts; `http` renders it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from apportion.service.workers.supervisor import Counters as TaskCounters

_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass
class Histogram:
    """counts[i]: values in (bounds[i - 1], bounds[i]], the last one those above all bounds."""

    bounds: tuple[float, ...] = _BOUNDS_S
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS_S) + 1))
    sum: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass
class Counters:
    """Since the start of the server; those of the tasks at workers are the supervisor's."""

    submitted: int = 0  # iterations, each once
    hits: int = 0  # of them: the plan was there, or under way for another
    misses: int = 0
    errors: int = 0  # of the pool, after which the batch was tried again
    healed: int = 0  # packs that were lost or damaged and are planned again
    deliveries: int = 0  # bodies
    quota: int = 0  # answers 429
    overload: int = 0  # answers 503
    plan_s: Histogram = field(default_factory=Histogram)  # at the worker
    publish_s: Histogram = field(default_factory=Histogram)  # from the worker's result until readers have it
    ready_s: Histogram = field(default_factory=Histogram)  # from the submission until readers have it


@dataclass(frozen=True)
class StreamGauges:
    """One stream of a job now."""

    job: str
    stream: str
    epoch: int
    front: int
    held: int  # iterations
    queued: int
    step_s: float  # between iterations, as ranks take them


@dataclass(frozen=True)
class Snapshot:
    """All there is to tell, now."""

    counters: Counters
    tasks: TaskCounters
    workers: int  # that there should be
    alive: int
    restarts: int  # of workers
    jobs: tuple[tuple[str, int], ...]  # (name, tasks at workers)
    streams: tuple[StreamGauges, ...]
    unplanned: int  # distinct requests that wait or are at a worker
    unplanned_bytes: int
    at_workers: int
    waiting: int  # readers
    packs: int
    pack_bytes: int
    record_bytes: int
    cached: int  # packs
    cache_bytes: int
    store_errors: int
