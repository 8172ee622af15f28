"""Linear-time sorting of integer keys, with or without a known range, and ranking of distinct keys."""

from __future__ import annotations

import numpy as np

from apportion._core import sorting as core
from apportion.ir.arrays import Ints


def stable_order(keys: Ints) -> Ints:
    """int64 [n]: the stable sorting order of `keys`, int64 [n]."""
    return core.stable_order(np.ascontiguousarray(keys))


def unique_inverse(*columns: Ints) -> tuple[Ints, ...]:
    """int64 [distinct]: the distinct numbers of int64 columns, ascending; then, for each column, the indexes of its
    numbers among these."""
    unique, number = core.unique_inverse(np.concatenate(columns))
    return unique, *np.split(number, np.cumsum([len(column) for column in columns[:-1]]))


def sort_order(key: Ints, size: int) -> Ints:
    """int32 [n]: the stable sorting order of `key`, int32 or int64 in [0, size)."""
    return core.counting_order(np.ascontiguousarray(key), size)
