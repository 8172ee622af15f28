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

from apportion.ir.arrays import Bools, Floats, Ints
from apportion.ir.loops.jit import jit
from apportion.planner.solvers.contracts import Partition, PartitionProblem
from apportion.planner.solvers.partition import lpt
from apportion.planner.solvers.status import Budget, Status, Termination

#: bins looked at together, the lightest first; steps a bin at most; how near to the bound is enough
BINS, STEPS, ENOUGH = 8, 16, 5e-4
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
    caps = np.ascontiguousarray(problem.caps, np.int64)
    allowed = _allowed(problem)
    for _ in range(STEPS):
        if not _swaps(bins, order, problem.weights, problem.sizes, caps, rates, allowed, goal):
            break


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


@jit
def _swaps(
    assigned: Ints,
    order: Ints,
    weights: Ints,
    sizes: Ints,
    caps: Ints,
    speed: Floats,
    allowed: Bools,
    goal: float,
) -> bool:
    """Improves `assigned`, in place, by one step a bin; whether more may help. order: of the items, by rising size, the
    lightest first."""
    bins = len(caps)
    load, used = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    head, after = np.full(bins, -1), np.full(len(order), -1)
    rank = np.empty(len(order), np.int64)
    for place in range(len(order) - 1, -1, -1):
        item = order[place]
        rank[item] = place
        if assigned[item] >= 0:
            load[assigned[item]] += weights[item]
            used[assigned[item]] += sizes[item]
            after[item], head[assigned[item]] = head[assigned[item]], item
    for _ in range(bins):
        time = load / speed
        heavy = int(np.argmax(time))
        if time[heavy] <= goal:
            return False
        best, bin_ = (-1, -1, -1), -1
        least, light = time[heavy], np.argsort(time, kind="mergesort")
        for number in range(bins):
            if number % BINS == 0 and bin_ >= 0:
                break
            to = light[number]
            if to == heavy:
                continue
            theirs = _held(head[to], after, allowed, heavy)
            rest = np.array([load[heavy], load[to], used[heavy], used[to], caps[heavy], caps[to]])
            value, found = _best(
                head[heavy], after, theirs, to, weights, sizes, allowed, rest, speed[heavy], speed[to], least
            )
            if value < least:
                least, best, bin_ = value, found, to
        if bin_ < 0:
            return False
        for index in range(3):
            if best[index] >= 0:
                source, target = (heavy, bin_) if index == 0 else (bin_, heavy)
                _move(best[index], source, target, assigned, rank, head, after)
                load[source] -= weights[best[index]]
                load[target] += weights[best[index]]
                used[source] -= sizes[best[index]]
                used[target] += sizes[best[index]]
    return True


@jit
def _held(first: int, after: Ints, allowed: Bools, bin_: int) -> Ints:
    """The items of a bin, in their order, that another may take."""
    count, item = 0, first
    while item >= 0:
        count += 1
        item = after[item]
    found, count, item = np.empty(count, np.int64), 0, first
    while item >= 0:
        if len(allowed) == 0 or allowed[item, bin_]:
            found[count] = item
            count += 1
        item = after[item]
    return found[:count]


@jit
def _best(
    first: int,
    after: Ints,
    theirs: Ints,
    to: int,
    weights: Ints,
    sizes: Ints,
    allowed: Bools,
    rest: Ints,
    speed: float,
    their_speed: float,
    least: float,
) -> tuple[float, tuple[int, int, int]]:
    """What the heavier of two bins takes after the best exchange, `least` where none is better, and the exchange: an
    item of the heavy bin for up to two of the light one, -1 for none. theirs: these, by rising size; rest: loads, sizes
    and caps of both."""
    load, their_load, used, their_used, cap, their_cap = rest
    count, best = len(theirs), (-1, -1, -1)
    lightest = np.full(count + 1, -1)  # of those from each on
    for index in range(count - 1, -1, -1):
        behind = lightest[index + 1]
        lighter = behind < 0 or weights[theirs[index]] <= weights[behind]
        lightest[index] = theirs[index] if lighter else behind
    a = first
    while a >= 0:
        if len(allowed) == 0 or allowed[a, to]:
            for index in range(-1, count):
                b = -1 if index < 0 else theirs[index]
                w, s, c = weights[a], sizes[a], -1
                if b >= 0:
                    w, s = w - weights[b], s - sizes[b]
                if w > 0 and their_used + s > their_cap and b >= 0:  # a second one makes room
                    low, high = 0, count
                    while low < high:
                        middle = (low + high) // 2
                        if sizes[theirs[middle]] < their_used + s - their_cap:
                            low = middle + 1
                        else:
                            high = middle
                    c = lightest[low]
                    if c < 0 or c == b:
                        continue
                    w, s = w - weights[c], s - sizes[c]
                if w > 0 and their_used + s <= their_cap and used - s <= cap:
                    value = max((load - w) / speed, (their_load + w) / their_speed)
                    if value < least:
                        least, best = value, (a, b, c)
        a = after[a]
    return least, best


@jit
def _move(item: int, source: int, target: int, assigned: Ints, rank: Ints, head: Ints, after: Ints) -> None:
    """From one bin's list to another's, which stay in the items' order."""
    if head[source] == item:
        head[source] = after[item]
    else:
        before = head[source]
        while after[before] != item:
            before = after[before]
        after[before] = after[item]
    if head[target] < 0 or rank[head[target]] > rank[item]:
        after[item], head[target] = head[target], item
    else:
        before = head[target]
        while after[before] >= 0 and rank[after[before]] < rank[item]:
            before = after[before]
        after[item], after[before] = after[before], item
    assigned[item] = target
