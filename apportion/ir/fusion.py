"""Which home rows are complete when an attention task has run, so that it writes them as results at once.

A sum over home rows (O, dQ, dKV) is kept in float32, and in the end `finish`, or a cast, turns it into what the caller
gets. Where nothing touches rows after a task but that, the task's kernel writes them in the model's dtype itself:

    instructions    attend 0      attend 3      merge 5     finish
    rows 0-99       ■             ■ complete                ·           nothing left to do
    rows 100-127    ■             ■             ■           ■

So a document that one task computes costs neither a wide accumulator nor another pass. The same holds for rows that
arrive as results (`isa.RESULTS`, `deliver`). The rule follows from the program alone; executors and the simulator go by
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import ADDED, OPERAND_COLUMNS, RESULTS, RULES, TASK_LIST, Argument, Op, Space, Tensor
from apportion.ir.jit import jit
from apportion.ir.ops import instruction_of
from apportion.ir.plan import Ints, ProgramSet

Bools = NDArray[np.bool_]


class Complete(NamedTuple):
    """Of one sum: tasks: bool [tasks of all ranks], those after which all rows that they add to are complete. rank,
    row0, row1: int64 [ranges], the home rows that such tasks leave, or that arrive as results, by rank and row."""

    tasks: Bools
    rank: Ints
    row0: Ints
    row1: Ints

    def within(self, rank: Ints, row: Ints, rows: Ints) -> Ints:
        """int64 [n]: how many of the rows [row, row + rows) of ranks are complete; integers [n] each."""
        span = 1 + max(int(self.row1.max(initial=0)), int((row + rows).max(initial=0)))
        begin, sizes = self.rank * span + self.row0, self.row1 - self.row0
        before = np.append(0, np.cumsum(sizes))
        return self._below(begin, sizes, before, rank * span + row + rows) - self._below(
            begin, sizes, before, rank * span + row
        )

    def gaps(self, row: int, stop: int) -> list[tuple[int, int]]:
        """Ranges of the rows [row, stop) of a program of one rank that are not complete."""
        found = []
        for row0, row1 in zip(self.row0.tolist(), self.row1.tolist(), strict=True):
            if row < min(row0, stop):
                found.append((row, min(row0, stop)))
            row = max(row, row1)
        return [*found, (row, stop)] if row < stop else found

    @staticmethod
    def _below(begin: Ints, sizes: Ints, before: Ints, key: Ints) -> Ints:
        at = np.searchsorted(begin, key, "right") - 1
        inside = np.where(at >= 0, np.minimum(key - begin[at], sizes[at]), 0) if len(begin) else 0 * key
        whole: Ints = before[np.maximum(at, 0)] + inside
        return whole


class _Uses(NamedTuple):
    """Every operand that an instruction names, but those of `finish`. operand: int64 [uses], over all ranks; at: int64
    [uses], the instruction."""

    operand: Ints
    at: Ints

    @staticmethod
    def of(programs: ProgramSet) -> _Uses:
        operands, instructions = programs["operands"], programs["instructions"]
        op, found = instructions["op"], []
        for table, columns in OPERAND_COLUMNS.items():
            at = instruction_of(op, instructions.wide("count"), table)
            first = operands.ptr[programs[table].rank_of_row()]
            some = np.flatnonzero(op[at] != Op.FINISH)
            found += [((first + programs[table][column])[some], at[some]) for column in columns]
        return _Uses(*map(np.concatenate, zip(*found, strict=True)))


def find_complete(programs: ProgramSet, phase: str) -> Mapping[str, Complete]:
    """Column of the phase's list of tasks -> what is complete, of programs of any number of ranks."""
    uses = _Uses.of(programs)
    return {column: _complete(programs, uses, phase, added) for column, added in ADDED[phase].items()}


