"""Zig-zag placement: ring attention as in trainers (TransformerEngine's CP, Llama 3's CP; the baselines TE CP and LLaMA
CP of Zeppelin, section 5, and Ring Attention of FCP, section 6.1).

    4 ranks    |  0  |  1  |  2  |     3     |  2  |  1  |  0  |      chunks i and 2N-1-i on rank i
    causal      light ------------------------------------> heavy    each rank has one of each
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from apportion._core import zigzag as core
from apportion.ir.arrays import Ints
from apportion.planner.options import Count
from apportion.planner.problem import Placement, PlacePass, Problem, Shards
from apportion.planner.shard.blocks import row_weights
from apportion.planner.shard.refusals import obey_token_cap, refuse_home_ranks
from apportion.planner.solvers.partition.lpt import makespan_bound


@dataclass(frozen=True)
class ZigZag(PlacePass):
    """Cuts every sequence (or the whole token axis) into 2N chunks; chunks i and 2N-1-i go to rank i.

    chunk: minimum tokens per chunk. A sequence too short for 2N chunks goes to fewer consecutive ranks, those with the
    fewest tokens, in chunks of the minimum. With 1 every sequence goes to all ranks, as in trainers, although kernels
    compute a tile of 128 rows even for the shortest chunk; the number of tasks per sequence grows with N^2. Lengths are
    arbitrary, without padding: a range of L = 2N*q + r tokens from token s gives q to every chunk, and one more to r of
    them, dealt to the ranks s mod N, s mod N + 1, ... in turn, so that over all sequences the ranks' tokens differ by
    at most one. A rank with one extra token adds it to its first or second chunk: the choice alternates from rank to
    rank and from lap to lap (s div N). With two, each chunk gets one. Empty chunks vanish; a rank's adjacent chunks are
    one block. Ignores relative speeds, like trainers, and the cuts of the shards. Raises ConfigError, CapacityError.
    """

    over: Literal["sequence", "batch"] = "sequence"
    chunk: Count = 128
    is_uncapped: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        refuse_home_ranks(problem, "zigzag")
        axis = problem.batch.starts
        return deal_evenly(problem, axis if self.over == "sequence" else axis[[0, -1]], "zigzag", self.chunk)


def deal_evenly(problem: Problem, ranges: Ints, name: str, chunk: int) -> Placement:
    """Cuts every range [ranges[i], ranges[i + 1]) zig-zag over as many ranks as get at least `chunk` tokens in each of
    their two chunks (at least one rank; all ranks if `chunk` is 1). `name` is the calling pass."""
    lengths = np.diff(ranges)
    if chunk == 1:  # uses all ranks, even if some of a short range's chunks are empty
        return finalize(
            problem, *deal(ranges, np.zeros_like(lengths), np.full_like(lengths, problem.ranks)), name
        )
    size = np.clip(lengths // (2 * chunk), 1, problem.ranks)
    first = core.emptiest(lengths, size, problem.ranks)
    return finalize(problem, *deal(ranges, first, size), name)


def finalize(problem: Problem, starts: Ints, home: Ints, name: str, whole: Ints | None = None) -> Placement:
    """The placement of blocks cut by the rule of pass `name`. Its bound is the mean load, since another rule could cut
    differently, or, if greater, the bound of the items never cut (`whole`: int64 [items], their weights). Raises
    CapacityError."""
    obey_token_cap(problem, starts, home, name)
    weight = row_weights(problem, starts)
    mean = float(weight.sum() / problem.speeds.sum())
    bound = mean if whole is None else max(mean, makespan_bound(whole, problem.speeds))
    return Placement(starts, home, weight, bound)


def deal(ranges: Ints, first: Ints, size: Ints) -> tuple[Ints, Ints]:
    """Starts int64 [blocks + 1] and ranks int64 [blocks] of ranges cut zig-zag, each over its own group.

    ranges: int64 [ranges + 1], ascending; first, size: int64 [ranges], the group's first rank and number of ranks. A
    group of one rank keeps its range whole.
    """
    return core.deal(ranges, first, size)
