"""Plans one microbatch: from a batch to a verified plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from warnings import warn

from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ConfigError
from apportion.ir.fields import flag, instance
from apportion.ir.plan.summary import departure
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import DEFAULT_RECIPE, Policy, Recipe
from apportion.ir.threads import checked_threads
from apportion.ir.verify import verify as verify_plan
from apportion.planner.pipeline.feasibility import check_call_memory, check_request
from apportion.planner.pipeline.pipeline import PlanResult, draft, seal
from apportion.planner.pipeline.placing import place
from apportion.planner.pipeline.report import departures
from apportion.planner.pipeline.watch import Stopwatch
from apportion.planner.problem import Problem
from apportion.planner.recipe.built_in import BUILT_IN
from apportion.planner.recipe.recipes import find_recipe, passes_of, search_of


def plan(
    batch: Batch,
    cluster: Cluster,
    model: Model,
    recipe: str | Mapping[str, Any] | Recipe | None = None,
    seed: int | None = None,
    policy: Policy | None = None,
    *,
    hardware: Hardware | str | None = None,
    verify: bool = True,
    timings: dict[str, float] | None = None,
    threads: int = 1,
) -> Plan:
    """Plans one microbatch; equal arguments give byte-identical plans.

    recipe: a name (default "auto"), a mapping or a Recipe; seed: default 0. `policy` has its own recipe and seed,
    and adds caps and tolerance. hardware: for recipes that compare predicted times, by default the built-in H100.
    verify: whether to check the finished plan. timings: filled with milliseconds per step. threads: number of
    cores for steps that can use several; the bytes do not depend on it. Raises ConfigError, CapacityError, VerifyError.
    """
    policy, threads = policy_of(recipe, seed, policy), checked_threads(threads)
    flag("verify", verify)
    if timings is not None:
        instance("timings", timings, dict)
    watch = Stopwatch(timings)
    result = make(Problem(batch, cluster, model, policy, Hardware.named(hardware)), watch, threads)
    if verify:
        with watch("verify"):
            verify_plan(result.plan, threads)
    return result.plan


def make(problem: Problem, watch: Stopwatch, threads: int = 1) -> PlanResult:
    """Runs all passes of the problem's recipe; a search runs on one core. Without a search, warns of each request of
    the recipe that its passes could not meet. Raises ConfigError, CapacityError."""
    recipe = problem.policy.recipe
    if recipe.step("search") is not None:
        search = search_of(recipe)
        check_request(problem)
        return search(problem, watch)
    passes = passes_of(recipe)
    check_request(problem)
    placed = place(problem, passes, watch, threads)
    plan = seal(draft(placed, watch, threads=threads), watch, threads=threads)
    _warn(recipe, plan.report.get("departures", ()))
    return PlanResult(plan, placed)


def sketch(problem: Problem) -> Plan:
    """Plans like `make`, but does not encode the plan, and its report has only the entry `remap`, if any: enough for
    forecasts. Searches, and policies with a tolerance, need a full `make`. Raises the errors of `make`."""
    recipe, watch = problem.policy.recipe, Stopwatch(None)
    if recipe.step("search") is not None or problem.policy.tolerance is not None:
        return make(problem, watch).plan
    check_request(problem)
    unsealed = draft(place(problem, passes_of(recipe), watch, 1), watch)
    check_call_memory(unsealed.problem, unsealed.programs, unsealed.layouts)
    _warn(recipe, [vars(item) for item in departures(unsealed.placed, unsealed.lowered)])
    return unsealed.plan({} if unsealed.remapping is None else {"remap": unsealed.remapping.entry})


def _warn(recipe: Recipe, entries: Iterable[Mapping[str, Any]]) -> None:
    for entry in entries:
        if _is_requested(recipe, entry):
            warn(f"recipe {recipe.name}: {departure(entry)}", stacklevel=4)


def _is_requested(recipe: Recipe, entry: Mapping[str, Any]) -> bool:
    """True if the plan departs from an explicit request: the degree of groups, or a value other than "auto" given by a
    recipe that is not exactly a built-in one."""
    step, name = str(entry["field"]).split(".")[1::2]
    recipe_step, built_in = recipe.step(step), BUILT_IN.get(recipe.name)
    if name == "degree" or recipe_step is None or entry["asked"] == "auto":
        return name == "degree"
    return name in recipe_step.params and (built_in is None or built_in.recipe != recipe)


def policy_of(
    recipe: str | Mapping[str, Any] | Recipe | None, seed: int | None, policy: Policy | None
) -> Policy:
    if policy is None:
        return Policy(
            find_recipe(DEFAULT_RECIPE if recipe is None else recipe), seed=0 if seed is None else seed
        )
    for name, value in (("recipe", recipe), ("seed", seed)):
        if value is not None:
            raise ConfigError(name, value, "conflicts with the policy's own value", "set it in the policy")
    return policy
