"""Edge colouring in the minimum number of matchings, the fullest first, by repeated min-cost flows.

Ranks with fewer sends or receives than the busiest get padding edges, so that all have the same degree; such a
multigraph has a perfect matching, even after others are removed (König, 1916). Each flow finds one with the
fewest padding edges. A flow of one unit per rank is an assignment problem, which scipy solves.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linear_sum_assignment

from apportion.ir.arrays import Ints, offsets
from apportion.planner.solvers.colouring.matching import matchings, max_degree
from apportion.planner.solvers.contracts import Colouring, ColouringProblem
from apportion.planner.solvers.status import Budget, Limit, Status, Termination

# cost of pairs without an edge: more than a whole matching of padding edges
_NEVER = 1e6


def solve(problem: ColouringProblem, budget: Budget) -> Colouring:
    """Solves the problem. Always OPTIMAL: edges left when the budget's flows (steps) are spent get König's colours, and
    the limit is reported."""
    src, dst, ranks = problem.src, problem.dst, problem.ranks
    degree = max_degree(src, dst, ranks)
    remaining, padding = _counts(src, dst, ranks), _padding(src, dst, ranks, degree)
    edges = np.argsort(src.astype(np.int64) * ranks + dst, kind="stable")
    first = offsets(remaining.reshape(-1))[:-1].reshape(ranks, ranks)  # next edge in `edges` for each pair
    colour = np.full(len(src), -1, np.int32)
    for number in range(degree):
        if number == budget.steps:
            uncoloured = np.flatnonzero(colour < 0)
            colour[uncoloured] = number + matchings(src[uncoloured], dst[uncoloured], ranks)
            return Colouring(colour, Termination(Status.OPTIMAL, float(degree), float(degree), Limit.STEPS))
        cost = np.where(remaining > 0, 0.0, np.where(padding > 0, 1.0, _NEVER))
        rows, columns = linear_sum_assignment(cost)
        is_tile = remaining[rows, columns] > 0
        colour[edges[first[rows, columns][is_tile]]] = number
        first[rows[is_tile], columns[is_tile]] += 1
        remaining[rows[is_tile], columns[is_tile]] -= 1
        padding[rows[~is_tile], columns[~is_tile]] -= 1
    return Colouring(colour, Termination(Status.OPTIMAL, float(degree), float(degree)))


def _counts(src: Ints, dst: Ints, ranks: int) -> Ints:
    """int64 [ranks, ranks]: number of edges of each pair."""
    return np.bincount(src.astype(np.int64) * ranks + dst, minlength=ranks * ranks).reshape(ranks, ranks)


def _padding(src: Ints, dst: Ints, ranks: int, degree: int) -> Ints:
    """int64 [ranks, ranks]: padding edges that raise every rank to `degree`; senders and receivers pair up in order."""
    deficits = [degree - np.bincount(ends, minlength=ranks) for ends in (src, dst)]
    ends = [np.repeat(np.arange(ranks), deficit) for deficit in deficits]
    return _counts(ends[0], ends[1], ranks)
