"""Fusion rules: the rows that an attention task completes, so that its kernel writes them directly as results; and the
row statistics that the first task on the rows computes.

A sum over home rows (O, dQ, dKV) is kept in float32, and finally `finish`, or a cast, converts it for the caller. If
only that conversion follows a task on some rows, the task's kernel writes them in the model's dtype:

    instructions    attend 0      attend 3      merge 5     finish
    rows 0-99       ■             ■ complete                ·           nothing left to do
    rows 100-127    ■             ■             ■           ■

So a document computed by a single task needs neither a wide accumulator nor another pass. The same holds for rows that
arrive as results (`isa.RESULTS`, `deliver`), and for work rows whose only use is to leave as results: the kernel writes
them *in place*, into the message or into home rows.

The dQ kernel has rows of dO in registers, and nothing needs their statistics (`delta`: dO · O, with the LSE) before it.
So `delta` skips home rows whose statistics only tasks of their own rank read:

    instructions    delta     launch     attend_grad 3     attend_grad 5
    rows 0-99       ·                    ■ computed        read
    rows 100-127    ■         sent       read              read

Learned sinks and gradients of LSE need `delta`: for layers with them, executors run every instruction in full. The
rules depend only on the program (`core/ir/fusion.cpp`); executors and the simulator apply them.
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
    """Row ranges [row0, row1); `of` is the item of each; int64 [ranges], sorted by item and row."""

    of: Ints
    row0: Ints
    row1: Ints

    @staticmethod
    def none() -> RowRanges:
        return RowRanges(*np.zeros((3, 0), np.int64))

    def __bool__(self) -> bool:
        return len(self.of) > 0

    def within(self, row: int, stop: int) -> list[tuple[int, int]]:
        """The intersections of [row, stop) with the ranges, which must all be of one item."""
        cut = zip(self.row0.clip(row).tolist(), self.row1.clip(max=stop).tolist(), strict=True)
        return [(start, end) for start, end in cut if start < end]


class CompleteRows(NamedTuple):
    """Complete rows of one sum. tasks: rows that a task completes by adding to them, by task. home: home rows that
    tasks complete or that arrive as results, by rank; arrived: only the latter. sent, delivered: work rows that tasks
    complete, by the transfer or the row of `rowops` that consumes them."""

    tasks: RowRanges
    home: RowRanges
    arrived: RowRanges
    sent: RowRanges
    delivered: RowRanges

    def gaps(self, row: int, stop: int) -> list[tuple[int, int]]:
        """Ranges of the home rows [row, stop) of a one-rank program that are not complete."""
        return gaps(zip(self.home.row0.tolist(), self.home.row1.tolist(), strict=True), row, stop)

    def has_all_results(self, rows: int) -> bool:
        """True if all `rows` home rows of a one-rank program arrive as results."""
        ranges = zip(self.arrived.row0.tolist(), self.arrived.row1.tolist(), strict=True)
        return not gaps(ranges, 0, rows)


class StatisticsRows(NamedTuple):
    """Home rows whose statistics attention computes: tasks, by the row of `grads` that computes them; rowops, by the
    row of `rowops` that may skip them."""

    tasks: RowRanges
    rowops: RowRanges


def find_complete_rows(programs: ProgramSet, phase: str | None = None) -> Mapping[str, CompleteRows]:
    """Column of the task list -> complete rows, for programs of any number of ranks. phase: None for both."""
    columns = [column for phase_name in PHASES for column in ADDED[phase_name]]
    sums = dict(zip(columns, core.fuse(programs.arrays)[0], strict=True))
    selection = columns if phase is None else ADDED[phase]
    return {column: CompleteRows(*(RowRanges(*ranges) for ranges in sums[column])) for column in selection}


def find_statistics(programs: ProgramSet) -> StatisticsRows:
    """The statistics of backward programs of any number of ranks; empty for forward programs."""
    return StatisticsRows(*(RowRanges(*ranges) for ranges in core.fuse(programs.arrays)[1:]))


def gaps(ranges: Iterable[tuple[int, int]], row: int, stop: int) -> list[tuple[int, int]]:
    """The parts of [row, stop) outside the ranges, ascending."""
    missing = []
    for row0, row1 in ranges:
        if row < min(row0, stop):
            missing.append((row, min(row0, stop)))
        row = max(row, row1)
    return [*missing, (row, stop)] if row < stop else missing


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges ranges that touch or overlap, ascending."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
