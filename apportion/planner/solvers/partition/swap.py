"""LPT, then local search by exchanges between the heaviest bin and a lighter one.

Under a size cap LPT ends uneven: bins that fill early stay light, and others get the rest. If work grows faster than
size, heavier items are larger too, so one item is exchanged for two:

    heavy bin    ■■■■■■■■ a             a for b and c: less work, equal size
    light bin    ■■■■■ b    ■■ c

A step takes the heaviest bin and, among a few of the lightest bins, then among all, the exchange of one item for none,
one or two after which the heavier of the two bins is lightest. It ends if none helps, or if the heaviest bin is close
enough to the bound.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apportion._core import swap as core
from apportion.ir.arrays import Bools, Floats, Ints
from apportion.planner.solvers.contracts import Partition, PartitionProblem
from apportion.planner.solvers.partition import lpt
from apportion.planner.solvers.status import Budget, Status, Termination

#: accepted relative distance to the bound
ENOUGH = 5e-4
#: limit of sums that float64 holds exactly; rate of a bin with cap 0
EXACT, TINY = 2.0**52, 1e-9


def solve(problem: PartitionProblem, budget: Budget) -> Partition:
    """LPT, improved. FEASIBLE with the makespan bound, OPTIMAL if it is reached; items that do not fit have bin -1.
    Ignores the budget."""
    order = _canonical(problem)
    allowed = None if problem.allowed is None else [problem.allowed[item] for item in order.tolist()]
    weights, sizes = problem.weights[order], problem.sizes[order]
    partition = _solve(replace(problem, weights=weights, sizes=sizes, allowed=allowed), budget)
    bins = np.empty_like(partition.bin)
    bins[order] = partition.bin
    return Partition(bins, partition.termination)


def _canonical(problem: PartitionProblem) -> Ints:
    """A canonical order of the items, in which only equal ones keep their given order."""
    restrictions = [()] * len(problem.weights) if problem.allowed is None else problem.allowed
    bins = [tuple(allowed or ()) for allowed in restrictions]
    number = {allowed: index for index, allowed in enumerate(sorted(set(bins)))}
    return np.lexsort((problem.sizes, problem.weights, np.array([number[allowed] for allowed in bins])))


def _solve(problem: PartitionProblem, budget: Budget) -> Partition:
    result = lpt.solve(problem, budget)
    if result.termination.status is Status.NO_SOLUTION:
        result = _balance_sizes(problem, budget) or result
    status, rates = result.termination.status, problem.rates
    if status in (Status.OPTIMAL, Status.INFEASIBLE) or problem.bins < 2:
        return result
    bins, bound = result.bin.copy(), lpt.makespan_bound(problem.weights, rates)
    _improve(bins, problem, rates, (1 + ENOUGH) * bound)
    if status is Status.NO_SOLUTION:
        return Partition(bins, result.termination)
    value = float((np.bincount(bins, problem.weights, problem.bins) / rates).max())
    status = Status.OPTIMAL if value <= bound else Status.FEASIBLE
    return Partition(bins, Termination(status, min(bound, value), value))


def _balance_sizes(problem: PartitionProblem, budget: Budget) -> Partition | None:
    """An answer by balancing sizes instead of weights, so that all items fit. None if not found, or if sums might not
    be exact."""
    sizes, caps = problem.sizes, problem.caps
    if float(sizes.astype(np.float64).sum()) > EXACT:
        return None
    rates = np.maximum(caps, TINY).astype(np.float64)
    size_problem = replace(problem, weights=sizes, caps=np.full(problem.bins, sizes.sum()), speeds=rates)
    bins = lpt.solve(size_problem, budget).bin
    _improve(bins, size_problem, rates, 1.0)
    if (np.bincount(bins, sizes, problem.bins) > caps).any():
        return None
    value = float((np.bincount(bins, problem.weights, problem.bins) / problem.rates).max())
    return Partition(bins, Termination(Status.FEASIBLE, 0.0, value))


def _improve(bins: Ints, problem: PartitionProblem, rates: Floats, goal: float) -> None:
    """Improves in place, until no bin's weight over `rates` is above the goal, or nothing helps."""
    order = np.lexsort((bins, problem.weights, problem.sizes))
    columns = (problem.weights, problem.sizes, problem.caps)
    weights, sizes, caps = (np.ascontiguousarray(column, np.int64) for column in columns)
    core.improve(bins, order, weights, sizes, caps, rates, _allowed(problem), goal)


def _allowed(problem: PartitionProblem) -> Bools:
    """bool [K, bins]: allowed bins, or [0, bins] if all items allow any."""
    if problem.allowed is None or not any(problem.allowed):
        return np.zeros((0, problem.bins), bool)
    allowed = np.ones((len(problem.weights), problem.bins), bool)
    for item, bins in enumerate(problem.allowed):
        if bins is not None:
            allowed[item] = False
            allowed[item, list(bins)] = True
    return allowed
