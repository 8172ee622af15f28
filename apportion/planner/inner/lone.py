"""Lone sequences: whole on one rank, with all heads, while the others are split among groups of ranks.

    group       0                       home rows of each rank
    rank 0      a a b │ x x x x         a .. d: lone sequences, without communication;
    rank 1      c d │ x x x y y         x, y: sequences of the group, each rank has a share of the heads in attention

Splitting heads serves sequences too long for one rank, at a cost to everything that is split: rows are exchanged twice,
and kernels have fewer heads. Lone sequences avoid that, and are computed while rows of the others travel.

A group shares the rest of its work evenly, so its ranks need equal lone work; groups may differ, since the rest is
placed according to the time that each has left.
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

# Candidate upper limits on a lone sequence's share of a rank's time. The first that leaves ranks even enough is used:
# on average a group's busiest rank exceeds the mean by at most MAX_UNEVENNESS of its time, and at most MAX_MISMATCH of
# all work is in groups without enough tokens for it.
SHARES, MAX_UNEVENNESS, MAX_MISMATCH = (0.5, 0.35, 0.25, 0.18, 0.12, 0.08, 0.05, 0.03), 0.004, 0.04
# If no limit leaves ranks even enough, the best may exceed these bounds by this factor; else none are lone.
MAX_INCREASE = 8
# A sequence with more than MAX_TOKENS of a rank's share of the tokens is never lone; a rank's lone sequences take at
# most MAX_FILLED of its share if there are other sequences.
MAX_TOKENS, MAX_FILLED = 0.6, 0.98
# Receiving the other sequences' rows takes the link's time, times this factor for unpacking them.
UNPACK_FACTOR = 1.5
# Minimum for the fraction of a group's time left for other sequences, which are placed in proportion to it.
MIN_LEFT = 1e-3


@dataclass(frozen=True)
class LoneSequences:
    """Lone sequences of a batch. index, others: int64, lone and other sequences; home: int64 [lone], their ranks, below
    `ranks`; time: int64 [lone], nanoseconds over all layers; left: float64 [groups], fraction of each group's time left
    for the others; arrival_ns: time over all layers in which rows of the others arrive."""

    batch: Batch
    ranks: int
    index: Ints
    others: Ints
    home: Ints
    time: Ints
    left: Floats
    arrival_ns: float

    @property
    def is_all(self) -> bool:
        """True if all sequences are lone."""
        return not len(self.others)

    @cached_property
    def lone_batch(self) -> Batch:
        return self.batch.take(self.index)

    @cached_property
    def shared(self) -> Batch:
        return self.batch.take(self.others)

    @cached_property
    def rows(self) -> Rows:
        """Home rows of the lone sequences, from 0 on each rank, on the token axis of `lone_batch`."""
        return Rows(self.lone_batch.starts, self.home, self.ranks)

    def in_groups(self, others: Rows, of_rank: Ints) -> tuple[Ints, Ints]:
        """Blocks of the whole batch: starts int64 [blocks + 1], and the group of each. others: rows of groups; of_rank:
        int64 [ranks], their groups."""
        rows = self.with_others(others)
        assert rows.later is not None
        return rows.starts, np.where(rows.later, rows.home, of_rank[rows.home])

    def with_others(self, others: Rows) -> Rows:
        """Home rows of the whole batch. others: home rows of the other sequences, on the token axis of `shared`; they
        come after the lone rows."""
        starts = np.union1d(others.starts, self.shared.starts)[:-1]
        sequence = np.searchsorted(self.shared.starts, starts, "right") - 1
        shared_starts = self.batch.starts[self.others[sequence]] + starts - self.shared.starts[sequence]
        first = np.concatenate([self.batch.starts[self.index], shared_starts])
        home = np.concatenate([self.home, others.home[others.block_of(starts)]])
        is_shared = np.arange(len(first)) >= len(self.index)
        order = np.argsort(first, kind="stable")
        return Rows(np.append(first[order], self.batch.tokens), home[order], self.ranks, is_shared[order])

    @cached_property
    def early(self) -> Bools:
        """bool [lone]: True for sequences computed while rows arrive, within that time; the rest run while results
        leave. The longest that fit come first, so that all ranks of a group start on the other sequences at about the
        same time."""
        is_early, free_time = np.zeros(len(self.index), bool), np.full(self.ranks, self.arrival_ns)
        for sequence in np.argsort(-self.time, kind="stable").tolist():
            rank, time = self.home[sequence], self.time[sequence]
            if time <= free_time[rank]:
                is_early[sequence] = True
                free_time[rank] -= time
        return is_early

    def placement(self, problem: Problem) -> tuple[Shards, Placement]:
        """The placement of a batch with only lone sequences."""
        starts = problem.batch.starts
        weight = row_weights(problem, starts)
        bound = makespan_bound(weight, problem.speeds)
        return Shards(starts, np.arange(len(weight)), weight, 0), Placement(starts, self.home, weight, bound)


def find_lone(problem: Problem, first: Ints, share: float | Literal["auto"]) -> LoneSequences | None:
    """The lone sequences for groups of consecutive ranks that begin at `first`, int64 [groups + 1]; None if there are
    none.

    share: largest fraction of a rank's time for a lone sequence; "auto": one of `SHARES`.
    """
    sizes = problem.batch.lengths
    times = np.maximum(row_times(problem, problem.batch.starts) - _saved_ns(problem, sizes), 1)
    best, lowest_unevenness = None, np.inf
    for limit in SHARES if share == "auto" else (share,):
        candidate, unevenness = _find(problem, first, times, sizes, limit)
        if candidate is not None and unevenness < lowest_unevenness:
            best, lowest_unevenness = candidate, unevenness
        if lowest_unevenness <= 1:
            break
    return best if share != "auto" or lowest_unevenness <= MAX_INCREASE else None


def _saved_ns(problem: Problem, rows: Ints) -> Ints:
    """int64 [sequences]: nanoseconds saved over all layers if a sequence of `rows` rows is lone: its rank need not pack
    that many rows for the exchange, nor unpack their results."""
    model, row_bytes = problem.model, 0
    for phase in PHASES:
        for side, heads in zip(SIDES, (model.q_heads, model.kv_heads), strict=True):
            row_bytes += 2 * sum(map(model.row_bytes, FETCHED[side, phase]))
            row_bytes += 2 * heads * sum(map(model.sent_result_bytes, RETURNED[side, phase]))
    time_ns = sum(problem.layers.values()) * 1e3 * problem.cost.moved_us(row_bytes * rows)
    return np.rint(time_ns).astype(np.int64)


def _find(
    problem: Problem, first: Ints, times: Ints, sizes: Ints, share: float
) -> tuple[LoneSequences | None, float]:
    """The lone sequences, and the unevenness that they leave, relative to the limit."""
    speeds, members = problem.speeds, np.diff(first)
    whole = float(times.sum()) / float(speeds.sum())
    is_small = sizes <= MAX_TOKENS * float(problem.token_shares.max())
    candidates = np.flatnonzero((times <= share * whole * float(speeds.max())) & is_small)
    order = candidates[np.argsort(-times[candidates], kind="stable")]
    slowest = np.minimum.reduceat(speeds, first[:-1])
    rest_time = float(times.sum() - times[candidates].sum()) / float((slowest * members).sum())
    base = np.repeat(slowest * rest_time, members)
    row_limit = np.floor(MAX_FILLED * np.minimum(problem.token_shares, problem.token_caps)).astype(np.int64)
    is_all = len(candidates) == len(sizes)
    sequences = times[order], sizes[order]
    home, load = core.deal(sequences, first, speeds, base, problem.token_caps if is_all else row_limit)
    if is_all and (home < 0).any():
        home, load = core.deal(sequences, first, speeds, base, row_limit)
    order, home = order[home >= 0], home[home >= 0]
    if not len(order):
        return None, np.inf
    rank_order = np.argsort(order)
    index, home = order[rank_order], home[rank_order]
    others = np.setdiff1d(np.arange(len(sizes)), index)
    busiest = np.maximum.reduceat(load / speeds, first[:-1])
    mean = np.add.reduceat(load, first[:-1]) / np.add.reduceat(speeds, first[:-1])
    unevenness = float(((busiest - mean) * members).sum()) / (whole * problem.ranks)
    free = np.minimum.reduceat(speeds * whole - (load - base), first[:-1])
    free = np.maximum(free, MIN_LEFT * whole) / whole
    tokens = problem.token_shares - np.bincount(home, sizes[index], problem.ranks)
    time_share, token_counts = free * members, np.add.reduceat(tokens, first[:-1])
    shortage = np.maximum(time_share / time_share.sum() - token_counts / max(tokens.sum(), 1.0), 0)
    mismatch = float(shortage.sum() * times[others].sum() / times.sum())
    arrival_ns = _arrival_ns(problem, int(sizes[others].sum()) / problem.ranks, int(members.max()))
    lone = LoneSequences(problem.batch, problem.ranks, index, others, home, times[index], free, arrival_ns)
    return lone, max(unevenness / MAX_UNEVENNESS, mismatch / MAX_MISMATCH)


def _arrival_ns(problem: Problem, rows: float, members: int) -> float:
    """Nanoseconds over all layers and both phases to receive a rank's share of rows from the members of its group."""
    row_bytes = sum(
        problem.model.row_bytes(t) for phase in PHASES for side in SIDES for t in FETCHED[side, phase]
    )
    sent = row_bytes * rows * (members - 1) / members
    return UNPACK_FACTOR * sum(problem.layers.values()) * sent / problem.cluster.intra_gbs
