"""Orders of integer keys in linear time, over a known range or over any, and distinct keys."""

from __future__ import annotations

import numpy as np

from apportion._core import sorting as core
from apportion.ir.arrays import Ints


def stable_order(keys: Ints) -> Ints:
    """int64 [n]: the stable order of `keys`, int64 [n]."""
    return core.stable_order(np.ascontiguousarray(keys))


def ranked(*columns: Ints) -> tuple[Ints, ...]:
    """int64 [distinct], the numbers in int64 columns, ascending; and of each column, where its numbers are among
    these."""
    found, number = core.ranked(np.concatenate(columns))
    return found, *np.split(number, np.cumsum([len(column) for column in columns[:-1]]))


def sort_order(key: Ints, size: int) -> Ints:
    """int32 [n]: the stable order that sorts `key`, int32 or int64 in [0, size)."""
    return core.counting_order(np.ascontiguousarray(key), size)
