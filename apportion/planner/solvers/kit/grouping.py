"""Grouping problems, their rules and, for small ones, the optimum by enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from apportion.planner.solvers.contracts import Grouping, GroupingProblem
from apportion.planner.solvers.kit.contract import Draw


@dataclass(frozen=True)
class GroupingCases:
    """Log-normal sequences with time per degree: quadratic work shared by the group, and a price of sharing."""

    def small(self, draw: Draw) -> GroupingProblem:
        return self._drawn(draw, int(draw.integers(1, 6)), 4, np.array([1, 2, 4]), 2.5)

    def medium(self, draw: Draw) -> GroupingProblem:
        return self._drawn(draw, 14, 8, np.array([1, 2, 4, 8]), 2.0)

    def hopeless(self) -> GroupingProblem:
        return GroupingProblem(np.ones((2, 1)), np.array([5, 6]), np.array([1]), 2, 5)

    def _drawn(self, draw: Draw, items: int, ranks: int, degrees: Any, room: float) -> GroupingProblem:
        sizes = np.rint(100 * np.exp(1.2 * draw.standard_normal(items))).astype(np.int64) + 1
        shared = 1 - 1 / degrees
        times = sizes[:, None] ** 2 / 100 / degrees + sizes[:, None] / degrees * shared * 0.3 + 2 * shared
        cap = int(max(room * sizes.sum() / ranks, -(-sizes.max() // degrees[-1])))
        return GroupingProblem(times, sizes, degrees, ranks, cap)

    def permuted(self, problem: GroupingProblem, draw: Draw) -> GroupingProblem:
        order = draw.permutation(len(problem.sizes))
        return replace(problem, times=problem.times[order], sizes=problem.sizes[order])

    def faults(self, problem: GroupingProblem, result: Grouping) -> Iterator[str]:
        groups = len(result.degree)
        if result.degree.sum() > problem.ranks or not np.isin(result.degree, problem.degrees).all():
            yield f"groups of {result.degree} ranks, there are {problem.ranks}, in groups of {problem.degrees}"
        if len(result.group) != len(problem.sizes) or result.group.min() < 0 or result.group.max() >= groups:
            yield f"groups {result.group} are not one of {groups} for each sequence"
            return
        used = np.bincount(result.group, problem.sizes, groups)
        if (used > problem.cap * result.degree).any():
            yield f"groups of {result.degree} ranks hold {used}, the cap is {problem.cap} a rank"
        if not np.allclose(self._times(problem, result), result.time):
            yield f"times {result.time}, they are {self._times(problem, result)}"

    def _times(self, problem: GroupingProblem, result: Grouping) -> Any:
        column = np.searchsorted(problem.degrees, result.degree)[result.group]
        own = problem.times[np.arange(len(column)), column]
        return np.bincount(result.group, own, len(result.degree))

    def value(self, problem: GroupingProblem, result: Grouping) -> float:
        return float(self._times(problem, result).max())

    def optimum(self, problem: GroupingProblem) -> float | None:
        """Over every partition of the sequences and every degree of each part."""
        values = [
            time
            for parts in _partitions(len(problem.sizes))
            for time in self._worths(problem, parts)
            if np.isfinite(time)
        ]
        return min(values, default=None)

    def _worths(self, problem: GroupingProblem, parts: list[list[int]]) -> Iterator[float]:
        if len(parts) > problem.ranks:
            return
        tokens = np.array([problem.sizes[part].sum() for part in parts])
        times = np.stack([problem.times[part].sum(0) for part in parts])
        for chosen in product(range(len(problem.degrees)), repeat=len(parts)):
            degree = problem.degrees[list(chosen)]
            if degree.sum() <= problem.ranks and (tokens <= problem.cap * degree).all():
                yield float(times[np.arange(len(parts)), list(chosen)].max())


def _partitions(items: int) -> Iterator[list[list[int]]]:
    """Every way to part the numbers below `items`."""
    if not items:
        yield []
        return
    for parts in _partitions(items - 1):
        yield [*parts, [items - 1]]
        for i, part in enumerate(parts):
            yield [*parts[:i], [*part, items - 1], *parts[i + 1 :]]
