"""Which tasks are the first on their rows, and overwrite them; what none of these opens is cleared before.

task 0          ┌─────────┐                 the first on all of its rows: opens them
task 1     ┌────┼────┐    │                 the first on some: these are cleared, it adds
task 2     │    │    │    │  ┌────┐         opens
rows       ▒▒▒▒▒■■■■■■■■■■■▒▒▒■■■■■■▒▒▒     ▒ cleared
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.jit import jit
from apportion.ir.sorting import distinct_in_lanes

Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]

_UNSEEN, _ADDED, _OPENED = range(3)


@dataclass(frozen=True)
class Openers:
    """flags: int32 [tasks], 1 for those that overwrite. lane, row, rows: int64 [n], rows that none of these opens, in
    longest ranges."""

    flags: Ints
    lane: Ints
    row: Ints
    rows: Ints


@dataclass(frozen=True)
class Written:
    """Rows that tasks add to, int [parts], by rising task: [row, row + rows) of a `lane`, which stands for one rank's
    rows or one tile, with some of the heads. may: bool [parts], whether they are certain to be as they were at the
    start but for tasks that come before."""

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
    every = np.arange(len(held))
    keys = np.concatenate([written.row, written.row + written.rows, np.zeros(len(held), np.int64), held])
    lanes = np.concatenate([written.lane, written.lane, every, every])
    points, ptr, number = distinct_in_lanes(lanes, keys, len(held))
    first, last = number[: len(written.lane)], number[len(written.lane) : 2 * len(written.lane)]
    state = np.zeros(len(points), np.int8)
    flags = np.zeros(tasks, np.int32)
    _paint(written.task, first, last, written.may, state, flags)
    return Openers(flags, *_closed(state, points, ptr))


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
def _paint(task: Ints, low: Ints, high: Ints, may: Bools, state: Ints, flags: Ints) -> None:
    """Visits tasks in their order, and notes of each elementary range [low, high) whether the first that reaches it
    opens it: into `state` and `flags`, in place."""
    after = np.arange(len(state) + 1)  # the next range that no task has reached, or a step towards it
    part = 0
    while part < len(task):
        begin, fresh = part, True
        while part < len(task) and task[part] == task[begin]:
            at = low[part]
            fresh = fresh and may[part]
            while fresh and at < high[part]:
                fresh = after[at] == at
                at += 1
            part += 1
        flags[task[begin]] = fresh
        for one in range(begin, part):
            at = _next(after, low[one])
            while at < high[one]:
                state[at] = _OPENED if fresh else _ADDED
                after[at] = at + 1
                at = _next(after, at + 1)


@jit
def _next(after: Ints, at: int) -> int:
    """The first range from `at` on that no task has reached, the last + 1 if there is none; shortens the way to it."""
    found = at
    while after[found] != found:
        found = after[found]
    while after[at] != found:
        after[at], at = found, after[at]
    return found
