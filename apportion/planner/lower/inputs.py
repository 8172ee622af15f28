"""What the programs of one attention kind are made of: row ranges, stages, and which task opens which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from apportion._core import first_writes as core
from apportion.ir.arrays import Bools, Floats, Ints, offsets
from apportion.ir.orders import ranked
from apportion.ir.tensors import Space
from apportion.planner.inner.groups import Groups, HeadSets
from apportion.planner.lower.exchange import Exchange
from apportion.planner.lower.first_writes import Openers, Written, find_openers
from apportion.planner.lower.order import Batches
from apportion.planner.lower.sides import Side
from apportion.planner.lower.stages import KeyParts
from apportion.planner.problem import exact_sums, raise_to
from apportion.planner.schedule.rounds import Schedule
from apportion.planner.tasks.cells import HeadGroups
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Edges, Tasks


@dataclass(frozen=True)
class Beside:
    """Lone sequences of the ranks of groups (`inner/lone.py`). alone: lowered for single ranks, without tiles; home:
    all home rows of every rank, of which these are the first; early: bool [tasks of alone], those that run while rows
    come in, the others while results leave."""

    alone: Lowering
    home: Rows
    early: Bools

    def steps(self, come: int, leave: int) -> Ints:
        """int64 [tasks]: the step of each, beside the way in or the way out."""
        return np.where(self.early, come, leave)


@dataclass(frozen=True)
class Lowering:
    """One attention kind, placed and scheduled, its tasks in program order; everything below is derived.

    rows: of every group of ranks, which is a rank by itself unless heads are split. heads: head groups of tasks.
    beside: what single ranks compute while rows of groups travel.
    """

    rows: Rows
    tasks: Tasks
    parts: KeyParts
    stage: Ints  # int32 [tasks]
    schedule: Schedule
    exchange: Exchange | None
    groups: Groups
    sets: HeadSets
    heads: HeadGroups
    beside: Beside | None = None

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
        if self.beside is not None:
            return self.beside.home
        return self.rows if self.exchange is None else self.exchange.home

    @property
    def held(self) -> Ints:
        """int64 [ranks]: tokens of each rank where attention is computed; where its ranks share tokens and split heads,
        those of its home rows."""
        return (self.home if self.groups.split else self.rows).per_rank

    @cached_property
    def pairs(self) -> Floats:
        """float64 [ranks]: what each computes; ranks of a group share that of the group."""
        work = exact_sums(self.tasks.exec, self.tasks.work, len(self.groups)) / len(self.heads)
        shared: Floats = (work / self.groups.sizes)[self.groups.of_rank]
        return shared if self.beside is None else shared + self.beside.alone.pairs

    @property
    def holds(self) -> bool:
        """Whether tiles stay for several stages of heads, so that their rows are never used for others."""
        return self.sets.stages is not None and self.sets.stages.hold

    @cached_property
    def kept(self) -> Ints:
        """int64 [groups]: work rows that attention rows take."""
        return np.zeros(self.rows.ranks, np.int64) if self.exchange is None else self.rows.per_rank

    @cached_property
    def queries(self) -> Side:
        tasks = self.tasks
        place, index, edges, round_, back = self._edges_of(1)
        edge = place[tasks.query_edge]
        if len(edges):
            inside = tasks.row - np.append(edges.row, 0)[edge]
            written = Written(self._numbers, edge, inside, tasks.rows, np.ones(len(edge), bool))
            tile_openers = find_openers(written, edges.rows.astype(np.int64), len(tasks))
        else:
            tile_openers = Openers.none(len(tasks))
        return Side(
            rows=self.rows,
            exec=tasks.exec,
            edge=edge,
            row=tasks.row,
            count=tasks.rows,
            group=tasks.group,
            index=index,
            edges=edges,
            round=round_,
            back=back,
            heads=self.heads.query,
            returns_to=edges.parent,
            openers=self._query_openers,
            tile_openers=tile_openers,
        )

    @cached_property
    def keys(self) -> Side:
        tasks, parts = self.tasks, self.parts
        place, index, edges, round_, back = self._edges_of(0)
        tile, may = place[parts.edge], np.ones(len(parts.edge), bool)
        if self._later:  # gradients may come back to a tile that is passed on before a later stage
            late = self.stage[parts.task] > self.schedule.leads + np.append(round_, 0)[tile]
            may = ~(late & self._passed_on[parts.edge])
        written = Written(parts.task, tile, parts.row, parts.keys, may)
        group = self.heads.shared[tasks.group] if len(self.heads) > 1 else tasks.group
        return Side(
            rows=self.rows,
            exec=tasks.exec,
            edge=place[tasks.edge],
            row=self._key_row,
            count=tasks.k1 - tasks.k0,
            group=group,
            index=index,
            edges=edges,
            round=round_,
            back=back,
            heads=self.heads.key_sets,
            returns_to=self._returns_to(edges),
            openers=self._key_openers,
            tile_openers=find_openers(written, edges.rows.astype(np.int64), len(tasks)),
        )

    def _edges_of(self, which: int) -> tuple[Ints, Ints, Edges, Ints, Ints]:
        """Where each of all edges is among those of query rows (1) or key rows (0), int32 [edges + 1] with a -1 at the
        end; and of these the indexes, the edges, their rounds, and when results may leave."""
        edges = self.edges
        if not self.tasks.queries_move:
            every = np.arange(len(edges), dtype=np.int32)
            if not which:
                return np.append(every, np.int32(-1)), every, edges, self.schedule.round, self.back
            none = every[:0]
            return np.full(len(edges) + 1, -1, np.int32), none, Edges(*[none] * 8), none, none
        of = edges.lane & 1 == which
        place = np.append(np.cumsum(of) - 1, -1).astype(np.int32)
        some = np.flatnonzero(of)
        return place, some, edges.take(some), self.schedule.round[some], self.back[some]

    @cached_property
    def _passed_on(self) -> Bools:
        """bool [edges + 1]: whether others bring each edge's tile to more ranks; False."""
        found = np.zeros(len(self.edges) + 1, bool)
        found[self.edges.parent] = True
        found[-1] = False  # parent -1 is the last
        return found

    @property
    def _numbers(self) -> Ints:
        """int32 [tasks]"""
        return np.arange(len(self.tasks), dtype=np.int32)

    def _returns_to(self, edges: Edges) -> Ints:
        """`Side.returns_to` of one side's edges: gradients go around rings where queries stay, so all are keys'."""
        routed = self.schedule.routed
        return routed.returns_to if routed.carry else edges.parent

    @property
    def _later(self) -> bool:
        """Whether a task may run in a later stage than the one behind the round of its tile."""
        return self.tasks.queries_move or self.schedule.division is not None

    @cached_property
    def back(self) -> Ints:
        """int32 [edges]: the round after whose stage the last task that uses the edge's tile has run."""
        if not self._later:
            return self.schedule.round
        back, used = np.append(self.schedule.round, np.int32(0)), self.stage - np.int32(self.schedule.leads)
        raise_to(back, self.tasks.query_edge, used)  # edge -1 is the last
        raise_to(back, self.parts.edge, used[self.parts.task])
        return np.asarray(back[:-1])

    def batches(self, phase: str) -> Batches:
        """In which batches results come back: of queries, and backward also of keys."""
        if not self._later:
            return Batches.of_rounds(self.schedule) if phase == "backward" else Batches.none(len(self.edges))
        every = np.full(len(self.edges), phase == "backward")
        results = np.zeros(len(self.edges), bool)
        results[self.queries.index] = self.whole_results
        return Batches.of(self.schedule.round, self.back, every | (self.edges.lane & 1 == 1), results)

    @cached_property
    def whole_results(self) -> Bools:
        """bool [query edges]: whether nothing else than the tile's tasks touches the rows, so that what they add up is
        complete, and goes straight home as results. Home rows only, and all heads at once."""
        tasks = self.tasks
        if not tasks.queries_move:
            return np.zeros(0, bool)
        _, index, edges, _, _ = self._edges_of(1)
        may = (edges.parent < 0) & ~self._passed_on[index]
        if self.exchange is not None or len(self.heads) > 1 or not may.any():
            return np.zeros(len(edges), bool)
        local = np.flatnonzero(tasks.query_edge < 0)
        offset = np.cumsum(self.rows.per_rank) - self.rows.per_rank
        low = np.concatenate([offset[edges.home] + edges.row, offset[tasks.exec[local]] + tasks.row[local]])
        high = low + np.concatenate([edges.rows, tasks.rows[local]])
        points, first, last = ranked(low, high)
        users = np.cumsum(
            np.bincount(first, minlength=len(points)) - np.bincount(last, minlength=len(points))
        )
        shared = offsets(users > 1)
        mine = slice(len(edges))
        found: Bools = may & (shared[last[mine]] == shared[first[mine]])
        return found

    @cached_property
    def _key_row(self) -> Ints:
        """int64 [tasks]: first key row of each task, in the attention order of the keys' home."""
        return self.rows.row[self.tasks.k] + self.tasks.k0 - self.rows.starts[self.tasks.k]

    @property
    def _query_openers(self) -> Openers:
        """Of home rows. Results of rows that left home may come back before a later stage."""
        tasks, groups = self.tasks, len(self.heads)
        rank, row, may = tasks.exec, tasks.row.astype(np.int64), np.ones(len(tasks), bool)
        if tasks.queries_move:
            rank = np.where(tasks.query_edge < 0, rank, np.int32(-1))
            may = (self.stage < self.schedule.leads) | self._stay_put(1, rank, row, tasks.rows)
        lane = rank if groups == 1 else np.where(rank < 0, rank, rank * groups + tasks.group)
        written = Written(self._numbers, lane, row, tasks.rows, may)
        held = np.repeat(self.rows.per_rank, groups)
        given = np.flatnonzero(self.whole_results)
        if not len(given):
            return find_openers(written, held, len(tasks))
        # rows that results overwrite, as if by tasks behind all others
        edges = self._edges_of(1)[2].take(given)
        behind = np.arange(len(tasks), len(tasks) + len(given), dtype=np.int32)
        results = Written(
            behind, edges.home, edges.row.astype(np.int64), edges.rows, np.ones(len(given), bool)
        )
        found = find_openers(written.join(results), held, len(tasks) + len(given))
        return replace(found, flags=found.flags[: len(tasks)])

    @property
    def _key_openers(self) -> Openers:
        """Of home rows. Gradients of rows that left home may come back before a later stage; and a head group must not
        overwrite what another added to KV heads that both use."""
        parts, lanes = self.parts, len(self.heads.key_sets)
        rank = np.where(parts.edge < 0, self.tasks.exec[parts.task], np.int32(-1))
        if self.heads.keys_overlap:
            may = np.zeros(len(rank), bool)
        else:
            early = self.stage[parts.task] < self.schedule.leads
            may = early | self._stay_put(0, rank, parts.row, parts.keys)
        lane = rank
        if lanes > 1:
            shared = self.heads.shared[self.tasks.group[parts.task]].astype(np.int32)
            lane = np.where(rank < 0, rank, rank * lanes + shared)
        written = Written(parts.task, lane, parts.row, parts.keys, may)
        return find_openers(written, np.repeat(self.rows.per_rank, lanes), len(self.tasks))

    def _stay_put(self, which: int, rank: Ints, row: Ints, rows: Ints) -> Bools:
        """bool [n]: whether none of the query (1) or key rows [row, row + rows) of a rank leave home, needed or not."""
        edges = self.edges
        leave = (edges.parent < 0) & (edges.lane & 1 == which)
        return core.stay_put(rank, row, rows, edges.home, edges.row, edges.rows, leave, self.rows.ranks)


#: (kind, phase) -> tasks and when their tiles move; the phases of a kind share one where queries stay home
Lowered = dict[tuple[str, str], Lowering]


def leading(lowered: Lowered) -> Lowering:
    """The one whose groups are the plan's: of a kind whose heads are split, if there is any."""
    return max(lowered.values(), key=lambda low: low.groups.split)


def held_tokens(lowered: Sequence[Lowered]) -> Ints:
    """int64 [ranks]: `Lowering.held` of the ranks of all parts."""
    return np.concatenate([leading(part).held for part in lowered])
