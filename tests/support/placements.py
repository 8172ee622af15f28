"""Masks and planning problems of the tests of placements."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import apportion as ap
from apportion.ir.request.model import Model
from apportion.planner.problem import Placement, Problem
from apportion.planner.shard.sequences import Sequences

MODEL = ap.Model(q_heads=4, kv_heads=2, head_dim=8, dtype="fp32", hidden=32, ffn=64, layers=1)
RECIPE = ap.Recipe("test", {"shard": {"sequences": {}}})
MASKS = {
    "causal": ap.masks.causal(),
    "full": ap.masks.full(),
    "window": ap.masks.sliding_window(7),
    "two-sided": ap.masks.sliding_window(4, 3),
    "sink": ap.masks.sink_window(2, 6),
    "chunked": ap.masks.chunked(9),
    "video": ap.masks.block_causal(5, 2),
    "blockwise": ap.masks.causal_blockwise(6, 2),
    "prefix": ap.masks.prefix_lm(4),
}


def problem(
    lengths: NDArray[Any] | list[int],
    ranks: int,
    mask: Any = None,
    *,
    token_cap: int | None = None,
    speeds: tuple[float, ...] | None = None,
    home_ranks: Any = None,
    model: Model = MODEL,
    nodes: int = 1,
) -> Problem:
    batch = ap.Batch.from_lengths(lengths, mask=mask, home_ranks=home_ranks)
    cluster = ap.Cluster(nodes, ranks // nodes, speeds=speeds)
    return Problem(batch, cluster, model, ap.Policy(RECIPE, token_cap=token_cap))


def place(placer: Any, made: Problem) -> Placement:
    return placer(made, Sequences()(made))


def owners(placement: Placement) -> NDArray[Any]:
    """The rank of every token."""
    return np.repeat(placement.home, placement.lengths)


def tokens(placement: Placement, ranks: int) -> NDArray[Any]:
    return placement.rank_sums(placement.lengths, ranks)


def work(placement: Placement, ranks: int) -> NDArray[Any]:
    return placement.rank_sums(placement.weight, ranks)
