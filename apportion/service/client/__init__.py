"""A training run's side of the service: submits batches, receives plans, over a network that may fail.

    Client                            a job: job, begin, submit, knows, plan, stream, close
    create_job, list_jobs, delete_job of a server, export_store; add_key, list_keys, revoke_key of a job

Synchronous; needs urllib3, neither torch nor a server's packages.
"""

from __future__ import annotations

from apportion.service.client.admin import (
    add_key,
    create_job,
    delete_job,
    export_store,
    list_jobs,
    list_keys,
    revoke_key,
)
from apportion.service.client.errors import (
    BadAnswerError,
    ChangedPlanError,
    ClientError,
    ClosedError,
    PlanTimeoutError,
    ServiceProblem,
    UnreachableError,
)
from apportion.service.client.job import Client
from apportion.service.client.waits import Pace
from apportion.service.protocol import EpochState, JobKey, JobSummary

__all__ = [
    "BadAnswerError",
    "ChangedPlanError",
    "Client",
    "ClientError",
    "ClosedError",
    "EpochState",
    "JobKey",
    "JobSummary",
    "Pace",
    "PlanTimeoutError",
    "ServiceProblem",
    "UnreachableError",
    "add_key",
    "create_job",
    "delete_job",
    "export_store",
    "list_jobs",
    "list_keys",
    "revoke_key",
]
