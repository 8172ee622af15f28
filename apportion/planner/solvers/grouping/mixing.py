"""A quick mix of group sizes, and its improvement by local search: what `ilp` starts from.

The mix is first-fit decreasing for a time limit T, the least T found by bisection (the dual approximation of Hochbaum
and Shmoys, 1987): each sequence needs the smallest degree that keeps it within T, goes where its rank-time is least
and the fit tightest, and opens a group of its own degree otherwise.

The search then walks over counts of groups: one group is split or some are merged, the sequences are spread anew, and
moves and swaps out of the slowest group follow while they help. The best of these mixes are annealed, and the best of
those kicked out of their local optima.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Floats, Ints, group_of
from apportion.ir.loops.jit import jit
from apportion.planner.solvers.contracts import GroupingProblem

_BISECTIONS = 24
# a descent ends much earlier; this is for degenerate ties
_MOST_EXCHANGES = 500
# and this for groups of thousands of sequences
_MOST_PAIRS = 20_000_000
_LEAST_GAIN = 1e-12
# sequences that a kick sends elsewhere: with three, descents still end near by
_KICK = 3
# temperatures of annealing as shares of the goal, from and to (0.01 to 0.3 and 0.0003 to 0.003 were tried)
_HOT, _COLD = 0.01, 0.001


@dataclass(frozen=True, eq=False)
class Mix:
    """column: int64 [groups], the column of each group's degree; group: int64 [K]; time: float64 [groups]."""

    column: Ints
    group: Ints
    time: Floats

    @property
    def value(self) -> float:
        return float(self.time.max(initial=0.0))

    def counts(self, columns: int) -> tuple[int, ...]:
        """How many groups of each degree."""
        return tuple(np.bincount(self.column, minlength=columns).tolist())


def greedy_mix(problem: GroupingProblem, bound: float) -> Mix | None:
    """The greedy mix, or None where it runs out of ranks or tokens at any speed. bound: below the optimum."""
    finite = problem.times[np.isfinite(problem.times)]
    low, high = bound, float(finite.sum())
    best = _first_fit_mix(problem, max(low, high))
    if best is None:
        return None
    for _ in range(_BISECTIONS):
        if best.value <= low * (1 + 1e-6):
            break
        middle = (max(low, 1e-9 * best.value) * best.value) ** 0.5
        tried = _first_fit_mix(problem, middle)
        low, best = (middle, best) if tried is None else (low, tried)
    return best


def _first_fit_mix(problem: GroupingProblem, limit: float) -> Mix | None:
    fits = problem.times <= limit
    if not fits.any(1).all():
        return None
    need = fits.argmax(1)
    order = np.lexsort((-problem.times[np.arange(len(need)), need], -need))
    rooms = problem.cap * problem.degrees
    column, group = _first_fit(
        order, need, problem.times, problem.sizes, problem.degrees, rooms, problem.ranks, limit
    )
    return mix_of(problem, column, group) if len(column) else None


def mix_of(problem: GroupingProblem, column: Ints, group: Ints) -> Mix:
    """The mix of these groups, with its times."""
    return Mix(column, group, _times(problem, column, group))


def _times(problem: GroupingProblem, column: Ints, group: Ints) -> Floats:
    own = problem.times[np.arange(len(group)), column[group]]
    return np.bincount(group, own, len(column)).astype(np.float64, copy=False)


@jit
def _first_fit(
    order: Ints,
    need: Ints,
    times: Floats,
    sizes: Ints,
    degrees: Ints,
    rooms: Ints,
    ranks: int,
    limit: float,
) -> tuple[Ints, Ints]:
    """(column of each group, group of each sequence); no groups where not all sequences fit."""
    group, groups, left = np.zeros(len(order), np.int64), 0, ranks
    column, load, used = np.zeros(ranks, np.int64), np.zeros(ranks, np.float64), np.zeros(ranks, np.int64)
    for k in order:
        best, least, tightest = -1, np.inf, np.inf
        for g in range(groups):
            c = column[g]
            room = limit - load[g] - times[k, c]
            if room < 0 or used[g] + sizes[k] > rooms[c]:
                continue
            spent = times[k, c] * degrees[c]
            if spent < least or (spent == least and room < tightest):
                best, least, tightest = g, spent, room
        if best < 0:
            if degrees[need[k]] > left:
                return column[:0], group
            best, groups = groups, groups + 1
            column[best] = need[k]
            left -= degrees[need[k]]
        group[k] = best
        load[best] += times[k, column[best]]
        used[best] += sizes[k]
    return column[:groups].copy(), group


# ---- search over counts of groups


