"""What the page shows of a server, as one JSON object."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import msgspec

from apportion.ir.version import __version__
from apportion.service.engine import BusyView, Engine, FailedView, Histogram, JobView

#: jobs that are shown
MOST_JOBS = 200
_DETAIL = 500  # characters of a reason


class Spread(msgspec.Struct, frozen=True):
    """A histogram. bounds_s: upper ends; counts has one more, for what is above all. sum_s: of all values."""

    bounds_s: tuple[float, ...]
    counts: list[int]
    sum_s: float


class Workers(msgspec.Struct, frozen=True):
    """size: that there should be; restarts: how many were replaced. at_workers: tasks, lowering included."""

    size: int
    alive: int
    restarts: int
    at_workers: int
    busy: list[BusyView]


class StoreView(msgspec.Struct, frozen=True):
    """Where plans are kept. free_bytes: of its disk, None where it is elsewhere; unplanned_bytes: of requests that
    wait."""

    place: str
    packs: int
    pack_bytes: int
    most_bytes: int
    cached: int
    cache_bytes: int
    free_bytes: int | None
    errors: int
    unplanned: int
    unplanned_bytes: int


class State(msgspec.Struct, frozen=True):
    """now: seconds since 1970; more_jobs: that are not shown; aside: jobs whose records are damaged, and why."""

    version: str
    now: float
    state: str
    jobs: list[JobView]
    more_jobs: int
    aside: dict[str, str]
    workers: Workers
    store: StoreView
    planning: Spread
    ready: Spread
    submitted: int
    planned: int
    deliveries: int
    waiting: int
    refused: int
    quarantined: int
    failures: list[FailedView]


def state_of(engine: Engine, place: Path | str) -> bytes:
    """The state as JSON. place: the store's folder or URL, whose user and password are not shown."""
    found, jobs = engine.snapshot(), engine.job_views()
    counters, tasks = found.counters, found.tasks
    folder = place if isinstance(place, Path) and place.exists() else None
    state = State(
        version=__version__,
        now=time.time(),
        state="stopping" if engine.draining else "ready" if engine.ready else "starting",
        jobs=jobs[:MOST_JOBS],
        more_jobs=max(len(jobs) - MOST_JOBS, 0),
        aside={name: why[:_DETAIL] for name, why in engine.aside.items()},
        workers=Workers(found.workers, found.alive, found.restarts, found.at_workers, engine.busy),
        store=StoreView(
            re.sub(r"//[^/@]*@", "//", str(place)),
            found.packs,
            found.pack_bytes,
            engine.limits.store_bytes,
            found.cached,
            found.cache_bytes,
            None if folder is None else shutil.disk_usage(folder).free,
            found.store_errors,
            found.unplanned,
            found.unplanned_bytes,
        ),
        planning=_spread(counters.plan_s),
        ready=_spread(counters.ready_s),
        submitted=counters.submitted,
        planned=tasks.plans,
        deliveries=counters.deliveries,
        waiting=found.waiting,
        refused=tasks.refused + tasks.deadlines,
        quarantined=tasks.poisoned,
        failures=[msgspec.structs.replace(one, detail=one.detail[:_DETAIL]) for one in engine.failures],
    )
    return msgspec.json.encode(state)


def _spread(held: Histogram) -> Spread:
    return Spread(held.bounds, list(held.counts), held.sum)
