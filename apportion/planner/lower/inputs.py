"""Inputs of lowering one attention kind; the core (`core/planner/lower/`) reads the attributes by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from apportion.ir.arrays import Bools, Floats, Ints, offsets
from apportion.ir.orders import unique_inverse
from apportion.ir.tensors import Side
from apportion.planner.inner.groups import Groups, HeadSets
from apportion.planner.lower.exchange import Exchange
from apportion.planner.lower.stages import KeyParts
from apportion.planner.problem import exact_sums
from apportion.planner.schedule.rounds import Schedule
from apportion.planner.tasks.cells import HeadGroups
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Edges, Tasks


@dataclass(frozen=True)
class LoneTasks:
    """Lone sequences of the ranks of groups (`inner/lone.py`). alone: lowered for single ranks, without tiles; home:
    all home rows of every rank, beginning with these; early: bool [tasks of alone], True for tasks that run while rows
    arrive; the others run while results leave."""

    alone: Lowering
    home: Rows
    early: Bools


@dataclass(frozen=True)
class Lowering:
    """One attention kind, placed and scheduled, its tasks in program order.

    rows: of every group of ranks (single ranks unless heads are split). heads: head groups of tasks. beside: tasks of
    single ranks that run while rows of groups travel.
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
    beside: LoneTasks | None = None

    @property
    def edges(self) -> Edges:
        return self.schedule.edges

    @property
    def home(self) -> Rows:
        """Home rows of every rank."""
        if self.beside is not None:
            return self.beside.home
        return self.rows if self.exchange is None else self.exchange.home

    @property
    def attention_tokens(self) -> Ints:
        """int64 [ranks]: tokens of each rank during attention; its home rows if ranks share tokens and split heads."""
        return (self.home if self.groups.split else self.rows).per_rank

    @cached_property
    def pairs(self) -> Floats:
        """float64 [ranks]: pairs computed by each rank; ranks of a group share the group's."""
        work = exact_sums(self.tasks.exec, self.tasks.work, len(self.groups)) / len(self.heads)
        shared: Floats = (work / self.groups.sizes)[self.groups.of_rank]
        return shared if self.beside is None else shared + self.beside.alone.pairs

    @cached_property
    def edges_of(self) -> Mapping[Side, Edges]:
        """The edges of query rows, and of key rows."""
        if not self.tasks.queries_move:
            return {"query": Edges(*[np.zeros(0, np.int32)] * len(fields(Edges))), "key": self.edges}
        is_query = self.edges.lane & 1 == 1
        return {
            "query": self.edges.take(np.flatnonzero(is_query)),
            "key": self.edges.take(np.flatnonzero(~is_query)),
        }

    @cached_property
    def whole_results(self) -> Bools:
        """bool [query edges]: True if only the tile's tasks touch the rows, so that their sums are complete and go home
        as results. All False with an exchange or with several head groups."""
        tasks = self.tasks
        if not tasks.queries_move:
            return np.zeros(0, bool)
        edges = self.edges_of["query"]
        has_child = np.zeros(len(edges) + 1, bool)
        has_child[edges.parent] = True  # parent -1 sets the last entry
        is_candidate = (edges.parent < 0) & ~has_child[:-1]
        if self.exchange is not None or len(self.heads) > 1 or not is_candidate.any():
            return np.zeros(len(edges), bool)
        local = np.flatnonzero(tasks.query_edge < 0)
        offset = np.cumsum(self.rows.per_rank) - self.rows.per_rank
        low = np.concatenate([offset[edges.home] + edges.row, offset[tasks.exec[local]] + tasks.row[local]])
        high = low + np.concatenate([edges.rows, tasks.rows[local]])
        points, first, last = unique_inverse(low, high)
        users = np.cumsum(
            np.bincount(first, minlength=len(points)) - np.bincount(last, minlength=len(points))
        )
        shared = offsets(users > 1)
        edge_part = slice(len(edges))
        result: Bools = is_candidate & (shared[last[edge_part]] == shared[first[edge_part]])
        return result


#: (kind, phase) -> tasks and rounds of their tiles; the phases of a kind share a lowering if queries stay home
Lowered = dict[tuple[str, str], Lowering]


def leading(lowered: Lowered) -> Lowering:
    """The lowering whose groups are the plan's: one with split heads, if there is any."""
    return max(lowered.values(), key=lambda item: item.groups.split)


def held_tokens(lowered: Sequence[Lowered]) -> Ints:
    """int64 [ranks]: `Lowering.attention_tokens` for the ranks of all parts."""
    return np.concatenate([leading(part).attention_tokens for part in lowered])
