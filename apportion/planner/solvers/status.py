"""What a solver is allowed to spend, and what it says of its answer (after OR-tools MathOpt). Nothing is "OK"."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from apportion.ir.errors import ConfigError
from apportion.planner.options import Amount, Natural


class Status(StrEnum):
    """How good an answer is; each result also carries the best bound known."""

    OPTIMAL = "OPTIMAL"
    FEASIBLE = "FEASIBLE"
    INFEASIBLE = "INFEASIBLE"
    NO_SOLUTION = "NO_SOLUTION"


class Limit(StrEnum):
    """What stopped a solver before it had proven its answer."""

    STEPS = "steps"
    GAP = "gap"  # the answer is as near to the bound as was asked for
    TASKS = "tasks"  # smaller blocks would be more even, but too many tasks (`shard blocks`)
    ENGINE = "engine"  # the engine died or its answer was wrong: this one is the fallback's


@dataclass(frozen=True)
class Termination:
    """Why a solver stopped and what is proven: `bound` <= optimum <= `value`, which is None without an answer.

    limit: None where the solver ran to its own end (a heuristic always does).
    """

    status: Status
    bound: float
    value: float | None = None
    limit: Limit | None = None

    @property
    def gap(self) -> float | None:
        """Value over bound, 1.0 where they agree; None without a value or with a bound of 0 below the value."""
        if self.value is None:
            return None
        if self.bound > 0:
            return self.value / self.bound
        return 1.0 if self.value == self.bound else None

    @property
    def solved(self) -> bool:
        """Whether there is an answer."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)

    def __str__(self) -> str:
        return f"{self.status}({self.limit})" if self.limit else str(self.status)


@dataclass(frozen=True)
class Budget:
    """What a solver may spend, counted and not timed: results are the same on every machine and every day.

    steps: the solver's own unit (for `ilp`, nodes of its search trees), None for the solver's default. gap: good enough
    when value <= (1 + gap) * bound. Raises ConfigError.
    """

    steps: Natural | None = None
    gap: Amount = 0.0

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("gap", self.gap)):
            if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ConfigError(f"budget.{name}", value, "must be a number, not negative", "leave it out")

    def reached(self, value: float, bound: float) -> bool:
        """Whether `value` is as near to `bound` as was asked for."""
        return value <= (1 + self.gap) * bound
