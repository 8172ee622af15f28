"""Zig-zag chunks: ring attention as trainers run it (TransformerEngine's CP, Llama 3's CP; the baselines TE CP and
LLaMA CP of Zeppelin, section 5, and Ring Attention of FCP, section 6.1).

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
    """Cut every sequence (or the whole token axis) into 2N chunks; chunks i and 2N-1-i go to rank i.

    chunk: tokens that a chunk has at least. A sequence too short for 2N of them goes, with chunks as short as that, to
    the fewer consecutive ranks that hold the fewest tokens. With 1 every sequence goes to all ranks, as trainers have
    it, whose kernels compute a tile of 128 rows for the shortest chunk; the number of tasks grows with N^2 for each.
    Any length will do, where trainers pad: a range that starts at token s and has L = 2N*q + r tokens gives q to every
    chunk, and one more to r of them, dealt to the ranks s mod N, s mod N + 1, ... in turn, so that over all
    sequences the ranks' tokens differ by at most one. A rank that gets one of them adds it to its first or its second
    chunk, by turns (neighbours differ, and so do laps, s div N); one that gets two, to both. Empty chunks vanish;
    neighbours on one rank are one block. Relative speeds are ignored, as trainers ignore them, and so are the cuts of
    the shards.
    Raises ConfigError, CapacityError.
    """

    over: Literal["sequence", "batch"] = "sequence"
    chunk: Count = 128
    own_cap: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        refuse_home_ranks(problem, "zigzag")
        axis = problem.batch.starts
        return deal_evenly(problem, axis if self.over == "sequence" else axis[[0, -1]], "zigzag", self.chunk)


def deal_evenly(problem: Problem, ranges: Ints, name: str, chunk: int) -> Placement:
    """Every range [ranges[i], ranges[i + 1]) zig-zag over all ranks, or as many as have `chunk` tokens in a chunk;
    `name` is the pass that asks."""
    lengths = np.diff(ranges)
    if chunk == 1:  # all ranks, though some of a short range's chunks are empty
        return placed(
            problem, *deal(ranges, np.zeros_like(lengths), np.full_like(lengths, problem.ranks)), name
        )
    size = np.clip(lengths // (2 * chunk), 1, problem.ranks)
    first = core.emptiest(lengths, size, problem.ranks)
    return placed(problem, *deal(ranges, first, size), name)


def placed(problem: Problem, starts: Ints, home: Ints, name: str, whole: Ints | None = None) -> Placement:
    """The placement of blocks that the pass `name` cut by its rule. Its bound is the mean load, as another rule may cut
    otherwise, or that of the items it never cuts: `whole`, int64 [items], their weights. Raises CapacityError."""
    obey_token_cap(problem, starts, home, name)
    weight = row_weights(problem, starts)
    mean = float(weight.sum() / problem.speeds.sum())
    bound = mean if whole is None else max(mean, makespan_bound(whole, problem.speeds))
    return Placement(starts, home, weight, bound)


def deal(ranges: Ints, first: Ints, size: Ints) -> tuple[Ints, Ints]:
    """Starts int64 [blocks + 1] and ranks int64 [blocks] of ranges that are cut zig-zag, each for its own group.

    ranges: int64 [ranges + 1], rising; first, size: int64 [ranges], the group's first rank and number of ranks. A
    group of one rank leaves its range whole.
    """
    return core.deal(ranges, first, size)
