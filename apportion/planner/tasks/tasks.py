"""The tasks of one attention kind, and the tiles that they need from other ranks.

A task is a band cut by a (query block, key block) rectangle. If queries stay home it runs at the home of its query
block, and its visible KV rows must reach that rank once (an *edge*: rows of a key block -> rank). Adjacent query blocks
on a rank that see all of the same keys make one task: fewer and larger kernel calls (FCP's coalescing, section 4.2, in
the query direction). With an `Execution`, each cell and head group is a task, and query rows may have edges too.

              keys of one tile
    block 4   x x x x  \
    block 7   x x x x   } one task of three blocks, though their tokens are not consecutive
    block 8   x x x x  /
    block 2   x . . .     a separate task: its band is not full
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from apportion._core import tasks as core
from apportion.ir.arrays import Bools, Ints
from apportion.ir.orders import unique_inverse
from apportion.planner.problem import Execution
from apportion.planner.tasks.cells import Cells, HeadGroups, checked_arrays, pairs
from apportion.planner.tasks.rows import Rows


@dataclass(frozen=True)
class Tasks:
    """Tasks of one kind as columns, int32 [tasks].

    exec: the executing rank; row, rows: its query rows in the attention order of their home; k: key block; k0, k1:
    keys, global tokens; dmin, dmax: diagonals of the band, counted from the first row and key, clipped; edge,
    query_edge: the edges of the keys and of the queries, -1 at home; group: head group.
    """

    exec: Ints
    row: Ints
    rows: Ints
    k: Ints
    k0: Ints
    k1: Ints
    dmin: Ints
    dmax: Ints
    edge: Ints
    query_edge: Ints
    group: Ints

    def __len__(self) -> int:
        return len(self.exec)

    @property
    def work(self) -> Ints:
        """int64 [tasks]: number of pairs."""
        return pairs(self.rows, self.k1 - self.k0, self.dmin, self.dmax)

    @property
    def columns(self) -> tuple[Ints, ...]:
        """All columns, for compiled loops."""
        return tuple(getattr(self, column.name) for column in fields(self))

    def with_routed_edges(self, arrives: Ints) -> Tasks:
        """The tasks with the edges after routing, which renumbers them; arrives: as in `Routes`."""
        arrives = np.append(arrives, np.int32(-1))
        queries = arrives[self.query_edge] if len(arrives) and self.queries_move else self.query_edge
        return replace(self, edge=arrives[self.edge], query_edge=queries)

    @cached_property
    def queries_move(self) -> bool:
        """True if any task does not run on its queries' home rank."""
        return bool((self.query_edge >= 0).any())


@dataclass(frozen=True)
class Edges:
    """Transfers of rows, int32 [edges]: rows [row, row + rows) in the attention order of rank `home` go from rank `src`
    to rank `dst`. parent: the edge that brought them to `src`, -1 if `src` is their home. Edges with one `tile` carry
    rows of one block (or of blocks merged by a route). lane: for query rows 2 * head group + 1, for KV rows twice the
    number of their set of KV heads (`HeadGroups.shared`)."""

    tile: Ints
    home: Ints
    row: Ints
    rows: Ints
    src: Ints
    dst: Ints
    parent: Ints
    lane: Ints

    def __len__(self) -> int:
        return len(self.tile)

    @property
    def star(self) -> tuple[Ints, ...]:
        """Columns of edges without relays, for the core."""
        return self.tile, self.home, self.row, self.rows, self.dst, self.lane

    def take(self, order: Ints) -> Edges:
        """Selects edges in this order, in which parents must precede their children and be included."""
        edges = Edges(*[np.take(getattr(self, column.name), order) for column in fields(self)])
        if (edges.parent < 0).all():
            return edges
        position = np.full(len(self) + 1, -1, np.int32)  # index -1 (no parent) is the last entry
        position[order] = np.arange(len(order), dtype=np.int32)
        return replace(edges, parent=position[edges.parent])


def find_tasks(bands: Ints, rows: Rows) -> tuple[Tasks, Edges]:
    """Tasks and edges of one kind; bands: int64 [bands, 6], global tokens."""
    tasks, edges = core.find(checked_arrays(bands, rows.starts), rows.home, rows.row, rows.ranks)
    return Tasks(*tasks), Edges(*edges)


def placed_tasks(cells: Cells, execution: Execution, rows: Rows, heads: HeadGroups) -> tuple[Tasks, Edges]:
    """Tasks and edges of one kind and phase with an execution."""
    groups, count = execution.rank.shape
    rank = execution.rank.reshape(-1).astype(np.int64)
    cell = np.tile(np.arange(count), groups)
    group = np.repeat(np.arange(groups), count)
    q, k, q0, q1, k0, k1, dmin, dmax = cells.columns[:, cell]
    is_remote = rows.home[q] != rank
    query_edge, queries = _edges(rows, q, rank, 2 * group + 1, q0, q1, is_remote)
    edge, keys = _edges(rows, k, rank, 2 * heads.shared[group], k0, k1, rows.home[k] != rank)
    query_edge[is_remote] += len(keys)
    row = rows.row[q] + q0 - rows.starts[q]
    columns = (rank, row, q1 - q0, k, k0, k1, dmin, dmax, edge, query_edge, group)
    return Tasks(*_int32(*columns)), join_edges(keys, queries)


def _edges(
    rows: Rows, block: Ints, rank: Ints, lane: Ints, low: Ints, high: Ints, is_remote: Bools
) -> tuple[Ints, Edges]:
    """int32 [n]: the edge of each task, -1 unless `is_remote`; and the edges: one per block, rank and lane, the hull of
    the tokens [low, high)."""
    index = np.flatnonzero(is_remote)
    blocks = len(rows.home)
    key = (lane[index] * rows.ranks + rank[index]) * blocks + block[index]
    tiles, number = unique_inverse(key)
    first, last = hulls(number, low[index], high[index], len(tiles))
    group_rank, tile_block = np.divmod(tiles, blocks)
    lanes, dst = np.divmod(group_rank, rows.ranks)
    home, unrouted = rows.home[tile_block], np.full(len(tiles), -1)
    row = rows.row[tile_block] + first - rows.starts[tile_block]
    edge = np.full(len(is_remote), -1, np.int32)
    edge[index] = number
    return edge, Edges(
        *_int32(lanes * blocks + tile_block, home, row, last - first, home, dst, unrouted, lanes)
    )


def hulls(number: Ints, low: Ints, high: Ints, count: int) -> tuple[Ints, Ints]:
    """int64 [count] each: the lowest `low` and the highest `high` of the entries with each `number`."""
    first, last = np.full(count, 1 << 62), np.zeros(count, np.int64)
    np.minimum.at(first, number, low)
    np.maximum.at(last, number, high)
    return first, last


def join_edges(first: Edges, second: Edges) -> Edges:
    """Concatenates edges; those of `second` are not relayed."""
    columns = (np.concatenate([getattr(edges, f.name) for edges in (first, second)]) for f in fields(Edges))
    return Edges(*columns)


def _int32(*columns: Ints) -> Iterator[Ints]:
    return (column.astype(np.int32) for column in columns)
