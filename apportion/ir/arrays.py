"""Idioms of integer columns: offsets of groups, ranges laid end to end, runs of equal rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def offsets(counts: ArrayLike) -> Ints:
    """int64 [n + 1]: where each of n groups begins, and where the last ends; `counts`, integers [n], lie end to end."""
    sizes = np.asarray(counts)
    found = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=found[1:])
    return found


def group_of(counts: ArrayLike) -> Ints:
    """int64 [sum of counts]: of which group each element is; groups of `counts`, integers [n]."""
    sizes = np.asarray(counts)
    return np.repeat(np.arange(len(sizes)), sizes)


def within(counts: Ints) -> Ints:
    """int64 [sum of counts]: which element of its group each is, from 0 on."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def changes(*columns: Ints) -> Bools:
    """bool [n]: where a row differs from the one before it, in any of the columns, [n] each; so does the first."""
    found = np.ones(len(columns[0]), np.bool_)
    if len(found):
        found[1:] = columns[0][1:] != columns[0][:-1]
        for column in columns[1:]:
            found[1:] |= column[1:] != column[:-1]
    return found
