"""Example package that adds a solver, a pass and a recipe; pyproject.toml has their entry points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from apportion.ir.request.policy import Recipe
from apportion.planner.options import Natural
from apportion.planner.problem import Placement, PlacePass, Problem, Shards
from apportion.planner.recipe.built_in import RecipeEntry
from apportion.planner.shard.blocks import row_weights
from apportion.planner.shard.refusals import obey_token_cap, refuse_home_ranks
from apportion.planner.solvers.contracts import Partition, PartitionProblem
from apportion.planner.solvers.registry import Entry
from apportion.planner.solvers.status import Budget, Status, Termination


def emptiest(problem: PartitionProblem, budget: Budget) -> Partition:
    """Assigns each item to its emptiest allowed bin, first items with the fewest allowed bins, then the largest;
    ignores weights."""
    bound = float(problem.weights.sum() / problem.rates.sum())
    used, bins = np.zeros(problem.bins, np.int64), np.full(len(problem.sizes), -1)
    allowed = problem.allowed or [None] * len(bins)
    free = np.array(
        [problem.bins if bins_allowed is None else len(bins_allowed) for bins_allowed in allowed], np.int64
    )
    every = np.arange(problem.bins)
    candidates = [every if bins_allowed is None else np.array(bins_allowed) for bins_allowed in allowed]
    for item in np.lexsort((-problem.weights, -problem.sizes, free)):
        best = candidates[item][(problem.caps - used)[candidates[item]].argmax()]
        if used[best] + problem.sizes[item] <= problem.caps[best]:
            bins[item] = best
            used[best] += problem.sizes[item]
    if (bins < 0).any():
        return Partition(bins, Termination(Status.NO_SOLUTION, bound))
    value = float((np.bincount(bins, problem.weights, problem.bins) / problem.rates).max())
    return Partition(bins, Termination(Status.FEASIBLE, bound, value))


@dataclass(frozen=True)
class RoundRobin(PlacePass):
    """Assigns blocks to ranks in turn. first: rank of the first block. Raises ConfigError, CapacityError."""

    first: Natural = 0
    is_uncapped: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        refuse_home_ranks(problem, "round_robin")
        home = (self.first + np.arange(len(shards.starts) - 1)) % problem.ranks
        obey_token_cap(problem, shards.starts, home, "round_robin")
        weight = row_weights(problem, shards.starts)
        return Placement(shards.starts, home, weight, float(weight.sum() / problem.speeds.sum()))


EMPTIEST = Entry(
    "emptiest",
    "partition",
    "apportion_plugin_example:emptiest",
    "an example",
    "the largest item to the emptiest bin",
    heuristic=True,
    limits=(),
)

ROUND_ROBIN = RecipeEntry(
    Recipe(
        "round_robin",
        {
            "shard": {"blocks": {"block": 256, "zigzag": False}},
            "place": {"round_robin": {}},
            "schedule": {"matchings": {}},
        },
    ),
    "blocks to ranks in turn",
    "an example",
)
