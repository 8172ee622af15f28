"""The rows of one side of a kind's tasks, queries or keys: at home, and in the tiles that bring them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.tensors import Space
from apportion.planner.lower.assemble import Ranges
from apportion.planner.lower.first_writes import Openers
from apportion.planner.lower.stages import arena_order
from apportion.planner.problem import raise_to
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Edges


@dataclass(frozen=True)
class Side:
    """The queries or the keys of one kind's tasks: rows at home, and tiles that bring them where they are not.

    exec, edge, row, count: integers [tasks], the rank that computes, the edge of this side (-1: at home), the first
    row in attention order at home, and how many; index: the edges of this side among all; edges, round, back: theirs:
    `round` brings a tile, and what its tasks add up may leave after the stage of round `back`. heads: int64 [lanes]
    head set of the tiles of each lane, and of its home rows; returns_to: int32 [edges], the edge to whose tile what
    each edge's tile adds up is added; -1: to its home rows. openers: of home rows.
    """

    rows: Rows
    exec: Ints
    edge: Ints
    row: Ints
    count: Ints
    group: Ints
    index: Ints
    edges: Edges
    round: Ints
    back: Ints
    heads: Ints
    returns_to: Ints
    openers: Openers
    tile_openers: Openers

    def of_tasks(self, space: Space, tile: Ints) -> Ranges:
        """The rows of each task. space: where rows in attention order are; tile: int64 [edges], the first work row of
        each tile."""
        away = np.flatnonzero(self.edge >= 0)
        heads = self._heads_of(self.group)
        found = Ranges.of(space, self.row, self.count, heads)
        if len(away):
            edge = self.edge[away]
            row = tile[edge] + self.row[away] - self.edges.row[edge]
            found.packed[away] = Ranges.of(Space.WORK, row, self.count[away]).packed
        return found

    @cached_property
    def cleared(self) -> tuple[Ints, Ints, Ints, Ints | int]:
        """Rows in attention order that no task opens: rank, row, rows, and head sets."""
        rank, group = np.divmod(self.openers.lane, len(self.heads))
        return rank, self.openers.row, self.openers.rows, self._heads_of(group)

    def tiles_cleared(self, tile: Ints) -> Ranges:
        """The same of tiles, `tile_openers`."""
        openers = self.tile_openers
        return Ranges.of(
            Space.WORK, tile[openers.lane] + openers.row, openers.rows, self.heads_of(openers.lane)
        )

    def tiles(self, tile: Ints) -> Ranges:
        """The rows of all tiles."""
        return Ranges.of(Space.WORK, tile, self.edges.rows, self.edge_heads)

    def sent(self, space: Space, tile: Ints) -> Ranges:
        """What each edge carries, where it starts: in attention order, or inside the tile that brought it."""
        edges, relays = self.edges, self.relays
        found = Ranges.of(space, edges.row, edges.rows, self.edge_heads)
        if len(relays):
            found.packed[relays] = self._inside(tile, relays, edges.parent[relays])
        return found

    def _inside(self, tile: Ints, inner: Ints, outer: Ints) -> Ints:
        """The rows of the edges `inner` in the tiles of the edges `outer`, packed."""
        edges = self.edges
        row = tile[outer] + edges.row[inner] - edges.row[outer]
        return Ranges.of(Space.WORK, row, edges.rows[inner]).packed

    def added_to(self, space: Space, tile: Ints) -> Ranges:
        """Where what each tile adds up goes: in attention order, or inside another tile."""
        edges, root = self.edges, self.root
        found = Ranges.of(space, edges.row[root], edges.rows[root], self.edge_heads)
        passed = np.flatnonzero(self.returns_to >= 0)
        if len(passed):
            found.packed[passed] = self._inside(tile, passed, self.returns_to[passed])
        return found

    def _heads_of(self, group: Ints) -> Ints | int:
        """Head sets of these head groups."""
        return 0 if len(self.heads) == 1 else self.heads[group]

    def heads_of(self, edge: Ints) -> Ints | int:
        """Head sets of the tiles of some edges."""
        return 0 if len(self.heads) == 1 else self.heads[self.edge_group[edge]]

    @cached_property
    def edge_heads(self) -> Ints | int:
        """Head sets of all tiles."""
        return self._heads_of(self.edge_group)

    @cached_property
    def order(self) -> Ints | None:
        """In which tiles lie that arrive together; None: as the edges are."""
        return arena_order(self.edges)

    @property
    def edge_group(self) -> Ints:
        """int32 [edges]: head group of each edge."""
        return self.edges.lane >> 1

    @cached_property
    def roots(self) -> Ints:
        """Indexes of the edges that leave home."""
        return np.flatnonzero(self.edges.parent < 0)

    @cached_property
    def relays(self) -> Ints:
        """Indexes of the edges that leave a rank where a tile has arrived."""
        return np.flatnonzero(self.edges.parent >= 0)

    @cached_property
    def last_sent(self) -> Ints:
        """int64 [edges]: the last round that passes the tile on, -1 for none."""
        last = np.full(len(self.edges), -1, np.int32)
        raise_to(last, self.edges.parent[self.relays], self.round[self.relays])
        return last

    @cached_property
    def returned_to(self) -> Ints:
        """int32 [edges]: the rank where that is."""
        return np.where(self.returns_to < 0, self.edges.home, self.edges.dst[self.returns_to])

    @cached_property
    def root(self) -> Ints:
        """int32 [edges]: the edge that took each edge's tile from home."""
        index = np.arange(len(self.edges), dtype=np.int32)
        root = np.where(self.edges.parent < 0, index, self.edges.parent)
        while (root != root[root]).any():
            root = root[root]
        return root

    @cached_property
    def opening(self) -> Ints:
        """int32 [tasks]: 1 for those that overwrite the rows that they add to, at home or in a tile."""
        return self.openers.flags | self.tile_openers.flags
