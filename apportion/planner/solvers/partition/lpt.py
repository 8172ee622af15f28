"""Longest processing time first, under a size cap.

Assigns K items with weights and sizes to N bins of unequal speed, to minimize the heaviest bin (weight over speed).
Items are taken by decreasing weight, restricted items first; each goes to the least loaded bin with room. Without the
cap and on equal bins the result is at most 4/3 - 1/(3N) times the optimum (Graham, 1969); FCP (section 4.1 and its
appendix) places blocks in this way.

`solve_near` is less strict: it accepts any bin whose load is below what the least loaded bin would have with the item,
and of these takes the lightest in a zone with members of the item's family, if there is one. So a document's blocks
gather on few nodes, while the lighter items that follow even out the bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from apportion._core import lpt as core
from apportion.ir.arrays import Floats, Ints, offsets
from apportion.planner.solvers.contracts import Partition, PartitionProblem
from apportion.planner.solvers.status import Budget, Status, Termination


def solve(problem: PartitionProblem, budget: Budget) -> Partition:
    """LPT. FEASIBLE with the makespan bound, OPTIMAL if it is reached; items that do not fit have bin -1. Ignores the
    budget."""
    return _solve(replace(problem, families=None))


def solve_near(problem: PartitionProblem, budget: Budget) -> Partition:
    """Like `solve`, but among about equally light bins it prefers zones with items of the same family."""
    return _solve(problem)


def _solve(problem: PartitionProblem) -> Partition:
    group, group_ptr, group_bins = _groups(problem.allowed, len(problem.weights))
    choice = np.diff(group_ptr)
    choice[0] = problem.bins  # the most restricted first, or others take their room
    rates, columns = problem.rates, (problem.weights, problem.sizes, problem.caps)
    weights, sizes, caps = (np.ascontiguousarray(column, np.int64) for column in columns)
    affinity = _near_affinity(problem)
    keys: list[Ints] = [-sizes, -weights]
    if len(affinity.family):
        keys.insert(0, affinity.family)
    if len(choice) > 1:
        keys.append(choice[group])
    order = np.lexsort(keys)
    with np.errstate(over="ignore"):  # at near-zero speed
        items = order, weights, sizes, group, group_ptr, group_bins
        assigned, load = core.assign(items, affinity, rates, caps)
        bound, value = makespan_bound(weights, rates), float((load / rates).max())
    if (assigned >= 0).all():
        status = Status.OPTIMAL if value <= bound else Status.FEASIBLE
        return Partition(assigned, Termination(status, min(bound, value), value))
    is_infeasible = int(sizes.max()) > int(caps.max()) or int(sizes.sum()) > int(caps.sum())
    return Partition(assigned, Termination(Status.INFEASIBLE if is_infeasible else Status.NO_SOLUTION, bound))


def makespan_bound(weights: Ints, speeds: Floats) -> float:
    """A lower bound on the busiest bin's weight over speed: mean load, heaviest item, and the pigeonhole principle: of
    the k*N + 1 heaviest items some bin gets k + 1, at least as heavy as the k + 1 lightest of them."""
    if not len(weights) or not weights.any():
        return 0.0
    bins, fastest = len(speeds), float(speeds.max())
    descending = np.sort(weights)[::-1].astype(np.float64)
    bounds = [descending.sum() / speeds.sum(), descending[0] / fastest]
    sums = np.concatenate([[0.0], np.cumsum(descending)])
    ends = np.arange(bins + 1, len(descending) + 1, bins)
    shares = 2 + np.arange(len(ends))
    bounds.extend((sums[ends] - sums[ends - shares]) / fastest)
    return float(max(bounds))


def _groups(allowed: Sequence[tuple[int, ...] | None] | None, items: int) -> tuple[Ints, Ints, Ints]:
    """The group of each item, and the allowed bins of each group as CSR; group 0 allows any bin."""
    group = np.zeros(items, np.int64)
    if allowed is None or not any(allowed):
        return group, np.zeros(2, np.int64), np.zeros(0, np.int64)
    distinct: dict[tuple[int, ...], int] = {(): 0}
    for item, bins in enumerate(allowed):
        group[item] = distinct.setdefault(tuple(bins or ()), len(distinct))
    ptr = offsets([len(bins) for bins in distinct])
    return group, ptr, np.fromiter(chain.from_iterable(distinct), np.int64, ptr[-1])


class _Affinity(NamedTuple):
    """Families and zones; all empty if unused.

    family: int64 [K], -1 for the only item of a family; zone: int64 [bins]; zone_ptr, zone_bins: the bins of each zone
    as CSR.
    """

    family: Ints
    zone: Ints
    zone_ptr: Ints
    zone_bins: Ints


_NONE = np.zeros(0, np.int64)
_NO_AFFINITY = _Affinity(_NONE, _NONE, _NONE, _NONE)


def _near_affinity(problem: PartitionProblem) -> _Affinity:
    if problem.families is None or problem.zones is None:
        return _NO_AFFINITY
    _, family, count = np.unique(problem.families, return_inverse=True, return_counts=True)
    _, zone, bins = np.unique(problem.zones, return_inverse=True, return_counts=True)
    if len(bins) == 1 or not (count > 1).any():
        return _NO_AFFINITY
    is_single = count[family] == 1
    return _Affinity(np.where(is_single, -1, family), zone, offsets(bins), np.argsort(zone, kind="stable"))
