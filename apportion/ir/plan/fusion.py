"""Which rows are complete when an attention task has run, so that it writes them as results at once, where they are
wanted.

A sum over home rows (O, dQ, dKV) is kept in float32, and in the end `finish`, or a cast, turns it into what the caller
gets. Where nothing touches rows after a task but that, the task's kernel writes them in the model's dtype itself:

    instructions    attend 0      attend 3      merge 5     finish
    rows 0-99       ■             ■ complete                ·           nothing left to do
    rows 100-127    ■             ■             ■           ■

So a document that one task computes costs neither a wide accumulator nor another pass. The same holds for rows that
arrive as results (`isa.RESULTS`, `deliver`), and for work rows that leave as results and are used for nothing else: the
kernel writes them *in place*, into the message, or into home rows. The rule follows from the program alone; executors
and the simulator go by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from apportion._core import fusion as core
from apportion.ir.arrays import Bools, Ints, offsets
from apportion.ir.isa import ADDED, OPERAND_COLUMNS, RESULTS, RULES, TASK_LIST, Argument, Op
from apportion.ir.orders import ranked
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import Space, Tensor

_NONE = np.zeros(0, np.int64)
WORK = int(Space.WORK)


class RowRanges(NamedTuple):
    """RowRanges [row0, row1) of something, by its number; int64 [ranges], by number and row."""

    of: Ints
    row0: Ints
    row1: Ints

    @staticmethod
    def none() -> RowRanges:
        return RowRanges(_NONE, _NONE, _NONE)

    def __bool__(self) -> bool:
        return len(self.of) > 0

    def sums(self, count: int) -> Ints:
        """int64 [count]: the rows of each."""
        return np.bincount(self.of, self.row1 - self.row0, count).astype(np.int64)


class Complete(NamedTuple):
    """Of one sum. tasks: rows that are complete when a task has run that adds to them, by task. rank, row0, row1: int64
    [ranges], the home rows that tasks leave so, or that arrive as results, by rank and row. sent, delivered: the work
    rows that tasks leave so, by the transfer, and the row of `rowops`, that takes them away."""

    tasks: RowRanges
    rank: Ints
    row0: Ints
    row1: Ints
    sent: RowRanges
    delivered: RowRanges

    def within(self, rank: Ints, row: Ints, rows: Ints) -> Ints:
        """int64 [n]: how many of the home rows [row, row + rows) of ranks are complete; integers [n] each."""
        span = 1 + max(int(self.row1.max(initial=0)), int((row + rows).max(initial=0)))
        begin, sizes = self.rank * span + self.row0, self.row1 - self.row0
        before = offsets(sizes)
        return self._below(begin, sizes, before, rank * span + row + rows) - self._below(
            begin, sizes, before, rank * span + row
        )

    def gaps(self, row: int, stop: int) -> list[tuple[int, int]]:
        """Ranges of the home rows [row, stop) of a program of one rank that are not complete."""
        return gaps(zip(self.row0.tolist(), self.row1.tolist(), strict=True), row, stop)

    @staticmethod
    def _below(begin: Ints, sizes: Ints, before: Ints, key: Ints) -> Ints:
        at = np.searchsorted(begin, key, "right") - 1
        inside = np.where(at >= 0, np.minimum(key - begin[at], sizes[at]), 0) if len(begin) else 0 * key
        whole: Ints = before[np.maximum(at, 0)] + inside
        return whole


def gaps(ranges: Iterable[tuple[int, int]], row: int, stop: int) -> list[tuple[int, int]]:
    """What is left of [row, stop) between ranges, ascending."""
    found = []
    for row0, row1 in ranges:
        if row < min(row0, stop):
            found.append((row, min(row0, stop)))
        row = max(row, row1)
    return [*found, (row, stop)] if row < stop else found


class _Uses(NamedTuple):
    """Every operand that an instruction names, but those of `finish`. operand: int64 [uses], over all ranks; at: int64
    [uses], the instruction; source: bool [uses], whether it is taken away as results; row: int64 [uses], of its list;
    is_transfer: bool [uses]."""

    operand: Ints
    at: Ints
    source: Bools
    row: Ints
    is_transfer: Bools

    @staticmethod
    def of(programs: ProgramSet) -> _Uses:
        operands, instructions = programs["operands"], programs["instructions"]
        op, found = instructions["op"], []
        for table, columns in OPERAND_COLUMNS.items():
            rows = programs[table]
            at = instruction_of(op, instructions.wide("count"), table)
            first = operands.ptr[rows.rank_of_row()]
            some = np.flatnonzero(op[at] != Op.FINISH)
            moves = np.full(len(some), table == "transfers")
            for column in columns:
                taken = np.zeros(len(some), bool)
                if table == "transfers":
                    taken = (instructions["mode"][at[some]] & RESULTS > 0) & (rows["send"][some] == 1)
                elif table == "rowops" and column == "a":
                    taken = op[at[some]] == Op.DELIVER
                found.append(((first + rows[column])[some], at[some], taken, some, moves))
        return _Uses(*map(np.concatenate, zip(*found, strict=True)))


def find_complete(programs: ProgramSet, phase: str) -> Mapping[str, Complete]:
    """Column of the phase's list of tasks -> what is complete, of programs of any number of ranks."""
    uses = _Uses.of(programs)
    return {column: _complete(programs, uses, phase, added) for column, added in ADDED[phase].items()}


