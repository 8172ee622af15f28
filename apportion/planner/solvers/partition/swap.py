"""Longest processing time first, then items of the heaviest bin change places with those of a lighter one.

Under a size cap LPT ends uneven: bins that are full early stay light, others get what is left. Where work grows faster
than size, what is heavier is larger too, so one item goes for two:

    heavy bin    ■■■■■■■■ a             a, for b and c: less work, as much size
    light bin    ■■■■■ b    ■■ c

A step takes the heaviest bin and, of a few of the lightest bins first, then of all, the exchange of one item for none,
one or two after which the heavier of the two bins is lightest. It ends where none helps, or where the heaviest bin is
nearly as light as the bound.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from apportion._core import swap as core
from apportion.ir.arrays import Bools, Floats, Ints
from apportion.planner.solvers.contracts import Partition, PartitionProblem
from apportion.planner.solvers.partition import lpt
from apportion.planner.solvers.status import Budget, Status, Termination

#: how near to the bound is enough
ENOUGH = 5e-4
#: float64 counts up to here; the rate of a bin that holds nothing
EXACT, TINY = 2.0**52, 1e-9


def solve(problem: PartitionProblem, budget: Budget) -> Partition:
    """LPT, improved. FEASIBLE with the makespan bound, OPTIMAL where it is reached; where some items have no room,
    these are at bin -1. It ends by itself."""
    order = _canonical(problem)
    allowed = None if problem.allowed is None else [problem.allowed[item] for item in order.tolist()]
    weights, sizes = problem.weights[order], problem.sizes[order]
    found = _solve(replace(problem, weights=weights, sizes=sizes, allowed=allowed), budget)
    bins = np.empty_like(found.bin)
    bins[order] = found.bin
    return Partition(bins, found.termination)


def _canonical(problem: PartitionProblem) -> Ints:
    """An order of the items in which only equal ones stand as they were given."""
    restrictions = [()] * len(problem.weights) if problem.allowed is None else problem.allowed
    bins = [tuple(some or ()) for some in restrictions]
    number = {some: place for place, some in enumerate(sorted(set(bins)))}
    return np.lexsort((problem.sizes, problem.weights, np.array([number[some] for some in bins])))


def _solve(problem: PartitionProblem, budget: Budget) -> Partition:
    found = lpt.solve(problem, budget)
    if found.termination.status is Status.NO_SOLUTION:
        found = _by_size(problem, budget) or found
    status, rates = found.termination.status, problem.rates
    if status in (Status.OPTIMAL, Status.INFEASIBLE) or problem.bins < 2:
        return found
    bins, bound = found.bin.copy(), lpt.makespan_bound(problem.weights, rates)
    _improve(bins, problem, rates, (1 + ENOUGH) * bound)
    if status is Status.NO_SOLUTION:
        return Partition(bins, found.termination)
    value = float((np.bincount(bins, problem.weights, problem.bins) / rates).max())
    status = Status.OPTIMAL if value <= bound else Status.FEASIBLE
    return Partition(bins, Termination(status, min(bound, value), value))


def _by_size(problem: PartitionProblem, budget: Budget) -> Partition | None:
    """Where all items have room: their sizes, not their weights, made even. None where that is not found, or where
    sums might not be exact."""
    sizes, caps = problem.sizes, problem.caps
    if float(sizes.astype(np.float64).sum()) > EXACT:
        return None
    rates = np.maximum(caps, TINY).astype(np.float64)
    whole = replace(problem, weights=sizes, caps=np.full(problem.bins, sizes.sum()), speeds=rates)
    bins = lpt.solve(whole, budget).bin
    _improve(bins, whole, rates, 1.0)
    if (np.bincount(bins, sizes, problem.bins) > caps).any():
        return None
    value = float((np.bincount(bins, problem.weights, problem.bins) / problem.rates).max())
    return Partition(bins, Termination(Status.FEASIBLE, 0.0, value))


def _improve(bins: Ints, problem: PartitionProblem, rates: Floats, goal: float) -> None:
    """Until no bin's weight over `rates` is above the goal, or nothing helps; in place."""
    order = np.lexsort((bins, problem.weights, problem.sizes))
    columns = (problem.weights, problem.sizes, problem.caps)
    weights, sizes, caps = (np.ascontiguousarray(column, np.int64) for column in columns)
    core.improve(bins, order, weights, sizes, caps, rates, _allowed(problem), goal)


def _allowed(problem: PartitionProblem) -> Bools:
    """bool [K, bins], or [0, bins] where any bin will do for all."""
    if problem.allowed is None or not any(problem.allowed):
        return np.zeros((0, problem.bins), bool)
    allowed = np.ones((len(problem.weights), problem.bins), bool)
    for item, bins in enumerate(problem.allowed):
        if bins is not None:
            allowed[item] = False
            allowed[item, list(bins)] = True
    return allowed
