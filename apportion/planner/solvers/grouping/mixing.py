"""Greedy mix of group sizes and its improvement by local search, for `ilp`.

The mix is first-fit decreasing for a time limit T, the smallest T found by bisection (the dual approximation of
Hochbaum and Shmoys, 1987): each sequence needs the smallest degree that keeps it within T; it goes to the group where
it adds the least rank-time (ties: the tightest fit), or else opens a group of its degree.

The search then walks over counts of groups: one group is split or some are merged, the sequences are redistributed, and
moves and swaps out of the slowest group follow while they help. The best of these mixes are annealed, and the best of
those kicked out of their local optima.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from apportion._core import grouping as core
from apportion.ir.arrays import Floats, Ints, group_of
from apportion.planner.solvers.contracts import GroupingProblem

_BISECTIONS = 24
# number of sequences that a kick moves to random groups: with three, descents still end nearby
_KICK = 3
# initial and final temperature of annealing as shares of the goal (0.01 to 0.3 and 0.0003 to 0.003 were tried)
_HOT, _COLD = 0.01, 0.001


@dataclass(frozen=True, eq=False)
class Mix:
    """A mix of degrees. column: int64 [groups], index of the group's degree; group: int64 [K], the group of each
    sequence; time: float64 [groups]."""

    column: Ints
    group: Ints
    time: Floats

    @property
    def value(self) -> float:
        return float(self.time.max(initial=0.0))

    def counts(self, columns: int) -> tuple[int, ...]:
        """The number of groups of each degree."""
        return tuple(np.bincount(self.column, minlength=columns).tolist())


def greedy_mix(problem: GroupingProblem, bound: float) -> Mix | None:
    """The greedy mix, or None if ranks or their capacity do not suffice at any time limit. bound: a lower bound."""
    finite = problem.times[np.isfinite(problem.times)]
    low, high = bound, float(finite.sum())
    best = _first_fit_mix(problem, max(low, high))
    if best is None:
        return None
    for _ in range(_BISECTIONS):
        if best.value <= low * (1 + 1e-6):
            break
        middle = (max(low, 1e-9 * best.value) * best.value) ** 0.5
        candidate = _first_fit_mix(problem, middle)
        low, best = (middle, best) if candidate is None else (low, candidate)
    return best


def _first_fit_mix(problem: GroupingProblem, limit: float) -> Mix | None:
    is_allowed = problem.times <= limit
    if not is_allowed.any(1).all():
        return None
    smallest = is_allowed.argmax(1)
    order = np.lexsort((-problem.times[np.arange(len(smallest)), smallest], -smallest))
    rooms = problem.cap * problem.degrees
    sequences = problem.times, problem.sizes
    column, group = core.first_fit(sequences, order, smallest, problem.degrees, rooms, problem.ranks, limit)
    return mix_of(problem, column, group) if len(column) else None


def mix_of(problem: GroupingProblem, column: Ints, group: Ints) -> Mix:
    """The mix of these groups, with computed times."""
    return Mix(column, group, _times(problem, column, group))


def _times(problem: GroupingProblem, column: Ints, group: Ints) -> Floats:
    item_times = problem.times[np.arange(len(group)), column[group]]
    return np.bincount(group, item_times, len(column)).astype(np.float64, copy=False)


# ---- search over counts of groups


def improve(problem: GroupingProblem, seeds: list[tuple[int, ...]], steps: int, goal: float) -> list[Mix]:
    """Mixes for up to `steps` group counts, sorted; tries the seeds, then neighbours of the best, up to `goal`."""
    visited: set[tuple[int, ...]] = set()
    queue: list[tuple[float, tuple[int, ...]]] = []
    mixes: list[Mix] = []
    pending = [_fill_idle_ranks(problem, seed) for seed in seeds]
    while len(visited) < steps and (pending or queue):
        if not pending:
            pending = _neighbours(problem, heapq.heappop(queue)[1])
            continue
        counts = pending.pop()
        if counts in visited:
            continue
        visited.add(counts)
        mix = spread(problem, counts)
        heapq.heappush(queue, (np.inf if mix is None else mix.value, counts))
        if mix is not None:
            mixes.append(mix)
            if mix.value <= goal:
                break
    return sorted(mixes, key=lambda mix: mix.value)


def polish(problem: GroupingProblem, mix: Mix, kicks: int, goal: float, seed: int) -> Mix:
    """The mix after `kicks` random moves of some sequences, each followed by descent; never worse."""
    rng = np.random.Generator(np.random.PCG64(seed))
    for _ in range(kicks):
        if mix.value <= goal:
            break
        group = mix.group.copy()
        group[rng.integers(len(group), size=_KICK)] = rng.integers(len(mix.column), size=_KICK)
        if _fits(problem, mix.column, group):
            candidate = descend(problem, mix_of(problem, mix.column, group))
            mix = candidate if candidate.value <= mix.value else mix
    return mix


def _fits(problem: GroupingProblem, column: Ints, group: Ints) -> bool:
    tokens = _tokens(problem, column, group)
    allowed = np.isfinite(problem.times[np.arange(len(group)), column[group]]).all()
    return bool(allowed and (tokens <= problem.cap * problem.degrees[column]).all())


def anneal(problem: GroupingProblem, mix: Mix, steps: int, goal: float, seed: int) -> Mix:
    """The mix after `steps` steps of simulated annealing of the time above `goal`, summed over groups; never worse."""
    rng = np.random.Generator(np.random.PCG64(seed))
    items, groups = len(mix.group), len(mix.column)
    moved, targets = rng.integers(items, size=steps), rng.integers(groups + items, size=steps)
    # thresholds for accepting a worse step: Metropolis' rule, drawn in advance
    limits = rng.standard_exponential(steps) * goal * np.geomspace(_HOT, _COLD, steps)
    free = problem.cap * problem.degrees[mix.column] - _tokens(problem, mix.column, mix.group)
    group = mix.group.copy()
    times, above = problem.times.take(mix.column, 1), float(np.maximum(mix.time - goal, 0.0).sum())
    core.anneal((times, problem.sizes), (moved, targets, limits), goal, above, mix.time.copy(), free, group)
    result = descend(problem, mix_of(problem, mix.column, group))
    return result if result.value < mix.value else mix


def _tokens(problem: GroupingProblem, column: Ints, group: Ints) -> Ints:
    """int64 [groups]: tokens of each group."""
    return np.bincount(group, problem.sizes, len(column)).astype(np.int64)


def _fill_idle_ranks(problem: GroupingProblem, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The counts with added groups of idle ranks, as large as possible."""
    result, idle = list(counts), problem.ranks - int(np.dot(counts, problem.degrees))
    for c in reversed(range(len(result))):
        added = idle // int(problem.degrees[c])
        result[c] += added
        idle -= added * int(problem.degrees[c])
    return tuple(result)