def _complete(programs: ProgramSet, uses: _Uses, phase: str, added: Argument) -> Complete:
    """Of one sum. Where any task of an instruction has its rows beside the sum elsewhere, or some of the heads, nothing
    is complete after it: rows may have several owners, one launch after another."""
    operands, instructions, name = programs["operands"], programs["instructions"], TASK_LIST[phase]
    home = operands["space"] == Space.HOME
    mine = np.flatnonzero(home & (operands["tensor"] == added.tensors[0]))
    if not len(mine):
        none = np.zeros(0, np.int64)
        return Complete(np.zeros(len(programs[name]), bool), none, none, none)
    number = np.full(len(operands), -1)
    number[mine] = np.arange(len(mine))
    row, rows = (operands.wide(column)[mine] for column in ("row", "rows"))
    span = int((row + rows).max()) + 1
    begin = operands.rank_of_row()[mine] * span + row
    points = np.unique(np.concatenate([begin, begin + rows]))
    ranges = np.searchsorted(points, begin), np.searchsorted(points, begin + rows)
    last = np.full(len(points), -1)
    _latest(last, number[uses.operand], uses.at, *ranges)
    tasks, whole = programs[name], home & (operands["heads"] == 0)
    at = instruction_of(instructions["op"], instructions.wide("count"), name)
    first = operands.ptr[tasks.rank_of_row()]
    plain = np.ones(len(tasks), bool)
    for column in (added.column, *_beside(phase, added)):
        plain &= whole[first + tasks[column]]
    own = number[first + tasks[added.column]]
    plain &= ~np.isin(at, at[(own >= 0) & ~plain])
    complete, covered = _decide(last, np.where(plain, own, -1), at, *ranges)
    given = number[results_of(programs)]
    _cover(covered, given[given >= 0], *ranges)
    edges = np.flatnonzero(np.diff(covered, prepend=0, append=0))
    row0, row1 = points[edges[::2]], points[edges[1::2]]
    return Complete(complete, row0 // span, row0 % span, row1 - row0 // span * span)


def results_of(programs: ProgramSet) -> Ints:
    """int64 [n]: the home operands, over all ranks, that take results from elsewhere."""
    operands, instructions = programs["operands"], programs["instructions"]
    op, found = instructions["op"], []
    for table, column in (("transfers", "operand"), ("rowops", "c")):
        rows = programs[table]
        at = instruction_of(op, instructions.wide("count"), table)
        if table == "transfers":
            some = np.flatnonzero((instructions["mode"][at] & RESULTS > 0) & (rows["send"] == 0))
        else:
            some = np.flatnonzero(op[at] == Op.DELIVER)
        found.append(operands.ptr[rows.rank_of_row()[some]] + rows[column][some])
    return np.concatenate(found).astype(np.int64)


def result_ranges(program: ProgramSet, tensor: Tensor) -> Callable[[int, int], list[tuple[int, int]]]:
    """Of a program of one rank: the parts of home rows [row, stop) of a sum that arrive as results."""
    operands = program["operands"]
    given = results_of(program)
    given = given[operands["tensor"][given] == tensor]
    row, rows = (operands.wide(name)[given] for name in ("row", "rows"))
    found = apart(zip(row.tolist(), (row + rows).tolist(), strict=True))

    def within(row: int, stop: int) -> list[tuple[int, int]]:
        cut = ((max(row, start), min(stop, end)) for start, end in found)
        return [(start, end) for start, end in cut if start < end]

    return within


def apart(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that meet as one, ascending."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _beside(phase: str, added: Argument) -> list[str]:
    """The columns of what tasks read whose rows stand beside those of a sum."""
    (rule,) = (rule for rule in RULES.values() if rule.list == TASK_LIST[phase])
    return [one.column for one in rule.arguments if one.use.reads and added.like in (one.column, one.like)]


@jit
def _latest(last: Ints, used: Ints, at: Ints, low: Ints, high: Ints) -> None:
    """Notes when each part of the rows is used. used: int64 [uses], number of a home operand or -1; at: int64 [uses],
    the instruction; low, high: int64 [home operands], the parts that it has; last: int64 [parts], in place."""
    for use in range(len(used)):
        if used[use] >= 0:
            for part in range(low[used[use]], high[used[use]]):
                last[part] = max(last[part], at[use])


@jit
def _cover(covered: Ints, given: Ints, low: Ints, high: Ints) -> None:
    """Marks the parts of home operands, int64 [n], in place."""
    for one in given:
        covered[low[one] : high[one]] = 1


@jit
def _decide(last: Ints, own: Ints, at: Ints, low: Ints, high: Ints) -> tuple[Bools, Ints]:
    """bool [tasks], those that are the last to use all of their rows; int8 [parts], 1 for what these leave. own: int64
    [tasks], number of a home operand, -1 for tasks that are not looked at."""
    complete, covered = np.zeros(len(own), np.bool_), np.zeros(len(last), np.int8)
    for task in range(len(own)):
        if own[task] < 0:
            continue
        done = True
        for part in range(low[own[task]], high[own[task]]):
            done = done and last[part] == at[task]
        complete[task] = done
        if done:
            covered[low[own[task]] : high[own[task]]] = 1
    return complete, covered
