"""Colouring problems, their rules and, for small ones, the optimum by enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from apportion.planner.solvers.contracts import Colouring, ColouringProblem
from apportion.planner.solvers.kit.contract import Draw


@dataclass(frozen=True)
class ColouringCases:
    """Random multigraphs. Their optimum is known: the largest degree (König, 1916)."""

    def small(self, draw: Draw) -> ColouringProblem:
        return self._drawn(draw, int(draw.integers(0, 20)), int(draw.integers(1, 6)))

    def medium(self, draw: Draw) -> ColouringProblem:
        return self._drawn(draw, 400, 16)

    def hopeless(self) -> None:
        return None

    def _drawn(self, draw: Draw, edges: int, ranks: int) -> ColouringProblem:
        return ColouringProblem(draw.integers(0, ranks, edges), draw.integers(0, ranks, edges), ranks)

    def permuted(self, problem: ColouringProblem, draw: Draw) -> ColouringProblem:
        order, names = draw.permutation(len(problem.src)), draw.permutation(problem.ranks)
        return replace(problem, src=names[problem.src[order]], dst=names[problem.dst[order]])

    def faults(self, problem: ColouringProblem, result: Colouring) -> Iterator[str]:
        for name, ends in (("sender", problem.src), ("receiver", problem.dst)):
            pairs, count = np.unique(np.stack([ends, result.colour]), axis=1, return_counts=True)
            if (count > 1).any():
                end, colour = pairs[:, count.argmax()]
                yield f"{name} {end} has {count.max()} edges of colour {colour}"

    def value(self, problem: ColouringProblem, result: Colouring) -> float:
        return float(len(np.unique(result.colour)))

    def optimum(self, problem: ColouringProblem) -> float:
        if not len(problem.src):
            return 0.0
        return float(max(np.bincount(problem.src).max(), np.bincount(problem.dst).max()))
