"""Longest processing time first, under a size cap.

K weights and sizes go to N bins of unequal speed; the heaviest bin (weight over speed) is made light. Items are taken
by falling weight, those that only some bins may take before the others; each goes to the least loaded bin that has
room. Without the cap and on equal bins the result is at most 4/3 - 1/(3N) of the optimum (Graham, 1969); FCP (section
4.1 and its appendix) places blocks in this way.

`solve_near` asks a little less: a bin that holds less than the least loaded one would with the item is as good, and of
these it takes the lightest in a zone that has some of the item's family, where there is one. So a document's blocks
gather on few nodes, while bins differ no more than by the items that are left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Floats, Ints, offsets
from apportion.ir.loops.jit import jit, lean
from apportion.planner.solvers.contracts import Partition, PartitionProblem
from apportion.planner.solvers.status import Budget, Status, Termination


def solve(problem: PartitionProblem, budget: Budget) -> Partition:
    """LPT. FEASIBLE with the makespan bound, OPTIMAL where it is reached; where some items have no room, these are at
    bin -1. It ends by itself, so the budget is not looked at."""
    return _solve(replace(problem, families=None))


def solve_near(problem: PartitionProblem, budget: Budget) -> Partition:
    """The same; of bins that are about as light, one of a zone where items of the same family are."""
    return _solve(problem)


def _solve(problem: PartitionProblem) -> Partition:
    group, group_ptr, group_bins = _groups(problem.allowed, len(problem.weights))
    choice = np.diff(group_ptr)
    choice[0] = problem.bins  # the least free go first, or others take their room
    weights, sizes, rates = problem.weights, problem.sizes, problem.rates
    caps = np.ascontiguousarray(problem.caps, np.int64)
    near = _near(problem)
    keys = [-sizes, -weights]
    if len(near.family):
        keys.insert(0, near.family)
    if len(choice) > 1:
        keys.append(choice[group])
    order = np.lexsort(keys)
    with np.errstate(over="ignore"):  # at a speed of next to nothing
        assigned, load = _assign(order, weights, sizes, rates, caps, group, group_ptr, group_bins, near)
        bound, value = makespan_bound(weights, rates), float((load / rates).max())
    if (assigned >= 0).all():
        status = Status.OPTIMAL if value <= bound else Status.FEASIBLE
        return Partition(assigned, Termination(status, min(bound, value), value))
    hopeless = int(sizes.max()) > int(caps.max()) or int(sizes.sum()) > int(caps.sum())
    return Partition(assigned, Termination(Status.INFEASIBLE if hopeless else Status.NO_SOLUTION, bound))


def makespan_bound(weights: Ints, speeds: Floats) -> float:
    """A lower bound of the busiest bin's weight over speed: mean load, heaviest item, and the pigeonhole: of the
    k*N + 1 heaviest items some bin takes k + 1, at least the k + 1 lightest of them."""
    if not len(weights) or not weights.any():
        return 0.0
    bins, fastest = len(speeds), float(speeds.max())
    falling = np.sort(weights)[::-1].astype(np.float64)
    bounds = [falling.sum() / speeds.sum(), falling[0] / fastest]
    sums = np.concatenate([[0.0], np.cumsum(falling)])
    ends = np.arange(bins + 1, len(falling) + 1, bins)
    shares = 2 + np.arange(len(ends))
    bounds.extend((sums[ends] - sums[ends - shares]) / fastest)
    return float(max(bounds))


def _groups(allowed: Sequence[tuple[int, ...] | None] | None, items: int) -> tuple[Ints, Ints, Ints]:
    """Distinct restrictions as CSR; group 0 is `any bin`."""
    group = np.zeros(items, np.int64)
    if allowed is None or not any(allowed):
        return group, np.zeros(2, np.int64), np.zeros(0, np.int64)
    distinct: dict[tuple[int, ...], int] = {(): 0}
    for item, bins in enumerate(allowed):
        group[item] = distinct.setdefault(tuple(bins or ()), len(distinct))
    ptr = offsets([len(bins) for bins in distinct])
    return group, ptr, np.fromiter(chain.from_iterable(distinct), np.int64, ptr[-1])


class _Near(NamedTuple):
    """Who is near whom; all empty where nobody is.

    family: int64 [K], of items that have relatives, else -1; family_ptr: int64 [families + 1], room for the zones of
    each; zone: int64 [bins]; zone_ptr, zone_bins: the bins of each zone as CSR.
    """

    family: Ints
    family_ptr: Ints
    zone: Ints
    zone_ptr: Ints
    zone_bins: Ints


_NONE = np.zeros(0, np.int64)
_NOBODY = _Near(_NONE, _NONE, _NONE, _NONE, _NONE)


def _near(problem: PartitionProblem) -> _Near:
    if problem.families is None or problem.zones is None:
        return _NOBODY
    _, family, count = np.unique(problem.families, return_inverse=True, return_counts=True)
    _, zone, bins = np.unique(problem.zones, return_inverse=True, return_counts=True)
    if len(bins) == 1 or not (count > 1).any():
        return _NOBODY
    alone = count[family] == 1
    return _Near(
        np.where(alone, -1, family),
        offsets(count),
        zone,
        offsets(bins),
        np.argsort(zone, kind="stable"),
    )


@jit
def _assign(
    order: Ints,
    weights: Ints,
    sizes: Ints,
    speed: Floats,
    caps: Ints,
    group: Ints,
    group_ptr: Ints,
    group_bins: Ints,
    near: _Near,
) -> tuple[Ints, Ints]:
    bins = len(speed)
    # the zones of each family, and how many they are
    held, zones = np.empty(len(near.family), np.int64), np.zeros(len(near.family_ptr), np.int64)
    assigned, load, room = np.full(len(order), -1, np.int64), np.zeros(bins, np.int64), caps.copy()
    lightest, most = _tree(room)
    for item in order:
        best = -1
        family = near.family[item] if len(near.family) else -1
        if group[item] == 0:
            best = _find(lightest, most, sizes[item])
            if family >= 0 and best >= 0:
                first = near.family_ptr[family]
                some, limit = held[first : first + zones[family]], (load[best] + weights[item]) / speed[best]
                best = _nearest(best, near, some, limit, load, room, speed, sizes[item])
        else:
            allowed = group_bins[group_ptr[group[item]] : group_ptr[group[item] + 1]]
            best = _least_loaded(allowed, load, room, speed, sizes[item])
        if best < 0:
            continue
        assigned[item] = best
        load[best] += weights[item]
        room[best] -= sizes[item]
        _update(lightest, most, best, load[best] / speed[best], room[best])
        if family >= 0:
            first = near.family_ptr[family]
            if not _among(held[first : first + zones[family]], near.zone[best]):
                held[first + zones[family]] = near.zone[best]
                zones[family] += 1
    return assigned, load


@jit
def _tree(room: Ints) -> tuple[Floats, Ints]:
    """A tournament of bins that hold nothing: (least load over speed, most room) of the two below each node, float64
    and int64 [2 x leaves]; its leaves are bins."""
    leaves = 1
    while leaves < len(room):
        leaves *= 2
    lightest, most = np.full(2 * leaves, np.inf), np.full(2 * leaves, -1)
    for bin_ in range(len(room)):  # assigning slices takes seconds to compile
        lightest[leaves + bin_], most[leaves + bin_] = 0.0, room[bin_]
    for node in range(leaves - 1, 0, -1):
        lightest[node] = min(lightest[2 * node], lightest[2 * node + 1])
        most[node] = max(most[2 * node], most[2 * node + 1])
    return lightest, most


@lean
def _update(lightest: Floats, most: Ints, bin_: int, load: float, room: int) -> None:
    node = len(most) // 2 + bin_
    lightest[node], most[node] = load, room
    while node > 1:
        node //= 2
        lightest[node] = min(lightest[2 * node], lightest[2 * node + 1])
        most[node] = max(most[2 * node], most[2 * node + 1])


@lean
def _find(lightest: Floats, most: Ints, size: int) -> int:
    """The least loaded bin with room, of equal ones the first; -1 where none has."""
    leaves, node = len(most) // 2, 1
    while node < leaves:
        node = 2 * node + (lightest[2 * node + 1] < lightest[2 * node])
    if most[node] >= size:
        return node - leaves
    best, least, node = -1, np.inf, 1
    while True:
        fits = most[node] >= size and (best < 0 or lightest[node] < least)
        if fits and node >= leaves:
            best, least = node - leaves, lightest[node]
        if fits and node < leaves:
            node *= 2
            continue
        while node % 2:  # up from what is to the right, then to the right of what is not
            if node == 1:
                return best
            node //= 2
        node += 1


@jit
def _nearest(
    lightest: int,
    near: _Near,
    some: Ints,
    limit: float,
    load: Ints,
    room: Ints,
    speed: Floats,
    size: int,
) -> int:
    """The lightest bin of some zones that has room and is below the limit; the lightest of all where none is."""
    if _among(some, near.zone[lightest]):
        return lightest
    best = -1
    for index in range(len(some)):
        bins = near.zone_bins[near.zone_ptr[some[index]] : near.zone_ptr[some[index] + 1]]
        found = _least_loaded(bins, load, room, speed, size)
        below = found >= 0 and load[found] / speed[found] < limit
        if below and (best < 0 or _before(found, best, load, speed)):
            best = found
    return best if best >= 0 else lightest


@jit
def _among(some: Ints, wanted: int) -> bool:
    return bool((some == wanted).any())


@jit
def _least_loaded(some: Ints, load: Ints, room: Ints, speed: Floats, size: int) -> int:
    best = -1
    for index in range(len(some)):
        candidate = some[index]
        if room[candidate] >= size and (best < 0 or _before(candidate, best, load, speed)):
            best = candidate
    return best


@lean
def _before(a: int, b: int, load: Ints, speed: Floats) -> bool:
    left, right = load[a] / speed[a], load[b] / speed[b]
    return bool(left < right or (left == right and a < b))
