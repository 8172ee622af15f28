"""What must be computed where: the tasks of one attention kind, and the tiles they need from other ranks.

A task is a band cut by a (query block, key block) rectangle. Queries stay home: a task runs where its query block
lives, and the KV rows that it sees must reach that rank once (an *edge*: rows of a key block -> rank). Query blocks
that lie side by side on a rank and see all of the same keys make one task: fewer and larger kernel calls (FCP's
coalescing, section 4.2, in the query direction).

              keys of one tile
    block 4   x x x x  \
    block 7   x x x x   } one task of three blocks, though their tokens are not consecutive
    block 8   x x x x  /
    block 2   x . . .     a task of its own: its band is not full
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.bands import area
from apportion.ir.jit import jit
from apportion.planner.passes.layouts import Rows
from apportion.planner.passes.sorting import counting_order

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Tasks:
    """Columns int32 [tasks].

    exec: the rank that computes; row, rows: its query rows in attention order; k: key block; k0, k1: keys, global
    tokens; dmin, dmax: the band counted from the first row and key, clipped; edge: the edge that brings the keys, -1
    where they are at home.
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

    def __len__(self) -> int:
        return len(self.exec)

    @property
    def full(self) -> NDArray[np.bool_]:
        """bool [tasks]: every row sees every key."""
        return (self.dmin <= self.k0 - self.k1 + 1) & (self.dmax >= self.rows - 1)

    @property
    def work(self) -> Ints:
        """int64 [tasks]: pairs."""
        keys = self.k1 - self.k0
        work = self.rows.astype(np.int64) * keys
        part = np.flatnonzero(~self.full)
        zero = np.zeros(len(part), np.int64)
        work[part] = area(
            np.stack([zero, self.rows[part], zero, keys[part], self.dmin[part], self.dmax[part]], axis=1)
        )
        return work

    def take(self, order: Ints) -> Tasks:
        """The tasks in another order."""
        return Tasks(*(np.take(getattr(self, column.name), order) for column in fields(self)))

    def arriving(self, arrives: Ints) -> Tasks:
        """The tasks once routes have renumbered the edges; arrives: int32, the new number of each."""
        return replace(self, edge=np.append(arrives, np.int32(-1))[self.edge])


@dataclass(frozen=True)
class Members:
    """The query blocks of the tasks, int32 [members]: `task` has rows of `block`; whole: all of them (0 or 1)."""

    task: Ints
    block: Ints
    whole: Ints


@dataclass(frozen=True)
class Edges:
    """KV rows on their way, int32 [edges]: rows [row, row + rows) in the attention order of rank `home` go from rank
    `src` to rank `dst`. parent: the edge that brought them to `src`, -1 where `src` is their home. Edges with one
    `tile` carry rows of one block (or whatever a route makes of blocks)."""

    tile: Ints
    home: Ints
    row: Ints
    rows: Ints
    src: Ints
    dst: Ints
    parent: Ints

    def __len__(self) -> int:
        return len(self.tile)

    def take(self, order: Ints) -> Edges:
        """The edges in another order, in which parents may not come after their children."""
        taken = Edges(*(np.take(getattr(self, column.name), order) for column in fields(self)))
        if (taken.parent < 0).all():
            return taken
        place = np.append(np.empty(len(order), np.int32), np.int32(-1))
        place[order] = np.arange(len(order), dtype=np.int32)
        return replace(taken, parent=place[taken.parent])


def find_tasks(bands: Ints, rows: Rows) -> tuple[Tasks, Members, Edges]:
    """Tasks and edges of one kind; bands: int64 [bands, 6], global tokens."""
    starts = rows.starts
    first = np.maximum(np.searchsorted(starts, bands[:, 0], "right") - 1, 0)
    first_key = np.maximum(np.searchsorted(starts, bands[:, 2], "right") - 1, 0)
    bands = np.ascontiguousarray(bands)
    count = _cut(bands, starts, first, first_key, np.empty((8, 0), np.int32))
    cells = np.empty((8, count), np.int32)
    _cut(bands, starts, first, first_key, cells)
    tasks, members, edges = _gather(cells, starts, rows.home, rows.row, rows.ranks)
    block, dst, k0, k1 = edges
    home, none = rows.home[block].astype(np.int32), np.full(len(block), -1, np.int32)
    row = (rows.row[block] + k0 - starts[block]).astype(np.int32)
    return Tasks(*tasks), Members(*members), Edges(block, home, row, k1 - k0, home, dst, none)


