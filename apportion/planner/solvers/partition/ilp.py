"""The exact partition: an integer program on HiGHS, started from `swap`.

    minimise T;  sum over bins of x[item, bin] = 1;  sum over items of weight * x <= T * speed, of size * x <= cap

If all bins are equal and open to every item, they are interchangeable: the i-th heaviest item is restricted to the
first i. A program with more choices than `DEFAULT_MAX_CHOICES` (`MAX_CHOICES` for an explicit node budget) is not
built, and the start is returned: solving the root node alone would take seconds, which no node limit prevents.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from apportion.ir.arrays import Ints
from apportion.planner.solvers.contracts import Partition, PartitionProblem
from apportion.planner.solvers.partition import swap
from apportion.planner.solvers.status import Budget, Limit, Status, Termination

# maximum choices (items x bins) of an integer program: by default, and with an explicit node budget
DEFAULT_MAX_CHOICES, MAX_CHOICES = 256, 6_000
# Default product of search-tree nodes and choices, for any size: about a second.
EFFORT = 50_000
# tolerance of HiGHS
_TOLERANCE = 1e-6


def solve(problem: PartitionProblem, budget: Budget) -> Partition:
    """Solves exactly; never worse than `swap`. OPTIMAL if value and bound agree; FEASIBLE or NO_SOLUTION with the first
    limit reached; INFEASIBLE if proven; all within 1e-6. Raises MissingDependencyError."""
    start = swap.solve(problem, budget)
    end = start.termination
    if end.status in (Status.OPTIMAL, Status.INFEASIBLE) or not len(problem.weights):
        return start
    if end.value is not None and budget.reached(end.value, end.bound):
        return replace(start, termination=replace(end, limit=Limit.GAP))
    if len(problem.weights) * problem.bins > (DEFAULT_MAX_CHOICES if budget.steps is None else MAX_CHOICES):
        return replace(start, termination=replace(end, limit=Limit.STEPS))
    return _solve_program(problem, start, budget)


def _solve_program(problem: PartitionProblem, start: Partition, budget: Budget) -> Partition:
    from apportion.planner.solvers.highs import solve_model

    # sorted, so that the order of the items does not matter
    order = np.lexsort((_restriction(problem), -problem.sizes, -problem.weights))
    end = start.termination
    scale = max(1.0, end.bound)  # makes T about 1
    model, variables, makespan = _model(problem, order, scale)
    if end.solved:
        for index, item in enumerate(order.tolist()):
            for bin_, var in variables[index].items():
                var.varValue = float(start.bin[item] == bin_)
        makespan.varValue = (end.value or 0.0) / scale
    nodes = EFFORT // sum(map(len, variables)) if budget.steps is None else int(budget.steps)
    run = solve_model(model, nodes, budget.gap)
    bound = max(end.bound, run.bound * scale * (1 - _TOLERANCE))
    if run.status is Status.INFEASIBLE:
        return Partition(start.bin, Termination(Status.INFEASIBLE, end.bound))
    if run.status is Status.NO_SOLUTION:
        return Partition(start.bin, replace(end, bound=_at_most(bound, end.value), limit=run.limit))
    bins: Ints = np.empty(len(order), np.int64)
    for index, item in enumerate(order.tolist()):
        bins[item] = max(variables[index], key=lambda bin_: variables[index][bin_].varValue)
    value = _value(problem, bins)
    if value is None:  # HiGHS's answer is not integral
        return Partition(start.bin, replace(end, limit=Limit.ENGINE))
    if end.value is not None and value > end.value:
        bins, value = start.bin, end.value
    is_optimal = run.status is Status.OPTIMAL and budget.gap == 0
    status = Status.OPTIMAL if is_optimal or value <= bound * (1 + _TOLERANCE) else Status.FEASIBLE
    limit = None if status is Status.OPTIMAL else run.limit or Limit.GAP
    return Partition(
        bins, Termination(status, value if status is Status.OPTIMAL else _at_most(bound, value), value, limit)
    )


def _model(problem: PartitionProblem, order: Ints, scale: float) -> tuple[Any, list[dict[int, Any]], Any]:
    """The program, its choices (bin -> variable for each item in `order`), and T."""
    import pulp

    model = pulp.LpProblem("partition", pulp.LpMinimize)
    makespan = model.add_variable("T", 0)
    model += makespan
    rates, caps = problem.rates, np.maximum(problem.caps, 1).tolist()
    equal = problem.speeds is None and problem.allowed is None and len(set(caps)) == 1
    variables: list[dict[int, Any]] = []
    for index, item in enumerate(order.tolist()):
        allowed = None if problem.allowed is None else problem.allowed[item]
        bins = range(min(index + 1, problem.bins) if equal else problem.bins) if allowed is None else allowed
        variables.append({bin_: model.add_variable(f"x_{index}_{bin_}", cat="Binary") for bin_ in bins})
        model += pulp.lpSum(variables[index].values()) == 1
    # coefficients of about 1: HiGHS satisfies rows within 1e-6
    weights, sizes = (problem.weights[order] / scale).tolist(), problem.sizes[order].tolist()
    for bin_ in range(problem.bins):
        terms = [(index, options[bin_]) for index, options in enumerate(variables) if bin_ in options]
        model += pulp.lpSum(weights[index] * var for index, var in terms) <= float(rates[bin_]) * makespan
        model += pulp.lpSum(sizes[index] / caps[bin_] * var for index, var in terms) <= 1
    return model, variables, makespan


def _restriction(problem: PartitionProblem) -> Ints:
    """int64 [K]: a number for each distinct `allowed`, in sorted order."""
    if problem.allowed is None:
        return np.zeros(len(problem.weights), np.int64)
    sets = [tuple(bins or ()) for bins in problem.allowed]
    number = {bins: index for index, bins in enumerate(sorted(set(sets)))}
    return np.array([number[bins] for bins in sets], np.int64)


def _value(problem: PartitionProblem, bins: Ints) -> float | None:
    """The heaviest bin's weight over speed; None if a bin exceeds its cap."""
    load, bin_sizes = np.zeros(problem.bins, np.int64), np.zeros(problem.bins, np.int64)
    np.add.at(load, bins, problem.weights)
    np.add.at(bin_sizes, bins, problem.sizes)
    return None if (bin_sizes > problem.caps).any() else float((load / problem.rates).max())


def _at_most(bound: float, value: float | None) -> float:
    return bound if value is None else min(bound, value)
