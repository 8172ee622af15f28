"""Which rows are complete when an attention task has run, so that it writes them as results at once, where they are
wanted; and which row statistics the first task on the rows computes.

A sum over home rows (O, dQ, dKV) is kept in float32, and in the end `finish`, or a cast, turns it into what the caller
gets. Where nothing touches rows after a task but that, the task's kernel writes them in the model's dtype itself:

    instructions    attend 0      attend 3      merge 5     finish
    rows 0-99       ■             ■ complete                ·           nothing left to do
    rows 100-127    ■             ■             ■           ■

So a document that one task computes costs neither a wide accumulator nor another pass. The same holds for rows that
arrive as results (`isa.RESULTS`, `deliver`), and for work rows that leave as results and are used for nothing else: the
kernel writes them *in place*, into the message, or into home rows.

The dQ kernel has rows of dO in registers, and nothing needs their statistics (`delta`: dO · O, beside the LSE) before
it. So `delta` does not go over home rows whose statistics only tasks of their own rank want:

    instructions    delta     launch     attend_grad 3     attend_grad 5
    rows 0-99       ·                    ■ computed        read
    rows 100-127    ■         sent       read              read

Learned sinks and gradients of LSE are for `delta` alone: where a layer has them, executors do all that is written. The
rules follow from the program alone (`core/ir/fusion.cpp`); executors and the simulator go by them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from apportion._core import fusion as core
from apportion.ir.arrays import Ints
from apportion.ir.isa import ADDED
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import PHASES


class RowRanges(NamedTuple):
    """Ranges [row0, row1) of rows of something, by its number; int64 [ranges], by number and row."""

    of: Ints
    row0: Ints
    row1: Ints

    @staticmethod
    def none() -> RowRanges:
        return RowRanges(*np.zeros((3, 0), np.int64))

    def __bool__(self) -> bool:
        return len(self.of) > 0

    def within(self, row: int, stop: int) -> list[tuple[int, int]]:
        """What of [row, stop) is in ranges of one thing."""
        cut = zip(self.row0.clip(row).tolist(), self.row1.clip(max=stop).tolist(), strict=True)
        return [(start, end) for start, end in cut if start < end]


class Complete(NamedTuple):
    """Of one sum. tasks: rows that are complete when a task has run that adds to them, by task. home: the home rows
    that tasks leave so, or that arrive as results, by rank; arrived: the latter alone. sent, delivered: the work rows
    that tasks leave so, by the transfer, and the row of `rowops`, that takes them away."""

    tasks: RowRanges
    home: RowRanges
    arrived: RowRanges
    sent: RowRanges
    delivered: RowRanges

    def gaps(self, row: int, stop: int) -> list[tuple[int, int]]:
        """Ranges of the home rows [row, stop) of a program of one rank that are not complete."""
        return gaps(zip(self.home.row0.tolist(), self.home.row1.tolist(), strict=True), row, stop)

    def all_arrive(self, rows: int) -> bool:
        """Whether all home rows of a program of one rank, `rows` of them, arrive as results."""
        arrived = zip(self.arrived.row0.tolist(), self.arrived.row1.tolist(), strict=True)
        return not gaps(arrived, 0, rows)


class Statistics(NamedTuple):
    """Home rows whose statistics attention computes: tasks, by the row of `grads` that does; rowops, by the row of
    `rowops` that need not."""

    tasks: RowRanges
    rowops: RowRanges


def find_complete(programs: ProgramSet, phase: str | None = None) -> Mapping[str, Complete]:
    """Column of the list of tasks -> what is complete, of programs of any number of ranks. phase: None for both."""
    columns = [column for each in PHASES for column in ADDED[each]]
    sums = dict(zip(columns, core.fuse(programs.arrays)[0], strict=True))
    wanted = columns if phase is None else ADDED[phase]
    return {column: Complete(*(RowRanges(*ranges) for ranges in sums[column])) for column in wanted}


def find_statistics(programs: ProgramSet) -> Statistics:
    """Of backward programs of any number of ranks; none of forward ones."""
    return Statistics(*(RowRanges(*ranges) for ranges in core.fuse(programs.arrays)[1:]))


def gaps(ranges: Iterable[tuple[int, int]], row: int, stop: int) -> list[tuple[int, int]]:
    """What is left of [row, stop) between ranges, ascending."""
    found = []
    for row0, row1 in ranges:
        if row < min(row0, stop):
            found.append((row, min(row0, stop)))
        row = max(row, row1)
    return [*found, (row, stop)] if row < stop else found


def apart(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that meet as one, ascending."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found
