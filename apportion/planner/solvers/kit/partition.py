"""Partition problems, their rules and, for small ones, the optimum by enumeration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from apportion.planner.solvers.contracts import Partition, PartitionProblem
from apportion.planner.solvers.kit.contract import Draw


@dataclass(frozen=True)
class PartitionCases:
    """Items of random weights and sizes."""

    def small(self, draw: Draw) -> PartitionProblem:
        return self._drawn(draw, int(draw.integers(1, 7)), int(draw.integers(1, 4)))

    def medium(self, draw: Draw) -> PartitionProblem:
        return self._drawn(draw, 300, 16)

    def hopeless(self) -> PartitionProblem:
        return PartitionProblem(np.array([1, 1]), np.array([3, 9]), np.array([8, 8]))

    def _drawn(self, draw: Draw, items: int, bins: int) -> PartitionProblem:
        weights, sizes = draw.integers(1, 1000, items), draw.integers(1, 50, items)
        speeds = draw.choice([0.5, 1.0, 1.0, 2.0], bins) if draw.random() < 0.7 else None
        room = np.ones(bins) if speeds is None or draw.random() < 0.5 else speeds
        caps = np.maximum(sizes.max(), sizes.sum() / room.sum() * room * 1.2 + 1).astype(np.int64)
        held = [tuple(np.flatnonzero(draw.random(bins) < 0.7).tolist()) or None for _ in range(items)]
        allowed = held if draw.random() < 0.3 else None
        families, zones = draw.integers(0, 1 + items // 4, items), np.arange(bins) // 4
        return PartitionProblem(weights, sizes, caps, speeds, allowed, families, zones)

    def permuted(self, problem: PartitionProblem, draw: Draw) -> PartitionProblem:
        order = draw.permutation(len(problem.weights))
        allowed = None if problem.allowed is None else [problem.allowed[item] for item in order]
        families = None if problem.families is None else problem.families[order]
        weights, sizes = problem.weights[order], problem.sizes[order]
        return replace(problem, weights=weights, sizes=sizes, allowed=allowed, families=families)

    def faults(self, problem: PartitionProblem, result: Partition) -> Iterator[str]:
        if len(result.bin) != len(problem.sizes) or result.bin.min() < 0 or result.bin.max() >= problem.bins:
            yield f"bins {result.bin} are not one of {problem.bins} for each item"
            return
        used = np.bincount(result.bin, problem.sizes, problem.bins)
        for full in np.flatnonzero(used > problem.caps)[:1].tolist():
            yield f"bin {full} holds {used[full]:.0f}, the cap is {problem.caps[full]}"
        if not self._allowed(problem, result.bin.tolist()):
            yield f"bins {result.bin} are not all allowed"

    def value(self, problem: PartitionProblem, result: Partition) -> float:
        return self._heaviest(problem, result.bin)

    def _heaviest(self, problem: PartitionProblem, bins: Any) -> float:
        return float((np.bincount(bins, problem.weights, problem.bins) / problem.rates).max())

    def _allowed(self, problem: PartitionProblem, bins: Sequence[int]) -> bool:
        allowed = problem.allowed or [None] * len(bins)
        return all(only is None or chosen in only for chosen, only in zip(bins, allowed, strict=True))

    def optimum(self, problem: PartitionProblem) -> float | None:
        values = [
            self._heaviest(problem, chosen)
            for chosen in product(range(problem.bins), repeat=len(problem.weights))
            if self._allowed(problem, chosen)
            and (np.bincount(chosen, problem.sizes, problem.bins) <= problem.caps).all()
        ]
        return min(values, default=None)
