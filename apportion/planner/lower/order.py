"""The order of a program's steps: when rounds start, when they are waited for, and what is computed in between.

    forward    start, ..                | local tasks | wait, start what may | tasks of that round | start what may | ..
    backward   the same, and after each stage: start the returns whose rows are complete, wait for those of earlier
               stages and add them; so does a forward whose queries leave home, for their results

Rows that one tile's tasks compute alone go home as results, in rounds of their own, and nothing is added there.

A round may start when the rounds that bring its relays have arrived and the buffers allow it. All ranks share the
order, so launches rise everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.isa import P2P, RESULTS, Op
from apportion.planner.lower.assemble import Assembler
from apportion.planner.schedule.rounds import Schedule


@dataclass(frozen=True)
class Fetches:
    """Positions of the steps that fetch tiles and compute with them. launch, wait: int64 [rounds]; stage: [stages of
    the schedule]."""

    launch: Ints
    wait: Ints
    stage: Ints


@dataclass(frozen=True)
class Returns:
    """Positions of the steps that bring `batches` of results or gradients home: launch, wait, add int64 [batches],
    `add` that of the wait where nothing is added; clear: int64 [rounds], before the stage that first writes those of a
    round's tiles."""

    batches: Batches
    clear: Ints
    launch: Ints
    wait: Ints
    add: Ints


class Between(Protocol):
    """Appends steps after the first stage, and before the last."""

    def first(self) -> None: ...

    def last(self) -> None: ...


@dataclass(frozen=True)
class Batches:
    """What tiles' tasks add up goes back in batches: batch int32 [edges], of the edges that return anything (-1: none);
    those of one batch came in one round and are complete after the stage of one round, int64 [batches] each, and go as
    `results`, bool [batches], or are added up. channel: int64 [batches], among those of returns; None: as its round's
    among those that fetch."""

    batch: Ints
    round: Ints
    complete: Ints
    results: Bools
    channel: Ints | None = None

    @staticmethod
    def of(round_: Ints, complete: Ints, returning: Bools, results: Bools) -> Batches:
        """round_, complete: int32 [edges]; returning, results: bool [edges]."""
        rounds = int(round_.max(initial=0)) + 1
        place = complete[returning] * np.int64(rounds) + round_[returning]
        keys, number = np.unique(2 * place + results[returning], return_inverse=True)
        batch = np.full(len(round_), -1, np.int32)
        batch[returning] = number
        complete, round_ = np.divmod(keys >> 1, rounds)
        return Batches(batch, round_, complete, keys & 1 == 1)

    @staticmethod
    def of_rounds(schedule: Schedule) -> Batches:
        """What came in a round goes back together, where it goes on one channel."""
        rounds = np.arange(schedule.rounds)
        if schedule.back is None:
            return Batches(schedule.round, rounds, rounds, np.zeros(len(rounds), bool))
        channels = 1 + int(schedule.back.max(initial=0))
        keys, batch = np.unique(channels * schedule.round + schedule.back, return_inverse=True)
        rounds, channel = np.divmod(keys, channels)
        return Batches(batch.astype(np.int32), rounds, rounds, np.zeros(len(rounds), bool), channel)

    @staticmethod
    def none(edges: int) -> Batches:
        """Nothing goes back."""
        none = np.zeros(0, np.int64)
        return Batches(np.full(edges, -1, np.int32), none, none, none > 0)

    def __len__(self) -> int:
        return len(self.round)


def append_steps(
    asm: Assembler,
    schedule: Schedule,
    compute: Op,
    combine: Op,
    batches: Batches,
    between: Between | None = None,
) -> tuple[Fetches, Returns]:
    """Append the steps between exchanges; compute: the op of the tasks; combine: that of what comes back; between: what
    exchanges do meanwhile.

    Returns are waited for some stages after they started, or every rank would wait for the slowest at every stage:
    one stage less than there are buffers, and one more for each level of relays: not around an inner ring, where the
    next rank waits for each."""
    channels = 1 + int(schedule.channel.max(initial=0))
    behind = max(1, schedule.buffers - 1) + (channels - 1 if schedule.back is None else 0)
    fetching, returning = _Fetching(asm, schedule), _Returning(asm, schedule, channels, combine, batches)
    fetching.compute(compute)
    if between is not None:
        between.first()
    for _ in range(schedule.leads - 1):
        fetching.compute(compute)
    for round_ in range(schedule.rounds):
        fetching.take(round_)
        returning.open(round_)
        fetching.compute(compute)
        returning.start(round_ + 1)
        fetching.start(round_ + 1, round_ + 1)
        returning.take(round_ + 1 - behind, round_ + 1)
        returning.start(round_ + 1)
    for left in range(schedule.tails, 0, -1):
        if left == 1 and between is not None:
            between.last()
        fetching.compute(compute)
        if left <= schedule.levels:
            returning.take(schedule.rounds, schedule.rounds)
            returning.start(schedule.rounds)
    while returning.under_way:
        returning.take(schedule.rounds, schedule.rounds)
        returning.start(schedule.rounds)
    return fetching.positions, returning.positions


