"""Conformance tests for plug-in solvers: `check` tests a solver against the contract of its kind.

    from apportion import testing
    from apportion.planner.solvers.registry import find_solver

    def test_mine():
        testing.check(find_solver("partition", "mine"))

No test framework is needed: a violation raises ConformanceError, an AssertionError. Passes are checked on discovery
(`planner/recipe/registry.py`), plans by the verifier. `problems.py` has problems and rules of each kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from itertools import chain
from typing import Any

import numpy as np

from apportion.planner.solvers.registry import Entry
from apportion.planner.solvers.status import Budget, Status, Termination
from apportion.testing.problems import PROBLEMS, Problems

__all__ = ["PROBLEMS", "ConformanceError", "check"]

_SMALL_PROBLEMS, _LARGE_SEED, _TOLERANCE = 12, 1000, 1e-6


class ConformanceError(AssertionError):
    """A solver violates its contract; names the check, the problem and the numbers."""


def check(entry: Entry, budget: Budget | None = None) -> None:
    """Draws 12 small problems and a large one of the entry's kind, and checks its solver against these rules:

    - an answer is feasible, has the value it claims, and a status that fits it;
    - bound <= optimum <= value on small problems, whose optimum is found by enumeration; INFEASIBLE is reported only
      if there is no answer;
    - the same problem gets the same answer, bit for bit, and the value does not depend on the order of the items;
    - a problem without an answer is refused (ValueError), or ends as INFEASIBLE or NO_SOLUTION, without a value.

    budget: limits of the solver, by default its own number of steps. Raises ConformanceError, MissingDependencyError.
    """
    solver, budget, kind = entry.load(), budget or Budget(), PROBLEMS[entry.kind]
    for seed in (*range(_SMALL_PROBLEMS), _LARGE_SEED):
        problem = kind.random_problem(np.random.default_rng(seed), large=seed == _LARGE_SEED)
        permutation = kind.permute(problem, np.random.default_rng(seed + 1))
        result, repeated, reordered = (
            solver(instance, budget) for instance in (problem, problem, permutation)
        )
        bounds = _bound_faults(result.termination, kind.optimum(problem)) if seed < _SMALL_PROBLEMS else ()
        for fault in chain(
            _answer_faults(kind, problem, result), bounds, _repeat_faults(result, repeated, reordered)
        ):
            raise ConformanceError(f"{entry.kind} problem {seed}: {fault}")
    if (problem := kind.infeasible_problem()) is not None:
        with suppress(ValueError):
            end = solver(problem, budget).termination
            if end.solved or end.value is not None:
                raise ConformanceError(f"{end} at {end.value}, but there is no answer")


def _answer_faults(kind: Problems, problem: Any, result: Any) -> Iterator[str]:
    end = result.termination
    if not end.solved:
        yield from _broken_rules((end.value is not None, f"{end} with a value of {end.value}"))
        return
    yield from kind.faults(problem, result)
    value, proven = kind.value(problem, result), end.status is Status.OPTIMAL
    yield from _broken_rules(
        (not _are_close(end.value, value), f"claims the value {end.value}, has {value}"),
        (proven and not _are_close(end.bound, value), f"OPTIMAL at {value} with the bound {end.bound}"),
    )


def _bound_faults(end: Termination, best: float | None) -> Iterator[str]:
    if best is None:
        yield from _broken_rules((end.solved, f"{end}, but there is no answer"))
        return
    slack = _TOLERANCE * max(1.0, best)
    yield from _broken_rules(
        (end.status is Status.INFEASIBLE, f"INFEASIBLE, but {best} is possible"),
        (end.bound > best + slack, f"bound {end.bound} above the optimum {best}"),
        (end.value is not None and end.value < best - slack, f"value {end.value} below the optimum {best}"),
        (
            end.status is Status.OPTIMAL and not _are_close(end.value, best),
            f"OPTIMAL, but the optimum is {best}",
        ),
    )


def _repeat_faults(result: Any, repeated: Any, reordered: Any) -> Iterator[str]:
    for name in (field.name for field in fields(result)):
        a, b = getattr(result, name), getattr(repeated, name)
        is_same = np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        yield from _broken_rules((not is_same, f"{name} differs from run to run: {a} and {b}"))
    first, second = result.termination, reordered.termination
    is_same = first.status is second.status and _are_close(first.value, second.value)
    yield from _broken_rules(
        (not is_same, f"{first} at {first.value}, but with the items reordered {second} at {second.value}")
    )


def _broken_rules(*rules: tuple[bool, str]) -> Iterator[str]:
    yield from (fault for broken, fault in rules if broken)


def _are_close(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return bool(abs(a - b) <= _TOLERANCE * max(1.0, abs(a), abs(b)))
