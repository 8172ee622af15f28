"""Operands that have the rows of others: dQ has those of Q, backward those of forward.

    Q[0:512)  Q[512:900)  O[0:512)  O[512:900)   dQ[0:512)  dQ[512:900)
        0         0           2         2            2          2          operands back to the source; 0: none

The operands of all of a rank's programs stand in one row, program after program: a source is any earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apportion.ir.columns import Cells, Encoded, checked, encode_columns
from apportion.ir.isa import TABLES
from apportion.ir.jit import jit, lean
from apportion.ir.plan import Ints, Table
from apportion.ir.predictions import ROWS, RULES, SOURCE, Columns, Named, columns_of

_RULES = RULES["operands"]
_PLACE = {rule.column: number for number, rule in enumerate(_RULES)}
#: slots that a search looks at: rows may be chosen so that all operands want the same
_PROBES = 16
_ROW, _COL, _HEADS = _PLACE["row"], _PLACE["col"], _PLACE["heads"]


class Operands(NamedTuple):
    """The operands of all programs. values: int64 [columns, operands], as they are written; ptr: int64 [ranks + 1],
    those of each rank; begins: int64 [programs + 1, ranks], those of each program. ranks: of the plan."""

    values: Ints
    ptr: Ints
    begins: Ints
    ranks: int

    def encode(self, program: int) -> Encoded:
        """The cells of a program."""
        return encode_columns(self._columns(program))

    def read(self, program: int, cells: Cells, lenient: bool) -> None:
        """Takes the operands of a program from its cells, those of earlier ones being there. Raises DecodeError."""
        cells.fill(self._columns(program), _RULES, lenient)

    def _columns(self, program: int) -> Columns:
        none = np.zeros(len(self.ptr) - 1, np.int64)
        sources = Named(self.values[SOURCE, :0], self.ptr[:-1], none, none)
        begins, ends = self.begins[program], self.begins[program + 1]
        return columns_of(self.values, begins, ends, _RULES, self.ranks, sources)

    def named(self, program: int) -> Named:
        """What the lists of a program refer to, none of them being read."""
        begins, ends = self.begins[program], self.begins[program + 1]
        return Named(self.values[ROWS], begins, ends - begins, np.zeros_like(begins))

    def table(self, program: int) -> Table:
        """The operands of one program."""
        ptr, at = _places(self.begins[program], self.begins[program + 1])
        return Table(ptr, {name: np.take(self.values[_PLACE[name]], at) for name in TABLES["operands"]})


def _places(begins: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """int64 [ranks + 1], [rows]: rows of each rank in a table of their own, and where they are."""
    ptr = np.concatenate([[0], np.cumsum(ends - begins)])
    return ptr, np.arange(ptr[-1]) + np.repeat(begins - ptr[:-1], ends - begins)


def room_for(counts: Sequence[Ints], ranks: int) -> Operands:
    """Operands without values; counts: int64 [those ranks that are here] for each program; ranks: of the plan."""
    begins = np.cumsum([np.zeros_like(counts[0]), *counts], 0)
    ptr = np.concatenate([[0], np.cumsum(begins[-1])])
    return Operands(np.empty((len(_RULES), int(ptr[-1])), np.int64), ptr, begins + ptr[:-1], ranks)


def gathered(tables: Sequence[Table], ranks: int) -> Operands:
    """The operands of all programs, with their sources. Raises ConfigError for numbers that no plan can hold."""
    found = room_for([np.diff(table.ptr) for table in tables], ranks)
    for program, table in enumerate(tables):
        for name in TABLES["operands"]:
            _copy(checked(name, table[name]), found.values[_PLACE[name]], table.ptr, found.begins[program])
    most = int(np.diff(found.ptr).max(initial=0))
    _find_sources(found.values, found.ptr, np.empty((2, 2 * most + 1), np.int64))
    return found


@jit
def _copy(column: Ints, values: Ints, ptr: Ints, begins: Ints) -> None:
    """A column of a program into `values`; begins: where the operands of each rank begin there."""
    for rank in range(len(begins)):
        here, there = values[begins[rank] :], column[ptr[rank] : ptr[rank + 1]]
        for row in range(len(there)):  # assigning the slice takes seconds to compile
            here[row] = there[row]


@jit
def _find_sources(values: Ints, ptr: Ints, slots: Ints) -> None:
    """Writes the column of sources: the operand behind the last one's, if it has as many rows in the same heads; else,
    of those for which that was not so, the latest of the same rows; else the latest of as many rows, if that is also so
    of the operands behind the two. slots: [2, more than twice a rank's operands], hash tables of operands, one for each
    search."""
    for rank in range(len(ptr) - 1):
        back, end, size = 0, ptr[rank + 1], 2 * (ptr[rank + 1] - ptr[rank]) + 1
        slots[:, :size] = -1
        for at in range(ptr[rank], end):
            if back == 0 or not _alike(values, at - back, at):
                same, ahead = (
                    _slot(values, slots[0], size, at, end, 0),
                    _slot(values, slots[1], size, at, end, 1),
                )
                source = slots[0, same] if same >= 0 and slots[0, same] >= 0 else -1
                if source < 0 and ahead >= 0:
                    source = slots[1, ahead]
                back = at - source if source >= 0 else 0
                if same >= 0:
                    slots[0, same] = at
                if ahead >= 0:
                    slots[1, ahead] = at
            values[SOURCE, at] = back


@lean
def _slot(values: Ints, slots: Ints, size: int, at: int, end: int, ahead: int) -> int:
    """Where a hash table has an operand like the one at `at`, or room for one; -1 where neither was found soon. end: of
    the rank's operands; ahead: whether the operands behind the two are compared, and not their first rows."""
    key = _key(values, at, end, ahead)
    slot = ((key * 31 + values[ROWS, at]) * 31 + values[_HEADS, at] + values[_COL, at]) % size
    for _ in range(_PROBES):
        other = slots[slot]
        if other < 0 or (key == _key(values, other, end, ahead) and _alike(values, other, at)):
            return int(slot)
        slot = slot + 1 if slot + 1 < size else 0
    return -1


@lean
def _key(values: Ints, at: int, end: int, ahead: int) -> int:
    if not ahead:
        return int(values[_ROW, at])
    return int(values[ROWS, at + 1]) if at + 1 < end else 0


@lean
def _alike(values: Ints, a: int, b: int) -> bool:
    same_rows = values[ROWS, a] == values[ROWS, b]
    return bool(same_rows and values[_HEADS, a] == values[_HEADS, b] and values[_COL, a] == values[_COL, b])
