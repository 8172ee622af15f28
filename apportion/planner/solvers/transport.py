"""Move surplus rows to the ranks that lack them, cheaply (the remapping of Zeppelin, section 3).

Two-level costs have a closed form. Rows that can stay in their node do: never dearer, for the sum or for the worst
rank. For the sum it does not matter which rows these are. For the worst rank, where a node has more rows to give
than to take, its receivers are served from inside and its senders share out that cheap part by water-filling: what is
left to send dearly levels the ranks that pay most. Formula (2) of the paper prices senders only ("senders"); "minmax"
does the same for receivers in nodes that have more to take, and so is best for both sides at once.
"""

from __future__ import annotations

import numpy as np

from apportion._core import transport as core
from apportion.ir.arrays import Ints
from apportion.planner.solvers.contracts import Transport, TransportProblem
from apportion.planner.solvers.status import Budget, Status, Termination


def solve(problem: TransportProblem, budget: Budget) -> Transport:
    """Rows for each pair of ranks, the best there are."""
    surplus, cost, objective = problem.surplus.astype(np.int64), problem.cost, problem.objective
    level = (objective != "sum", objective == "minmax")
    flows = core.two_level(surplus, cost.ranks_per_node, float(cost.intra), float(cost.inter), *level)
    value = flow_value(problem, *flows)
    return Transport(*flows, Termination(Status.OPTIMAL, value, value))


def flow_value(problem: TransportProblem, src: Ints, dst: Ints, rows: Ints) -> float:
    """What the flows cost: the sum, or the most that one rank pays on a side that counts."""
    price = problem.prices(src, dst) * rows
    if problem.objective == "sum":
        return float(price.sum())
    ranks, sides = len(problem.surplus), (src, dst) if problem.objective == "minmax" else (src,)
    return max(float(np.bincount(side, price, ranks).max(initial=0.0)) for side in sides)