class _Fetching:
    """Builds the steps of `Fetches`."""

    def __init__(self, asm: Assembler, schedule: Schedule) -> None:
        self._asm, self._buffers, self._after = asm, schedule.buffers, schedule.after
        self._when, self._channel = [*schedule.when.tolist(), 2**62], schedule.channel.tolist()
        self._waiting = list(range(schedule.rounds))
        self._launch, self._wait = [-1] * schedule.rounds, [-1] * schedule.rounds
        self._stage: list[int] = []
        self.start(0, 0)

    def start(self, arrived: int, used: int) -> None:
        """Launch every round that may go when `arrived` rounds are waited for and the first `used` are used up."""
        limit, left = self._when[used] + self._buffers, []
        for index, round_ in enumerate(self._waiting):
            if self._when[round_] >= limit:
                left += self._waiting[index:]
                break
            if self._after[round_] < arrived:
                self._launch[round_] = self._asm.launch(self._channel[round_])
            else:
                left.append(round_)
        self._waiting = left

    def take(self, round_: int) -> None:
        """Wait for a round."""
        self._wait[round_] = self._asm.wait(self._launch[round_])
        self.start(round_ + 1, round_)

    def compute(self, op: Op) -> None:
        """The tasks of the next stage."""
        self._stage.append(self._asm.step(op))

    @property
    def positions(self) -> Fetches:
        return Fetches(*(np.array(steps, np.int64) for steps in (self._launch, self._wait, self._stage)))


class _Returning:
    """Builds the steps of `Returns`."""

    def __init__(
        self, asm: Assembler, schedule: Schedule, channel: int, combine: Op, batches: Batches
    ) -> None:
        self._asm, self._combine, self._batches = asm, combine, batches
        own = schedule.channel[batches.round] if batches.channel is None else batches.channel
        self._channel = (channel + own).tolist()
        self._complete, self._results = batches.complete.tolist(), batches.results.tolist()
        self._clear = [-1] * schedule.rounds
        self._launch, self._wait, self._add = ([-1] * len(batches) for _ in range(3))
        self._needs, self._opened = _needs(schedule, batches)
        self._waiting = list(range(len(batches)))
        self.under_way: list[tuple[int, int]] = []  # (batch, stage in which its return started)

    def open(self, round_: int) -> None:
        """What the round's tiles add up begins at nothing."""
        if self._complete:
            self._clear[round_] = self._asm.step(Op.CLEAR)

    def start(self, computed: int) -> None:
        """Launch the batches complete in the first `computed` rounds that have all they add up."""
        for batch in [some for some in self._waiting if self._complete[some] < computed]:
            if all(self._add[need] >= 0 for need in self._needs[batch]):
                mode = RESULTS if self._results[batch] else P2P
                self._launch[batch] = self._asm.launch(self._channel[batch], mode)
                self._waiting.remove(batch)
                self.under_way.append((batch, computed))

    def take(self, started: int, computed: int) -> None:
        """Wait for the batches that had started by that stage and add them, where rows to add them to are open."""
        for batch, stage in sorted(self.under_way):
            if stage <= started and self._opened[batch] < computed:
                self._wait[batch] = wait = self._asm.wait(self._launch[batch])
                self._add[batch] = wait if self._results[batch] else self._asm.step(self._combine)
                self.under_way.remove((batch, stage))

    @property
    def positions(self) -> Returns:
        steps = (self._clear, self._launch, self._wait, self._add)
        return Returns(self._batches, *(np.array(column, np.int64) for column in steps))


def _needs(schedule: Schedule, batches: Batches) -> tuple[list[set[int]], list[int]]:
    """For each batch: those that its own adds up; and the last round that opens rows it is added to."""
    needs: list[set[int]] = [set() for _ in range(len(batches))]
    ready = [-1] * len(batches)
    to, batch = schedule.routed.returns_to, batches.batch
    passed = np.flatnonzero((to >= 0) & (batch >= 0))
    if not len(passed):
        return needs, ready
    pairs = np.unique(batch[to[passed]] * np.int64(len(batches)) + batch[passed]).tolist()
    for later, earlier in (divmod(pair, len(batches)) for pair in pairs):
        needs[later].add(earlier)
        ready[earlier] = max(ready[earlier], int(batches.round[later]))
    return needs, ready
