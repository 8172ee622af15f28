"""What a solver says of its answer (after OR-tools MathOpt). Nothing is "OK"."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """How good an answer is; each result also carries the best bound known."""

    OPTIMAL = "OPTIMAL"
    FEASIBLE = "FEASIBLE"
    INFEASIBLE = "INFEASIBLE"
    NO_SOLUTION = "NO_SOLUTION"
