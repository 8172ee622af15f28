"""Compares solvers with the optimum, on problems small enough to enumerate all answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from apportion.planner.solvers.registry import Entry
from apportion.planner.solvers.status import Status
from apportion.testing import PROBLEMS

_NEAR = 1e-6


def compare(entries: Sequence[Entry], problems: int, report: Callable[[str], object]) -> list[dict[str, Any]]:
    """Returns a row for each solver. Solvers of a kind get the same problems, drawn from seeds 0, 1, ….

    entries: installed solvers; report: called after every problem, with the solver's name. Columns: problems: those
    that have an answer; solved: those that the solver solved; optimal: solutions whose value is the optimum; proven:
    solutions reported as optimal; worst, mean: value over optimum, None if nothing was solved or every optimum is 0;
    ms: median time of a call. Raises the errors of the solvers.
    """
    return [_comparison_row(entry, problems, report) for entry in entries]


def _comparison_row(entry: Entry, problems: int, report: Callable[[str], object]) -> dict[str, Any]:
    kind, solver = PROBLEMS[entry.kind], entry.load()
    instances = [kind.random_problem(np.random.default_rng(seed)) for seed in range(problems)]
    solver(instances[0], entry.budget)  # warm-up: loading and compiling are not counted
    times, optima, values, proven = [], [], [], 0
    for problem in instances:
        start = time.perf_counter()
        result = solver(problem, entry.budget)
        times.append(1e3 * (time.perf_counter() - start))
        report(f"{entry.kind} {entry.name}")
        optimum = kind.optimum(problem)
        optima += [] if optimum is None else [optimum]
        if optimum is not None and result.termination.solved:
            values.append((kind.value(problem, result), optimum))
            proven += result.termination.status is Status.OPTIMAL
    ratios = [value / optimum for value, optimum in values if optimum > 0]
    return {
        "kind": entry.kind,
        "solver": entry.name,
        "problems": len(optima),
        "solved": len(values),
        "optimal": sum(value <= optimum + _NEAR * max(1.0, optimum) for value, optimum in values),
        "proven": proven,
        "worst": max(ratios, default=None),
        "mean": fmean(ratios) if ratios else None,
        "ms": median(times),
    }
