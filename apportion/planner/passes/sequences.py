"""One block per sequence: for placements that cut by their own rule, or not at all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.planner.passes.shard import row_weights
from apportion.planner.problem import Problem, ShardPass, Shards


@dataclass(frozen=True)
class Sequences(ShardPass):
    """Every sequence is one block and one piece; there are no blocks of one size (`block_tokens` 0)."""

    def __call__(self, problem: Problem) -> Shards:
        starts, lengths = problem.batch.starts, problem.batch.lengths
        return Shards(starts, np.arange(len(lengths)), row_weights(problem, starts), 0)
