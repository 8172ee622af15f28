"""What the programs of one attention kind are made of: row ranges, stages, and which task opens which rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import Space
from apportion.ir.jit import jit
from apportion.planner.passes.assemble import Numbers, RangeSet, range_set
from apportion.planner.passes.layouts import Rows, whole_ranges
from apportion.planner.passes.reshuffle import Reshuffle
from apportion.planner.passes.schedule import Slots
from apportion.planner.passes.sorting import sort_order
from apportion.planner.passes.tasks import Edges, Members, Tasks

Ints = NDArray[np.integer[Any]]

# Requests of the range sets, in the order in which they are made.
QUERIES, QUERY_CLEARED, QUERY_WHOLE, QUERY_SHUFFLE = range(4)
LOCAL_KEYS, SENT_KEYS, KEY_CLEARED, KEY_SHUFFLE = range(4)
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
    members: Members
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
        return range_set(
            (tasks.exec, tasks.row, tasks.rows),
            self._blocks(self.query_openers.cleared),
            whole_ranges(rows),
            self._shuffled,
        )

    @cached_property
    def key_ranges(self) -> RangeSet:
        tasks, edges, local = self.tasks, self.edges, self.local
        return range_set(
            (tasks.exec[local], self._key_row(tasks.k[local], tasks.k0[local]), (tasks.k1 - tasks.k0)[local]),
            (edges.src, self._key_row(edges.block, edges.k0), edges.rows),
            self._blocks(self.key_openers.cleared),
            self._shuffled,
        )

    def _blocks(self, blocks: Ints) -> tuple[Ints, Ints, Ints]:
        """Ranges of whole blocks."""
        rows = self.rows
        return rows.home[blocks], rows.row[blocks], rows.lengths[blocks]

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
        """By query block; a task of several blocks opens all of them or none."""
        members = self.members
        opens, cleared = _openers_of_many(
            members.task, members.block, members.whole, len(self.tasks), len(self.rows.home)
        )
        return Openers(np.flatnonzero(opens), np.flatnonzero(cleared))

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


def program_order(tasks: Tasks, members: Members, slots: Slots, ranks: int) -> tuple[Tasks, Members]:
    """The tasks by rank and stage. Within a stage those with a band that is not full come first: they have one block
    each, so that they can open it, and the rest keep the order in which they were found."""
    count = 2 * (slots.rounds + 1)
    key = tasks.exec.astype(np.int64) * count + 2 * stages(tasks, slots) + tasks.full
    order = sort_order(key, ranks * count)
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return tasks.take(order), replace(members, task=place[members.task])


def _openers(members: Ints, group: Ints, rows: Ints, lengths: Ints) -> Openers:
    """The first of `members` on each group in program order, where it has all the group's rows.

    members: indexes of tasks, which are in program order; group, rows: [tasks]; lengths: [groups].
    """
    opener = np.full(len(lengths), -1, np.int32)
    opener[group[members[::-1]]] = members[::-1]  # the last assignment wins: the earliest task
    whole = (opener >= 0) & (rows[opener] == lengths) if len(rows) else np.zeros(len(lengths), bool)
    return Openers(opener[whole], np.flatnonzero(~whole))


@jit
def _openers_of_many(task: Ints, block: Ints, whole: Ints, tasks: int, blocks: int) -> tuple[Ints, Ints]:
    """Which tasks are the first on all rows of all their blocks (1 or 0), and which blocks no such task opens."""
    first = np.full(blocks, tasks, np.int32)
    for member in range(len(task)):
        first[block[member]] = min(first[block[member]], task[member])
    opens, cleared = np.ones(tasks, np.int8), np.ones(blocks, np.int8)
    for member in range(len(task)):
        if first[block[member]] != task[member] or whole[member] == 0:
            opens[task[member]] = 0
    for index in range(blocks):
        if first[index] < tasks:
            cleared[index] = 1 - opens[first[index]]
    return opens, cleared
