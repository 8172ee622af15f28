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
from apportion.planner.passes.exchange import Exchange
from apportion.planner.passes.groups import Groups, HeadSets
from apportion.planner.passes.layouts import Rows, whole_ranges
from apportion.planner.passes.schedule import Schedule
from apportion.planner.passes.sorting import sort_order
from apportion.planner.passes.tasks import Edges, Members, Tasks

Ints = NDArray[np.integer[Any]]

# Requests of the range sets, in the order in which they are made.
QUERIES, QUERY_CLEARED, QUERY_WHOLE, QUERY_PIECES = range(4)
LOCAL_KEYS, SENT_KEYS, KEY_CLEARED, KEY_PIECES = range(4)
TILE_KEYS, TILE, TILE_INSIDE, ARRIVING = range(4)


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
    """One attention kind, placed and scheduled, its tasks in program order; everything below is derived.

    rows: of every group of ranks, which is a rank by itself unless heads are split.
    """

    rows: Rows
    tasks: Tasks
    members: Members
    stage: Ints  # int32 [tasks]
    schedule: Schedule
    exchange: Exchange | None
    groups: Groups
    sets: HeadSets

    @property
    def edges(self) -> Edges:
        return self.schedule.edges

    @property
    def space(self) -> Space:
        """Where rows in attention order are: home, or work rows where an exchange fills them."""
        return Space.HOME if self.exchange is None else Space.WORK

    @property
    def home(self) -> Rows:
        """Home rows of every rank."""
        return self.rows if self.exchange is None else self.exchange.home

    @cached_property
    def local(self) -> Ints:
        """Indexes of the tasks whose keys are at home."""
        return np.flatnonzero(self.tasks.edge < 0)

    @cached_property
    def remote(self) -> Ints:
        """Indexes of the tasks whose keys arrive in a tile."""
        return np.flatnonzero(self.tasks.edge >= 0)

    @cached_property
    def query_ranges(self) -> RangeSet:
        rows, tasks = self.rows, self.tasks
        return range_set(
            (tasks.exec, tasks.row, tasks.rows),
            self._blocks(self.query_openers.cleared),
            whole_ranges(rows) if self.exchange is None else _NO_RANGES,
            self._pieces,
        )

    @cached_property
    def key_ranges(self) -> RangeSet:
        tasks, local, sent = self.tasks, self.local, self.roots
        return range_set(
            (tasks.exec[local], self._key_row[local], (tasks.k1 - tasks.k0)[local]),
            (self.edges.home[sent], self.edges.row[sent], self.edges.rows[sent]),
            self._blocks(self.key_openers.cleared),
            self._pieces,
        )

    def _blocks(self, blocks: Ints) -> tuple[Ints, Ints, Ints]:
        """Ranges of whole blocks."""
        rows = self.rows
        return rows.home[blocks], rows.row[blocks], rows.lengths[blocks]

    @cached_property
    def _key_row(self) -> Ints:
        """int64 [tasks]: first key row of each task, in the attention order of the keys' home."""
        return self.rows.row[self.tasks.k] + self.tasks.k0 - self.rows.starts[self.tasks.k]

    @property
    def _pieces(self) -> tuple[Ints, Ints, Ints]:
        return _NO_RANGES if self.exchange is None else self.exchange.ranges

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
        np.maximum.at(last, self.edges.parent[self.relays], self.schedule.round[self.relays])
        return last

    @cached_property
    def returns_to(self) -> Ints:
        """int32 [edges]: the edge to whose tile the gradients of each edge's tile are added; -1: to its home rows."""
        if not self.schedule.routed.carry:
            return self.edges.parent
        following = np.full(len(self.edges), -1, np.int32)
        following[self.edges.parent[self.relays]] = self.relays
        return following

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
    def kept(self) -> Ints:
        """int64 [groups]: work rows that attention rows take."""
        return np.zeros(self.rows.ranks, np.int64) if self.exchange is None else self.rows.per_rank

    def tile_ranges(
        self, row: Ints, inner: Ints, outer: Ints, arriving: tuple[Ints, Ints, Ints] | None = None
    ) -> RangeSet:
        """Work rows of tiles from `row` on (int64 [edges]): the keys of tasks, whole tiles, the rows of the edges
        `inner` inside the tiles of the edges `outer`, and other ranges that `arrive`."""
        tasks, edges, remote = self.tasks, self.edges, self.remote
        edge = tasks.edge[remote]
        keys = row[edge] + self._key_row[remote] - edges.row[edge]
        inside = row[outer] + edges.row[inner] - edges.row[outer]
        return range_set(
            (edges.dst[edge], keys, (tasks.k1 - tasks.k0)[remote]),
            (edges.dst, row, edges.rows),
            (edges.dst[outer], inside, edges.rows[inner]),
            _NO_RANGES if arriving is None else arriving,
        )

    def keys(self, home: Numbers, tiles: Numbers) -> Ints:
        """int32 [tasks]: the operand of each task's keys."""
        keys = np.empty(len(self.tasks), np.int32)
        keys[self.local] = home[LOCAL_KEYS]
        if len(self.remote):
            keys[self.remote] = tiles[TILE_KEYS]
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
        """By key block at home. Gradients of rows that left home may come back before a later stage."""
        early = self.stage[self.local] == 0
        first = self.local if early.all() else self.local[early | ~self._sent[self.tasks.k[self.local]]]
        return _openers(first, self.tasks.k, self.tasks.k1 - self.tasks.k0, self.rows.lengths)

    @property
    def _sent(self) -> NDArray[np.bool_]:
        """bool [blocks]: whether any of the block's rows leave home, needed or not."""
        order, per_rank = self.rows.order, self.rows.per_rank
        ends = np.cumsum(self.rows.lengths[order])
        low = (np.cumsum(per_rank) - per_rank)[self.edges.home[self.roots]] + self.edges.row[self.roots]
        blocks = len(order) + 1
        first = np.searchsorted(ends, low, "right")
        last = np.searchsorted(ends, low + self.edges.rows[self.roots] - 1, "right") + 1
        inside = np.cumsum(np.bincount(first, minlength=blocks) - np.bincount(last, minlength=blocks))
        sent = np.empty(len(order), bool)
        sent[order] = inside[:-1] > 0
        return sent

    @cached_property
    def tile_openers(self) -> Openers:
        """By tile that arrives."""
        return _openers(self.remote, self.tasks.edge, self.tasks.k1 - self.tasks.k0, self.edges.rows)


