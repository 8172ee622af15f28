"""Cells: the bands of a mask cut by (query block, key block), and head groups.

A cell is the smallest unit of computation for given blocks. Placements with travelling queries assign a rank to each
cell, head group and phase (an `Execution`); all others compute it at the home of its queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from apportion._core import tasks as core
from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.request.model import Model

#: limit for one attention kind, forward; a plan with more would take over 10 GB
MOST_TASKS = 1 << 24


@dataclass(frozen=True)
class Cells:
    """Cells as columns int32 [cells].

    q, k: query and key block; q0, q1, k0, k1: queries and keys, global tokens; dmin, dmax: diagonals of the band,
    counted from the first query and key, clipped.
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
        """int64 [cells]: number of visible (query, key) pairs."""
        return pairs(self.q1 - self.q0, self.k1 - self.k0, self.dmin, self.dmax)


@dataclass(frozen=True)
class HeadGroups:
    """Contiguous shares of the query heads, and the KV heads that they use. Groups with the same KV heads share tiles.

    sets: of heads, as in a plan's header; query, key: int64 [groups], number of each group's set of query and of KV
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
        """int64: the number of each set of KV heads shared by groups."""
        return self.key[np.unique(self.shared, return_index=True)[1]]

    @property
    def keys_overlap(self) -> bool:
        """True if groups use some of each other's KV heads, but not the same sets."""
        heads = [head for number in self.key_sets if number for head in self.sets[number - 1]]
        return len(heads) > len(set(heads))

    @staticmethod
    def of(model: Model, count: int) -> HeadGroups:
        """Builds `count` groups. Raises ConfigError if `count` does not divide the query heads."""
        if count == 1:
            zero = np.zeros(1, np.int64)
            return HeadGroups((), zero, zero, zero)
        if model.q_heads % count:
            rule = f"must divide the {model.q_heads} query heads"
            raise ConfigError("head_groups", count, rule, f"use {gcd(count, model.q_heads)}")
        share, ratio = model.q_heads // count, model.q_heads // model.kv_heads
        queries = [tuple(range(g * share, (g + 1) * share)) for g in range(count)]
        keys = [tuple(sorted({head // ratio for head in heads})) for heads in queries]
        numbers = {heads: number for number, heads in enumerate(dict.fromkeys([*queries, *keys]), 1)}
        distinct = {heads: number for number, heads in enumerate(dict.fromkeys(keys))}
        return HeadGroups(
            tuple(numbers),
            np.array([numbers[heads] for heads in queries]),
            np.array([numbers[heads] for heads in keys]),
            np.array([distinct[heads] for heads in keys]),
        )


def pairs(rows: Ints, keys: Ints, dmin: Ints, dmax: Ints) -> Ints:
    """int64 [n]: the number of pairs of each band, over `rows` query and `keys` key rows; arguments: integers [n]."""
    return core.pairs(rows, keys, dmin, dmax)


def cut_cells(bands: Ints, starts: Ints) -> Cells:
    """The cells of bands (int64 [bands, 6], global tokens) in blocks (int64 [blocks + 1]), sorted by band, query block,
    key block."""
    return Cells(*cut_columns(bands, starts))


def cut_columns(bands: Ints, starts: Ints) -> Ints:
    """The columns of `Cells`, int32 [8, cells]. Raises CapacityError for too many cells."""
    return core.cut_cells(checked_arrays(bands, starts))


def checked_arrays(bands: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """Bands and starts as contiguous arrays. Raises CapacityError for too many cells."""
    bands, starts = (np.ascontiguousarray(array, np.int64) for array in (bands, starts))
    check_tasks(core.count_cells((bands, starts)))
    return bands, starts


def check_tasks(count: int) -> None:
    """Raises CapacityError for too many tasks."""
    if count > MOST_TASKS:
        raise CapacityError(
            f"{count} tasks, one per block of queries and block of keys that it sees: at most {MOST_TASKS} are "
            "planned at once; use larger blocks, a recipe that keeps short sequences whole, or smaller pods (--pods)"
        )
