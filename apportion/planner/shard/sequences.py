"""Blocks that do not depend on loads: one a sequence, for placements that cut by their own rule or not at all; equal
chunks of the token axis, wherever sequences begin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.planner.options import Count
from apportion.planner.problem import Problem, ShardPass, Shards
from apportion.planner.shard.blocks import row_weights
from apportion.planner.shard.refusals import refuse_home_ranks


@dataclass(frozen=True)
class Sequences(ShardPass):
    """Every sequence is one block and one piece; there are no blocks of one size (`block_tokens` 0)."""

    def __call__(self, problem: Problem) -> Shards:
        starts, lengths = problem.batch.starts, problem.batch.lengths
        return Shards(starts, np.arange(len(lengths)), row_weights(problem, starts), 0)


@dataclass(frozen=True)
class Chunks(ShardPass):
    """The token axis in chunks of `size` tokens, each a piece, the last one maybe shorter (MagiAttention's dispatch).
    Smaller where ranks would otherwise not have as many chunks as tokens: the largest number of tokens that divides
    their share into whole chunks. Raises ConfigError."""

    size: Count = 4096

    def __call__(self, problem: Problem) -> Shards:
        refuse_home_ranks(problem, "chunks")
        share = max(problem.batch.tokens // problem.ranks, 1)
        size = max(1, share // max(1, -(-share // self.size)))
        starts = np.append(np.arange(0, problem.batch.tokens, size), problem.batch.tokens)
        return Shards(starts, np.arange(len(starts) - 1), row_weights(problem, starts), size)
