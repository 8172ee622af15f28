"""Who is planned next."""

from __future__ import annotations

from collections.abc import Iterable

from apportion.service.engine.state import Iteration, Job


def choose(jobs: Iterable[Job], now_s: float) -> Iteration | None:
    """The job with the fewest tasks at workers, of these the one whose next iteration has the nearest deadline; among
    deadlines that have passed none is nearer, and whoever was served longest ago is served."""
    waiting = (found for job in jobs if job.current is not None and (found := job.current.candidate()))
    return min(waiting, key=lambda found: _urgency(found, now_s), default=None)


def _urgency(found: Iteration, now_s: float) -> tuple[int, float, int]:
    epoch = found.epoch
    return epoch.job.at_workers, max(epoch.deadline_s(found.number), now_s), epoch.job.served
