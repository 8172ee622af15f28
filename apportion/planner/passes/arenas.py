"""Work rows of tiles, reused once their data is dead."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.jit import jit
from apportion.planner.passes.sorting import sort_order

Ints = NDArray[np.integer[Any]]


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


@jit
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