def improve(problem: GroupingProblem, seeds: list[tuple[int, ...]], steps: int, goal: float) -> list[Mix]:
    """Mixes of `steps` counts, best first: those of the seeds and, from the best known on, of their neighbours. Ends
    at `goal`."""
    seen: set[tuple[int, ...]] = set()
    queue: list[tuple[float, tuple[int, ...]]] = []
    mixes: list[Mix] = []
    waiting = [_filled(problem, seed) for seed in seeds]
    while len(seen) < steps and (waiting or queue):
        if not waiting:
            waiting = _neighbours(problem, heapq.heappop(queue)[1])
            continue
        counts = waiting.pop()
        if counts in seen:
            continue
        seen.add(counts)
        mix = spread(problem, counts)
        heapq.heappush(queue, (np.inf if mix is None else mix.value, counts))
        if mix is not None:
            mixes.append(mix)
            if mix.value <= goal:
                break
    return sorted(mixes, key=lambda mix: mix.value)


def polish(problem: GroupingProblem, mix: Mix, kicks: int, goal: float, seed: int) -> Mix:
    """The mix after `kicks` times sending some sequences elsewhere and descending again; never worse."""
    draw = np.random.Generator(np.random.PCG64(seed))
    for _ in range(kicks):
        if mix.value <= goal:
            break
        group = mix.group.copy()
        group[draw.integers(len(group), size=_KICK)] = draw.integers(len(mix.column), size=_KICK)
        if _fits(problem, mix.column, group):
            tried = descend(problem, mix_of(problem, mix.column, group))
            mix = tried if tried.value <= mix.value else mix
    return mix


def _fits(problem: GroupingProblem, column: Ints, group: Ints) -> bool:
    used = _tokens(problem, column, group)
    allowed = np.isfinite(problem.times[np.arange(len(group)), column[group]]).all()
    return bool(allowed and (used <= problem.cap * problem.degrees[column]).all())


def anneal(problem: GroupingProblem, mix: Mix, steps: int, goal: float, seed: int) -> Mix:
    """The mix after so many steps of simulated annealing of the time above `goal`, summed over groups; never worse."""
    draw = np.random.Generator(np.random.PCG64(seed))
    items, groups = len(mix.group), len(mix.column)
    moved, to = draw.integers(items, size=steps), draw.integers(groups + items, size=steps)
    # a step that is worse by less than this is taken: Metropolis' rule, drawn beforehand
    bar = draw.standard_exponential(steps) * goal * np.geomspace(_HOT, _COLD, steps)
    left = problem.cap * problem.degrees[mix.column] - _tokens(problem, mix.column, mix.group)
    group = mix.group.copy()
    times, above = problem.times[:, mix.column], float(np.maximum(mix.time - goal, 0.0).sum())
    _anneal(times, problem.sizes, group, mix.time.copy(), left, goal, above, moved, to, bar)
    tried = descend(problem, mix_of(problem, mix.column, group))
    return tried if tried.value < mix.value else mix


@jit
def _anneal(
    times: Floats,
    sizes: Ints,
    group: Ints,
    load: Floats,
    left: Ints,
    goal: float,
    above: float,
    moved: Ints,
    to: Ints,
    bar: Floats,
) -> None:
    """Step s moves sequence moved[s] to group to[s], or swaps it with sequence to[s] - groups; tokens always fit.
    times: float64 [K, groups]; load: time and left: tokens of each group; above: time above `goal`. `group`
    ends as the best one seen."""
    now, least = group.copy(), above
    for s in range(len(moved)):
        k, other = moved[s], to[s] - len(load)
        g = now[k]
        h = to[s] if other < 0 else now[other]
        grows = sizes[k] if other < 0 else sizes[k] - sizes[other]
        if h == g or left[h] < grows or left[g] < -grows:
            continue
        here, there = load[g] - times[k, g], load[h] + times[k, h]
        if other >= 0:
            here, there = here + times[other, g], there - times[other, h]
        worse = max(0.0, here - goal) - max(0.0, load[g] - goal)
        worse += max(0.0, there - goal) - max(0.0, load[h] - goal)
        if not worse < bar[s]:
            continue
        load[g], load[h], now[k] = here, there, h
        left[g], left[h] = left[g] + grows, left[h] - grows
        if other >= 0:
            now[other] = g
        above += worse
        if above < least - _LEAST_GAIN * goal:
            least = above
            group[:] = now
            if least <= _LEAST_GAIN * goal:
                return


def _tokens(problem: GroupingProblem, column: Ints, group: Ints) -> Ints:
    """int64 [groups]: tokens that each group holds."""
    return np.bincount(group, problem.sizes, len(column)).astype(np.int64)


