"""Plans one iteration of a job.

job, batches ──pack──► microbatches ──place, schedule, lower, seal──► iteration plan
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.ir.bytes.iteration import IterationPlan
from apportion.ir.bytes.job import Job
from apportion.ir.bytes.sequences import consecutive
from apportion.ir.errors import ConfigError
from apportion.ir.request.batch import Batch
from apportion.ir.request.policy import Policy
from apportion.ir.verify import verify as verify_plan
from apportion.planner.api import make
from apportion.planner.iteration.iterate import pack
from apportion.planner.pack import Packing
from apportion.planner.pipeline.watch import SILENT
from apportion.planner.problem import Problem


def plan_job(job: Job, batches: Sequence[Batch], *, verify: bool = True) -> IterationPlan:
    """Plans an iteration of a job; equal requests give byte-identical plans.

    batches: one per microbatch; or, if the recipe packs, a single one with all sequences, for `job.microbatches`
    microbatches, or as many as there are sequences, if these are fewer. verify: check the finished plans (as `api.plan`
    does). Raises ConfigError, CapacityError, VerifyError.
    """
    job.check(batches)
    policy = _policy(job, batches)
    packing = _packing(job, batches, policy)
    plans = [make(problem, SILENT).plan for problem in _problems(job, batches, policy, packing)]
    if verify:
        for microbatch in plans:
            verify_plan(microbatch)
    return IterationPlan(tuple(plans), packing.microbatches)


def _problems(job: Job, batches: Sequence[Batch], policy: Policy, packing: Packing) -> list[Problem]:
    """One problem per microbatch."""
    parts = [batches[0].take(indexes) for indexes in packing.microbatches] if job.packs else batches
    return [Problem(part, job.cluster, job.model, policy, job.hardware) for part in parts]


def _packing(job: Job, batches: Sequence[Batch], policy: Policy) -> Packing:
    """Packs sequences into microbatches. Raises ConfigError if some would be deferred."""
    if not job.packs:
        return Packing(consecutive(len(batch.lengths) for batch in batches), np.zeros(0, np.int64))
    packing = pack(Problem(batches[0], job.cluster, job.model, policy, job.hardware))
    if len(packing.deferred):
        raise _deferral_error(f"{len(packing.deferred)} sequences")
    return packing


def _policy(job: Job, batches: Sequence[Batch]) -> Policy:
    """The job's policy. Raises ConfigError if it would defer sequences."""
    step = job.policy.recipe.step("pack")
    if step is not None and step.params.get("defer"):
        raise _deferral_error(True)
    return job.policy_for(len(batches[0].lengths))


def _deferral_error(value: object) -> ConfigError:
    rule = "a job plans every sequence in its iteration"
    return ConfigError("recipe.pack.defer", value, rule, "use plan_iteration and keep what it defers")
