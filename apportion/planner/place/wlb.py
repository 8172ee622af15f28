"""WLB-LLM's adaptive sharding: per packed sequence or per document, whichever is predicted to be faster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from apportion.ir.arrays import Bools, Floats, Ints, group_of
from apportion.ir.masks import bands as band_algebra
from apportion.ir.tensors import PHASES
from apportion.planner.options import Count
from apportion.planner.place.zigzag import deal_evenly
from apportion.planner.problem import Placement, PlacePass, Problem, Shards
from apportion.planner.shard.refusals import refuse_home_ranks

# Largest number of pieces to price; beyond it, only every n-th rank is priced.
PRICED_PIECES = 2**20


@dataclass(frozen=True)
class Wlb(PlacePass):
    """WLB-LLM (OSDI 2025; DistCA, section 3.2): context parallelism per sequence or per document.

    sequence: the packed microbatch is cut zig-zag like one sequence: few, long pieces, but early chunks of long
    documents see fewer keys. document: every document is cut zig-zag: even work, but short pieces. auto: the one with
    the shorter predicted attention time on its busiest rank (forward and backward, all kinds and layers); both gather
    the same KV. Speeds are ignored. chunk: as in `ZigZag`. Raises ConfigError, CapacityError.
    """

    shard: Literal["auto", "sequence", "document"] = "auto"
    chunk: Count = 128
    is_uncapped: ClassVar[bool] = True

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        refuse_home_ranks(problem, "wlb")
        axis = problem.batch.starts
        ranges = {"document": axis, "sequence": axis[[0, -1]]}
        if self.shard != "auto":
            return deal_evenly(problem, ranges[self.shard], "wlb", self.chunk)
        choices = [deal_evenly(problem, cut, "wlb", self.chunk) for cut in ranges.values()]
        return min(choices, key=lambda choice: busiest_us(problem, choice))


def busiest_us(problem: Problem, placement: Placement) -> float:
    """Predicted attention microseconds of the busiest rank, forward and backward, over all layers: a band's part in
    a query block, with all its keys, is one piece for the cost model, however short."""
    time = np.zeros(problem.ranks)
    for kind, bands in problem.bands.items():
        time += problem.layers[kind] * _rank_us(problem, bands, placement)
    return float(time.max())


def _rank_us(problem: Problem, bands: Ints, placement: Placement) -> Floats:
    step = -(-(len(placement.home) + len(bands)) // PRICED_PIECES)
    pieces, block = query_pieces(bands, placement.starts, placement.home % step == 0)
    home = placement.home[block]
    rows, keys = pieces[:, 1] - pieces[:, 0], pieces[:, 3] - pieces[:, 2]
    pairs, model = band_algebra.area(pieces), problem.model
    time = np.zeros(problem.ranks)
    for phase in PHASES:
        piece_us = problem.cost.attention_us(phase, rows, keys, pairs, model.q_heads, model.kv_heads)
        time += np.bincount(home, piece_us, problem.ranks)
    return time


def query_pieces(bands: Ints, starts: Ints, is_priced: Bools) -> tuple[Ints, Ints]:
    """Bands cut by the `is_priced` query blocks, int64 [pieces, 6], without empty ones, and the block of each, int64
    [pieces].

    bands: int64 [bands, 6], global tokens; starts: int64 [blocks + 1]; is_priced: bool [blocks].
    """
    first_block = np.searchsorted(starts, bands[:, 0], "right") - 1
    count = np.maximum(np.searchsorted(starts, bands[:, 1], "left") - first_block, 0)
    band = group_of(count)
    block = np.arange(len(band)) - np.repeat(np.cumsum(count) - count - first_block, count)
    band, block = band[is_priced[block]], block[is_priced[block]]
    pieces = bands[band]
    pieces[:, 0] = np.maximum(pieces[:, 0], starts[block])
    pieces[:, 1] = np.minimum(pieces[:, 1], starts[block + 1])
    pieces = band_algebra.tighten(pieces)
    nonempty = pieces[:, 0] < pieces[:, 1]
    return pieces[nonempty], block[nonempty]
