"""Which row statistics of backward (`delta`: dO · O, beside the LSE) the first attention task on the rows computes.

The dQ kernel has rows of dO in registers, and nothing needs their statistics before it. So `delta` does not go over
home rows whose statistics only tasks of their own rank want:

    instructions    delta     launch     attend_grad 3     attend_grad 5
    rows 0-99       ·                    ■ computed        read
    rows 100-127    ■         sent       read              read

The rule follows from the program alone; executors and the simulator go by it. Learned sinks and gradients of LSE are
for `delta` alone: where a layer has them, executors do all that is written.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion._core import fusion as core
from apportion.ir.arrays import Bools, Ints
from apportion.ir.isa import OPERAND_COLUMNS, Op
from apportion.ir.orders import ranked
from apportion.ir.plan.fusion import RowRanges
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import Space, Tensor


class Statistics(NamedTuple):
    """Home rows whose statistics attention computes: tasks, by the row of `grads` that does; rowops, by the row of
    `rowops` that need not."""

    tasks: RowRanges
    rowops: RowRanges


class _Uses(NamedTuple):
    """The operands of home rows of statistics in a column of a list. row: int64 [uses], of the list; at: int64 [uses],
    the instruction; operand: int64 [uses], by its number among such operands."""

    row: Ints
    at: Ints
    operand: Ints

    def take(self, some: Bools) -> _Uses:
        return _Uses(self.row[some], self.at[some], self.operand[some])


def find_statistics(programs: ProgramSet) -> Statistics:
    """Of backward programs of any number of ranks; none of forward ones."""
    operands = programs["operands"]
    named = np.flatnonzero((operands["tensor"] == Tensor.DELTA) & (operands["space"] == Space.HOME))
    if not len(named):
        return Statistics(RowRanges.none(), RowRanges.none())
    number = np.full(len(operands), -1)
    number[named] = np.arange(len(named))
    row, rows = (operands.wide(column)[named] for column in ("row", "rows"))
    span = int((row + rows).max()) + 1
    begin = operands.rank_of_row()[named] * span + row
    points, low, high = ranked(begin, begin + rows)

    reading, writing, others = _uses(programs, number)
    first = np.full(len(points), -1)  # the instruction that wants each part first, and computes it
    order = np.argsort(-reading.at, kind="stable")
    core.put(first, low[reading.operand[order]], high[reading.operand[order]], reading.at[order])
    core.put(first, low[others], high[others], np.full(len(others), -1))
    written = np.zeros(len(points), np.int64)
    core.put(written, low[writing.operand], high[writing.operand], np.ones(len(writing.at), np.int64))
    first[written == 0] = -1
    found = []
    for uses, value, wanted in (
        (reading, first, reading.at),
        (writing, (first >= 0).astype(np.int64), np.ones(len(writing.at), np.int64)),
    ):
        of, start, behind = core.runs(value, wanted, low[uses.operand], high[uses.operand])
        found.append(RowRanges(uses.row[of], points[start] % span, points[behind] % span))
    return Statistics(*found)


def _uses(programs: ProgramSet, number: Ints) -> tuple[_Uses, _Uses, Ints]:
    """Who reads statistics, and who writes them, where rows of dO and dQ, or of dO and O, are the same, with all heads;
    and the operands of all other uses. number: int64 [operands]."""
    operands, op = programs["operands"], programs["instructions"]["op"]
    others, found = [], {}
    for table, columns in OPERAND_COLUMNS.items():
        at = instruction_of(op, programs["instructions"].wide("count"), table)
        first = operands.ptr[programs[table].rank_of_row()]
        for column in columns:
            own = number[first + programs[table][column]]
            some = np.flatnonzero(own >= 0)
            uses, fits = _Uses(some, at[some], own[some]), np.zeros(len(some), bool)
            if (table, column) == ("grads", "delta"):
                fits = _at_one_place(programs, table, some, ("delta", "do", "dq"))
                found["reading"] = uses.take(fits)
            elif (table, column) == ("rowops", "c"):
                fits = (op[uses.at] == Op.DELTA) & _at_one_place(programs, table, some, ("c", "a", "b"))
                found["writing"] = uses.take(fits)
            others.append(uses.operand[~fits])
    return found["reading"], found["writing"], np.concatenate(others)


def _at_one_place(programs: ProgramSet, table: str, some: Ints, columns: tuple[str, ...]) -> Bools:
    """bool [some]: whether these operands of some rows of a list are the same home rows, with all heads."""
    operands, rows = programs["operands"], programs[table]
    first = operands.ptr[rows.rank_of_row()[some]]
    named = [first + rows[column][some] for column in columns]
    same = np.ones(len(some), bool)
    for one in named:
        same &= (operands["space"][one] == Space.HOME) & (operands["heads"][one] == 0)
        same &= operands["row"][one] == operands["row"][named[0]]
    return same
