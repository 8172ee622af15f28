"""Common operations on integer columns: group offsets, positions within groups, run boundaries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def offsets(counts: ArrayLike) -> Ints:
    """int64 [n + 1]: start offsets of n consecutive groups, and the end of the last group. counts: integers [n], the
    sizes of the groups."""
    sizes = np.asarray(counts)
    starts = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def group_of(counts: ArrayLike) -> Ints:
    """int64 [sum of counts]: the group index of each element of n consecutive groups. counts: integers [n], the sizes
    of the groups."""
    sizes = np.asarray(counts)
    return np.repeat(np.arange(len(sizes)), sizes)


def index_in_group(counts: Ints) -> Ints:
    """int64 [sum of counts]: the index of each element within its group, from 0."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def changes(*columns: Ints) -> Bools:
    """bool [n]: True at row 0 and wherever a row differs from the previous one in any column. columns: integers [n]."""
    is_change = np.ones(len(columns[0]), np.bool_)
    if len(is_change):
        is_change[1:] = columns[0][1:] != columns[0][:-1]
        for column in columns[1:]:
            is_change[1:] |= column[1:] != column[:-1]
    return is_change
