"""Drafts the launches of each step of a rank's program, and their tables, before the copy to the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from apportion.backends.interp import Operand, Step
from apportion.backends.torch.executor import LoadRequest
from apportion.backends.torch.memory.arenas import Arenas
from apportion.backends.torch.memory.rounds import Message, find_rounds, tile_arrays
from apportion.backends.torch.stage.in_place import direct_writes, earliest_writes
from apportion.backends.torch.stage.rowlists import (
    SLOTS,
    Panel,
    Part,
    RowTiles,
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
from apportion.backends.torch.stage.variants import ROWS, add_constants, row_constants, variant
from apportion.backends.torch.stage.worklists import ROLES, Columns, Targets, work_list
from apportion.ir.arrays import Ints
from apportion.ir.errors import ExecutionError
from apportion.ir.isa import OP_NAMES, Op
from apportion.ir.plan.fusion import RowRanges, find_complete_rows, find_statistics, gaps, merge_ranges
from apportion.ir.plan.ops import instruction_of
from apportion.ir.tensors import Space, Tensor as Name


class Launch(NamedTuple):
    """A kernel launch before its arrays are known. Arguments in order: `tables`, tensors on the device, but in a draft
    their ranges in the buffer; what `arrays` picks from the machine's arrays; the layer's tensors; `sizes`. constants
    of attention: without and with a softcap."""

    kernel: str
    programs: int
    tables: tuple[Any, ...]
    arrays: Callable[[Sequence[Any]], Any]
    sizes: tuple[int, ...]
    constants: Any

    def on(self, buffer: Tensor) -> Launch:
        """The launch with its tables, which lie in `buffer`."""
        first, *rest = (buffer[section] for section in self.tables)
        return self._replace(tables=(first.view(torch.int64) if self.kernel == "move" else first, *rest))


class Drafts:
    """Drafts of the launches of each step, and their tables. slots: arrays that a machine provides, by number; shares:
    number of tiles of all delta instructions; in_place: the destinations of each sum's complete work rows."""

    def __init__(self, request: LoadRequest) -> None:
        columns, program, _, rows, hidden, envelope = request
        self._complete, self._statistics = find_complete_rows(columns), find_statistics(columns)
        self.rounds = find_rounds(columns, program, hidden, earliest_writes(columns, self._complete))
        sums = (Name[name.upper()] for name, ranges in self._complete.items() if ranges.has_all_results(rows))
        self.arenas = Arenas(program, self.rounds.staging_bytes, hidden, envelope, frozenset(sums))
        self._program, self._header = program, program.header
        self._variant = variant(self._header.dtype, self._header.head_dim, self._header.v_head_dim)
        self.tables: list[Ints] = []
        self.slots: list[Slot] = []
        self.shares = 0
        self._end = 0
        self._home = {operand.tensor for operand in program.operands[1:] if operand.is_home}
        self._columns, self._programs = Columns(program), columns
        self.in_place = direct_writes(columns, program, hidden, self.rounds, self._complete)
        self._lists: dict[str, tuple[Any, ...]] = {}

    def complete_rows(self, step: Step, operand: Operand) -> list[tuple[int, int]]:
        """Disjoint ranges of the rows of an operand's array that the step leaves as results."""
        roles = next(roles for roles in ROLES.values() if Name[roles.owner.upper()] == operand.tensor)
        tasks, table = self._complete[roles.owner].tasks, self._programs[roles.table]
        op, count = (self._programs["instructions"].wide(name) for name in ("op", "count"))
        space = self._programs["operands"]["space"][table[roles.owner]]
        found = (instruction_of(op, count, roles.table) == step.index) & (space == operand.space)
        found = found[tasks.of]
        return merge_ranges(zip(tasks.row0[found].tolist(), tasks.row1[found].tolist(), strict=True))

    def step(self, step: Step) -> Iterator[Launch]:
        """The launches of a step; a row op without rows has none."""
        handler = STEPS.get(step.op)
        if handler is not None and (step.rowops or step.op.rule.list != "rowops"):
            yield from handler(self, step)

    def _launch(
        self,
        kernel: str,
        programs: int,
        tables: tuple[slice, ...],
        slots: Sequence[Slot],
        sizes: tuple[int, ...],
        constants: Mapping[Any, Any],
    ) -> Launch:
        for slot in slots:
            if slot not in self.slots:
                self.slots.append(slot)
        arrays = itemgetter(*map(self.slots.index, slots))  # at least two
        return Launch(kernel, programs, tables, arrays, sizes, constants)

    # --- attention

    def attend(self, step: Step) -> Iterator[Launch]:
        slots = [*self._spaces(Name.Q), *self._kv(), *self._spaces(Name.O), *self._spaces(Name.O, 1)]
        slots += [(Name.NONE, True, 0), *_WIRE]
        yield from self._attention("attend", step, slots, (Name.Q, Name.KV, Name.O))

    def attend_grad(self, step: Step) -> Iterator[Launch]:
        gradients = [*self._spaces(Name.DO), *self._spaces(Name.DELTA)]
        for kernel, output, results in (("dq", Name.DQ, (0,)), ("dkdv", Name.DKV, (1, 2))):
            slots = [*self._spaces(Name.Q), *self._kv(), *gradients, *self._spaces(output)]
            # without gradients of home rows no task completes a row: these slots are unused, and any array will do
            slots += [(Name.NONE, True, i) if output in self._home else slots[0] for i in results]
            slots += _WIRE[:1]
            if kernel == "dq":
                slots += [(Name.O, True, 0), (Name.O, True, 1)]
            yield from self._attention(kernel, step, slots, (Name.Q, Name.KV, Name.DO, Name.DELTA, output))

    def _attention(
        self, kernel: str, step: Step, slots: list[Slot], work: Sequence[Name]
    ) -> Iterator[Launch]:
        if kernel not in self._lists:
            shape, owner = self._variant.shapes[kernel], ROLES[kernel].owner
            targets = Targets.of([entry[:7] for entry in self.in_place.get(owner, ())])
            ranges = self._statistics.tasks if kernel == "dq" else RowRanges.none()
            rows = self._complete[owner].tasks, targets, ranges
            items = work_list(self._programs, self._columns, kernel, shape.owner, shape.walked, *rows)
            tables = self._table_ranges(items.tiles, items.entries, items.heads)
            constants = {capped: self._variant.constants(kernel, capped) for capped in (False, True)}
            self._lists[kernel] = items.launches, tables, constants
        launches, tables, constants = self._lists[kernel]
        columns = tuple(self.arenas.columns.get(name, 1) for name in work)
        heads = (self._header.q_heads, self._header.kv_heads)
        for tiles in launches.get(step.index, ()):
            sizes = (tiles.tile, tiles.lanes, *heads, *columns)
            yield self._launch(kernel, tiles.tiles * tiles.lanes, tables, slots, sizes, constants)

    def _kv(self) -> list[Slot]:
        """k and v at home, and work rows."""
        home, work = self._spaces(Name.KV)
        return [home, (Name.KV, True, 1) if home == (Name.KV, True, 0) else work, work]

    def _spaces(self, tensor: Name, number: int = 0) -> list[Slot]:
        """An array's home rows and work rows; if the program has only one of these, the same twice."""
        home, work = (tensor, True, number), (tensor, False, number)
        if tensor not in self.arenas.columns:
            return [home, home]
        is_input = tensor in _INPUTS and not self._program.uses_project
        return [home if is_input or tensor in self._home else work, work]

    # --- rows

    def _operand_parts(self, operand: Operand) -> list[Part]:
        """The place of each part, and its bytes per column."""
        parts = []
        for number, array in enumerate(self.arenas.arrays(operand.tensor, operand.space)):
            slot = (operand.tensor, operand.is_home, number)
            parts += parts_of(slot, operand.row * array.row_bytes, operand.column_list, array)
        return parts

    def copy(self, step: Step) -> Iterator[Launch]:
        """One launch, unless a row op of the step reads or writes rows that another one writes."""
        operands = self._program.operands
        pairs = [(operands[row.a], operands[row.c]) for row in step.rowops]
        groups = [list(move_panels(self._operand_parts(a), self._operand_parts(c), c.rows)) for a, c in pairs]
        for panels in groups if _overlap(pairs) else [[panel for group in groups for panel in group]]:
            yield from self._move(panels)

    def clear(self, step: Step) -> Iterator[Launch]:
        panels: list[Panel] = []
        for row in step.rowops:
            operand = self._program.operands[row.c]
            panels += clear_panels(self._operand_parts(operand), operand.rows, operand.tensor)
        yield from self._move(panels)

    def launch(self, step: Step) -> Iterator[Launch]:
        """Packs staged tiles into their messages."""
        yield from self._move(list(self._staged_panels(self.rounds.of_step[step.index].sends, unpack=False)))

    def wait(self, step: Step) -> Iterator[Launch]:
        """Unpacks staged tiles from their messages."""
        yield from self._move(
            list(self._staged_panels(self.rounds.of_step[step.index].receives, unpack=True))
        )

    def _staged_panels(self, messages: Sequence[Message], unpack: bool) -> Iterator[Panel]:
        """Panels from staged tiles to memory, or from memory to tiles, without rows that are written in place."""
        for message in messages:
            for tile, (index, _) in enumerate(message.tiles if message.is_staged else ()):
                operand = self._program.operands[index]
                arrays = list(tile_arrays(operand, self._header, self.arenas.hidden, message.results))
                for piece in self._remaining(operand):
                    is_result = message.results and piece.is_home
                    local = self._result(piece) if is_result else self._operand_parts(piece)
                    staged = message_parts(message, tile, operand, arrays, piece.row - operand.row)
                    source, target = (staged, local) if unpack else (local, staged)
                    yield from move_panels(source, target, piece.rows)

    def deliver(self, step: Step) -> Iterator[Launch]:
        operands = self._program.operands
        panels: list[Panel] = []
        for rowop in step.rowops:
            source, target = operands[rowop.a], operands[rowop.c]
            for piece in self._remaining(source):
                home = replace(target, row=target.row + piece.row - source.row, rows=piece.rows)
                panels += move_panels(self._operand_parts(piece), self._result(home), piece.rows)
        yield from self._move(panels)

    def _remaining(self, operand: Operand) -> Iterator[Operand]:
        """The parts of an operand whose rows are not written in place."""
        written = self._written.get(operand.index, ())
        for row, stop in gaps(written, operand.row, operand.row + operand.rows):
            yield replace(operand, row=row, rows=stop - row)

    @cached_property
    def _written(self) -> Mapping[int, list[tuple[int, int]]]:
        """Number of an operand -> its rows that are written in place, ascending."""
        ranges = defaultdict(list)
        for entry in sorted(chain(*self.in_place.values()), key=lambda entry: entry.row):
            ranges[entry.operand.index].append((entry.row, entry.stop))
        return ranges

    def _result(self, operand: Operand) -> list[Part]:
        """The parts of a sum's home rows in the caller's results."""
        sum_tensor, first = _RESULT[operand.tensor]
        parts = self._operand_parts(replace(operand, tensor=sum_tensor))
        result = [
            (part._replace(slot=(Name.NONE, True, first + i)), width) for i, (part, width) in enumerate(parts)
        ]
        return result + self._operand_parts(operand)[1:] if operand.tensor == Name.O else result

    def _move(self, panels: list[Panel]) -> Iterator[Launch]:
        if not panels:
            return
        moves = move(panels)
        if len(moves.slots) > SLOTS:
            half = len(panels) // 2
            yield from self._move(panels[:half])
            yield from self._move(panels[half:])
            return
        tables = self._table_ranges(moves.panels.view(np.int32), moves.chunks)
        constants = moves.constants(self._header.dtype)
        yield self._launch("move", len(moves.chunks), tables, _filled(moves.slots), (), constants)

    def add(self, step: Step) -> Iterator[Launch]:
        for fold in folds(step, self._program.operands, ROWS):
            arrays = [
                self.arenas.arrays(tensor, Space.HOME if home else Space.WORK)[0]
                for tensor, home, _ in fold.slots
            ]
            sizes = np.array([[max(array.columns, 1), array.width] for array in arrays], np.int32)
            tables = self._table_ranges(fold.tiles, fold.entries, fold.heads, sizes)
            constants, programs = add_constants(int(sizes[:, 1].max())), len(fold.tiles) * fold.lanes
            yield self._launch("add", programs, tables, _filled(fold.slots), (fold.lanes,), constants)

    def merge(self, step: Step) -> Iterator[Launch]:
        for fold in folds(step, self._program.operands, ROWS):
            # there are only two arrays of O: 1 for work rows, 0 for home rows, instead of slots
            work = np.array([not home for _, home, _ in fold.slots], np.int32)
            fold.tiles[:, 7], fold.entries[:, 3] = work[fold.tiles[:, 7]], work[fold.entries[:, 3]]
            tables = self._table_ranges(fold.tiles, fold.entries, fold.heads)
            slots = [*self._spaces(Name.O), *self._spaces(Name.O, 1)]
            sizes = (fold.lanes, self._header.q_heads, self.arenas.columns.get(Name.O, 1))
            yield self._launch("merge", len(fold.tiles) * fold.lanes, tables, slots, sizes, self._widths)

    def delta(self, step: Step) -> Iterator[Launch]:
        """Two launches, of which one runs: for all rows, or for those whose statistics attention does not compute."""
        operands = self._program.operands
        if any(not operands[row.b].is_home for row in step.rowops):
            raise ExecutionError("delta of work rows of O: a plan must compute it from home rows")
        slots = [*self._spaces(Name.DO), (Name.O, True, 0), (Name.O, True, 1), *self._spaces(Name.DELTA)]
        columns = [self.arenas.columns.get(name, 1) for name in (Name.DO, Name.DELTA)]
        all_rows = row_tiles(step, operands, ROWS)
        remaining = row_tiles(step, operands, ROWS, self._rows_without_statistics)
        for items in (all_rows, remaining) if self._statistics.rowops else (all_rows,):
            sizes = (self.shares, items.lanes, self._header.q_heads, *columns)
            yield self._rows("delta", items, slots, sizes)
        self.shares += len(all_rows.tiles)

    def _rows_without_statistics(self, operand: Operand) -> list[tuple[int, int]]:
        """Ranges of rows whose statistics no task computes."""
        return gaps(self._statistic_rows if operand.is_home else (), operand.row, operand.row + operand.rows)

    @cached_property
    def _statistic_rows(self) -> list[tuple[int, int]]:
        _, row0, row1 = (column.tolist() for column in self._statistics.rowops)
        return merge_ranges(zip(row0, row1, strict=True))

    def finish(self, step: Step) -> Iterator[Launch]:
        """Finishes rows of sums; then, for layers with learned sinks, rows that arrived as results."""
        lse, result = (Name.O, True, 1), (Name.NONE, True, 0)
        sums, results = self._complete["o"].gaps, self._complete["o"].arrived.within
        for o, ranges in (((Name.O, True, 0), sums), (result, results)):
            items = row_tiles(step, self._program.operands, ROWS, partial(_rows_of, ranges))
            yield self._rows("finish", items, [o, lse, result], (items.lanes, self._header.q_heads))

    def _rows(self, kernel: str, items: RowTiles, slots: Sequence[Slot], sizes: tuple[int, ...]) -> Launch:
        tables = self._table_ranges(items.tiles, items.heads)
        return self._launch(kernel, len(items.tiles) * items.lanes, tables, slots, sizes, self._widths)

    def results(self, rows: int) -> Iterator[Launch]:
        """Copies gradients of home rows to the caller's results: dq, dk and dv, separate arrays."""
        panels: list[Panel] = []
        for tensor, column in ((Name.DQ, "dq"), (Name.DKV, "dkv")):
            for row, stop in self._complete[column].gaps(0, rows) if tensor in self._home else ():
                heads = self._header.heads_of(tensor)
                columns = tuple(range(heads)), slice(0, heads, 1)
                operand = Operand(0, tensor, Space.HOME, row, stop - row, *columns)
                panels += move_panels(self._operand_parts(operand), self._result(operand), stop - row)
        yield from self._move(panels)

    @property
    def _widths(self) -> Mapping[str, int]:
        return row_constants(self._variant.v)

    def _table_ranges(self, *tables: Ints) -> tuple[slice, ...]:
        """The range of each table in the buffer, in int32; each begins at a multiple of 16 bytes."""
        sections = []
        for table in tables:
            flat = np.ascontiguousarray(table).reshape(-1)
            padded = np.zeros(-(-len(flat) // 4) * 4, np.int32)
            padded[: len(flat)] = flat
            self.tables.append(padded)
            sections.append(slice(self._end, self._end + len(padded)))
            self._end += len(padded)
        return tuple(sections)


#: staging as numbers of the model's dtype, and as float32
_WIRE: list[Slot] = [(Name.NONE, False, 0), (Name.NONE, False, 1)]
#: a sum -> the tensor whose home rows have the shape of its results, and the index of its first result
_RESULT = {Name.O: (Name.DO, 0), Name.DQ: (Name.Q, 0), Name.DKV: (Name.KV, 1)}
#: home rows that callers pass in, unless the program projects
_INPUTS = frozenset({Name.Q, Name.KV, Name.DO})


def _filled(slots: Sequence[Slot]) -> list[Slot]:
    """`SLOTS` slots, the first one in place of those that are missing."""
    return [*slots, *[slots[0]] * (SLOTS - len(slots))]


def _rows_of(ranges: Callable[[int, int], list[tuple[int, int]]], operand: Operand) -> list[tuple[int, int]]:
    return ranges(operand.row, operand.row + operand.rows)


def _overlap(pairs: Sequence[tuple[Operand, Operand]]) -> bool:
    """True if one row op of a copy may read or write rows that another one writes; conservative: overlaps are rare."""
    read, written = (
        {(operand.tensor, operand.is_home) for operand in side} for side in zip(*pairs, strict=True)
    )
    return bool(read & written) or owners_meet([operand for _, operand in pairs], np.arange(len(pairs)))


#: op -> the function that drafts its launches; the machine executes other ops itself, on views
STEPS: Mapping[Op, Callable[[Drafts, Step], Iterator[Launch]]] = {
    op: handler for op in Op if (handler := getattr(Drafts, OP_NAMES[op], None))
}
