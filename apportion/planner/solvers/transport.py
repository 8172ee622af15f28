"""Moves surplus rows, at minimum cost, to ranks that lack rows (the remapping of Zeppelin, section 3).

Two-level costs have a closed form. Rows that can stay in their node do, which never costs more, for the sum or for the
worst rank. For the sum any choice of such rows is equivalent. For the worst rank, in a node with a surplus, receivers
are served from inside, and senders share these cheap rows by water-filling, so that the largest costs of ranks become
equal. Formula (2) of the paper prices senders only ("senders"); "minmax" does the same for
receivers in nodes with a deficit, and so is optimal for both sides at once.
"""

from __future__ import annotations

import numpy as np

from apportion._core import transport as core
from apportion.ir.arrays import Ints
from apportion.planner.solvers.contracts import Transport, TransportProblem
from apportion.planner.solvers.status import Budget, Status, Termination


def solve(problem: TransportProblem, budget: Budget) -> Transport:
    """Optimal rows for each pair of ranks."""
    surplus, cost, objective = problem.surplus.astype(np.int64), problem.cost, problem.objective
    level = (objective != "sum", objective == "minmax")
    price = float(cost.inter), float(cost.inter) - float(cost.intra)
    src, dst, rows = core.two_level(surplus, cost.ranks_per_node, price, *level)
    value = flow_value(problem, src, dst, rows)
    return Transport(src, dst, rows, Termination(Status.OPTIMAL, value, value))


def flow_value(problem: TransportProblem, src: Ints, dst: Ints, rows: Ints) -> float:
    """The objective's value: the sum of all costs, or the largest cost of a rank's sends (minmax: or receives)."""
    price = problem.prices(src, dst) * rows
    if problem.objective == "sum":
        return float(price.sum())
    ranks, sides = len(problem.surplus), (src, dst) if problem.objective == "minmax" else (src,)
    return max(float(np.bincount(side, price, ranks).max(initial=0.0)) for side in sides)
