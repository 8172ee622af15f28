"""What every solver must keep, to be run on a new one:

    from apportion.planner.solvers import kit
    from apportion.planner.solvers.registry import find_solver

    def test_mine():
        kit.check(find_solver("partition", "mine"))

Problems, optima by enumeration and rules of each kind are in `kit_cases`. Nothing here needs a test framework: a
breach raises ConformanceError, which is an AssertionError.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from apportion.planner.solvers.contracts import KINDS, Solver
from apportion.planner.solvers.kit.cases import CASES
from apportion.planner.solvers.kit.contract import Cases
from apportion.planner.solvers.registry import Entry
from apportion.planner.solvers.status import Budget, Status

AnySolver = Solver[Any, Any]

SMALL, MEDIUM_SEED, TOLERANCE = 12, 1000, 1e-6


class ConformanceError(AssertionError):
    """A solver breaks its contract; says which check, on which problem, and the numbers."""


def check(entry: Entry, budget: Budget | None = None) -> None:
    """All checks on the solver of an Entry. Raises ConformanceError, MissingDependencyError."""
    solver = entry.load()
    for one in (check_answers, check_bounds, check_repeats, check_order, check_hopeless):
        one(solver, entry.kind, budget or Budget())


def check_answers(solver: AnySolver, kind: str, budget: Budget) -> None:
    """Answers are feasible, have the value they claim, and a status that fits it."""
    for seed, problem in _problems(kind):
        result = solver(problem, budget)
        _require(isinstance(result, KINDS[kind][1]), seed, f"gives a {type(result).__name__}")
        end = result.termination
        if not end.solved:
            _require(end.value is None, seed, f"{end} with a value of {end.value}")
            continue
        for fault in CASES[kind].faults(problem, result):
            raise ConformanceError(f"{kind} problem {seed}: {fault}")
        value = CASES[kind].value(problem, result)
        _require(_near(end.value, value), seed, f"claims the value {end.value}, has {value}")
        proven = end.status is Status.OPTIMAL
        _require(
            not proven or _near(end.bound, value), seed, f"OPTIMAL at {value} with the bound {end.bound}"
        )


def check_bounds(solver: AnySolver, kind: str, budget: Budget) -> None:
    """Bound <= optimum <= value, the optimum by enumeration; no answer only where there is none or none was found."""
    for seed in range(SMALL):
        problem = CASES[kind].small(np.random.default_rng(seed))
        end, best = solver(problem, budget).termination, CASES[kind].optimum(problem)
        if best is None:
            _require(not end.solved, seed, f"{end}, but there is no answer")
            continue
        slack = TOLERANCE * max(1.0, best)
        _require(end.status is not Status.INFEASIBLE, seed, f"INFEASIBLE, but {best} is possible")
        _require(end.bound <= best + slack, seed, f"bound {end.bound} above the optimum {best}")
        if end.value is not None:
            _require(end.value >= best - slack, seed, f"value {end.value} below the optimum {best}")
            _require(end.bound <= end.value + slack, seed, f"bound {end.bound} above the value {end.value}")
        wrong = end.status is Status.OPTIMAL and not _near(end.value, best)
        _require(not wrong, seed, f"OPTIMAL at {end.value}, the optimum is {best}")


def check_repeats(solver: AnySolver, kind: str, budget: Budget) -> None:
    """The same problem has the same answer, to the bit."""
    for seed, problem in _problems(kind):
        one, other = solver(problem, budget), solver(problem, budget)
        for field in fields(one):
            a, b = getattr(one, field.name), getattr(other, field.name)
            same = np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
            _require(same, seed, f"{field.name} differs from run to run: {a} and {b}")


def check_order(solver: AnySolver, kind: str, budget: Budget) -> None:
    """The value does not depend on the order of the items."""
    for seed, problem in _problems(kind):
        other = CASES[kind].permuted(problem, np.random.default_rng(seed + 1))
        one, two = solver(problem, budget).termination, solver(other, budget).termination
        same = one.status is two.status and _near(one.value, two.value)
        _require(same, seed, f"{one} at {one.value}, in another order {two} at {two.value}")


def check_hopeless(solver: AnySolver, kind: str, budget: Budget) -> None:
    """A problem without an answer is refused (ValueError) or ends INFEASIBLE or NO_SOLUTION, without a value."""
    problem = CASES[kind].hopeless()
    if problem is None:
        return
    try:
        end = solver(problem, budget).termination
    except ValueError:
        return
    _require(not end.solved and end.value is None, 0, f"{end} at {end.value}, but there is no answer")


def _problems(kind: str) -> Iterator[tuple[int, Any]]:
    cases: Cases = CASES[kind]
    for seed in range(SMALL):
        yield seed, cases.small(np.random.default_rng(seed))
    yield MEDIUM_SEED, cases.medium(np.random.default_rng(MEDIUM_SEED))


def _near(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(abs(one - other) <= TOLERANCE * max(1.0, abs(one), abs(other)))


def _require(held: bool, seed: int, fault: str) -> None:
    if not held:
        raise ConformanceError(f"problem {seed}: {fault}")
