"""From a batch to a verified plan."""

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
from apportion.planner.pipeline.pipeline import Made, draft, seal
from apportion.planner.pipeline.placing import place
from apportion.planner.pipeline.report import departures
from apportion.planner.pipeline.watch import Watch
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
    """The plan of one microbatch: equal arguments give equal bytes.

    recipe: a name (default "auto"), a mapping or a Recipe; seed: default 0. `policy` brings its own recipe and seed,
    and adds caps and tolerance. hardware: what recipes that compare times price with, by default the built-in H100.
    verify: check the finished plan (design, "Verify"). timings: filled with milliseconds per step. threads: on how many
    cores steps work, where they can; the bytes are the same.
    Raises ConfigError, CapacityError, VerifyError.
    """
    policy, threads = policy_of(recipe, seed, policy), checked_threads(threads)
    flag("verify", verify)
    if timings is not None:
        instance("timings", timings, dict)
    watch = Watch(timings)
    made = make(Problem(batch, cluster, model, policy, Hardware.named(hardware)), watch, threads)
    if verify:
        with watch("verify"):
            verify_plan(made.plan, threads)
    return made.plan


def make(problem: Problem, watch: Watch, threads: int = 1) -> Made:
    """Runs all passes of the problem's recipe; a search on one core. Warns where a recipe that does not search asks for
    something and its passes did something else. Raises ConfigError, CapacityError."""
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
    return Made(plan, placed)


def sketch(problem: Problem) -> Plan:
    """The plan of `make` without bytes, and without a report but of its second layout: what a forecast simulates.
    Raises as `make`."""
    recipe, watch = problem.policy.recipe, Watch(None)
    if recipe.step("search") is not None or problem.policy.tolerance is not None:
        return make(problem, watch).plan
    check_request(problem)
    drafted = draft(place(problem, passes_of(recipe), watch, 1), watch)
    check_call_memory(drafted.problem, drafted.programs, drafted.layouts)
    _warn(recipe, [vars(one) for one in departures(drafted.placed, drafted.lowered)])
    return drafted.plan({} if drafted.remapping is None else {"remap": drafted.remapping.said})


def _warn(recipe: Recipe, every: Iterable[Mapping[str, Any]]) -> None:
    for told in every:
        if _is_wanted(recipe, told):
            warn(f"recipe {recipe.name}: {departure(told)}", stacklevel=4)


def _is_wanted(recipe: Recipe, told: Mapping[str, Any]) -> bool:
    """Whether the recipe asks for what the plan departs from: groups of ranks, or a value that is not a built-in's."""
    step, name = str(told["field"]).split(".")[1::2]
    given, built_in = recipe.step(step), BUILT_IN.get(recipe.name)
    if name == "degree" or given is None or told["asked"] == "auto":
        return name == "degree"
    return name in given.params and (built_in is None or built_in.recipe != recipe)


def policy_of(
    recipe: str | Mapping[str, Any] | Recipe | None, seed: int | None, policy: Policy | None
) -> Policy:
    if policy is None:
        return Policy(
            find_recipe(DEFAULT_RECIPE if recipe is None else recipe), seed=0 if seed is None else seed
        )
    for name, value in (("recipe", recipe), ("seed", seed)):
        if value is not None:
            raise ConfigError(
                name, value, "is given beside a policy, which has its own", "put it into the policy"
            )
    return policy