def _neighbours(problem: GroupingProblem, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Counts with one group split to the next smaller degree, or some merged to the next larger."""
    result, degrees = [], problem.degrees.tolist()
    for small in range(len(degrees) - 1):
        parts = -(-degrees[small + 1] // degrees[small])
        if counts[small] >= parts:
            result.append(_change(counts, small, -parts, 1))
        if counts[small + 1]:
            result.append(_change(counts, small, degrees[small + 1] // degrees[small], -1))
    return [_fill_idle_ranks(problem, changed) for changed in result]


def _change(counts: tuple[int, ...], small: int, added: int, added_larger: int) -> tuple[int, ...]:
    changed = list(counts)
    changed[small] += added
    changed[small + 1] += added_larger
    return tuple(changed)


def spread(problem: GroupingProblem, counts: tuple[int, ...]) -> Mix | None:
    """A mix with these counts of groups, or None if a sequence does not fit."""
    column = group_of(counts)[::-1].copy()
    rooms = problem.cap * problem.degrees[column]
    group = core.list_schedule((problem.times, problem.sizes), (column, rooms))
    return None if group is None else descend(problem, mix_of(problem, column, group))


def descend(problem: GroupingProblem, mix: Mix) -> Mix:
    """Descends by moves and swaps out of the slowest group, best first, while the larger of the two times falls; ends
    after a fixed number of evaluations."""
    result = Mix(mix.column, mix.group.copy(), mix.time.copy())
    rooms = problem.cap * problem.degrees[mix.column]
    core.descend((problem.times, problem.sizes), (mix.column, rooms), result.group, result.time)
    return result
