"""The order of a program's steps: when rounds start, when they are waited for, and what is computed in between.

    forward    start, ..                | local tasks | wait, start what may | tasks of that round | start what may | ..
    backward   the same, and after each stage: start the returns whose rows are complete, wait for those of earlier
               stages and add them

A round may start when the rounds that bring its relays have arrived and the buffers allow it. All ranks share the
order, so launches rise everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import Op
from apportion.planner.passes.assemble import Assembler
from apportion.planner.passes.schedule import Schedule

Ints = NDArray[np.integer[Any]]


@dataclass
class Fetches:
    """Positions of the steps that fetch tiles and compute with them. launch, wait: int64 [rounds]; stage: [1 + rounds],
    the one before all rounds first."""

    asm: Assembler
    schedule: Schedule
    channel: int
    launch: Ints = field(init=False)
    wait: Ints = field(init=False)
    stage: Ints = field(init=False)

    def __post_init__(self) -> None:
        rounds = self.schedule.rounds
        self.launch, self.wait = np.full((2, rounds), -1, np.int64)
        self.stage = np.full(rounds + 1, -1, np.int64)
        self._ends = [*self.schedule.when.tolist(), 2**62]

    def start(self, arrived: int, used: int) -> None:
        """Launch every round that may go when `arrived` rounds are waited for and the first `used` are used up."""
        limit = self._ends[used] + self.schedule.buffers
        for round_ in np.flatnonzero(self.launch < 0).tolist():
            if self._ends[round_] >= limit:
                return
            if self.schedule.after[round_] < arrived:
                self.launch[round_] = self.asm.launch(self.channel + int(self.schedule.channel[round_]))

    def take(self, round_: int) -> None:
        """Wait for a round."""
        self.wait[round_] = self.asm.wait(int(self.launch[round_]))
        self.start(round_ + 1, round_)

    def compute(self, stage: int, op: Op) -> None:
        """The tasks of a stage."""
        self.stage[stage] = self.asm.step(op)


def forward_script(asm: Assembler, schedule: Schedule) -> Fetches:
    """Append the steps of the forward between exchanges."""
    fetches = Fetches(asm, schedule, channel=0)
    fetches.start(0, 0)
    fetches.compute(0, Op.ATTEND)
    for round_ in range(schedule.rounds):
        fetches.take(round_)
        fetches.compute(round_ + 1, Op.ATTEND)
        fetches.start(round_ + 1, round_ + 1)
    return fetches


@dataclass
class Returns:
    """Positions of the steps that bring gradients home: launch, wait, add int64 [rounds]; clear: before the stage that
    first writes the gradients of a round's tiles."""

    asm: Assembler
    schedule: Schedule
    channel: int
    clear: Ints = field(init=False)
    launch: Ints = field(init=False)
    wait: Ints = field(init=False)
    add: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.clear, self.launch, self.wait, self.add = np.full((4, self.schedule.rounds), -1, np.int64)
        self.started = np.full(self.schedule.rounds, -1, np.int64)
        self._needs, self._ready_at = _needs(self.schedule)

    def start(self, computed: int) -> None:
        """Launch the returns of the first `computed` rounds that have all they add up."""
        for round_ in np.flatnonzero(self.launch[:computed] < 0).tolist():
            if all(self.add[need] >= 0 for need in self._needs[round_]):
                self.launch[round_] = self.asm.launch(self.channel + int(self.schedule.channel[round_]))
                self.started[round_] = computed

    def take(self, rounds: list[int], computed: int) -> None:
        """Wait for these returns and add them, where the rows that they are added to have been opened."""
        for round_ in rounds:
            if self.add[round_] < 0 and self._ready_at[round_] < computed:
                self.wait[round_] = self.asm.wait(int(self.launch[round_]))
                self.add[round_] = self.asm.step(Op.ADD)

    def before(self, stage: int) -> list[int]:
        """Returns that have started in that stage or earlier and are not added yet."""
        return [int(r) for r in np.flatnonzero((self.launch >= 0) & (self.add < 0) & (self.started <= stage))]


def backward_script(asm: Assembler, schedule: Schedule) -> tuple[Fetches, Returns]:
    """Append the steps of the backward between exchanges.

    Returns are waited for some stages after they started, or every rank would wait for the slowest at every stage:
    one stage less than there are buffers, and one more for each level of relays."""
    channels = 1 + int(schedule.channel.max(initial=0))
    behind = max(1, schedule.buffers - 1) + channels - 1
    fetches, returns = Fetches(asm, schedule, channel=0), Returns(asm, schedule, channel=channels)
    fetches.start(0, 0)
    fetches.compute(0, Op.ATTEND_GRAD)
    for round_ in range(schedule.rounds):
        fetches.take(round_)
        returns.clear[round_] = asm.step(Op.CLEAR)
        fetches.compute(round_ + 1, Op.ATTEND_GRAD)
        returns.start(round_ + 1)
        fetches.start(round_ + 1, round_ + 1)
        returns.take(returns.before(round_ + 1 - behind), round_ + 1)
        returns.start(round_ + 1)
    while waiting := returns.before(schedule.rounds):
        returns.take(waiting, schedule.rounds)
        returns.start(schedule.rounds)
    return fetches, returns


def _needs(schedule: Schedule) -> tuple[list[set[int]], list[int]]:
    """For each round: the rounds whose returns its own adds up; and the last round that opens rows it is added to."""
    needs: list[set[int]] = [set() for _ in range(schedule.rounds)]
    ready = [-1] * schedule.rounds
    parent, round_ = schedule.edges.parent, schedule.round
    relays = np.flatnonzero(parent >= 0)
    pairs = np.unique(np.stack([round_[parent[relays]], round_[relays]]), axis=1).T.tolist()
    for earlier, later in pairs:
        if schedule.routed.carry:  # the tile's gradient goes on to the next rank, and is added there
            needs[later].add(earlier)
            ready[earlier] = max(ready[earlier], later)
        else:
            needs[earlier].add(later)
            ready[later] = max(ready[later], earlier)
    return needs, ready
