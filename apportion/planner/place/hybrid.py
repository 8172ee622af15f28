"""Hybrid data and context parallelism: the number of ranks of a sequence depends on its length.

long      |0|1|2|  3  |2|1|0|           a group of consecutive ranks, zig-zag
shorter                      |4| 5 |4|
short                                |6|7|5|6|     whole, on the least loaded ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.planner.options import Count
from apportion.planner.place.whole import spread
from apportion.planner.place.zigzag import deal, finalize
from apportion.planner.problem import Placement, PlacePass, Problem, Shards
from apportion.planner.shard.blocks import row_weights
from apportion.planner.shard.refusals import refuse_home_ranks
from apportion.planner.solvers.contracts import PartitionProblem
from apportion.planner.solvers.use import PartitionSolver


@dataclass(frozen=True)
class HybridDp(PlacePass):
    """ByteScale's hybrid data parallelism (SIGCOMM 2025), the baseline Hybrid DP of Zeppelin, section 5.

    A sequence of L tokens gets ceil(L / capacity) ranks. Those with several, longest first, are cut zig-zag over the
    consecutive ranks with the least work; others stay whole, placed by LPT on work over speed (see `Whole`). capacity:
    tokens per rank, default the mean rounded up. solver: of kind partition. Raises ConfigError, CapacityError.
    """

    capacity: Count | None = None
    solver: PartitionSolver = PartitionSolver("lpt")
    is_uncapped: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        refuse_home_ranks(problem, "hybrid_dp")
        axis, lengths = problem.batch.starts, problem.batch.lengths
        size = _ranks_needed(problem, self.capacity, problem.ranks)
        weight = row_weights(problem, axis)
        first, load, tokens = _windows(problem, size, weight)
        is_single = size == 1
        first[is_single] = spread(problem, weight[is_single], lengths[is_single], load, tokens, self.solver)
        return finalize(problem, *deal(axis, first, size), "hybrid_dp", weight[is_single])


@dataclass(frozen=True)
class MegatronHybrid(PlacePass):
    """Hybrid context parallelism of Megatron-Core (its class BalancedCPScheduler).

    A sequence gets L / capacity ranks, rounded up to a power of two within the cluster, and is priced at L^2 / ranks
    regardless of its mask. In each turn the ranks are divided into aligned groups, largest first: all sequences of a
    group size go to the groups of this size that the turn has room for, each to the cheapest; a size without a group
    waits for the next turn. Idle ranks of a turn widen its smallest groups. Not implemented: ending a turn early once
    it is balanced, and taking back its last sequence. Speeds are ignored. capacity: tokens per rank, default the mean
    rounded up. Raises ConfigError, CapacityError.
    """

    capacity: Count | None = None
    solver: PartitionSolver = PartitionSolver("lpt")
    is_uncapped: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        refuse_home_ranks(problem, "megatron_hybrid")
        counts = _ranks_needed(problem, self.capacity, 1 << problem.ranks.bit_length() - 1)
        sizes = np.int64(1) << np.frexp(counts - 1)[1].astype(np.int64)
        first, size = _turn_groups(problem.batch.lengths, sizes, problem.ranks, self.solver)
        return finalize(problem, *deal(problem.batch.starts, first, size), "megatron_hybrid")


def _ranks_needed(problem: Problem, capacity: int | None, limit: int) -> Ints:
    """int64 [sequences]: number of ranks needed at `capacity` tokens each, at most `limit`. Raises CapacityError if an
    explicit capacity needs more."""
    lengths = problem.batch.lengths
    counts = -(-lengths // (capacity or -(-problem.batch.tokens // problem.ranks)))
    longest = int(lengths.argmax())
    if capacity is not None and counts[longest] > limit:
        raise CapacityError(
            f"sequence {longest} has {lengths[longest]} tokens and needs {counts[longest]} ranks of {capacity} tokens, "
            f"but the largest group has {limit} of {problem.ranks} ranks: raise capacity to at least "
            f"{-(-lengths[longest] // limit)} or leave it out, or use more ranks"
        )
    return np.minimum(counts, limit)


def _windows(problem: Problem, size: Ints, weight: Ints) -> tuple[Ints, Ints, Ints]:
    """First rank of each sequence with several ranks; and the pairs and tokens that these sequences add to each
    rank."""
    lengths, ranks = problem.batch.lengths, problem.ranks
    first = np.zeros(len(size), np.int64)
    load, tokens = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    split = np.flatnonzero(size > 1)
    for sequence in split[np.lexsort((split, -lengths[split]))].tolist():
        group = int(size[sequence])
        time = np.concatenate([[0.0], np.cumsum(load / problem.speeds)])
        rank = int(np.argmin(time[group:] - time[:-group]))
        first[sequence] = rank
        load[rank : rank + group] += weight[sequence] // group
        tokens[rank : rank + group] += -(-lengths[sequence] // group)
    return first, load, tokens


def _turn_groups(lengths: Ints, requested: Ints, ranks: int, solver: PartitionSolver) -> tuple[Ints, Ints]:
    """First rank and number of ranks of each sequence's group. Each turn serves at least one size, so turns are few."""
    first, size = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    pending = np.unique(requested)[::-1].tolist()
    while pending:
        free, group = ranks, np.full(len(lengths), -1, np.int64)
        groups: list[int] = []
        for degree in pending:
            members = np.flatnonzero(requested == degree)
            count = min(len(members), free // degree)
            if count:
                group[members] = len(groups) + _assign_cheapest(lengths[members], count, solver)
                groups += [degree] * count
                free -= degree * count
        served = set(groups)
        pending = [degree for degree in pending if degree not in served]
        widths = _widen_groups(groups, ranks)
        is_set = group >= 0
        size[is_set], first[is_set] = widths[group[is_set]], _aligned_first_ranks(widths)[group[is_set]]
    return first, size


def _assign_cheapest(lengths: Ints, groups: int, solver: PartitionSolver) -> Ints:
    """The group of each sequence; all groups have the same size, so that L^2 is the price."""
    return solver(PartitionProblem(lengths**2, lengths, np.full(groups, lengths.sum()))).bin


def _widen_groups(groups: list[int], ranks: int) -> Ints:
    """Group sizes after idle ranks have repeatedly doubled the smallest group, the first among equals."""
    widths = list(groups)
    while True:
        smallest = min(widths)
        gain = min(2 * smallest, ranks) - smallest
        if gain == 0 or sum(widths) + gain > ranks:
            return np.array(widths, np.int64)
        widths[widths.index(smallest)] += gain


def _aligned_first_ranks(widths: Ints) -> Ints:
    """First ranks, larger groups first, so that every group whose size is a power of two starts at a multiple of it."""
    order = np.argsort(-widths, kind="stable")
    first = np.empty(len(widths), np.int64)
    first[order] = np.cumsum(widths[order]) - widths[order]
    return first
