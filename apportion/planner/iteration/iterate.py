"""Plans the microbatches of a training iteration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from apportion.ir.bytes.iteration import IterationPlan
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.planner import api
from apportion.planner.pack import Packing, Sequential
from apportion.planner.problem import Problem
from apportion.planner.recipe.recipes import pack_of


def plan_iteration(
    batch: Batch,
    cluster: Cluster,
    model: Model,
    recipe: str | Mapping[str, Any] | Recipe | None = None,
    seed: int | None = None,
    policy: Policy | None = None,
    *,
    verify: bool = True,
    hardware: Hardware | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> IterationPlan:
    """Plans an iteration: the recipe's `pack` step (default: `Sequential`) distributes the sequences of `batch` over
    microbatches, each planned like `api.plan`. Equal arguments give byte-identical plans.

    recipe, seed, policy, verify, hardware: as in `api.plan`. progress: called with (planned microbatches, total), first
    with 0. Sequences deferred by the pack step are in `deferred` of the result: the caller prepends them to the next
    iteration's batch. Raises ConfigError, CapacityError, VerifyError.
    """
    policy, hardware = api.policy_of(recipe, seed, policy), Hardware.named(hardware)
    packing = pack(Problem(batch, cluster, model, policy, hardware))
    report = progress or _no_progress
    report(0, len(packing.microbatches))
    plans = []
    for indexes in packing.microbatches:
        part = batch.take(indexes)
        plans.append(api.plan(part, cluster, model, policy=policy, hardware=hardware, verify=verify))
        report(len(plans), len(packing.microbatches))
    return IterationPlan(tuple(plans), packing.microbatches, packing.deferred)


def pack(problem: Problem) -> Packing:
    """The sequences of each microbatch, and the deferred ones. Raises the errors of `plan_iteration`."""
    return (pack_of(problem.policy.recipe) or Sequential())(problem)


def _no_progress(done: int, total: int) -> None:
    pass