def _filled(problem: GroupingProblem, counts: tuple[int, ...]) -> tuple[int, ...]:
    """The counts, with idle ranks in groups as large as possible."""
    filled, idle = list(counts), problem.ranks - int(np.dot(counts, problem.degrees))
    for c in reversed(range(len(filled))):
        more = idle // int(problem.degrees[c])
        filled[c] += more
        idle -= more * int(problem.degrees[c])
    return tuple(filled)


def _neighbours(problem: GroupingProblem, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Counts with one group split into the next smaller degree, or some merged into one of the next larger."""
    found, degrees = [], problem.degrees.tolist()
    for small in range(len(degrees) - 1):
        parts = -(-degrees[small + 1] // degrees[small])
        if counts[small] >= parts:
            found.append(_changed(counts, small, -parts, 1))
        if counts[small + 1]:
            found.append(_changed(counts, small, degrees[small + 1] // degrees[small], -1))
    return [_filled(problem, changed) for changed in found]


def _changed(counts: tuple[int, ...], small: int, more: int, more_large: int) -> tuple[int, ...]:
    changed = list(counts)
    changed[small] += more
    changed[small + 1] += more_large
    return tuple(changed)


def spread(problem: GroupingProblem, counts: tuple[int, ...]) -> Mix | None:
    """A mix with these counts of groups, or None where the spreading finds no room for a sequence."""
    column = group_of(counts)[::-1].copy()
    rooms = problem.cap * problem.degrees[column]
    group = _list_schedule(problem.times, problem.sizes, column, rooms)
    if (group < 0).any():
        return None
    return descend(problem, mix_of(problem, column, group))


@jit
def _list_schedule(times: Floats, sizes: Ints, column: Ints, rooms: Ints) -> Ints:
    """Each sequence, longest first, to the group that it leaves quickest; -1 from the first one without room on."""
    items, groups = len(times), len(column)
    group, load, left = np.full(items, -1, np.int64), np.zeros(groups, np.float64), rooms.copy()
    shortest = np.empty(items, np.float64)
    for k in range(items):
        shortest[k] = -times[k].min()
    for k in np.argsort(shortest, kind="mergesort"):
        best, least = -1, np.inf
        for g in range(groups):
            end = load[g] + times[k, column[g]]
            if sizes[k] <= left[g] and end < least:
                best, least = g, end
        if best < 0:
            return group
        group[k] = best
        load[best] = least
        left[best] -= sizes[k]
    return group


def descend(problem: GroupingProblem, mix: Mix) -> Mix:
    """Moves and swaps out of the slowest group, the best first, while the larger of the two times falls; ends after
    `_MOST_PAIRS` looks at a move or swap."""
    column, group, time = mix.column, mix.group.copy(), mix.time.copy()
    rooms, looks = problem.cap * problem.degrees[column], 0
    for _ in range(_MOST_EXCHANGES):
        slow = int(time.argmax())
        looks += int((group == slow).sum()) * (len(group) + len(time))
        if looks > _MOST_PAIRS:
            break
        left = rooms - _tokens(problem, column, group)
        item, to, other = _best_exchange(problem.times, problem.sizes, column, group, time, left, slow)
        if item < 0:
            break
        group[item] = to
        if other >= 0:
            group[other] = slow
        time = _times(problem, column, group)
    return Mix(column, group, time)


@jit
def _best_exchange(
    times: Floats, sizes: Ints, column: Ints, group: Ints, time: Floats, left: Ints, slow: int
) -> tuple[int, int, int]:
    """(sequence of the slowest group, its new group, the sequence that comes back or -1 for none) of the move or
    swap after which the slower of its two groups is quickest, the first of equals; -1 where none helps."""
    least, item, to, other = time[slow] * (1 - _LEAST_GAIN), -1, -1, -1
    for i in range(len(group)):
        if group[i] != slow:
            continue
        rest = time[slow] - times[i, column[slow]]
        for g in range(len(column)):
            end = max(rest, time[g] + times[i, column[g]])
            if g != slow and sizes[i] <= left[g] and end < least:
                least, item, to, other = end, i, g, -1
        for j in range(len(group)):
            g, grows = group[j], sizes[i] - sizes[j]
            back = rest + times[j, column[slow]]
            if g == slow or not back < least or grows > left[g] or -grows > left[slow]:
                continue
            end = max(back, time[g] - times[j, column[g]] + times[i, column[g]])
            if end < least:
                least, item, to, other = end, i, g, j
    return item, to, other
