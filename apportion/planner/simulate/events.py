"""Events in the order of their times, and short lists of numbers: both in columns that are allocated once.

`heapq` and lists would do, but what holds Python objects or grows counts references, which costs the compiled loop
more than its work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.loops.jit import lean

#: up to here insertion sorts faster
_SHORT = 24


class Events(NamedTuple):
    """A heap of (time, code), least first, equal times by code. time: float64, code: int64 [room]; left: int64 [1],
    how many."""

    time: Floats
    code: Ints
    left: Ints


class Numbers(NamedTuple):
    """A list of integers. items: int64 [room]; left: int64 [1], how many."""

    items: Ints
    left: Ints


def no_events(room: int) -> Events:
    """A heap without events that holds up to `room`."""
    return Events(np.zeros(room), np.zeros(room, np.int64), np.zeros(1, np.int64))


def no_numbers(room: int) -> Numbers:
    """A list without items that holds up to `room`."""
    return Numbers(np.zeros(room, np.int64), np.zeros(1, np.int64))


@lean
def push(events: Events, time: float, code: int) -> None:
    """Adds an event."""
    at = events.left[0]
    events.left[0] += 1
    while at > 0:
        above = (at - 1) // 2
        if not _sooner(time, code, events.time[above], events.code[above]):
            break
        events.time[at], events.code[at] = events.time[above], events.code[above]
        at = above
    events.time[at], events.code[at] = time, code


@lean
def pop(events: Events) -> int:
    """Takes away the first event and returns its code."""
    first = events.code[0]
    events.left[0] -= 1
    count, at, below = events.left[0], 0, 1
    time, code = events.time[count], events.code[count]
    while below < count:
        right = below + 1
        if right < count and _sooner(
            events.time[right], events.code[right], events.time[below], events.code[below]
        ):
            below = right
        if not _sooner(events.time[below], events.code[below], time, code):
            break
        events.time[at], events.code[at] = events.time[below], events.code[below]
        at, below = below, 2 * below + 1
    events.time[at], events.code[at] = time, code
    return int(first)


@lean
def _sooner(time: float, code: int, other_time: float, other_code: int) -> bool:
    return bool(time < other_time or (time == other_time and code < other_code))


@lean
def append(numbers: Numbers, item: int) -> None:
    """Adds an item at the end."""
    numbers.items[numbers.left[0]] = item
    numbers.left[0] += 1


@lean
def sort(numbers: Numbers) -> None:
    """Sorts the items, in place."""
    items, count = numbers.items, numbers.left[0]
    if count > _SHORT:
        for top in range(count // 2 - 1, -1, -1):
            _sift(items, top, count)
        for end in range(count - 1, 0, -1):
            items[0], items[end] = items[end], items[0]
            _sift(items, 0, end)
        return
    for end in range(1, count):
        item, at = items[end], end
        while at > 0 and items[at - 1] > item:
            items[at] = items[at - 1]
            at -= 1
        items[at] = item


@lean
def _sift(items: Ints, top: int, count: int) -> None:
    """The largest of a heap's items rises to its top."""
    item, below = items[top], 2 * top + 1
    while below < count:
        if below + 1 < count and items[below + 1] > items[below]:
            below += 1
        if items[below] <= item:
            break
        items[top] = items[below]
        top, below = below, 2 * below + 1
    items[top] = item
