"""From the request of a job to the plans of an iteration, and back from the compact form of these.

    job, batches ──pack──► microbatches ──place──► assignment ──schedule, lower, seal──► iteration plan
                                                       └── stored

Reading what is stored runs the passes behind it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.ir.bytes.codec import Plan
from apportion.ir.bytes.iteration import IterationPlan
from apportion.ir.bytes.job import Job
from apportion.ir.bytes.sequences import consecutive
from apportion.ir.errors import ApportionError, ConfigError, DecodeError
from apportion.ir.request.batch import Batch
from apportion.ir.request.policy import Policy
from apportion.ir.verify import verify as verify_plan
from apportion.planner.api import make
from apportion.planner.iteration import assignment, restored
from apportion.planner.iteration.iterate import pack
from apportion.planner.pack import Packing
from apportion.planner.pipeline.pipeline import draft, seal
from apportion.planner.pipeline.placing import Placed
from apportion.planner.pipeline.watch import SILENT
from apportion.planner.problem import Problem


@dataclass(frozen=True)
class Planned:
    """The plans of an iteration and their compact form, which `lower_job` reads; None where an iteration is larger
    than the compact form takes."""

    plan: IterationPlan
    assignment: bytes | None


def plan_job(job: Job, batches: Sequence[Batch], *, verify: bool = True) -> Planned:
    """The plans of an iteration: equal requests give equal bytes.

    batches: one a microbatch; or one of all sequences, where the recipe packs: into `job.microbatches`, or as many as
    there are sequences. verify: check the finished plans (as `api.plan` does). The compact form is a few KB; there is
    none where an iteration has more than 2**24 cells (pairs of blocks of which one sees the other), a microbatch more
    than 2**22 blocks or cells that are placed by themselves, or the request more than 16 MiB.
    Raises ConfigError, CapacityError, VerifyError.
    """
    job.check(batches)
    policy = _policy(job, batches)
    packing = _packing(job, batches, policy)
    made = [make(problem, SILENT) for problem in _problems(job, batches, policy, packing)]
    if verify:
        for each in made:
            verify_plan(each.plan)
    plan = IterationPlan(tuple(each.plan for each in made), packing.microbatches)
    sequences = packing.microbatches if job.packs else ()
    return Planned(plan, assignment.encode_assignment(job, batches, sequences, made, plan.id))


def lower_job(data: bytes) -> IterationPlan:
    """The plans that `plan_job` made when it made this assignment, byte for byte; nothing is placed or searched anew.

    Raises DecodeError where `data` is no assignment, was changed, or is another release's (VersionError); ConfigError
    and CapacityError as `plan_job` does. Memory is bounded, whatever the bytes: 48 MiB are expanded at most, into
    plans of at most as many cells as `plan_job` says.
    """
    found = assignment.decode_assignment(data)
    policy = _policy(found.job, found.batches)
    sequences = found.sequences or consecutive(len(batch.lengths) for batch in found.batches)
    packing = Packing(sequences, np.zeros(0, np.int64))
    with _of_foreign_bytes():
        problems = _problems(found.job, found.batches, policy, packing)
        plans = [_lowered(*each) for each in restored.restored(problems, found.choices)]
    plan = IterationPlan(tuple(plans), packing.microbatches)
    if plan.id != found.id:
        raise DecodeError(
            f"assignment: it is said to be of plan {found.id[:32].hex()} and lowers to {plan.id.hex()}: it was "
            "changed, or another release made it; plan again"
        )
    return plan


def _lowered(placed: Placed, search: Mapping[str, Any] | None) -> Plan:
    return seal(draft(placed, SILENT), SILENT, search)


@contextmanager
def _of_foreign_bytes() -> Iterator[None]:
    """Passes trust recipes and placements. Foreign bytes may say what nobody can have planned."""
    try:
        yield
    except ApportionError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise DecodeError(f"assignment: the passes of its recipe cannot use it ({said})") from error


def _problems(job: Job, batches: Sequence[Batch], policy: Policy, packing: Packing) -> list[Problem]:
    """Of each microbatch."""
    parts = [batches[0].take(indexes) for indexes in packing.microbatches] if job.packs else batches
    return [Problem(part, job.cluster, job.model, policy, job.hardware) for part in parts]


def _packing(job: Job, batches: Sequence[Batch], policy: Policy) -> Packing:
    """Which sequences each microbatch has. Raises ConfigError where some would wait for a later iteration."""
    if not job.packs:
        return Packing(consecutive(len(batch.lengths) for batch in batches), np.zeros(0, np.int64))
    packing = pack(batches[0], job.cluster, job.model, policy, job.hardware)
    if len(packing.deferred):
        raise _deferring(f"{len(packing.deferred)} sequences")
    return packing


def _policy(job: Job, batches: Sequence[Batch]) -> Policy:
    """The job's policy. Raises ConfigError where it would defer sequences."""
    step = job.policy.recipe.step("pack")
    if step is not None and step.params.get("defer"):
        raise _deferring(True)
    return job.policy_for(len(batches[0].lengths))


def _deferring(value: object) -> ConfigError:
    rule = "a job plans every sequence in its iteration"
    return ConfigError("recipe.pack.defer", value, rule, "use plan_iteration and keep what it defers")
