"""Which tasks are the first on their rows, and overwrite them; what none of these opens is cleared before.

task 0          ┌─────────┐                 the first on all of its rows: opens them
task 1     ┌────┼────┐    │                 the first on some: these are cleared, it adds
task 2     │    │    │    │  ┌────┐         opens
rows       ▒▒▒▒▒■■■■■■■■■■■▒▒▒■■■■■■▒▒▒     ▒ cleared
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.loops.jit import jit, lean, unlocked

_UNSEEN, _ADDED, _OPENED = range(3)


@dataclass(frozen=True)
class Openers:
    """flags: int32 [tasks], 1 for those that overwrite. lane, row, rows: int64 [n], rows that none of these opens, in
    longest ranges."""

    flags: Ints
    lane: Ints
    row: Ints
    rows: Ints

    @staticmethod
    def none(tasks: int) -> Openers:
        """Without lanes."""
        nothing = np.zeros(0, np.int64)
        return Openers(np.zeros(tasks, np.int32), nothing, nothing, nothing)


@dataclass(frozen=True)
class Written:
    """Rows that tasks add to, by rising task, int32 [parts] but for int64 `row`: [row, row + rows) of a `lane`, which
    stands for one rank's rows or one tile, with some of the heads; -1: rows that are elsewhere. may: bool [parts],
    whether they are certain to be as they were at the start but for tasks that come before."""

    task: Ints
    lane: Ints
    row: Ints
    rows: Ints
    may: Bools

    def join(self, later: Written) -> Written:
        """These, and those of later tasks."""
        return Written(*map(np.concatenate, zip(vars(self).values(), vars(later).values(), strict=True)))


def find_openers(written: Written, held: Ints, tasks: int) -> Openers:
    """held: int64 [lanes], all rows of each lane."""
    return Openers(*_find(written.task, written.lane, written.row, written.rows, written.may, held, tasks))


@jit
def stay_put(
    rank: Ints, row: Ints, rows: Ints, home: Ints, first: Ints, size: Ints, leave: Bools, ranks: int
) -> Bools:
    """bool [parts]: whether none of the rows [row, row + rows) of a rank, int64 `row`, else int32 [parts], leaves it;
    false where rank is -1. home, first, size: int32 [ranges], rows of ranks, of which those leave that are marked."""
    begin = np.zeros(ranks + 1, np.int64)
    for one in range(len(home)):
        if leave[one]:
            begin[home[one] + 1] += 1
    for one in range(ranks):
        begin[one + 1] += begin[one]
    low, high, at = np.empty(begin[ranks], np.int64), np.empty(begin[ranks], np.int64), begin[:-1].copy()
    for one in range(len(home)):
        if leave[one]:
            place, end = at[home[one]], first[one] + size[one]
            if place > begin[home[one]] and first[one] <= high[place - 1] and end >= low[place - 1]:
                low[place - 1], high[place - 1] = min(first[one], low[place - 1]), max(end, high[place - 1])
            else:
                low[place], high[place] = first[one], end
                at[home[one]] += 1
    for one in range(ranks):
        low[begin[one] : at[one]].sort()
        high[begin[one] : at[one]].sort()
    found = np.zeros(len(rank), np.bool_)
    for part in range(len(rank)):
        if rank[part] >= 0:
            start, stop = begin[rank[part]], at[rank[part]]
            begun = _below(low, start, stop, row[part] + rows[part])
            found[part] = begun == _below(high, start, stop, row[part] + 1)
    return found


@lean
def _below(rising: Ints, low: int, high: int, value: int) -> int:
    """Where in rising[low:high] the first is that is not below a value."""
    while low < high:
        middle = (low + high) // 2
        if rising[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@unlocked
def _find(
    task: Ints, lane: Ints, row: Ints, rows: Ints, may: Bools, held: Ints, tasks: int
) -> tuple[Ints, Ints, Ints, Ints]:
    """The columns of `Openers`."""
    points, ptr, low, high = _elementary(lane, row, rows, held)
    state = np.zeros(len(points), np.int8)
    flags = _paint(task, lane, low, high, may, state, tasks)
    lanes, first, count = _closed(state, points, ptr)
    return flags, lanes, first, count


@jit
def _elementary(lane: Ints, row: Ints, rows: Ints, held: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """int64: where elementary ranges begin, rising in each lane, and where the lane ends; int64 [lanes + 1], the first
    of each lane; int32 [parts], of each part its first range and the last + 1."""
    lanes, parts = len(held), len(lane)
    begin = np.zeros(lanes + 1, np.int64)
    for part in range(parts):
        if lane[part] >= 0:
            begin[lane[part] + 1] += 1
    for one in range(lanes):
        begin[one + 1] += begin[one]
    order, at = np.empty(begin[lanes], np.int32), begin[:-1].copy()
    for part in range(parts):
        if lane[part] >= 0:
            order[at[lane[part]]] = part
            at[lane[part]] += 1
    points, ptr = np.empty(2 * (len(order) + lanes), np.int64), np.zeros(lanes + 1, np.int64)
    low, high, count = np.empty(parts, np.int32), np.empty(parts, np.int32), 0
    for one in range(lanes):
        first = count
        points[count], points[count + 1] = 0, held[one]
        count += 2 if held[one] else 1
        for place in range(begin[one], begin[one + 1]):
            part = order[place]
            if row[part] > 0 or rows[part] < held[one]:  # few have not all of a tile
                count = _add(points, first, count, row[part])
                count = _add(points, first, count, row[part] + rows[part])
        if count - first > _FEW:
            points[first:count].sort()
            count = _distinct(points, first, count)
        for place in range(begin[one], begin[one + 1]):
            part = order[place]
            low[part] = _index(points, first, count, row[part])
            high[part] = _index(points, first, count, row[part] + rows[part])
        ptr[one + 1] = count
    return points[:count], ptr, low, high


_FEW = 64  # points of a lane that are kept rising as they are found


@lean
def _add(points: Ints, first: int, end: int, point: int) -> int:
    """Puts it among the rising points [first, end), unless it is there, or behind them if they are many; returns their
    end."""
    at = end
    if end - first <= _FEW:
        at = 1 + _index(points, first, end, point)
        if points[at - 1] == point:
            return end
        for behind in range(end, at, -1):
            points[behind] = points[behind - 1]
    points[at] = point
    return end + 1


@lean
def _distinct(points: Ints, first: int, end: int) -> int:
    """Moves the distinct ones of the rising points [first, end) together; returns their end."""
    kept = first + 1
    for at in range(first + 1, end):
        if points[at] != points[kept - 1]:
            points[kept] = points[at]
            kept += 1
    return kept


@lean
def _index(points: Ints, low: int, high: int, point: int) -> int:
    """Where the last of the rising points [low, high) is that is not above it."""
    while high - low > 1:
        middle = (low + high) // 2
        if points[middle] <= point:
            low = middle
        else:
            high = middle
    return low


@jit
def _closed(state: Ints, points: Ints, ptr: Ints) -> tuple[Ints, Ints, Ints]:
    """int64 [n] each: lane, row and rows of the longest ranges that no task opens."""
    lanes, row, rows, count = (
        np.empty(len(points), np.int64),
        np.empty(len(points), np.int64),
        np.empty(len(points), np.int64),
        0,
    )
    for lane in range(len(ptr) - 1):
        longer = False
        for at in range(ptr[lane], ptr[lane + 1] - 1):
            if state[at] == _OPENED:
                longer = False
                continue
            if not longer:
                lanes[count], row[count], rows[count] = lane, points[at], 0
                count += 1
            rows[count - 1] += points[at + 1] - points[at]
            longer = True
    return lanes[:count].copy(), row[:count].copy(), rows[:count].copy()


@jit
def _paint(task: Ints, lane: Ints, low: Ints, high: Ints, may: Bools, state: Ints, tasks: int) -> Ints:
    """int32 [tasks]: 1 for those that open. Visits tasks in their order, and notes of each elementary range [low, high)
    whether the first that reaches it opens it: into `state`, in place."""
    flags = np.zeros(tasks, np.int32)
    after = np.arange(len(state) + 1)  # the next range that no task has reached, or a step towards it
    part = 0
    while part < len(task):
        begin, fresh, some = part, True, False
        while part < len(task) and task[part] == task[begin]:
            if lane[part] >= 0:
                at, some = low[part], True
                fresh = fresh and may[part]
                while fresh and at < high[part]:
                    fresh = after[at] == at
                    at += 1
            part += 1
        if some and fresh:
            flags[task[begin]] = 1
        for one in range(begin, part):
            if lane[one] >= 0:
                at = _next(after, low[one])
                while at < high[one]:
                    state[at] = _OPENED if fresh else _ADDED
                    after[at] = at + 1
                    at = _next(after, at + 1)
    return flags


@lean
def _next(after: Ints, at: int) -> int:
    """The first range from `at` on that no task has reached, the last + 1 if there is none; shortens the way to it."""
    found = at
    while after[found] != found:
        found = after[found]
    while after[at] != found:
        after[at], at = found, after[at]
    return found
