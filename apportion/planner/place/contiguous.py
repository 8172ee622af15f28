"""Contiguous placement without planning: the baseline of every strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from apportion.planner.place.zigzag import finalize
from apportion.planner.problem import Placement, PlacePass, Problem, Shards
from apportion.planner.shard.refusals import refuse_home_ranks


@dataclass(frozen=True)
class Contiguous(PlacePass):
    """Equal contiguous shares of the token axis, rank after rank; tokens differ by at most one.

    Ignores masks, relative speeds and the cuts of the shards; with fewer tokens than ranks, some ranks get none. Raises
    ConfigError, CapacityError.
    """

    is_uncapped: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        refuse_home_ranks(problem, "contiguous")
        edges = np.arange(problem.ranks + 1) * problem.batch.tokens // problem.ranks
        home = np.flatnonzero(np.diff(edges))
        return finalize(problem, np.append(edges[home], edges[-1]), home, "contiguous")
