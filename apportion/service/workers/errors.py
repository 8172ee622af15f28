"""Why a task has no result.

ApportionError
├── RefusedError (ValueError)       the planner refused it: the same task would be refused again
├── DeadlineError (TimeoutError)    its worker took too long and was killed
├── WorkerDiedError (RuntimeError)  its worker died
│   └── LineLostError               so did the line to it: nobody can tell whether the task was to blame
├── PoisonedError (RuntimeError)    its worker died again and again
├── LaunchError (RuntimeError)      no worker can be started
└── ClosedError (RuntimeError)      the pool was closed
"""

from __future__ import annotations

from apportion.ir.errors import ApportionError


class RefusedError(ApportionError, ValueError):
    """The planner refused the task. kind: name of its exception; message: what it said; field: of the request that is
    wrong, None where it names none."""

    def __init__(self, kind: str, message: str, field: str | None = None) -> None:
        self.kind, self.message, self.field = kind, message, field
        super().__init__(message)


class DeadlineError(ApportionError, TimeoutError):
    """The worker was still at it when its time was over, and was killed."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        super().__init__(
            f"deadline_s = {deadline_s:g}: the worker was not done by then and was killed; allow more time, plan "
            "fewer tokens at once, or take a recipe that searches less"
        )


class WorkerDiedError(ApportionError, RuntimeError):
    """The worker died over the task."""


class LineLostError(WorkerDiedError):
    """The line to the worker was lost: it died, or what it ran on."""


class PoisonedError(ApportionError, RuntimeError):
    """The task killed every worker it was given to. attempts: how many."""

    def __init__(self, attempts: int, last: str) -> None:
        self.attempts = attempts
        super().__init__(f"{attempts} workers died over this task one after another; the last time: {last}")


class LaunchError(ApportionError, RuntimeError):
    """The process that workers come from cannot be started; its own output says why."""


class ClosedError(ApportionError, RuntimeError):
    """The pool was closed before the task was done."""
