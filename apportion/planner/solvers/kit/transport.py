"""Transport problems, their rules and, for small ones, the optimum by enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from apportion.planner.solvers.contracts import Transport, TransportProblem, TwoLevelCost
from apportion.planner.solvers.kit.contract import Draw


@dataclass(frozen=True)
class TransportCases:
    """Random surpluses under two-level and random costs, for the sum and for the worst rank."""

    def small(self, draw: Draw) -> TransportProblem:
        surplus = draw.integers(-2, 3, 4)
        surplus[int(draw.integers(4))] -= surplus.sum()
        return self._drawn(draw, surplus, 2)

    def medium(self, draw: Draw) -> TransportProblem:
        return self._drawn(draw, self._surplus(draw, 24), 8)

    def hopeless(self) -> None:
        return None

    def _surplus(self, draw: Draw, ranks: int) -> Any:
        rows = draw.integers(-1000, 1001, ranks)
        rows[0] -= rows.sum()
        return rows

    def _drawn(self, draw: Draw, surplus: Any, per_node: int) -> TransportProblem:
        objective: Any = str(draw.choice(["sum", "minmax", "senders"]))
        levels = TwoLevelCost(per_node, 1.0, float(draw.integers(1, 10)))
        cost = levels if draw.random() < 0.5 else draw.uniform(0, 9, (len(surplus), len(surplus)))
        return TransportProblem(surplus, cost, objective)

    def permuted(self, problem: TransportProblem, draw: Draw) -> TransportProblem:
        if isinstance(problem.cost, TwoLevelCost):
            nodes = np.arange(len(problem.surplus)).reshape(-1, problem.cost.ranks_per_node)
            order = draw.permuted(nodes[draw.permutation(len(nodes))], axis=1).ravel()
            return replace(problem, surplus=problem.surplus[order])
        order = draw.permutation(len(problem.surplus))
        return replace(problem, surplus=problem.surplus[order], cost=problem.cost[np.ix_(order, order)])

    def faults(self, problem: TransportProblem, result: Transport) -> Iterator[str]:
        ranks = len(problem.surplus)
        moved = np.zeros(ranks, np.int64)
        np.add.at(moved, result.src, result.rows)
        np.subtract.at(moved, result.dst, result.rows)
        if not np.array_equal(moved, problem.surplus) or (result.rows <= 0).any():
            yield f"rows {moved} are moved, the surplus is {problem.surplus}"
        if not (problem.surplus[result.src] > 0).all() or not (problem.surplus[result.dst] < 0).all():
            yield "a rank without surplus sends, or one without deficit receives"

    def value(self, problem: TransportProblem, result: Transport) -> float:
        ranks = len(problem.surplus)
        flows = np.zeros((ranks, ranks), np.int64)
        flows[result.src, result.dst] = result.rows
        return self._worth(problem, flows)

    def _worth(self, problem: TransportProblem, flows: Any) -> float:
        prices = flows * problem.matrix
        if problem.objective == "sum":
            return float(prices.sum())
        sides = (0, 1) if problem.objective == "minmax" else (1,)
        return float(max(prices.sum(side).max() for side in sides))

    def optimum(self, problem: TransportProblem) -> float:
        ranks = len(problem.surplus)
        flows = np.zeros((ranks, ranks), np.int64)
        return min(self._worth(problem, each) for each in self._all(problem.surplus.copy(), flows))

    def _all(self, rest: Any, flows: Any) -> Iterator[Any]:
        """Every way to move the rest, row by row from its first sender."""
        senders = np.flatnonzero(rest > 0)
        if not len(senders):
            yield flows
            return
        src = int(senders[0])
        last = np.flatnonzero(flows[src])
        for dst in np.flatnonzero(rest < 0):
            if len(last) and dst < last[-1]:
                continue  # rows are alike: their receivers rise
            step = np.zeros_like(flows)
            step[src, dst] = 1
            yield from self._all(rest - step.sum(1) + step.sum(0), flows + step)