def _complete(programs: ProgramSet, uses: _Uses, phase: str, added: Argument) -> Complete:
    """Of one sum: its rows are cut where operands begin or end, and a part of them counts as a whole."""
    operands, instructions = programs["operands"], programs["instructions"]
    mine = np.flatnonzero(operands["tensor"] == added.tensors[0])
    if not len(mine):
        none = RowRanges.none()
        return Complete(none, _NONE, _NONE, _NONE, none, none)
    number = np.full(len(operands), -1)
    number[mine] = np.arange(len(mine))
    place = 2 * operands.rank_of_row()[mine] + operands["space"][mine]
    row, rows = (operands.wide(column)[mine] for column in ("row", "rows"))
    span = int((row + rows).max()) + 1
    points, begins, ends = ranked(place * span + row, place * span + row + rows)
    used, of_rank = number[uses.operand], points // span // 2
    alike = _alike(programs, (added.tensors[0], *(one.tensors[0] for one in _beside(phase, added))))
    home = points // span % 2 == Space.HOME
    last = _last_used(uses, used, (begins, ends), home, alike[np.minimum(of_rank, programs.ranks - 1)])

    tasks, some = programs[TASK_LIST[phase]], np.flatnonzero(_plain(programs, phase, added))
    at = instruction_of(instructions["op"], instructions.wide("count"), TASK_LIST[phase])[some]
    owner = number[(operands.ptr[tasks.rank_of_row()] + tasks[added.column])[some]]
    of, low, high = core.runs(last, at, begins[owner], ends[owner])
    of_tasks = RowRanges(some[of], points[low] % span, points[high] % span)
    covered = np.zeros(len(points), np.int64)
    core.put(covered, low, high, np.ones_like(low))

    in_place = []
    for moves in (True, False):
        taken = np.flatnonzero(uses.source & (used >= 0) & (uses.is_transfer == moves))
        begin, end = begins[used[taken]], ends[used[taken]]
        of, low, high = core.runs(covered, np.ones_like(begin), begin, end)
        in_place.append(RowRanges(uses.row[taken][of], points[low] % span, points[high] % span))
    given = number[results_of(programs)]
    given = given[given >= 0]
    covered[~home] = 0
    core.put(covered, begins[given], ends[given], np.ones_like(given))
    edges = np.flatnonzero(np.diff(covered, prepend=0, append=0))
    row0, row1 = points[edges[::2]], points[edges[1::2]]
    return Complete(of_tasks, row0 // span // 2, row0 % span, row1 % span, *in_place)


def _last_used(uses: _Uses, used: Ints, parts: tuple[Ints, Ints], home: Bools, alike: Bools) -> Ints:
    """int64 [parts]: the last instruction that uses each part of the rows, but for what takes results away; -1 for work
    rows that are not taken away once, behind all else. used: int64 [uses], number of an operand or -1; parts: int64
    [operands] each, the first part and the one behind; alike: bool [parts], of work rows of the rank."""
    found = []
    for some in (~uses.source, uses.source):
        last, times = np.full(len(home), -1), np.zeros(len(home), np.int64)
        core.latest(last, times, used[some], uses.at[some], *parts)
        found.append((last, times))
    (last, _), (taken, times) = found
    once = (times == 1) & (taken > last)
    return np.where(home | (once & alike), last, -1)


def _plain(programs: ProgramSet, phase: str, added: Argument) -> Bools:
    """bool [tasks]: those after which rows may be complete. Where any task of an instruction has rows beside the sum
    elsewhere, or at home some of the heads, none is: rows may have several owners, one launch after another."""
    operands, instructions, name = programs["operands"], programs["instructions"], TASK_LIST[phase]
    tasks, space, row = programs[name], operands["space"], operands["row"]
    first = operands.ptr[tasks.rank_of_row()]
    owner, whole = first + tasks[added.column], operands["heads"] == 0
    work = space[owner] == Space.WORK
    plain: Bools = work | whole[owner]
    for one in _beside(phase, added):
        beside = first + tasks[one.column]
        same = (space[beside] == space[owner]) & (row[beside] == row[owner])
        plain &= same & (work | whole[beside])
    if not plain.all():
        at = instruction_of(instructions["op"], instructions.wide("count"), name)
        key = 2 * at + work
        plain &= ~np.isin(key, key[~plain])
    return plain


def _alike(programs: ProgramSet, tensors: Iterable[Tensor]) -> Bools:
    """bool [ranks]: whether work rows of each of these have the same heads in the same columns, all of them."""
    operands = programs["operands"]
    looked_at = np.zeros(len(Tensor) + 1, bool)
    looked_at[list(tensors)] = True
    tensor, space, col, heads = (operands[name] for name in ("tensor", "space", "col", "heads"))
    return core.all_alike(operands.ptr, tensor, space, col, heads, looked_at, WORK)


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


def _beside(phase: str, added: Argument) -> list[Argument]:
    """What tasks read whose rows stand beside those of a sum."""
    (rule,) = (rule for rule in RULES.values() if rule.list == TASK_LIST[phase])
    return [one for one in rule.arguments if one.use.reads and added.like in (one.column, one.like)]
