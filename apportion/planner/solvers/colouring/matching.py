"""Edge colouring of a bipartite multigraph with as many colours as its maximum degree (König).

König (1916): the edges of a bipartite multigraph of maximum degree D can be coloured with D colours, so that adjacent
edges differ. Edge by edge: a colour free at both ends is used; if there is none, a colour free at one end is freed at
the other by swapping two colours along an alternating path. FCP (section 4.2) reaches the same count by repeated
maximum matchings.
"""

from __future__ import annotations

import numpy as np

from apportion._core import matching as core, rounds
from apportion.ir.arrays import Ints
from apportion.planner.solvers.contracts import Colouring, ColouringProblem
from apportion.planner.solvers.status import Budget, Status, Termination


def max_degree(src: Ints, dst: Ints, ranks: int) -> int:
    """The largest number of edges that one rank sends or receives; no schedule has fewer slots."""
    src, dst = np.ascontiguousarray(src), np.ascontiguousarray(dst)
    return int(rounds.degrees(src, dst, np.zeros(len(src), np.int32), 1, ranks)[0])


def matchings(src: Ints, dst: Ints, ranks: int) -> Ints:
    """int32 [E]: the matching of each edge src -> dst, numbered from 0 to `max_degree` - 1.

    src, dst: integers [E] in [0, ranks).
    """
    return _colour(src, dst, ranks, max_degree(src, dst, ranks))


def solve(problem: ColouringProblem, budget: Budget) -> Colouring:
    """`matchings` as a solver: always OPTIMAL; it ignores the budget."""
    src, dst, ranks = problem.src, problem.dst, problem.ranks
    degree = max_degree(src, dst, ranks)
    end = Termination(Status.OPTIMAL, float(degree), float(degree))
    return Colouring(_colour(src, dst, ranks, degree), end)


def _colour(src: Ints, dst: Ints, ranks: int, colours: int) -> Ints:
    if not colours:
        return np.zeros(0, np.int32)
    return core.colours(np.ascontiguousarray(src), np.ascontiguousarray(dst), ranks, colours)
