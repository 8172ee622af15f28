"""Planning in other processes, behind `concurrent.futures.Executor`: on this machine, or on a Ray cluster."""

from __future__ import annotations

from apportion.service.workers.local import ProcessExecutor, WorkerDiedError
from apportion.service.workers.work import Done, Refusal, plan_pack

__all__ = ["Done", "ProcessExecutor", "Refusal", "WorkerDiedError", "plan_pack"]
