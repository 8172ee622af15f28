"""Routes: a tree of edges for every tile, from its home to the ranks that need it; and the contract of route passes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from apportion._core import routes as core
from apportion.ir.arrays import Ints, changes
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.planner.problem import Departure, Pass
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Edges, hulls


@dataclass(frozen=True)
class Site:
    """Input of routing: the attention rows, their sequences, and the ranks."""

    rows: Rows
    batch: Batch
    cluster: Cluster


@dataclass(frozen=True)
class Routes:
    """Routes of tiles. edges: with relays, parents before their children. arrives: int32, for each edge of the star the
    edge that now delivers its rows. carry: True if gradients continue along the ring. ring: int32 [edges], size of each
    edge's ring, if there are rings. division: int32 [edges], the first division that needs each edge's rows, for
    placements with divisions. onward: int32 [edges], for branching tiles with carried gradients: the edge to whose tile
    each edge's gradients are added, -1: to its home rows. departures: from the recipe's request."""

    edges: Edges
    arrives: Ints
    carry: bool = False
    ring: Ints | None = None
    division: Ints | None = None
    onward: Ints | None = None
    departures: tuple[Departure, ...] = ()

    @cached_property
    def returns_to(self) -> Ints:
        """int32 [edges]: the edge to whose tile each edge's sums are added; -1: to its home rows."""
        if not self.carry:
            return self.edges.parent
        if self.onward is not None:
            return self.onward
        child, relays = np.full(len(self.edges), -1, np.int32), np.flatnonzero(self.edges.parent >= 0)
        child[self.edges.parent[relays]] = relays
        return child

    def take(self, order: Ints) -> Routes:
        """The same routes with edges in another order, parents before children."""
        position = np.empty(len(order), np.int32)
        position[order] = np.arange(len(order), dtype=np.int32)
        ring, division = (None if column is None else column[order] for column in (self.ring, self.division))
        onward = self.onward
        if onward is not None:
            onward = np.append(position, np.int32(-1))[onward[order]]  # index -1 is the last entry
        edges, arrives = self.edges.take(order), position[self.arrives]
        return Routes(edges, arrives, self.carry, ring, division, onward, self.departures)


def join(edges: Edges, whole: bool) -> Routes:
    """Merges the star's tiles of rows that are adjacent at home and go to the same rank; whole: True for one tile per
    rank, the hull of all rows that leave it."""
    if whole and len(edges):
        leaving = edges.lane * np.int64(int(edges.home.max()) + 1) + edges.home
        key = leaving * (int(edges.dst.max()) + 1) + edges.dst
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        tiles = as_tiles(replace(edges, tile=leaving), _numbers_of(leaving))
        return Routes(tiles.take(first), group.astype(np.int32))
    order = np.lexsort((edges.row, edges.lane, edges.dst, edges.home))
    ordered = edges.take(order)
    gap = ordered.row - np.cumsum(ordered.rows) + ordered.rows  # changes where rows are not adjacent
    is_first = changes(ordered.home, ordered.dst, ordered.lane, gap)
    first = np.flatnonzero(is_first)
    rows = np.add.reduceat(ordered.rows, first) if len(first) else ordered.rows
    joined = replace(ordered.take(first), tile=np.arange(len(first), dtype=np.int32), rows=rows)
    arrives = np.empty(len(order), np.int32)
    arrives[order] = np.cumsum(is_first) - 1
    return Routes(joined, arrives)


def _numbers_of(keys: Ints) -> Ints:
    """int64 [n]: numbers from 0, equal for equal keys."""
    return np.unique(keys, return_inverse=True)[1]


class RoutePass(Pass, Protocol):
    """Routes tiles. edges: the star, home -> every rank that needs rows, in tile order.

    rings: True if tiles go around rings, which carry keys only. relays: True if ranks may forward shared tiles.
    by_block: True if tiles must be blocks, so that the schedule cannot merge them.
    """

    rings: ClassVar[bool] = False
    relays: ClassVar[bool] = True

    @property
    def by_block(self) -> bool:
        return False

    @abstractmethod
    def __call__(self, edges: Edges, site: Site) -> Routes: ...


def depths(parent: Ints) -> Ints:
    """int64 [edges]: number of relays before each edge; parents precede children."""
    return core.depths(parent)


def as_tiles(edges: Edges, group: Ints) -> Edges:
    """Edges that each carry the hull of their group's rows."""
    first, last = hulls(group, edges.row, edges.row + edges.rows, int(group.max()) + 1)
    columns = (
        edges.tile,
        edges.home,
        first[group],
        (last - first)[group],
        edges.src,
        edges.dst,
        edges.parent,
        edges.lane,
    )
    return Edges(*(column.astype(np.int32) for column in columns))
