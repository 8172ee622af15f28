"""A training run's side of the service: submits batches, receives plans, over a network that may fail.

    Client                            a job: job, begin, submit, knows, plan, stream, close
    create_job, list_jobs, delete_job of a server

Synchronous; needs urllib3, neither torch nor a server's packages.
"""

from __future__ import annotations

from apportion.service.client.admin import create_job, delete_job, list_jobs
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
from apportion.service.protocol import EpochState, JobSummary

__all__ = [
    "BadAnswerError",
    "ChangedPlanError",
    "Client",
    "ClientError",
    "ClosedError",
    "EpochState",
    "JobSummary",
    "Pace",
    "PlanTimeoutError",
    "ServiceProblem",
    "UnreachableError",
    "create_job",
    "delete_job",
    "list_jobs",
]
