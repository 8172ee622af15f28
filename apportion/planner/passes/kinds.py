"""Several attention kinds, one layout: every attention call waits for its busiest rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from apportion.planner.passes.shard import row_areas
from apportion.planner.problem import Placement, Problem

#: how often a kind that is balanced by itself counts, where the others count once
ALONE = 64


def lightest(problem: Problem, place: Callable[[Mapping[str, int]], Placement]) -> Placement:
    """The placement with the smallest sum over kinds of layers x busiest rank, of those that `place` finds for pairs
    that count so many times: all kinds as their layers, or one of them almost alone; the first of equals."""
    layers = problem.layers
    first = place(layers)
    if len(layers) == 1:
        return first
    alone = [place({**layers, kind: ALONE * count}) for kind, count in layers.items()]
    return min([first, *alone], key=lambda placement: busiest(problem, placement))


def busiest(problem: Problem, placement: Placement) -> float:
    """Sum over kinds of layers x the busiest rank's pairs over its speed."""
    cost = 0.0
    for kind, bands in problem.bands.items():
        load = placement.rank_sums(row_areas(bands, placement.starts), problem.ranks)
        cost += problem.layers[kind] * float((load / problem.speeds).max())
    return cost
