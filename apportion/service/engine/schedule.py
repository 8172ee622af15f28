"""Scheduling of queued requests: fair in worker time between tenants, earliest deadline first within a tenant.

lanes   one per worker, and an extra one only for light requests, which therefore never wait for heavy ones
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import TypeVar

from apportion.service.engine.entry import Entry

T = TypeVar("T")
LIGHT_S = 1.0
HALF_LIFE_S = 60.0  # half-life of the worker time that counts against a tenant
FIRST_STEP_S, STEPS_S = 1.0, (0.05, 60.0)  # step time of a job without history; bounds of step times
REMEMBERED = 1024  # jobs


class Schedule:
    """Queue and scheduling policy. workers: concurrent requests of any weight. clock: monotonic seconds."""

    def __init__(self, workers: int, clock: Callable[[], float]) -> None:
        self._workers, self._clock = workers, clock
        self._queued = dict[str, dict[Entry, None]]()
        # by tenant: worker seconds used, and the time of that figure
        self._spent = dict[str, tuple[float, float]]()
        self._seconds = OrderedDict[bytes, float]()  # by job: seconds per plan
        # by job: time of the last submission, seconds between submissions
        self._steps = OrderedDict[bytes, tuple[float, float]]()

    def __len__(self) -> int:
        return sum(map(len, self._queued.values()))

    def due(self, job: bytes, ahead: int) -> float:
        """The deadline of a request that the trainer needs `ahead` steps from now."""
        now = self._clock()
        last, step = self._steps.get(job, (now, FIRST_STEP_S))
        gap = min(max(now - last, step / 2), 2 * step)  # a pause does not count as a step
        step = min(max(0.8 * step + 0.2 * gap, STEPS_S[0]), STEPS_S[1]) if last != now else step
        _remember(self._steps, job, (now, step))
        return now + ahead * step

    def add(self, entry: Entry) -> None:
        self._queued.setdefault(entry.tenant, {})[entry] = None

    def share(self, tenant: str) -> tuple[int, int, float]:
        """The number and the bytes of a tenant's waiting requests, and its even share of the queue."""
        queued = self._queued.get(tenant, {})
        return len(queued), sum(len(entry.request) for entry in queued), 1 / len({tenant, *self._queued})

    def next(self, running: Collection[Entry]) -> Entry | None:
        """Removes and returns the next request to plan; None if none may run."""
        if len(running) > self._workers:
            return None
        only_light = len(running) == self._workers
        for tenant in sorted(self._queued, key=self._time_used):
            queued = self._queued[tenant]
            candidates = [entry for entry in queued if not only_light or self._is_light(entry, running)]
            if candidates:
                earliest = min(candidates, key=lambda entry: entry.due)
                self._take(earliest)
                return earliest
        return None

    def record_time(self, entry: Entry, seconds: float) -> None:
        """Records the worker time of a request."""
        _remember(self._seconds, entry.job, seconds)
        self._spent[entry.tenant] = self._time_used(entry.tenant) + seconds, self._clock()

    def _take(self, entry: Entry) -> None:
        queued = self._queued[entry.tenant]
        del queued[entry]
        if not queued:
            del self._queued[entry.tenant]

    def _time_used(self, tenant: str) -> float:
        spent, updated_at = self._spent.get(tenant, (0.0, 0.0))
        return float(spent * 0.5 ** ((self._clock() - updated_at) / HALF_LIFE_S))

    def _is_light(self, entry: Entry, running: Collection[Entry]) -> bool:
        """True for a light request. For a job without history, one request at a time counts as light."""
        seconds = self._seconds.get(entry.job)
        return seconds < LIGHT_S if seconds is not None else all(entry.job != other.job for other in running)


def _remember(values: OrderedDict[bytes, T], key: bytes, value: T) -> None:
    values[key] = value
    values.move_to_end(key)
    while len(values) > REMEMBERED:
        values.popitem(last=False)
