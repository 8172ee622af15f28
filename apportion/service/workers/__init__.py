"""Plans in other processes, behind `concurrent.futures.Executor`: on this machine, or on a Ray cluster."""

from __future__ import annotations

import os
from concurrent.futures import Executor

from apportion.service.workers.local import ProcessExecutor, WorkerDiedError
from apportion.service.workers.work import Completion, Refusal, plan_pack

__all__ = ["Completion", "ProcessExecutor", "Refusal", "WorkerDiedError", "executor_of", "plan_pack"]


def executor_of(
    workers: int,
    task_s: float | None,
    memory_bytes: int | None = None,
    ray: str | None = None,
    spare: int = 0,
) -> tuple[Executor, int]:
    """The executor of plans and its number of workers. workers: processes, 0: one per core; spare: additional
    processes on this machine; ray: address of a Ray cluster to use instead, "local" to start one. Raises
    MissingDependencyError."""
    workers = workers or len(os.sched_getaffinity(0))
    if ray is None:
        return ProcessExecutor(workers + spare, task_s, memory_bytes), workers
    from apportion.service.workers.ray import RayExecutor

    cluster = RayExecutor(workers, task_s, ray)
    return cluster, cluster.workers
