"""Exchanges homes inside nodes to shorten the busiest rank's link time.

A tile needed on other nodes leaves its node from its home rank, so homes within a node decide which links are busy:
the busiest rank swaps a block that it sends for a block of another rank of its node.
"""

from __future__ import annotations

from collections.abc import Sequence

from apportion._core import dcp as core
from apportion.ir.arrays import Bools, Floats, Ints
from apportion.planner.problem import Problem
from apportion.planner.solvers.contracts import HypergraphProblem

#: (case, ranks of all vertices, number of query hyperedges): the case's first vertices are the blocks, the first pin of
#: each hyperedge is the block that holds its tile, and the query hyperedges come first
PlacedProblem = tuple[HypergraphProblem, Ints, int]


def link_gbs(problem: Problem) -> tuple[float, float]:
    """GB/s of a rank's links inside its node, and of its share of the NICs."""
    cluster = problem.cluster
    return cluster.intra_gbs, cluster.inter_gbs * cluster.nics_per_node / cluster.ranks_per_node


def swap_homes(placed: Sequence[PlacedProblem], free: Bools, gbs: tuple[float, float]) -> tuple[Ints, Floats]:
    """(int64 [blocks], float64 [ranks]): homes after exchanges of free blocks inside nodes, within the token caps, and
    the time on each rank's links. placed: cases of the same blocks and homes. gbs: see `link_gbs`."""
    case, cases = placed[0][0], [(x.ptr, x.pins, x.price, rank, count) for x, rank, count in placed]
    return core.exchange(
        cases, free, case.tokens[: len(free)], case.tokens_caps[1], case.ranks_per_node, (*map(float, gbs),)
    )
