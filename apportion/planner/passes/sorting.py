"""Stable counting sort."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.jit import HAS_NUMBA, jit

Ints = NDArray[np.integer[Any]]


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
