"""Lone sequences: whole on one rank, with all heads, while the others are split among groups of ranks.

    group       0                       home rows of each rank
    rank 0      a a b │ x x x x         a .. d: lone sequences, without communication;
    rank 1      c d │ x x x y y         x, y: the group's, a share of the heads on each rank during attention

Splitting heads serves sequences too long for one rank, at a cost for all that is split: rows are exchanged twice, and
kernels have fewer heads. Lone sequences avoid that, and are computed while rows of the others travel.

A group shares the rest of its work evenly, so its ranks need equal lone work; groups may differ, since the rest
is placed by the time that each has left.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from apportion._core import lone as core
from apportion.ir.arrays import Bools, Floats, Ints
from apportion.ir.request.batch import Batch
from apportion.ir.tensors import FETCHED, PHASES, RETURNED, SIDES
from apportion.planner.problem import Placement, Problem, Shards
from apportion.planner.shard.blocks import row_times, row_weights
from apportion.planner.solvers.partition.lpt import makespan_bound
from apportion.planner.tasks.rows import Rows

# Candidate upper limits of a lone sequence's share of a rank's time; the first one that leaves ranks even enough is
# used: on average a group's busiest rank exceeds the mean by at most this fraction of its time, and at most this
# fraction of all work is in groups without enough tokens for it.
SHARES, UNEVEN, APART = (0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03), 0.004, 0.04
# Lone sequences may increase the unevenness of the rest at most by this factor; else none are lone.
MOST_UNEVEN = 8
# A sequence with a larger share of a rank's tokens is never lone, nor do lone sequences exceed this share if there are
# others.
TOKENS, FILLED = 0.6, 0.98
# Unpacking slows the reception of the others' rows by this factor over the link's time.
UNPACK_FACTOR = 1.5
# Least fraction of a group's time left for the others, which are placed in proportion.
LEAST_LEFT = 1e-3


@dataclass(frozen=True)
class LoneSequences:
    """Lone sequences of a batch. index, others: int64, lone and other sequences; home: int64 [lone], their ranks, of
    `ranks`; time: int64 [lone], nanoseconds over all layers; left: float64 [groups], fraction of each group's time left
    for the others; come: nanoseconds over all layers in which rows of the others arrive."""

    batch: Batch
    ranks: int
    index: Ints
    others: Ints
    home: Ints
    time: Ints
    left: Floats
    come: float

    @property
    def is_all(self) -> bool:
        """True if all sequences are lone."""
        return not len(self.others)

    @cached_property
    def alone(self) -> Batch:
        return self.batch.take(self.index)

    @cached_property
    def shared(self) -> Batch:
        return self.batch.take(self.others)

    @cached_property
    def rows(self) -> Rows:
        """Home rows of the lone sequences, from 0 on each rank, by their own tokens."""
        return Rows(self.alone.starts, self.home, self.ranks)

    def in_groups(self, others: Rows, of_rank: Ints) -> tuple[Ints, Ints]:
        """Blocks of the whole batch: starts int64 [blocks + 1], and the group of each. others: rows of groups; of_rank:
        int64 [ranks], their groups."""
        rows = self.beside(others)
        assert rows.later is not None
        return rows.starts, np.where(rows.later, rows.home, of_rank[rows.home])

    def beside(self, others: Rows) -> Rows:
        """Home rows of the whole batch. others: home rows of the other sequences, by their own tokens, which come after
        the lone ones."""
        starts = np.union1d(others.starts, self.shared.starts)[:-1]
        sequence = np.searchsorted(self.shared.starts, starts, "right") - 1
        moved = self.batch.starts[self.others[sequence]] + starts - self.shared.starts[sequence]
        first = np.concatenate([self.batch.starts[self.index], moved])
        home = np.concatenate([self.home, others.home[others.block_of(starts)]])
        later = np.arange(len(first)) >= len(self.index)
        order = np.argsort(first, kind="stable")
        return Rows(np.append(first[order], self.batch.tokens), home[order], self.ranks, later[order])

    @cached_property
    def early(self) -> Bools:
        """bool [lone]: True for those computed while rows arrive, up to that time; the rest run while results leave.
        The longest fitting ones are first, so that all ranks of a group start on the others at about the same time."""
        early, room = np.zeros(len(self.index), bool), np.full(self.ranks, self.come)
        for one in np.argsort(-self.time, kind="stable").tolist():
            rank, time = self.home[one], self.time[one]
            if time <= room[rank]:
                early[one] = True
                room[rank] -= time
        return early

    def placement(self, problem: Problem) -> tuple[Shards, Placement]:
        """The placement of a batch with only lone sequences."""
        starts = problem.batch.starts
        weight = row_weights(problem, starts)
        bound = makespan_bound(weight, problem.speeds)
        return Shards(starts, np.arange(len(weight)), weight, 0), Placement(starts, self.home, weight, bound)


def find_lone(problem: Problem, first: Ints, share: float | Literal["auto"]) -> LoneSequences | None:
    """The lone sequences for groups of consecutive ranks that begin at `first`, int64 [groups + 1]; None if there are
    none.

    share: largest fraction of a rank's time for a lone sequence.
    """
    sizes = problem.batch.lengths
    times = np.maximum(row_times(problem, problem.batch.starts) - _spared_ns(problem, sizes), 1)
    best, lowest_unevenness = None, np.inf
    for most in SHARES if share == "auto" else (share,):
        found, uneven = _find(problem, first, times, sizes, most)
        if found is not None and uneven < lowest_unevenness:
            best, lowest_unevenness = found, uneven
        if lowest_unevenness <= 1:
            break
    return best if share != "auto" or lowest_unevenness <= MOST_UNEVEN else None


def _spared_ns(problem: Problem, rows: Ints) -> Ints:
    """int64, like `rows`: nanoseconds over all layers to pack a rank's own exchanged rows and unpack their results. The
    more lone rows it has, the fewer rows it exchanges."""
    model, moved = problem.model, 0
    for phase in PHASES:
        for side, heads in zip(SIDES, (model.q_heads, model.kv_heads), strict=True):
            moved += 2 * sum(map(model.row_bytes, FETCHED[side, phase]))
            moved += 2 * heads * sum(map(model.sent_result_bytes, RETURNED[side, phase]))
    spent = sum(problem.layers.values()) * 1e3 * problem.cost.moved_us(moved * rows)
    return np.rint(spent).astype(np.int64)


def _find(
    problem: Problem, first: Ints, times: Ints, sizes: Ints, share: float
) -> tuple[LoneSequences | None, float]:
    """The lone sequences, and the unevenness that they leave: at most 1 is even enough."""
    speeds, members = problem.speeds, np.diff(first)
    whole = float(times.sum()) / float(speeds.sum())
    fits = sizes <= TOKENS * float(problem.token_shares.max())
    short = np.flatnonzero((times <= share * whole * float(speeds.max())) & fits)
    order = short[np.argsort(-times[short], kind="stable")]
    slowest = np.minimum.reduceat(speeds, first[:-1])
    rest = float(times.sum() - times[short].sum()) / float((slowest * members).sum())
    base = np.repeat(slowest * rest, members)
    room = np.floor(FILLED * np.minimum(problem.token_shares, problem.token_caps)).astype(np.int64)
    every = len(short) == len(sizes)
    sequences = times[order], sizes[order]
    home, load = core.deal(sequences, first, speeds, base, problem.token_caps if every else room)
    if every and (home < 0).any():
        home, load = core.deal(sequences, first, speeds, base, room)
    order, home = order[home >= 0], home[home >= 0]
    if not len(order):
        return None, np.inf
    back = np.argsort(order)
    index, home = order[back], home[back]
    others = np.setdiff1d(np.arange(len(sizes)), index)
    busiest = np.maximum.reduceat(load / speeds, first[:-1])
    mean = np.add.reduceat(load, first[:-1]) / np.add.reduceat(speeds, first[:-1])
    uneven = float(((busiest - mean) * members).sum()) / (whole * problem.ranks)
    left = np.minimum.reduceat(speeds * whole - (load - base), first[:-1])
    left = np.maximum(left, LEAST_LEFT * whole) / whole
    tokens = problem.token_shares - np.bincount(home, sizes[index], problem.ranks)
    wanted, there = left * members, np.add.reduceat(tokens, first[:-1])
    lacking = np.maximum(wanted / wanted.sum() - there / max(tokens.sum(), 1.0), 0)
    apart = float(lacking.sum() * times[others].sum() / times.sum())
    come = _come(problem, int(sizes[others].sum()) / problem.ranks, int(members.max()))
    lone = LoneSequences(problem.batch, problem.ranks, index, others, home, times[index], left, come)
    return lone, max(uneven / UNEVEN, apart / APART)


def _come(problem: Problem, rows: float, members: int) -> float:
    """Nanoseconds over all layers and both phases to receive a rank's share of rows from the members of its group."""
    moved = sum(
        problem.model.row_bytes(t) for phase in PHASES for side in SIDES for t in FETCHED[side, phase]
    )
    sent = moved * rows * (members - 1) / members
    return UNPACK_FACTOR * sum(problem.layers.values()) * sent / problem.cluster.intra_gbs
