"""Budgets of solvers, and the status and bound of their answers (after OR-Tools MathOpt)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from apportion.ir.errors import ConfigError
from apportion.planner.options import Amount, Natural


class Status(StrEnum):
    """Quality of an answer; each result also has the best known bound."""

    OPTIMAL = "OPTIMAL"
    FEASIBLE = "FEASIBLE"
    INFEASIBLE = "INFEASIBLE"
    NO_SOLUTION = "NO_SOLUTION"


class Limit(StrEnum):
    """The limit that stopped a solver before it had proven its answer."""

    STEPS = "steps"
    GAP = "gap"  # the answer is within the budget's gap of the bound
    TASKS = "tasks"  # smaller blocks would be more even, but make too many tasks (`shard blocks`)
    ENGINE = "engine"  # the engine crashed or its answer was wrong: the fallback's answer is used


@dataclass(frozen=True)
class Termination:
    """Outcome of a solver: `bound` <= optimum <= `value`, which is None if there is no answer.

    limit: None if the solver ran to its own end (a heuristic always does).
    """

    status: Status
    bound: float
    value: float | None = None
    limit: Limit | None = None

    @property
    def gap(self) -> float | None:
        """Value over bound, 1.0 if they agree; None if there is no value, or if the bound is 0 and the value is not."""
        if self.value is None:
            return None
        if self.bound > 0:
            return self.value / self.bound
        return 1.0 if self.value == self.bound else None

    @property
    def solved(self) -> bool:
        """True if there is an answer."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)

    def __str__(self) -> str:
        return f"{self.status}({self.limit})" if self.limit else str(self.status)


@dataclass(frozen=True)
class Budget:
    """Effort limits of a solver, counted instead of timed, so that results are reproducible.

    steps: the solver's own unit (for `ilp`, nodes of its search trees), None for the solver's default. gap: accepts
    value <= (1 + gap) * bound. Raises ConfigError.
    """

    steps: Natural | None = None
    gap: Amount = 0.0

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("gap", self.gap)):
            if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ConfigError(f"budget.{name}", value, "must be a non-negative number", "leave it out")

    def reached(self, value: float, bound: float) -> bool:
        """True if `value` is within the gap of `bound`."""
        return value <= (1 + self.gap) * bound