_NO_ROWS = np.zeros(0, np.int64)
_NO_RANGES = (_NO_ROWS, _NO_ROWS, _NO_ROWS)


def program_order(
    tasks: Tasks, members: Members, schedule: Schedule, ranks: int
) -> tuple[Tasks, Members, Ints]:
    """The tasks by rank and stage, and their stages, int32 [tasks]. Within a stage those with a band that is not full
    come first: they have one block each, so that they can open it, and the rest keep the order in which they were
    found."""
    count = schedule.rounds + 1
    stage = stages(tasks, schedule, ranks)
    key = 2 * (tasks.exec.astype(np.int64) * count + stage) + tasks.full
    order = sort_order(key, 2 * ranks * count)
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return tasks.take(order), replace(members, task=place[members.task]), stage[order]


def stages(tasks: Tasks, schedule: Schedule, ranks: int) -> Ints:
    """int32 [tasks]: 1 + round of their tile. Tasks that need none run in the first stage, in the last, or where they
    make every rank compute evenly from stage to stage, so that none keeps others waiting for its rounds."""
    first = np.int32(schedule.rounds if schedule.local == "last" else 0)
    stage = np.append(1 + schedule.round, first)[tasks.edge].astype(np.int32)  # edge -1 picks the last
    if schedule.local == "even":
        _fill(stage, tasks.exec, tasks.edge, tasks.work, ranks, schedule.rounds + 1)
    return stage


@jit
def _fill(stage: Ints, rank: Ints, edge: Ints, work: Ints, ranks: int, stages: int) -> None:
    """Give tasks without an edge the first stage, not before that of the one before, up to which their rank has
    computed less than the stage's share of its work; into `stage`, in place."""
    load, total = np.zeros((ranks, stages), np.int64), np.zeros(ranks, np.int64)
    for task in range(len(rank)):
        total[rank[task]] += work[task]
        if edge[task] >= 0:
            load[rank[task], stage[task]] += work[task]
    now, done = np.zeros(ranks, np.int64), load[:, 0].copy()
    for task in range(len(rank)):
        if edge[task] < 0:
            r = rank[task]
            while now[r] < stages - 1 and done[r] / (now[r] + 1) >= total[r] / stages:
                now[r] += 1
                done[r] += load[r, now[r]]
            stage[task] = now[r]
            done[r] += work[task]


def allot(rank: Ints, rows: Ints, start: Ints, end: Ints, base: Ints) -> Ints:
    """int64 [tiles]: first work row of each tile, so that tiles of one rank that are held at the same time (program
    positions `start` to `end`, both included) do not meet. base: int64 [ranks], the first row of each rank to use.

    Tiles that arrive together at a rank lie side by side. All such rows take a place as long as the longest of the
    rank, the first that is free when they arrive, so there are as many places as are ever held at once.
    """
    span = int(start.max()) + 1
    order = sort_order(rank * np.int64(span) + start, len(base) * span)
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
