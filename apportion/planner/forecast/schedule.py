"""Pipeline schedules: 1F1B and interleaved 1F1B (Megatron-LM: Narayanan et al., 2021) over microbatches of different
durations.

    stage 0   F0 F1 F2 F3 .  .  B0 F4 B1 ..        warm-up, one forward one backward, drain
    stage 1   .  F0 F1 F2 .  B0 F3 B1 F4 ..

Each stage runs its list in order; an item starts after the previous one in its list, and `hop_us` after its input is
complete on the neighbouring stage.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Floats


class Item(NamedTuple):
    """A unit of work of a stage: a chunk of layers of a microbatch, forward or backward."""

    backward: bool
    chunk: int
    microbatch: int


def orders(stages: int, microbatches: int, virtual: int = 1) -> list[list[Item]]:
    """The items of each stage in order. Interleaved stages process their chunks in groups of `stages` microbatches;
    their warm-up has two items for each later stage, and one group for each chunk but the last."""
    return [_order(stage, stages, microbatches, virtual) for stage in range(stages)]


def _order(stage: int, stages: int, microbatches: int, virtual: int) -> list[Item]:
    forwards = _ordered_items(stages, microbatches, virtual, backward=False)
    backwards = _ordered_items(stages, microbatches, virtual, backward=True)
    later_stages = stages - 1 - stage
    lead = later_stages if virtual == 1 else 2 * later_stages + (virtual - 1) * stages
    lead = min(lead, len(forwards))
    steady = [item for pair in zip(forwards[lead:], backwards, strict=False) for item in pair]
    return forwards[:lead] + steady + backwards[len(forwards) - lead :]


def _ordered_items(stages: int, microbatches: int, virtual: int, backward: bool) -> list[Item]:
    group = stages if virtual > 1 else microbatches
    chunks = range(virtual - 1, -1, -1) if backward else range(virtual)
    return [
        Item(backward, chunk, microbatch)
        for first in range(0, microbatches, group)
        for chunk in chunks
        for microbatch in range(first, min(first + group, microbatches))
    ]


def makespan_us(forward_us: Floats, backward_us: Floats, virtual: int = 1, hop_us: float = 0.0) -> float:
    """Time until all stages are done. forward_us, backward_us: float64 [stages, microbatches], each for all chunks of a
    stage together; hop_us: time from one stage to the next."""
    stages, microbatches = forward_us.shape
    stage_orders = orders(stages, microbatches, virtual)
    ends = np.full((2, stages * virtual, microbatches), -1.0)
    position, clock = [0] * stages, [0.0] * stages
    while any(position[stage] < len(stage_orders[stage]) for stage in range(stages)):
        has_moved = False
        for stage in range(stages):
            while position[stage] < len(stage_orders[stage]):
                item = stage_orders[stage][position[stage]]
                index = item.chunk * stages + stage
                ready = _ready(ends, item, index, hop_us)
                if ready < 0:
                    break
                duration = (backward_us if item.backward else forward_us)[stage, item.microbatch] / virtual
                clock[stage] = max(clock[stage], ready) + duration
                ends[int(item.backward), index, item.microbatch] = clock[stage]
                position[stage], has_moved = position[stage] + 1, True
        if not has_moved:
            raise AssertionError("the stages wait for each other")  # cannot happen with the lists of `orders`
    return max(clock)


def _ready(ends: Floats, item: Item, index: int, hop_us: float) -> float:
    """Time at which an item's input has arrived; negative if not yet known."""
    if not item.backward:
        return 0.0 if index == 0 else _arrival(ends[0, index - 1, item.microbatch], hop_us)
    if index == ends.shape[1] - 1:
        return float(ends[0, index, item.microbatch])
    return _arrival(ends[1, index + 1, item.microbatch], hop_us)


def _arrival(time: float, hop_us: float) -> float:
    return float(time + hop_us) if time >= 0 else -1.0
