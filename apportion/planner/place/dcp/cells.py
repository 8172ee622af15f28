"""Hypergraph of a mask's cells, and their assignment to divisions (DCP, Listing 3).

Q, O of block 2 ─┬─ block 2          the hyperedge of a tile: the block that holds it,
                 ├─ cell (2, 0)      and every cell that reads it or adds to it
                 └─ cell (2, 2)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion._core import dcp as core
from apportion.ir.arrays import Ints, changes, offsets
from apportion.ir.errors import ConfigError
from apportion.ir.orders import sort_order
from apportion.ir.request.model import Model
from apportion.ir.tensors import TRAVELLING
from apportion.planner.problem import exact_sums
from apportion.planner.tasks.cells import Cells


@dataclass(frozen=True)
class Heads:
    """groups: number of query-head shares; key_sets: number of KV-head shares, each used by one or more groups."""

    groups: int
    key_sets: int

    @staticmethod
    def of(model: Model, groups: int, field: str) -> Heads:
        """Splits a model's heads. Raises ConfigError if groups would get parts of heads, or both exclusive and shared
        KV heads."""
        kv = model.kv_heads
        if model.q_heads % groups or (kv % groups and groups % kv):
            rule = f"must divide the {model.q_heads} query heads, and divide or be a multiple of the {kv} KV heads"
            raise ConfigError(field, groups, rule, f"use 1 or {kv}")
        return Heads(groups, min(groups, kv))

    def bytes_of(self, model: Model, phase: str) -> tuple[int, int]:
        """Bytes sent and returned for a group's remote query row, and for a key set's remote key row."""
        queries, keys = model.q_heads // self.groups, model.kv_heads // self.key_sets
        return (
            sum(model.sent_bytes(tensor, queries) for tensor in TRAVELLING["query", phase]),
            sum(model.sent_bytes(tensor, keys) for tensor in TRAVELLING["key", phase]),
        )


@dataclass(frozen=True)
class Pairs:
    """Cells merged by block pair, since they need the same tiles.

    q, k: int64 [pairs], query and key block; work: int64 [pairs]; of_cell: int64 [cells], the pair of each cell.
    """

    q: Ints
    k: Ints
    work: Ints
    of_cell: Ints

    def __len__(self) -> int:
        return len(self.q)

    @staticmethod
    def of(cells: Cells, blocks: int) -> Pairs:
        """Merges cells with the same query and key blocks: many short documents can share a block. blocks: how many."""
        key = cells.q.astype(np.int64) * blocks + cells.k
        if (key[1:] < key[:-1]).any():
            key, cell_pair = np.unique(key, return_inverse=True)
        else:
            is_first = changes(key)
            key, cell_pair = key[is_first], np.cumsum(is_first) - 1
        return Pairs(key // blocks, key % blocks, exact_sums(cell_pair, cells.work, len(key)), cell_pair)


@dataclass(frozen=True)
class Hyperedges:
    """Columns of `HypergraphProblem`: ptr, pins, price. Vertices: the blocks, then the pairs, head group after head
    group. Hyperedges: the query tiles by (group, block), then the key tiles by (key set, block)."""

    ptr: Ints
    pins: Ints
    price: Ints


def hyperedges(cells: Cells | Pairs, lengths: Ints, heads: Heads, row_bytes: tuple[int, int]) -> Hyperedges:
    """The hypergraph of cells, or pairs, in blocks of `lengths` tokens, int64 [blocks]."""
    blocks, count = len(lengths), len(cells)
    group = np.repeat(np.arange(heads.groups), count)
    q, k = np.tile(cells.q, heads.groups), np.tile(cells.k, heads.groups)
    key_set = group * heads.key_sets // heads.groups
    tiles = (heads.groups + heads.key_sets) * blocks
    edge = np.concatenate([np.arange(tiles), group * blocks + q, (heads.groups + key_set) * blocks + k])
    computed = blocks + np.arange(len(group))
    vertex = np.concatenate([np.tile(np.arange(blocks), tiles // max(1, blocks)), computed, computed])
    ptr = offsets(np.bincount(edge, minlength=tiles))
    price = np.concatenate(
        [np.tile(lengths * row_bytes[0], heads.groups), np.tile(lengths * row_bytes[1], heads.key_sets)]
    )
    return Hyperedges(ptr, vertex[sort_order(edge, tiles)], price)


def divide(
    cells: Cells, rank: Ints, home: Ints, lengths: Ints, heads: Heads, row_bytes: tuple[int, int], count: int
) -> Ints:
    """int32 [groups, cells]: the division of each cell (DCP, Listing 3).

    The first has all cells without communication; each following one takes cells in order while what every other rank
    sends to this rank stays within 1/T of its total; the last has the rest. Tiles already here are free. Budgets are
    per ordered pair of ranks, so the order of ranks does not matter. rank: int32 [groups, cells]; home, lengths: int64
    [blocks]; count: T.
    """
    if count == 1:
        return np.zeros(rank.shape, np.int32)
    tiles = heads.groups, heads.key_sets, *row_bytes
    divisions = core.divide(cells.q, cells.k, rank.ravel(), home, lengths, tiles, count)
    return divisions.reshape(rank.shape)
