"""Cells: the bands of a mask cut by (query block, key block), and who computes them.

A cell is the least that can be computed by itself once blocks are chosen. Placements that let queries travel say for
each cell, head group and phase which rank computes it (an `Execution`); all others compute it where its queries live.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.loops.jit import jit, unlocked
from apportion.ir.masks.areas import area_of
from apportion.ir.request.model import Model

#: of one attention kind, forward; a plan of more takes beyond 10 GB
MOST_TASKS = 1 << 24


@dataclass(frozen=True)
class Cells:
    """Columns int32 [cells].

    q, k: query and key block; q0, q1, k0, k1: queries and keys, global tokens; dmin, dmax: the band counted from the
    first query and key, clipped.
    """

    q: Ints
    k: Ints
    q0: Ints
    q1: Ints
    k0: Ints
    k1: Ints
    dmin: Ints
    dmax: Ints

    def __len__(self) -> int:
        return len(self.q)

    @cached_property
    def columns(self) -> Ints:
        """int32 [8, cells]: the columns in order."""
        return np.stack([self.q, self.k, self.q0, self.q1, self.k0, self.k1, self.dmin, self.dmax])

    @cached_property
    def work(self) -> Ints:
        """int64 [cells]: pairs of a query and a key that it sees."""
        return pairs(self.q1 - self.q0, self.k1 - self.k0, self.dmin, self.dmax)


@dataclass(frozen=True)
class HeadGroups:
    """Contiguous shares of the query heads, and the KV heads that they use. Groups that use the same KV heads share
    their tiles.

    sets: of heads, as in a plan's header; query, key: int64 [groups], the number of each group's set of query and of KV
    heads, counted from 1 (0: all heads); shared: int64 [groups], equal for groups with the same KV heads.
    """

    sets: tuple[tuple[int, ...], ...]
    query: Ints
    key: Ints
    shared: Ints

    def __len__(self) -> int:
        return len(self.query)

    @cached_property
    def key_sets(self) -> Ints:
        """int64: the number of each set of KV heads that groups share."""
        return self.key[np.unique(self.shared, return_index=True)[1]]

    @property
    def keys_overlap(self) -> bool:
        """Whether groups use some of each other's KV heads, but not the same ones."""
        held = [head for number in self.key_sets if number for head in self.sets[number - 1]]
        return len(held) > len(set(held))

    @staticmethod
    def of(model: Model, count: int) -> HeadGroups:
        """`count` groups. Raises ConfigError where that does not divide the query heads."""
        if count == 1:
            zero = np.zeros(1, np.int64)
            return HeadGroups((), zero, zero, zero)
        if model.q_heads % count:
            rule = f"must divide the {model.q_heads} query heads"
            raise ConfigError("head_groups", count, rule, f"use {gcd(count, model.q_heads)}")
        share, ratio = model.q_heads // count, model.q_heads // model.kv_heads
        queries = [tuple(range(g * share, (g + 1) * share)) for g in range(count)]
        keys = [tuple(sorted({head // ratio for head in heads})) for heads in queries]
        numbers = {heads: place for place, heads in enumerate(dict.fromkeys([*queries, *keys]), 1)}
        distinct = {heads: place for place, heads in enumerate(dict.fromkeys(keys))}
        return HeadGroups(
            tuple(numbers),
            np.array([numbers[heads] for heads in queries]),
            np.array([numbers[heads] for heads in keys]),
            np.array([distinct[heads] for heads in keys]),
        )


def pairs(rows: Ints, keys: Ints, dmin: Ints, dmax: Ints) -> Ints:
    """int64 [n]: pairs of a band over `rows` query and `keys` key rows, all integers [n]."""
    return _pairs(rows, keys, dmin, dmax)


@jit
def _pairs(rows: Ints, keys: Ints, dmin: Ints, dmax: Ints) -> Ints:
    found = np.empty(len(rows), np.int64)
    for band in range(len(rows)):
        q, k, low, high = int(rows[band]), int(keys[band]), int(dmin[band]), int(dmax[band])
        found[band] = area_of(0, q, 0, k, low, high)
    return found


def cut_cells(bands: Ints, starts: Ints) -> Cells:
    """The cells of bands (int64 [bands, 6], global tokens) in blocks (int64 [blocks + 1]): by band, then query block,
    then key block."""
    return Cells(*cut_columns(bands, starts))


def cut_columns(bands: Ints, starts: Ints) -> Ints:
    """The columns of `Cells`, int32 [8, cells]. Raises CapacityError where they are too many to plan."""
    bands = np.ascontiguousarray(bands)
    first = np.maximum(np.searchsorted(starts, bands[:, 0], "right") - 1, 0)
    first_key = np.maximum(np.searchsorted(starts, bands[:, 2], "right") - 1, 0)
    count = _cut(bands, starts, first, first_key, np.empty((8, 0), np.int32))
    check_tasks(count)
    cells = np.empty((8, count), np.int32)
    _cut(bands, starts, first, first_key, cells)
    return cells


def check_tasks(count: int) -> None:
    """Raises CapacityError where tasks are too many to plan."""
    if count > MOST_TASKS:
        raise CapacityError(
            f"{count} tasks, of each block of queries and each of the keys that it sees: at most {MOST_TASKS} are "
            "planned at a time; use larger blocks, a recipe that keeps short sequences whole, or smaller pods (--pods)"
        )


@jit
def _reach(band: Ints, low: int, high: int) -> tuple[int, int, int, int]:
    """Rows of the band in [low, high) and the keys that they see: q0, q1, k0, k1 (empty where q0 >= q1 or k0 >= k1)."""
    q0, q1 = max(band[0], low), min(band[1], high)
    return q0, q1, max(band[2], q0 - band[5]), min(band[3], q1 - band[4])


@unlocked
def _cut(bands: Ints, starts: Ints, first: Ints, first_key: Ints, cell: Ints) -> int:
    """Each band in each (query block, key block), into the columns of int32 `cell` [8, room] as far as there is room.
    Returns how many there are, which takes no longer where they are many."""
    c, blocks = 0, len(starts) - 1
    for i in range(len(bands)):
        block, key = first[i], first_key[i]
        while block < blocks and starts[block] < bands[i, 1]:
            q0, q1, k0, k1 = _reach(bands[i], starts[block], starts[block + 1])
            if q0 < q1 and k0 < k1:
                while starts[key + 1] <= k0:
                    key += 1
                end = min(np.searchsorted(starts, k1), blocks)
                for last in range(key, min(end, key + cell.shape[1] - c)):
                    a, b, at = max(k0, starts[last]), min(k1, starts[last + 1]), c + last - key
                    cell[0, at], cell[1, at], cell[2, at], cell[3, at] = block, last, q0, q1
                    cell[4, at], cell[5, at] = a, b
                    cell[6, at] = max(bands[i, 4] - (q0 - a), a - b + 1)
                    cell[7, at] = min(bands[i, 5] - (q0 - a), q1 - q0 - 1)
                c += end - key
            block += 1
    return c
