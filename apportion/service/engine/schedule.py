"""Who is planned next."""

from __future__ import annotations

from collections.abc import Sequence

from apportion.service.engine.kept.state import Iteration, Job

#: plans that take longer than so many seconds are long
LONG_S = 1.0


def choose(jobs: Sequence[Job], now_s: float, short: bool) -> Iteration | None:
    """The job with the fewest tasks at workers, of these the one whose next iteration, of any stream, has the nearest
    deadline. Among deadlines that have passed none is nearer: then the job goes first that has had fewest seconds of
    workers lately, and of its streams the one that was served longest ago.

    short: not what is known to take long."""
    may = (job for job in jobs if not short or job.plan_s <= LONG_S)
    epochs = (epoch for job in may for epoch in job.open.values())
    waiting = (found for epoch in epochs if (found := epoch.candidate()) and not (short and found.entry.long))
    return min(waiting, key=lambda found: _urgency(found, now_s), default=None)


def _urgency(found: Iteration, now_s: float) -> tuple[int, float, float, int]:
    epoch, job = found.epoch, found.epoch.job
    return job.at_workers, max(epoch.deadline_s(found.number), now_s), job.worked_s(now_s), epoch.served
