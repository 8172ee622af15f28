"""Who is planned next."""

from __future__ import annotations

from collections.abc import Iterable

from apportion.service.engine.state import Iteration, Job


def choose(jobs: Iterable[Job], now_s: float) -> Iteration | None:
    """The job with the fewest tasks at workers, of these the one whose next iteration, of any stream, has the nearest
    deadline; among deadlines that have passed none is nearer, and whoever was served longest ago is served: first among
    jobs, then among a job's streams."""
    epochs = (epoch for job in jobs for epoch in job.open.values())
    waiting = (found for epoch in epochs if (found := epoch.candidate()))
    return min(waiting, key=lambda found: _urgency(found, now_s), default=None)


def _urgency(found: Iteration, now_s: float) -> tuple[int, float, int, int]:
    epoch = found.epoch
    due_s = max(epoch.deadline_s(found.number), now_s)
    return epoch.job.at_workers, due_s, epoch.job.served, epoch.served
