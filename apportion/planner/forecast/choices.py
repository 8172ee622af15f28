"""Candidate parallelisms of forecasts: plans over all ranks, static grids of every degree, and a search space."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from apportion.ir.errors import ConfigError
from apportion.ir.fields import instance
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.planner.forecast.experts import NO_EXPERTS, Experts
from apportion.planner.forecast.parallelism import PACKINGS, Degrees, Parallelism
from apportion.planner.recipe.recipes import entries, find_recipes

#: recipes used without a planner, forecast as static grids of every degree
GRID_RECIPES = ("ring", "allgather", "ulysses", "usp")


def recipe_parallelisms(
    recipes: Sequence[Recipe | str] | None = None, degrees: Degrees | None = None
) -> list[Parallelism]:
    """One plan over all data × context ranks, for each recipe (None: all known ones). Raises ConfigError."""
    chosen = find_recipes("recipes", list(entries()) if recipes is None else recipes)
    base = Degrees() if degrees is None else degrees
    return [Parallelism(recipe, base) for recipe in chosen]


def static_grids(
    cluster: Cluster, recipes: Sequence[Recipe | str] = GRID_RECIPES, degrees: Degrees | None = None
) -> list[Parallelism]:
    """Static grids of every context degree that divides the data × context ranks of a stage, for each recipe (at degree
    1 only the first) and both packings. recipes: by default ring, all-gather, Ulysses, USP. Raises ConfigError."""
    instance("cluster", cluster, Cluster)
    chosen, base = find_recipes("recipes", recipes), Degrees() if degrees is None else degrees
    stage = Parallelism(chosen[0], base).stage(cluster)
    result: list[Parallelism] = []
    for context in _degrees(stage):
        packings = PACKINGS if context < stage.ranks else PACKINGS[:1]
        result += [
            Parallelism(recipe, base, context, packing)
            for recipe in (chosen if context > 1 else chosen[:1])
            for packing in packings
        ]
    return result


def _degrees(stage: Cluster) -> list[int]:
    """Divisors of the number of ranks that are multiples or divisors of the ranks per node."""
    on_node = stage.ranks_per_node
    return [degree for degree in _divisors(stage.ranks) if degree % on_node == 0 or on_node % degree == 0]


def _divisors(number: int) -> list[int]:
    return [degree for degree in range(1, number + 1) if number % degree == 0]


def search_space(
    cluster: Cluster,
    model: Model,
    layers: int,
    recipes: Sequence[Recipe | str],
    microbatches: int = 1,
    experts: Experts = NO_EXPERTS,
) -> list[Parallelism]:
    """Each recipe over all ranks under every tensor, pipeline and expert degree that fits the model and the cluster;
    with several stages also interleaved, in two chunks each, if the layers allow it."""
    combinations = [
        Degrees(tensor, pipeline, virtual, microbatches, expert)
        for tensor in _divisors(cluster.ranks_per_node)
        for pipeline in _divisors(cluster.ranks // tensor)
        for virtual in ((1, 2) if pipeline > 1 else (1,))
        for expert in _divisors(gcd(experts.count or 1, cluster.ranks // pipeline))
    ]
    candidates = [form for degrees in combinations for form in recipe_parallelisms(recipes, degrees)]
    return [form for form in candidates if _is_possible(form, cluster, model, layers, experts)]


def _is_possible(form: Parallelism, cluster: Cluster, model: Model, layers: int, experts: Experts) -> bool:
    try:
        form.check(cluster, model, layers, experts)
    except ConfigError:
        return False
    return True
