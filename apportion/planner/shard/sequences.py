"""Load-independent blocks: one per sequence, for placements that cut by their own rule or not at all; or equal chunks
of the token axis, independent of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.planner.options import Count
from apportion.planner.problem import Problem, ShardPass, Shards
from apportion.planner.shard.blocks import row_weights
from apportion.planner.shard.refusals import refuse_home_ranks


@dataclass(frozen=True)
class Sequences(ShardPass):
    """Makes every sequence one block and one piece; there is no block size (`block_tokens` 0)."""

    def __call__(self, problem: Problem) -> Shards:
        starts, lengths = problem.batch.starts, problem.batch.lengths
        return Shards(starts, np.arange(len(lengths)), row_weights(problem, starts), 0)


@dataclass(frozen=True)
class Chunks(ShardPass):
    """Cuts the token axis into chunks of `size` tokens, each a piece, the last one possibly shorter (MagiAttention's
    dispatch). Chunks are smaller if a rank's share is not a multiple of `size`: the share over the fewest chunks
    that hold it, rounded down. Raises ConfigError."""

    size: Count = 4096

    def __call__(self, problem: Problem) -> Shards:
        refuse_home_ranks(problem, "chunks")
        share = max(problem.batch.tokens // problem.ranks, 1)
        size = max(1, share // max(1, -(-share // self.size)))
        starts = np.append(np.arange(0, problem.batch.tokens, size), problem.batch.tokens)
        return Shards(starts, np.arange(len(starts) - 1), row_weights(problem, starts), size)
