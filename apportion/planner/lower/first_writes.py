"""Which tasks are the first on their rows, and overwrite them; what none of these opens is cleared before.

task 0          ┌─────────┐                 the first on all of its rows: opens them
task 1     ┌────┼────┐    │                 the first on some: these are cleared, it adds
task 2     │    │    │    │  ┌────┐         opens
rows       ▒▒▒▒▒■■■■■■■■■■■▒▒▒■■■■■■▒▒▒     ▒ cleared
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion._core import first_writes as core
from apportion.ir.arrays import Bools, Ints


@dataclass(frozen=True)
class Openers:
    """flags: int32 [tasks], 1 for those that overwrite. lane, row, rows: int64 [n], rows that none of these opens, in
    longest ranges."""

    flags: Ints
    lane: Ints
    row: Ints
    rows: Ints

    @staticmethod
    def none(tasks: int) -> Openers:
        """Without lanes."""
        nothing = np.zeros(0, np.int64)
        return Openers(np.zeros(tasks, np.int32), nothing, nothing, nothing)


@dataclass(frozen=True)
class Written:
    """Rows that tasks add to, by rising task, int32 [parts] but for int64 `row`: [row, row + rows) of a `lane`, which
    stands for one rank's rows or one tile, with some of the heads; -1: rows that are elsewhere. may: bool [parts],
    whether they are certain to be as they were at the start but for tasks that come before."""

    task: Ints
    lane: Ints
    row: Ints
    rows: Ints
    may: Bools

    def join(self, later: Written) -> Written:
        """These, and those of later tasks."""
        return Written(*map(np.concatenate, zip(vars(self).values(), vars(later).values(), strict=True)))


def find_openers(written: Written, held: Ints, tasks: int) -> Openers:
    """held: int64 [lanes], all rows of each lane."""
    return Openers(
        *core.find(written.task, written.lane, written.row, written.rows, written.may, held, tasks)
    )
