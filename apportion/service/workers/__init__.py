"""Workers plan in processes of their own: a crash, a leak or an endless search ends one of them, never the server.

    Supervisor ──► Pool ┬─ ProcessPool ──► zygote ──fork──► worker, worker, …      (this machine)
     retries,           └─ RayPool ──────► driver ────────► Ray's workers          (a cluster)
     quarantine
    Planner: the same for code without an event loop

Between these processes go msgpack frames (`tasks`), nothing is pickled.
"""

from __future__ import annotations

from apportion.service.workers.errors import (
    ClosedError,
    DeadlineError,
    LaunchError,
    LineLostError,
    PoisonedError,
    RefusedError,
    WorkerDiedError,
)
from apportion.service.workers.planner import DEADLINE_S, Planner, pool_of
from apportion.service.workers.pool import Pool
from apportion.service.workers.processes import ProcessPool
from apportion.service.workers.supervisor import Counters, Supervisor
from apportion.service.workers.tasks import Done, Task

__all__ = [
    "ClosedError",
    "Counters",
    "DEADLINE_S",
    "DeadlineError",
    "Done",
    "LaunchError",
    "LineLostError",
    "Planner",
    "PoisonedError",
    "Pool",
    "ProcessPool",
    "RefusedError",
    "Supervisor",
    "Task",
    "WorkerDiedError",
    "pool_of",
]
