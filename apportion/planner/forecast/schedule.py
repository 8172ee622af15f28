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
    their warm-up has twice the number of stages behind them, and a group for each chunk but the last."""
    return [_order(stage, stages, microbatches, virtual) for stage in range(stages)]


def _order(stage: int, stages: int, microbatches: int, virtual: int) -> list[Item]:
    forwards = _ordered_items(stages, microbatches, virtual, backward=False)
    backwards = _ordered_items(stages, microbatches, virtual, backward=True)
    behind = stages - 1 - stage
    ahead = behind if virtual == 1 else 2 * behind + (virtual - 1) * stages
    ahead = min(ahead, len(forwards))
    steady = [item for pair in zip(forwards[ahead:], backwards, strict=False) for item in pair]
    return forwards[:ahead] + steady + backwards[len(forwards) - ahead :]


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
    """End time of the last stage. forward_us, backward_us: float64 [stages, microbatches], of all chunks of a stage
    together; hop_us: from a stage to the next."""
    stages, microbatches = forward_us.shape
    lists = orders(stages, microbatches, virtual)
    done = np.full((2, stages * virtual, microbatches), -1.0)
    at, clock = [0] * stages, [0.0] * stages
    while any(at[stage] < len(lists[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            while at[stage] < len(lists[stage]):
                item = lists[stage][at[stage]]
                place = item.chunk * stages + stage
                ready = _ready(done, item, place, hop_us)
                if ready < 0:
                    break
                took = (backward_us if item.backward else forward_us)[stage, item.microbatch] / virtual
                clock[stage] = max(clock[stage], ready) + took
                done[int(item.backward), place, item.microbatch] = clock[stage]
                at[stage], moved = at[stage] + 1, True
        if not moved:
            raise AssertionError("the stages wait for each other")  # cannot happen for orders of `orders`
    return max(clock)


def _ready(done: Floats, item: Item, place: int, hop_us: float) -> float:
    """Time at which an item's input has arrived; negative if not yet known."""
    if not item.backward:
        return 0.0 if place == 0 else _later(done[0, place - 1, item.microbatch], hop_us)
    if place == done.shape[1] - 1:
        return float(done[0, place, item.microbatch])
    return _later(done[1, place + 1, item.microbatch], hop_us)


def _later(time: float, hop_us: float) -> float:
    return float(time + hop_us) if time >= 0 else -1.0