@jit
def _reach(band: Ints, low: int, high: int) -> tuple[int, int, int, int]:
    """Rows of the band in [low, high) and the keys that they see: q0, q1, k0, k1 (empty where q0 >= q1 or k0 >= k1)."""
    q0, q1 = max(band[0], low), min(band[1], high)
    return q0, q1, max(band[2], q0 - band[5]), min(band[3], q1 - band[4])


@jit
def _cut(bands: Ints, starts: Ints, first: Ints, first_key: Ints, cell: Ints) -> int:
    """Each band in each (query block, key block): q, k, q0, q1, k0, k1, dmin, dmax, into the columns of int32
    `cell` [8, room] as far as there is room. Returns how many there are."""
    c, blocks = 0, len(starts) - 1
    for i in range(len(bands)):
        block, key = first[i], first_key[i]
        while block < blocks and starts[block] < bands[i, 1]:
            q0, q1, k0, k1 = _reach(bands[i], starts[block], starts[block + 1])
            if q0 < q1 and k0 < k1:
                while starts[key + 1] <= k0:
                    key += 1
                last = key
                while last < blocks and starts[last] < k1:
                    if c < cell.shape[1]:
                        a, b = max(k0, starts[last]), min(k1, starts[last + 1])
                        cell[0, c], cell[1, c], cell[2, c], cell[3, c] = block, last, q0, q1
                        cell[4, c], cell[5, c] = a, b
                        cell[6, c] = max(bands[i, 4] - (q0 - a), a - b + 1)
                        cell[7, c] = min(bands[i, 5] - (q0 - a), q1 - q0 - 1)
                    c, last = c + 1, last + 1
            block += 1
    return c


@jit
def _gather(cell: Ints, starts: Ints, home: Ints, row: Ints, ranks: int) -> tuple[Ints, Ints, Ints]:
    """Tasks, members and edges (block, dst, and the hull of the keys) by key block, then in the order of the cells."""
    cells = cell.shape[1]
    order = counting_order(cell[1], len(home))
    task, member, edge = (
        np.empty((9, cells), np.int32),
        np.empty((3, cells), np.int32),
        np.empty((4, cells), np.int32),
    )
    tasks, edges = 0, 0
    seen, tile, last = np.full(ranks, -1, np.int64), np.full(ranks, -1, np.int64), np.zeros(ranks, np.int64)
    for m in range(cells):
        c = order[m]
        block, key, q0, q1, k0, k1, dmin, dmax = cell[:, c]
        dst, rows = home[block], q1 - q0
        at = row[block] + q0 - starts[block]
        if seen[dst] != key:
            seen[dst], tile[dst], last[dst] = key, -1, -1
            if home[key] != dst:
                edge[0, edges], edge[1, edges], edge[2, edges], edge[3, edges] = key, dst, k0, k1
                tile[dst] = edges
                edges += 1
        e, t = tile[dst], last[dst]
        if e >= 0:
            edge[2, e], edge[3, e] = min(edge[2, e], k0), max(edge[3, e], k1)
        full = dmin == k0 - k1 + 1 and dmax == rows - 1
        if full and t >= 0 and task[4, t] == k0 and task[5, t] == k1 and task[1, t] + task[2, t] == at:
            task[2, t] += rows
            task[7, t] += rows
        else:
            t = tasks
            task[0, t], task[1, t], task[2, t], task[3, t], task[4, t] = dst, at, rows, key, k0
            task[5, t], task[6, t], task[7, t], task[8, t] = k1, dmin, dmax, e
            tasks += 1
        last[dst] = t if full else -1
        member[0, m], member[1, m] = t, block
        member[2, m] = rows == starts[block + 1] - starts[block]
    return task[:, :tasks].copy(), member, edge[:, :edges].copy()
