"""Operands that have the rows of others: dQ has those of Q, backward those of forward.

    Q[0:512)  Q[512:900)  O[0:512)  O[512:900)   dQ[0:512)  dQ[512:900)
        0         0           2         2            2          2          operands back to the source; 0: none

The operands of all of a rank's programs stand in one row, program after program: a source is any earlier one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Ints, offsets
from apportion.ir.bytes.cells.columns import Cells
from apportion.ir.bytes.cells.predictions import ROWS, RULES, SOURCE, Named
from apportion.ir.isa import TABLES
from apportion.ir.loops.jit import inlined
from apportion.ir.plan.tables import Table

_RULES = RULES["operands"]
_PLACE = {rule.column: number for number, rule in enumerate(_RULES)}
#: slots that a search looks at: rows may be chosen so that all operands want the same
_PROBES = 16
_ROW, _COL, _HEADS = _PLACE["row"], _PLACE["col"], _PLACE["heads"]


class WrittenOperands(NamedTuple):
    """The operands of all programs. values: int64 [columns, operands], as they are written; ptr: int64 [ranks + 1],
    those of each rank; begins: int64 [programs + 1, ranks], those of each program. ranks: of the plan."""

    values: Ints
    ptr: Ints
    begins: Ints
    ranks: int

    def read(self, program: int, cells: Cells, lenient: bool) -> None:
        """Takes the operands of a program from its cells, those of earlier ones being there. Raises DecodeError."""
        none = np.zeros(len(self.ptr) - 1, np.int64)
        sources = Named(self.values[SOURCE, :0], self.ptr[:-1], none, none)
        cells.fill(self.values, self.begins[program], _RULES, self.ranks, sources, lenient)

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
    ptr = offsets(ends - begins)
    return ptr, np.arange(ptr[-1]) + np.repeat(begins - ptr[:-1], ends - begins)


def room_for(counts: Sequence[Ints], ranks: int) -> WrittenOperands:
    """Operands without values; counts: int64 [those ranks that are here] for each program; ranks: of the plan."""
    begins = np.cumsum([np.zeros_like(counts[0]), *counts], 0)
    ptr = offsets(begins[-1])
    return WrittenOperands(np.empty((len(_RULES), int(ptr[-1])), np.int64), ptr, begins + ptr[:-1], ranks)


@inlined
def find_sources(values: Ints, total: int, count: int, slots: Ints) -> None:
    """Writes a rank's column of sources: the operand behind the last one's, if it has as many rows in the same heads;
    else, of those for which that was not so, the latest of the same rows; else the latest of as many rows, if that is
    also so of the operands behind the two. values: columns of `total` operands end to end, of which the first `count`
    are there; slots: [2, more than twice as many], hash tables of operands, one for each search."""
    back, size = 0, 2 * count + 1
    source = values[SOURCE * total : SOURCE * total + count]
    rows = values[ROWS * total : ROWS * total + count]
    row = values[_ROW * total : _ROW * total + count]
    col = values[_COL * total : _COL * total + count]
    heads = values[_HEADS * total : _HEADS * total + count]
    slots[:, :size] = -1
    at = 0
    while at < count:
        if back > 0:
            at = _follow(rows, col, heads, source, back, at)
            if at == count:
                return
        same = _slot(rows, row, col, heads, slots[0], size, at, False)
        ahead = _slot(rows, row, col, heads, slots[1], size, at, True)
        found = slots[0, same] if same >= 0 and slots[0, same] >= 0 else -1
        if found < 0 and ahead >= 0:
            found = slots[1, ahead]
        back = at - found if found >= 0 else 0
        if same >= 0:
            slots[0, same] = at
        if ahead >= 0:
            slots[1, ahead] = at
        source[at] = back
        at += 1


@inlined
def _follow(rows: Ints, col: Ints, heads: Ints, source: Ints, back: int, at: int) -> int:
    """As long as operands from `at` on are like those so far back, these are their sources. Returns the first that is
    not."""
    own, col_own, heads_own = rows[at:], col[at:], heads[at:]
    like, col_like, heads_like = rows[at - back :], col[at - back :], heads[at - back :]
    for n in range(len(own)):
        if own[n] != like[n] or heads_own[n] != heads_like[n] or col_own[n] != col_like[n]:
            return at + n
        source[at + n] = back
    return at + len(own)


@inlined
def _slot(rows: Ints, row: Ints, col: Ints, heads: Ints, slots: Ints, size: int, at: int, ahead: bool) -> int:
    """Where a hash table has an operand like the one at `at`, or room for one; -1 where neither was found soon. ahead:
    whether the operands behind the two are compared, and not their first rows."""
    key = _key(rows, row, at, ahead)
    slot = ((key * 31 + rows[at]) * 31 + heads[at] + col[at]) % size
    for _ in range(_PROBES):
        other = slots[slot]
        if other < 0 or (key == _key(rows, row, other, ahead) and _alike(rows, col, heads, other, at)):
            return int(slot)
        slot = slot + 1 if slot + 1 < size else 0
    return -1


@inlined
def _key(rows: Ints, row: Ints, at: int, ahead: bool) -> int:
    if not ahead:
        return int(row[at])
    return int(rows[at + 1]) if at + 1 < len(rows) else 0


@inlined
def _alike(rows: Ints, col: Ints, heads: Ints, a: int, b: int) -> bool:
    return bool(rows[a] == rows[b] and heads[a] == heads[b] and col[a] == col[b])
