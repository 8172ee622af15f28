"""What the programs of one attention kind are made of: row ranges, stages, and which task opens which rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import Space
from apportion.planner.passes.assemble import Numbers, RangeSet, range_set
from apportion.planner.passes.layouts import Rows, whole_ranges
from apportion.planner.passes.reshuffle import Reshuffle
from apportion.planner.passes.schedule import Slots
from apportion.planner.passes.tasks import Edges, Tasks, sort_order

Ints = NDArray[np.integer[Any]]

# Requests of the range sets, in the order in which they are made.
ENTRY, QUERY_BLOCK, QUERY_WHOLE, QUERY_SHUFFLE = range(4)
LOCAL_KEYS, SENT_KEYS, KEY_BLOCK, KEY_SHUFFLE = range(4)
TILE_KEYS, TILE = range(2)


@dataclass(frozen=True)
class Openers:
    """tasks: those that are the first on their rows and cover them all, so they may overwrite;
    cleared: the groups of rows (blocks or tiles) that no task opens."""

    tasks: Ints
    cleared: Ints

    def flags(self, tasks: int) -> Ints:
        """int32 [tasks]: 1 for those that overwrite."""
        flags = np.zeros(tasks, np.int32)
        flags[self.tasks] = 1
        return flags


@dataclass(frozen=True)
class Lowering:
    """One attention kind, placed and scheduled, its tasks in program order; everything below is derived."""

    rows: Rows
    tasks: Tasks
    edges: Edges
    slots: Slots
    reshuffle: Reshuffle | None
    heads: dict[int, int]  # tensor -> head columns of its work arena

    @property
    def ranks(self) -> int:
        return self.rows.ranks

    @property
    def space(self) -> Space:
        """Where rows in attention order are: work rows where the program reshuffles, else home rows."""
        return Space.HOME if self.reshuffle is None else Space.WORK

    @cached_property
    def exec(self) -> Ints:
        """int64 [tasks]: the rank that computes each task."""
        return self.rows.home[self.tasks.q]

    @cached_property
    def local(self) -> Ints:
        """Indexes of the tasks whose keys are at home."""
        return np.flatnonzero(self.tasks.edge < 0)

    @cached_property
    def remote(self) -> Ints:
        """Indexes of the tasks whose keys arrive in a tile."""
        return np.flatnonzero(self.tasks.edge >= 0)

    @cached_property
    def stage(self) -> Ints:
        """int32 [tasks]: 0 for local tasks, 1 + round of their tile for the others."""
        return stages(self.tasks, self.slots)

    @cached_property
    def query_ranges(self) -> RangeSet:
        rows, tasks = self.rows, self.tasks
        block = tasks.entry_block
        entry = rows.row[block] + tasks.entry_q0 - rows.starts[block]
        return range_set(
            (rows.home[block], entry, tasks.entry_q1 - tasks.entry_q0),
            (rows.home, rows.row, rows.lengths),
            whole_ranges(rows),
            self._shuffled,
        )

    @cached_property
    def key_ranges(self) -> RangeSet:
        rows, tasks, edges, local = self.rows, self.tasks, self.edges, self.local
        return range_set(
            (self.exec[local], self._key_row(tasks.k[local], tasks.k0[local]), (tasks.k1 - tasks.k0)[local]),
            (edges.src, self._key_row(edges.block, edges.k0), edges.rows),
            (rows.home, rows.row, rows.lengths),
            self._shuffled,
        )

    def _key_row(self, block: Ints, token: Ints) -> Ints:
        return self.rows.row[block] + token - self.rows.starts[block]

    @property
    def _shuffled(self) -> tuple[Ints, Ints, Ints]:
        none = np.zeros(0, np.int64)
        return (none, none, none) if self.reshuffle is None else self.reshuffle.attention_ranges

    @cached_property
    def fetched_ranges(self) -> RangeSet:
        """Work rows of the tiles that a rank holds to compute with."""
        return self.tile_ranges(self.slots.buffers)

    def tile_ranges(self, depth: int) -> RangeSet:
        """Work rows of the tiles that a rank takes in, `depth` rounds at a time."""
        tasks, edges, remote = self.tasks, self.edges, self.remote
        row, edge = self._tile_rows(edges.dst, depth), tasks.edge[remote]
        keys = row[edge] + tasks.k0[remote] - edges.k0[edge]
        return range_set(
            (edges.dst[edge], keys, (tasks.k1 - tasks.k0)[remote]),
            (edges.dst, row, edges.rows),
        )

    def returned_ranges(self, depth: int) -> RangeSet:
        """Work rows of the gradients that come back to the sender of a tile, after those that it sends itself."""
        edges = self.edges
        below = self.slots.places(depth) * self._stride
        return range_set((edges.src, self._tile_rows(edges.src, depth) + below, edges.rows))

    def _tile_rows(self, rank: Ints, depth: int) -> Ints:
        """int64 [edges]: first work row of each tile on `rank`: after the rows kept in attention order, if any."""
        kept = np.zeros(self.ranks, np.int64) if self.reshuffle is None else self.rows.per_rank
        return kept[rank] + self.slots.place(depth) * self._stride

    @cached_property
    def _stride(self) -> int:
        return int(self.edges.rows.max()) if len(self.edges) else 0

    def keys(self, home: Numbers, tiles: Numbers) -> Ints:
        """int32 [tasks]: the operand of each task's keys."""
        keys = np.empty(len(self.tasks), np.int32)
        keys[self.local], keys[self.remote] = home[LOCAL_KEYS], tiles[TILE_KEYS]
        return keys

    @cached_property
    def query_openers(self) -> Openers:
        """By query block."""
        tasks = self.tasks
        rows = (tasks.entry_q1 - tasks.entry_q0)[tasks.entry]
        return _openers(np.arange(len(tasks)), tasks.q, rows, self.rows.lengths)

    @cached_property
    def key_openers(self) -> Openers:
        """By key block at home."""
        return _openers(self.local, self.tasks.k, self.tasks.k1 - self.tasks.k0, self.rows.lengths)

    @cached_property
    def tile_openers(self) -> Openers:
        """By tile that arrives."""
        return _openers(self.remote, self.tasks.edge, self.tasks.k1 - self.tasks.k0, self.edges.rows)


def stages(tasks: Tasks, slots: Slots) -> Ints:
    """int32 [tasks]: 0 for local tasks, 1 + round of their tile for the others."""
    rounds = np.append(1 + slots.round, np.int32(0))  # edge -1, a local task, picks the last
    return rounds[tasks.edge]


def program_order(tasks: Tasks, rows: Rows, slots: Slots) -> Tasks:
    """The tasks by rank and stage; within a stage as they were found."""
    count = slots.rounds + 1
    return tasks.take(sort_order(rows.home[tasks.q] * count + stages(tasks, slots), rows.ranks * count))


def _openers(members: Ints, group: Ints, rows: Ints, lengths: Ints) -> Openers:
    """The first of `members` on each group in program order, where it has all the group's rows.

    members: indexes of tasks, which are in program order; group, rows: [tasks]; lengths: [groups].
    """
    opener = np.full(len(lengths), -1, np.int32)
    opener[group[members[::-1]]] = members[::-1]  # the last assignment wins: the earliest task
    whole = (opener >= 0) & (rows[opener] == lengths) if len(rows) else np.zeros(len(lengths), bool)
    return Openers(opener[whole], np.flatnonzero(~whole))
