"""Solvers against the optimum, on problems so small that all their answers can be enumerated."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from apportion.planner.solvers.kit.cases import CASES
from apportion.planner.solvers.registry import Entry
from apportion.planner.solvers.status import Status

_NEAR = 1e-6


@dataclass(frozen=True)
class Compared:
    """One solver. Of `problems` that have an answer: solved, those it found one for; optimal, those whose value is the
    optimum, and proven, those of which it said so; worst, mean: its value over the optimum, None where nothing was
    solved or an optimum is 0. ms: the median of a call."""

    kind: str
    solver: str
    problems: int
    solved: int
    optimal: int
    proven: int
    worst: float | None
    mean: float | None
    ms: float


def compare(entries: Sequence[Entry], problems: int, tell: Callable[[str], object]) -> list[Compared]:
    """Each solver on the same problems of its kind, drawn from seeds 0, 1, ….

    entries: installed ones; tell: called behind every problem, with the solver's name. Raises what a solver raises.
    """
    return [_compared(entry, problems, tell) for entry in entries]


def _compared(entry: Entry, problems: int, tell: Callable[[str], object]) -> Compared:
    cases, solver = CASES[entry.kind], entry.load()
    ratios: list[float] = []
    times: list[float] = []
    count = optimal = proven = solved = 0
    for seed in range(problems):
        problem = cases.small(np.random.default_rng(seed))
        best = cases.optimum(problem)
        if seed == 0:
            solver(problem, entry.budget)  # what loads or compiles once is not the solver's time
        begun = time.perf_counter()
        result = solver(problem, entry.budget)
        times.append(1e3 * (time.perf_counter() - begun))
        tell(f"{entry.kind} {entry.name}")
        if best is None:
            continue
        count += 1
        if not result.termination.solved:
            continue
        value = cases.value(problem, result)
        solved += 1
        optimal += value <= best + _NEAR * max(1.0, best)
        proven += result.termination.status is Status.OPTIMAL
        if best > 0:
            ratios.append(value / best)
    worst, mean = (max(ratios), fmean(ratios)) if ratios else (None, None)
    return Compared(entry.kind, entry.name, count, solved, optimal, proven, worst, mean, median(times))
