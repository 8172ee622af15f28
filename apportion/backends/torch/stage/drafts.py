"""Drafts the launches of each step of a rank's program, and their tables, before the copy to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apportion.backends.interp import Operand, Program, Step
from apportion.backends.torch.memory.arenas import Arenas
from apportion.backends.torch.memory.rounds import Message, Rounds, tile_arrays
from apportion.backends.torch.stage.in_place import DirectWrites
from apportion.backends.torch.stage.rowlists import (
    SLOTS,
    Fold,
    Panel,
    Part,
    Slot,
    clear_panels,
    folds,
    message_parts,
    move,
    move_panels,
    owners_meet,
    parts_of,
    row_tiles,
)
from apportion.backends.torch.stage.variants import ROWS, Variant, add_constants, row_constants
from apportion.backends.torch.stage.worklists import ROLES, Columns, WorkList, work_list
from apportion.ir.arrays import Ints
from apportion.ir.errors import ExecutionError
from apportion.ir.isa import OP_NAMES, Op
from apportion.ir.plan.fusion import CompleteRows, RowRanges, find_statistics, gaps, merge_ranges
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import Space, Tensor as Name


class Launch(NamedTuple):
    """A kernel launch before its arrays are known. Arguments in order: `tables`, tensors on the device; what
    `arrays` picks from the machine's arrays; the layer's tensors; `sizes`."""

    kernel: str
    programs: int
    tables: tuple[Tensor, ...]
    arrays: Callable[[Sequence[Any]], Any]
    sizes: tuple[int, ...]
    constants: Mapping[str, Any]


@dataclass
class Draft:
    """A launch whose tables are not on the device yet. tables: the range of each in the buffer."""

    kernel: str
    programs: int
    tables: list[slice]
    slots: Sequence[Slot]
    sizes: tuple[int, ...]
    constants: Mapping[str, Any]

    def launch(self, buffer: Tensor, drafts: Drafts) -> Launch:
        views = [buffer[section] for section in self.tables]
        if self.kernel == "move":
            views[0] = views[0].view(torch.int64)
        arrays = itemgetter(*(drafts.number(slot) for slot in self.slots))  # at least two
        return Launch(self.kernel, self.programs, tuple(views), arrays, self.sizes, self.constants)


class Drafts:
    """Drafts of the launches of each step, and their tables."""

    def __init__(
        self,
        columns: ProgramSet,
        program: Program,
        arenas: Arenas,
        rounds: Rounds,
        variant: Variant,
        complete: Mapping[str, CompleteRows],
    ) -> None:
        self._program, self._header, self._arenas, self._rounds = program, program.header, arenas, rounds
        self._variant = variant
        self.tables: list[Ints] = []
        self.slots: list[Slot] = []
        self.shares = 0
        self._end = 0
        self._home = {operand.tensor for operand in program.operands[1:] if operand.is_home}
        self._columns, self._programs = Columns(program), columns
        self._complete, self._statistics = complete, find_statistics(columns)
        self.in_place = DirectWrites.of(columns, program, arenas, rounds, complete)
        self._lists: dict[str, tuple[WorkList, list[slice]]] = {}

    def number(self, slot: Slot) -> int:
        """The number of an array among `slots`, to which it is added if it is new."""
        if slot not in self.slots:
            self.slots.append(slot)
        return self.slots.index(slot)

    def complete(self) -> dict[tuple[int, Name, bool], list[tuple[int, int]]]:
        """(step, tensor, whether at home) -> disjoint ranges of the rows that the step leaves as results."""
        result: dict[tuple[int, Name, bool], set[tuple[int, int]]] = {}
        instructions = self._programs["instructions"]
        for roles in ROLES.values():
            step = instruction_of(instructions["op"], instructions.wide("count"), roles.table)
            for task, *rows in zip(
                *(column.tolist() for column in self._complete[roles.owner].tasks), strict=True
            ):
                operand = self._program.operands[int(self._programs[roles.table][roles.owner][task])]
                key = int(step[task]), operand.tensor, operand.is_home
                result.setdefault(key, set()).add((rows[0], rows[1]))
        return {key: merge_ranges(ranges) for key, ranges in result.items()}

    def step(self, step: Step) -> Iterator[Draft]:
        """The launches of a step; a row op without rows has none."""
        handler = STEPS.get(step.op)
        if handler is not None and (step.rowops or step.op.rule.list != "rowops"):
            yield from handler(self, step)

    # --- attention

    def attend(self, step: Step) -> Iterator[Draft]:
        slots = [*self._spaces(Name.Q), *self._kv(), *self._spaces(Name.O), *self._spaces(Name.O, 1)]
        slots += [(Name.NONE, True, 0), *_WIRE]
        yield from self._attention("attend", step, slots, (Name.Q, Name.KV, Name.O))

    def attend_grad(self, step: Step) -> Iterator[Draft]:
        gradients = [*self._spaces(Name.DO), *self._spaces(Name.DELTA)]
        for kernel, output, results in (("dq", Name.DQ, (0,)), ("dkdv", Name.DKV, (1, 2))):
            slots = [*self._spaces(Name.Q), *self._kv(), *gradients, *self._spaces(output)]
            # without gradients of home rows no task completes a row: these slots are unused, and any array will do
            slots += [(Name.NONE, True, i) if output in self._home else slots[0] for i in results]
            slots += _WIRE[:1]
            if kernel == "dq":
                slots += [(Name.O, True, 0), (Name.O, True, 1)]
            yield from self._attention(kernel, step, slots, (Name.Q, Name.KV, Name.DO, Name.DELTA, output))

    def _attention(self, kernel: str, step: Step, slots: list[Slot], work: Sequence[Name]) -> Iterator[Draft]:
        if kernel not in self._lists:
            shape = self._variant.shapes[kernel]
            owner = ROLES[kernel].owner
            complete, targets = self._complete[owner].tasks, self.in_place.targets(owner)
            ranges = self._statistics.tasks if kernel == "dq" else RowRanges.none()
            items = work_list(
                self._programs, self._columns, kernel, shape.owner, shape.walked, complete, targets, ranges
            )
            self._lists[kernel] = items, self._table_ranges(items.tiles, items.entries, items.heads)
        items, tables = self._lists[kernel]
        heads = (self._header.q_heads, self._header.kv_heads)
        columns = tuple(self._arenas.columns.get(name, 1) for name in work)
        for launch in items.launches.get(step.index, ()):
            sizes = (launch.tile, launch.lanes, *heads, *columns)
            yield Draft(kernel, launch.tiles * launch.lanes, tables, slots, sizes, {})

    def _kv(self) -> list[Slot]:
        """k and v at home, and work rows."""
        home, work = self._spaces(Name.KV)
        return [home, (Name.KV, True, 1) if home == (Name.KV, True, 0) else work, work]

    def _spaces(self, tensor: Name, number: int = 0) -> list[Slot]:
        """An array's home rows and work rows; if the program has only one of these, the same twice."""
        home, work = (tensor, True, number), (tensor, False, number)
        if tensor not in self._arenas.columns:
            return [home, home]
        is_input = tensor in _INPUTS and not self._program.uses_project
        return [home if is_input or tensor in self._home else work, work]

    # --- rows

    def _operand_parts(self, operand: Operand) -> list[Part]:
        """The place of each part, and its bytes per column."""
        parts = []
        for number, array in enumerate(self._arenas.arrays(operand.tensor, operand.space)):
            slot = (operand.tensor, operand.is_home, number)
            parts += parts_of(slot, operand.row * array.row_bytes, operand.column_list, array)
        return parts

    def copy(self, step: Step) -> Iterator[Draft]:
        """One launch, unless a row op of the step reads or writes rows that another one writes."""
        operands = self._program.operands
        pairs = [(operands[row.a], operands[row.c]) for row in step.rowops]
        groups = [list(move_panels(self._operand_parts(a), self._operand_parts(c), c.rows)) for a, c in pairs]
        for panels in groups if _overlap(pairs) else [[panel for group in groups for panel in group]]:
            yield from self._move(panels)

    def clear(self, step: Step) -> Iterator[Draft]:
        operands = [self._program.operands[row.c] for row in step.rowops]
        yield from self._move(
            [
                p
                for operand in operands
                for p in clear_panels(self._operand_parts(operand), operand.rows, operand.tensor)
            ]
        )

    def launch(self, step: Step) -> Iterator[Draft]:
        """Packs staged tiles into their messages."""
        tiles = self._staged_tiles(self._rounds.of_step[step.index].sends)
        yield from self._move([p for remote, local, rows in tiles for p in move_panels(local, remote, rows)])

    def wait(self, step: Step) -> Iterator[Draft]:
        """Unpacks staged tiles from their messages."""
        tiles = self._staged_tiles(self._rounds.of_step[step.index].receives)
        yield from self._move([p for remote, local, rows in tiles for p in move_panels(remote, local, rows)])

    def _staged_tiles(self, messages: Sequence[Message]) -> Iterator[tuple[list[Part], list[Part], int]]:
        """The parts of each staged tile in its message and in memory, and its rows, without those written in place."""
        for message in messages:
            for tile, (index, _) in enumerate(message.tiles if message.is_staged else ()):
                operand = self._program.operands[index]
                arrays = list(tile_arrays(operand, self._header, self._arenas.hidden, message.results))
                for row, stop in self.in_place.remaining(index, operand):
                    piece = replace(operand, row=row, rows=stop - row)
                    staging = message_parts(message, tile, operand, arrays, row - operand.row)
                    is_result = message.results and operand.is_home
                    yield (
                        staging,
                        self._result(piece) if is_result else self._operand_parts(piece),
                        piece.rows,
                    )

    def deliver(self, step: Step) -> Iterator[Draft]:
        operands = self._program.operands
        panels: list[Panel] = []
        for rowop in step.rowops:
            source, target = operands[rowop.a], operands[rowop.c]
            for row, stop in self.in_place.remaining(rowop.a, source):
                piece = replace(source, row=row, rows=stop - row)
                destination = replace(target, row=target.row + row - source.row, rows=stop - row)
                panels += move_panels(self._operand_parts(piece), self._result(destination), piece.rows)
        yield from self._move(panels)

    def _result(self, operand: Operand) -> list[Part]:
        """The parts of a sum's home rows in the caller's results."""
        sum_tensor, first = _RESULT[operand.tensor]
        parts = self._operand_parts(replace(operand, tensor=sum_tensor))
        result = [
            (part._replace(slot=(Name.NONE, True, first + i)), width) for i, (part, width) in enumerate(parts)
        ]
        return result + self._operand_parts(operand)[1:] if operand.tensor == Name.O else result

    def _move(self, panels: list[Panel]) -> Iterator[Draft]:
        if not panels:
            return
        moves = move(panels)
        if len(moves.slots) > SLOTS:
            half = len(panels) // 2
            yield from self._move(panels[:half])
            yield from self._move(panels[half:])
            return
        tables = self._table_ranges(moves.panels.view(np.int32), moves.chunks)
        slots = [*moves.slots, *[moves.slots[0]] * (SLOTS - len(moves.slots))]
        constants = moves.constants(self._header.dtype)
        yield Draft("move", len(moves.chunks), tables, slots, (), constants)

    def add(self, step: Step) -> Iterator[Draft]:
        for fold in folds(step, self._program.operands, ROWS):
            arrays = [
                self._arenas.arrays(tensor, Space.HOME if home else Space.WORK)[0]
                for tensor, home, _ in fold.slots
            ]
            sizes = np.array([[max(array.columns, 1), array.width] for array in arrays], np.int32)
            tables = self._table_ranges(fold.tiles, fold.entries, fold.heads, sizes)
            slots = [*fold.slots, *[fold.slots[0]] * (SLOTS - len(fold.slots))]
            constants = add_constants(int(sizes[:, 1].max()))
            yield Draft("add", len(fold.tiles) * fold.lanes, tables, slots, (fold.lanes,), constants)

    def merge(self, step: Step) -> Iterator[Draft]:
        for fold in folds(step, self._program.operands, ROWS):
            self._by_space(fold)
            tables = self._table_ranges(fold.tiles, fold.entries, fold.heads)
            slots = [*self._spaces(Name.O), *self._spaces(Name.O, 1)]
            sizes = (fold.lanes, self._header.q_heads, self._arenas.columns.get(Name.O, 1))
            yield Draft("merge", len(fold.tiles) * fold.lanes, tables, slots, sizes, self._widths())

    def _by_space(self, fold: Fold) -> None:
        """Replaces each slot with 1 for work rows, else 0: `merge` has only two arrays of O."""
        work = np.array([not home for _, home, _ in fold.slots], np.int32)
        fold.tiles[:, 7], fold.entries[:, 3] = work[fold.tiles[:, 7]], work[fold.entries[:, 3]]

    def delta(self, step: Step) -> Iterator[Draft]:
        """Two launches, of which one runs: for all rows, or for those whose statistics attention does not compute."""
        operands = self._program.operands
        if any(not operands[row.b].is_home for row in step.rowops):
            raise ExecutionError("delta of work rows of O: a plan must compute it from home rows")
        slots = [*self._spaces(Name.DO), (Name.O, True, 0), (Name.O, True, 1), *self._spaces(Name.DELTA)]
        columns = [self._arenas.columns.get(name, 1) for name in (Name.DO, Name.DELTA)]
        all_rows = row_tiles(step, operands, ROWS)
        remaining = row_tiles(step, operands, ROWS, self._rows_without_statistics)
        for items in (all_rows, remaining) if self._statistics.rowops else (all_rows,):
            tables = self._table_ranges(items.tiles, items.heads)
            sizes = (self.shares, items.lanes, self._header.q_heads, *columns)
            yield Draft("delta", len(items.tiles) * items.lanes, tables, slots, sizes, self._widths())
        self.shares += len(all_rows.tiles)

    def _rows_without_statistics(self, operand: Operand) -> list[tuple[int, int]]:
        """Ranges of rows whose statistics no task computes."""
        return gaps(self._statistic_rows if operand.is_home else (), operand.row, operand.row + operand.rows)

    @cached_property
    def _statistic_rows(self) -> list[tuple[int, int]]:
        _, row0, row1 = (column.tolist() for column in self._statistics.rowops)
        return merge_ranges(zip(row0, row1, strict=True))

    def finish(self, step: Step) -> Iterator[Draft]:
        """Finishes rows of sums; then, for layers with learned sinks, rows that arrived as results."""
        lse, result = (Name.O, True, 1), (Name.NONE, True, 0)
        sums, results = self._complete["o"].gaps, self._complete["o"].arrived.within
        for o, ranges in (((Name.O, True, 0), sums), (result, results)):
            items = row_tiles(step, self._program.operands, ROWS, partial(_rows_of, ranges))
            tables, sizes = self._table_ranges(items.tiles, items.heads), (items.lanes, self._header.q_heads)
            programs = len(items.tiles) * items.lanes
            yield Draft("finish", programs, tables, [o, lse, result], sizes, self._widths())

    def results(self, rows: int) -> Iterator[Draft]:
        """Copies gradients of home rows to the caller's results: dq, dk and dv, separate arrays."""
        panels: list[Panel] = []
        for tensor, column in ((Name.DQ, "dq"), (Name.DKV, "dkv")):
            for row, stop in self._complete[column].gaps(0, rows) if tensor in self._home else ():
                heads = self._header.heads_of(tensor)
                columns = tuple(range(heads)), slice(0, heads, 1)
                operand = Operand(0, tensor, Space.HOME, row, stop - row, *columns)
                panels += move_panels(self._operand_parts(operand), self._result(operand), stop - row)
        yield from self._move(panels)

    def _widths(self) -> Mapping[str, int]:
        return row_constants(self._variant.v)

    def _table_ranges(self, *tables: Ints) -> list[slice]:
        """The range of each table in the buffer, in int32; each begins at a multiple of 16 bytes."""
        sections = []
        for table in tables:
            flat = np.ascontiguousarray(table).reshape(-1)
            padded = np.zeros(-(-len(flat) // 4) * 4, np.int32)
            padded[: len(flat)] = flat
            self.tables.append(padded)
            sections.append(slice(self._end, self._end + len(padded)))
            self._end += len(padded)
        return sections


#: staging as numbers of the model's dtype, and as float32
_WIRE: list[Slot] = [(Name.NONE, False, 0), (Name.NONE, False, 1)]
#: a sum -> the tensor whose home rows have the shape of its results, and the index of its first result
_RESULT = {Name.O: (Name.DO, 0), Name.DQ: (Name.Q, 0), Name.DKV: (Name.KV, 1)}
#: home rows that callers pass in, unless the program projects
_INPUTS = frozenset({Name.Q, Name.KV, Name.DO})


def _rows_of(ranges: Callable[[int, int], list[tuple[int, int]]], operand: Operand) -> list[tuple[int, int]]:
    return ranges(operand.row, operand.row + operand.rows)


def _overlap(pairs: Sequence[tuple[Operand, Operand]]) -> bool:
    """True if one row op of a copy may read or write rows that another one writes; conservative: overlaps are rare."""
    read, written = (
        {(operand.tensor, operand.is_home) for operand in side} for side in zip(*pairs, strict=True)
    )
    return bool(read & written) or owners_meet([operand for _, operand in pairs], np.arange(len(pairs)))


#: op -> the function that drafts its launches; the machine executes other ops itself, on views
STEPS: Mapping[Op, Callable[[Drafts, Step], Iterator[Draft]]] = {
    op: handler for op in Op if (handler := getattr(Drafts, OP_NAMES[op], None))
}
