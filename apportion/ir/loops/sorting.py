"""Orders of integer keys in linear time, over a known range or over any, and distinct keys."""

from __future__ import annotations

import numpy as np

from apportion.ir.arrays import Ints, changes
from apportion.ir.loops.jit import HAS_NUMBA, jit

_DIGIT = 12  # bits a pass: 4,096 counters stay in the first-level cache
_WORTH = 4096  # keys from which counting beats comparing


def stable_order(keys: Ints) -> Ints:
    """int64 [n]: the stable order of `keys`, int64 [n], all >= 0."""
    if not HAS_NUMBA or len(keys) < _WORTH:
        return np.argsort(keys, kind="stable")
    low = int(keys.min())
    return radix_order(keys - low, int(keys.max()) - low)


def ranked(*columns: Ints) -> tuple[Ints, ...]:
    """int64 [distinct], the numbers in int64 columns, all >= 0, ascending; and of each column, where its numbers are
    among these."""
    keys = np.concatenate(columns)
    order = stable_order(keys)
    ordered = keys[order]
    fresh = changes(ordered)
    number = np.empty(len(keys), np.int64)
    number[order] = np.cumsum(fresh) - 1
    return ordered[fresh], *np.split(number, np.cumsum([len(column) for column in columns[:-1]]))


@jit
def radix_order(keys: Ints, most: int) -> Ints:
    """int64 [n]: the stable order of `keys`, int64 [n] in [0, most]: least significant digit first (Knuth, volume 3,
    section 5.2.5)."""
    count = len(keys)
    order, other = np.arange(count), np.empty(count, np.int64)
    mask = (1 << _DIGIT) - 1
    starts = np.empty(mask + 2, np.int64)
    for shift in range(0, 63, _DIGIT):
        if most >> shift == 0:
            break
        starts[:] = 0
        for i in range(count):
            starts[((keys[i] >> shift) & mask) + 1] += 1
        for digit in range(mask + 1):
            starts[digit + 1] += starts[digit]
        for i in range(count):
            at = order[i]
            digit = (keys[at] >> shift) & mask
            other[starts[digit]] = at
            starts[digit] += 1
        order, other = other, order
    return order


@jit
def counting_order(key: Ints, size: int) -> Ints:
    """int32 [n]: the stable order that sorts `key`, integers in [0, size)."""
    place = np.zeros(size + 1, np.int64)
    for index in range(len(key)):
        place[key[index] + 1] += 1
    for value in range(size):
        place[value + 1] += place[value]
    order = np.empty(len(key), np.int32)
    for index in range(len(key)):
        order[place[key[index]]] = index
        place[key[index]] += 1
    return order


def sort_order(key: Ints, size: int) -> Ints:
    """int32 [n]: the stable order that sorts `key`, integers in [0, size)."""
    if HAS_NUMBA:
        return counting_order(key, size)
    return np.argsort(key, kind="stable").astype(np.int32)
