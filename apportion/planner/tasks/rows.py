"""Rows of ranks: home rows of blocks, work rows of tiles, reused once their data is dead."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.isa import SPAN_COLUMNS
from apportion.ir.loops.jit import jit, unlocked
from apportion.ir.loops.sorting import sort_order
from apportion.ir.plan.tables import Layout, Table
from apportion.ir.request.batch import Batch


@dataclass(frozen=True)
class Rows:
    """Rows of blocks: each rank holds its blocks by rising token. starts: int64 [blocks + 1], home: int64 [blocks];
    later: bool [blocks], those that lie behind the others of their rank."""

    starts: Ints
    home: Ints
    ranks: int
    later: Bools | None = None

    @cached_property
    def lengths(self) -> Ints:
        return np.diff(self.starts)

    @cached_property
    def order(self) -> Ints:
        """Blocks by (rank, token), the later ones behind the others."""
        if self.later is None:
            return sort_order(self.home, self.ranks)
        return sort_order(2 * self.home + self.later, 2 * self.ranks)

    @cached_property
    def per_rank(self) -> Ints:
        """int64 [ranks]: rows of each rank."""
        return np.bincount(self.home, self.lengths, self.ranks).astype(np.int64)

    @cached_property
    def row(self) -> Ints:
        """int64 [blocks]: first row of each block on its home."""
        ends = np.cumsum(self.lengths[self.order])
        first_of_rank = np.cumsum(self.per_rank) - self.per_rank
        row = np.empty(len(self.home), np.int64)
        row[self.order] = ends - self.lengths[self.order] - first_of_rank[self.home[self.order]]
        return row

    def block_of(self, tokens: Ints) -> Ints:
        """int64 [n]: the block of each global token."""
        return np.searchsorted(self.starts, tokens, "right") - 1

    def row_of(self, tokens: Ints) -> Ints:
        """int64 [n]: the row of each global token on its rank."""
        block = self.block_of(tokens)
        return self.row[block] + tokens - self.starts[block]

    def layout(self, name: str, batch: Batch) -> Layout:
        """Spans: cut where the next row holds another sequence, or a token or position that does not follow."""
        found = _cuts(self.order, self.starts, self.home, batch.position_breaks(), self.ranks)
        ptr, row, token = map(np.array, found)  # in numpy's own memory, which a plan can seal
        length = np.append(row[1:], 0) - row
        last = ptr[1:][np.diff(ptr) > 0] - 1
        length[last] += self.per_rank[np.diff(ptr) > 0]
        sequence = np.searchsorted(batch.starts, token, "right") - 1
        columns = (row, token, length, sequence, batch.position_at(token))
        return Layout(name, Table(ptr, SPAN_COLUMNS, np.stack(columns)))


@jit
def _cuts(order: Ints, starts: Ints, home: Ints, breaks: Ints, ranks: int) -> tuple[Ints, Ints, Ints]:
    """int64 [ranks + 1], where the spans of each rank begin; int64 [spans], their first rows and tokens. breaks: int64,
    rising tokens at which a span ends. order: the blocks by rank, as they lie there."""
    most = len(order) + len(breaks)
    ptr, row, token = np.zeros(ranks + 1, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    count, at, before = 0, 0, -1
    for block in order:
        fresh = before < 0 or home[before] != home[block]
        if fresh:
            at = 0
        cut = np.searchsorted(breaks, starts[block])
        if fresh or before + 1 != block:
            row[count], token[count] = at, starts[block]
            count += 1
            if cut < len(breaks) and breaks[cut] == starts[block]:
                cut += 1
        while cut < len(breaks) and breaks[cut] < starts[block + 1]:
            row[count], token[count] = at + breaks[cut] - starts[block], breaks[cut]
            count, cut = count + 1, cut + 1
        at += starts[block + 1] - starts[block]
        ptr[home[block] + 1] = count
        before = block
    for rank in range(ranks):
        ptr[rank + 1] = max(ptr[rank + 1], ptr[rank])
    return ptr, row[:count].copy(), token[:count].copy()


def whole_ranges(rows: Rows) -> tuple[Ints, Ints, Ints]:
    """All rows of each rank that has any, as ranges (rank, row, rows)."""
    rank = np.flatnonzero(rows.per_rank)
    return rank, np.zeros(len(rank), np.int64), rows.per_rank[rank]


def allot(rank: Ints, rows: Ints, start: Ints, end: Ints, base: Ints, order: Ints | None = None) -> Ints:
    """int64 [tiles]: first work row of each tile, so that tiles of one rank that are held at the same time (program
    positions `start` to `end`, both included) do not meet. base: int64 [ranks], the first row of each rank to use.
    order: in which tiles are placed that arrive together; None: as they are.

    Tiles that arrive together at a rank lie side by side. All such rows take a place as long as the longest of the
    rank, the first that is free when they arrive, so there are as many places as are ever held at once.
    """
    span = int(start.max()) + 1
    key = rank * np.int64(span) + start
    order = (
        sort_order(key, len(base) * span)
        if order is None
        else order[sort_order(key[order], len(base) * span)]
    )
    return _allot(order, rank, rows, start, end, base)


@unlocked
def _allot(order: Ints, rank: Ints, rows: Ints, start: Ints, end: Ints, base: Ints) -> Ints:
    """int64 [tiles]: first row of each tile; `order` sorts the tiles by rank and start."""
    tiles = len(order)
    longest = np.zeros(len(base), np.int64)
    row = np.empty(tiles, np.int64)  # first of all: the row inside the place
    for index in range(tiles):
        tile, before = order[index], order[index - 1]
        together = index > 0 and rank[before] == rank[tile] and start[before] == start[tile]
        row[tile] = row[before] + rows[before] if together else 0
        longest[rank[tile]] = max(longest[rank[tile]], row[tile] + rows[tile])
    busy = np.empty(tiles, np.int64)  # until when each place of the rank is held
    places, at = 0, 0
    for index in range(tiles):
        tile = order[index]
        if index == 0 or rank[order[index - 1]] != rank[tile]:
            places = 0
        if row[tile] == 0:
            at = 0
            while at < places and busy[at] >= start[tile]:
                at += 1
            places = max(places, at + 1)
            busy[at] = end[tile]
        busy[at] = max(busy[at], end[tile])
        row[tile] += base[rank[tile]] + at * longest[rank[tile]]
    return row
