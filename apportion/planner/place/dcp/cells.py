"""Cells of a mask as a hypergraph, and Listing 3 of DCP, which assigns them to divisions.

Q, O of block 2 ─┬─ block 2          the hyperedge of a tile: the block that holds it,
                 ├─ cell (2, 0)      and every cell that reads it or adds to it
                 └─ cell (2, 2)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Ints, changes, offsets
from apportion.ir.errors import ConfigError
from apportion.ir.loops.jit import jit
from apportion.ir.loops.sorting import sort_order
from apportion.ir.request.model import Model
from apportion.ir.tensors import TRAVELLING
from apportion.planner.problem import exact_sums
from apportion.planner.tasks.cells import Cells


@dataclass(frozen=True)
class Heads:
    """groups: shares of the query heads; key_sets: shares of the KV heads, one for each group or for several."""

    groups: int
    key_sets: int

    @staticmethod
    def of(model: Model, groups: int, field: str) -> Heads:
        """Raises ConfigError where a group would have parts of heads, or KV heads of its own and shared ones."""
        kv = model.kv_heads
        if model.q_heads % groups or (kv % groups and groups % kv):
            rule = (
                f"must divide {model.q_heads} query heads and divide {kv} KV heads or be a multiple of them"
            )
            raise ConfigError(field, groups, rule, f"use 1 or {kv}")
        return Heads(groups, min(groups, kv))

    def bytes_of(self, model: Model, phase: str) -> tuple[int, int]:
        """Bytes of a query row of a group and of a key row of a key set that is needed elsewhere, both ways."""
        queries, keys = model.q_heads // self.groups, model.kv_heads // self.key_sets
        return (
            sum(model.sent_bytes(tensor, queries) for tensor in TRAVELLING["query", phase]),
            sum(model.sent_bytes(tensor, keys) for tensor in TRAVELLING["key", phase]),
        )


@dataclass(frozen=True)
class Pairs:
    """Cells of the same two blocks as one, for they need the same tiles.

    q, k: int64 [pairs], query and key block; work: int64 [pairs]; of_cell: int64 [cells], the pair of each cell."""

    q: Ints
    k: Ints
    work: Ints
    of_cell: Ints

    def __len__(self) -> int:
        return len(self.q)

    @staticmethod
    def of(cells: Cells, blocks: int) -> Pairs:
        """Those of cells in so many blocks: many short documents share a block."""
        key = cells.q.astype(np.int64) * blocks + cells.k
        if (key[1:] < key[:-1]).any():
            key, of_cell = np.unique(key, return_inverse=True)
        else:
            fresh = changes(key)
            key, of_cell = key[fresh], np.cumsum(fresh) - 1
        return Pairs(key // blocks, key % blocks, exact_sums(of_cell, cells.work, len(key)), of_cell)


@dataclass(frozen=True)
class Hyperedges:
    """Columns of `HypergraphProblem`: ptr, pins, price. Vertices: the blocks, then the pairs, head group after head
    group. Hyperedges: the query tiles by (group, block), then the key tiles by (key set, block)."""

    ptr: Ints
    pins: Ints
    price: Ints


def hyperedges(cells: Cells | Pairs, lengths: Ints, heads: Heads, row_bytes: tuple[int, int]) -> Hyperedges:
    """The hypergraph of cells, or pairs, in blocks of so many tokens, int64 [blocks]."""
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


@jit
def traffic(ptr: Ints, pins: Ints, price: Ints, rank: Ints, ranks: int, per_node: int) -> Ints:
    """int64 [4, ranks]: what each rank sends inside its node and to others, and receives; a hyperedge goes from the
    rank of its first vertex to all others that it spans. rank: int64 [vertices]."""
    moved, seen = np.zeros((4, ranks), np.int64), np.full(ranks, -1, np.int64)
    for edge in range(len(price)):
        home = rank[pins[ptr[edge]]]
        seen[home] = edge
        for at in range(ptr[edge] + 1, ptr[edge + 1]):
            to = rank[pins[at]]
            if seen[to] != edge:
                seen[to] = edge
                away = 0 if to // per_node == home // per_node else 1
                moved[away, home] += price[edge]
                moved[2 + away, to] += price[edge]
    return moved


def divide(
    cells: Cells, rank: Ints, home: Ints, lengths: Ints, heads: Heads, row_bytes: tuple[int, int], count: int
) -> Ints:
    """int32 [groups, cells]: the division of each cell (DCP, Listing 3).

    The first has what needs no communication; in each of the following, cells are taken in order as long as what
    every other rank sends stays within 1/T of all that it sends to this rank; the last has the rest. A tile that is
    there already is free. Budgets are of ordered pairs of ranks, so it does not matter which rank goes first.
    rank: int32 [groups, cells]; home, lengths: int64 [blocks]; count: T.
    """
    if count == 1:
        return np.zeros(rank.shape, np.int32)
    group = np.repeat(np.arange(heads.groups), len(cells))
    block = np.stack([np.tile(cells.q, heads.groups), np.tile(cells.k, heads.groups)])
    first = np.stack([group, heads.groups + group * heads.key_sets // heads.groups]) * len(home)
    size = lengths[block] * np.array(row_bytes)[:, None] * (home[block] != rank.ravel())
    ranks = int(max(rank.max(initial=0), home.max(initial=0))) + 1
    end = np.cumsum(np.bincount(rank.ravel(), minlength=ranks))
    division = np.zeros(rank.size, np.int32)
    got = np.full((heads.groups + heads.key_sets) * len(home), -1, np.int64)
    tiles = _CellTiles(first + block, home[block], size, got)
    _divide(sort_order(rank.ravel(), ranks), end, tiles, count, division)
    return division.reshape(rank.shape)


class _CellTiles(NamedTuple):
    """Of the queries and the keys of each cell, int64 [2, n]: tile; source, the rank that has it; size, bytes, 0 where
    it is at home. got: int64 [tiles], the last rank that has fetched each."""

    tile: Ints
    source: Ints
    size: Ints
    got: Ints


@jit
def _divide(order: Ints, end: Ints, tiles: _CellTiles, count: int, division: Ints) -> None:
    """order: cells by rank; end: int64 [ranks], the end of those of each; fills `division`."""
    need, spent = np.zeros(len(end), np.int64), np.zeros(len(end), np.int64)
    for rank in range(len(end)):
        mine = order[(end[rank - 1] if rank else 0) : end[rank]]
        need[:] = 0
        for cell in mine:
            _fetch(tiles, cell, rank, need)
        for cell in mine:
            for side in range(2):
                tiles.got[tiles.tile[side, cell]] = -1
        for turn in range(1, count):
            spent[:] = 0
            for cell in mine:
                away = tiles.size[0, cell] > 0 or tiles.size[1, cell] > 0
                if division[cell] or not away:
                    continue
                if turn == count - 1 or _fits(tiles, cell, rank, spent, need, count):
                    division[cell] = turn
                    _fetch(tiles, cell, rank, spent)


@jit
def _fetch(tiles: _CellTiles, cell: int, rank: int, spent: Ints) -> None:
    """Adds to `spent`, by source, what the cell needs that is not there yet."""
    for side in range(2):
        spent[tiles.source[side, cell]] += _new(tiles, side, cell, rank)
        tiles.got[tiles.tile[side, cell]] = rank


@jit
def _new(tiles: _CellTiles, side: int, cell: int, rank: int) -> int:
    return 0 if tiles.got[tiles.tile[side, cell]] == rank else tiles.size[side, cell]


@jit
def _fits(tiles: _CellTiles, cell: int, rank: int, spent: Ints, need: Ints, count: int) -> bool:
    """Whether no source sends more than 1/count of all that it sends to the rank."""
    new = (_new(tiles, 0, cell, rank), _new(tiles, 1, cell, rank))
    same = tiles.source[0, cell] == tiles.source[1, cell]
    for side in range(2):
        source, added = tiles.source[side, cell], new[0] + new[1] if same else new[side]
        if added and (spent[source] + added) * count > need[source]:
            return False
    return True
