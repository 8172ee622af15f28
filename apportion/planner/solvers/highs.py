"""Runs PuLP models on HiGHS: one thread, a fixed seed, and a precise status.

PuLP has no status for an answer at a node limit, so the status is read from HiGHS. Needs pulp and highspy: import this
module inside a function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import highspy
import pulp

from apportion.planner.solvers.status import Limit, Status

_SEED = 0
_ENDS = {
    highspy.HighsModelStatus.kOptimal: (Status.OPTIMAL, None),
    highspy.HighsModelStatus.kInfeasible: (Status.INFEASIBLE, None),
    highspy.HighsModelStatus.kObjectiveTarget: (Status.FEASIBLE, Limit.GAP),
    highspy.HighsModelStatus.kSolutionLimit: (Status.FEASIBLE, Limit.STEPS),
    highspy.HighsModelStatus.kIterationLimit: (Status.FEASIBLE, Limit.STEPS),
}


@dataclass(frozen=True)
class SolverRun:
    """Outcome of a model: its variables hold an answer if `status` is OPTIMAL or FEASIBLE.

    bound: lower bound of the objective, which is minimised; minus infinity if unknown.
    """

    status: Status
    limit: Limit | None
    bound: float


class _HighsEngine(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's HiGHS, started from the current values of the variables."""

    run: SolverRun

    def callSolver(self, lp: pulp.LpProblem) -> None:
        start = [variable.varValue for variable in lp.variables()]
        if all(value is not None for value in start):
            solution = highspy.HighsSolution()
            solution.col_value = start
            lp.solverModel.setSolution(solution)
        lp.solverModel.run()

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:
        info = lp.solverModel.getInfo()
        is_feasible = info.primal_solution_status == highspy.kSolutionStatusFeasible
        self.run = _run(lp.solverModel.getModelStatus(), is_feasible, info.mip_dual_bound)
        if is_feasible:
            values = lp.solverModel.getSolution().col_value
            for variable, value in zip(lp.variables(), values, strict=True):
                variable.varValue = value
        if self.run.status is Status.OPTIMAL:
            return pulp.LpStatusOptimal, pulp.LpSolutionOptimal
        if is_feasible:
            return pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible
        return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound


def _run(end: highspy.HighsModelStatus, is_feasible: bool, bound: float) -> SolverRun:
    status, limit = _ENDS.get(end, (Status.FEASIBLE, Limit.ENGINE))
    if status is Status.FEASIBLE and not is_feasible:
        status = Status.NO_SOLUTION
    return SolverRun(status, limit, bound)


def solve_model(model: pulp.LpProblem, nodes: int, gap: float = 0.0) -> SolverRun:
    """Minimises a PuLP model, starting from its variables' values if all have one; they receive the answer.

    nodes: limit of the search tree; gap: accepted relative gap.
    """
    options: dict[str, Any] = {"random_seed": _SEED, "mip_max_nodes": nodes, "parallel": "off"}
    engine = _HighsEngine(msg=False, threads=1, gapRel=gap, **options)
    model.solve(engine)
    return engine.run
