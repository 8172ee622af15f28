"""Operands in the order in which lists use them: what the format writes in fewest bytes (`ir.predictions`).

Numbers follow the lists, column after column (`isa.OPERAND_COLUMNS`), and in each its rows. Operands that nothing uses
go.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from apportion.ir.isa import OPERAND_COLUMNS, TABLES
from apportion.ir.jit import jit
from apportion.ir.plan import Ints, Table

#: list -> where among its columns are numbers of operands
_PLACES = {
    name: np.array([TABLES[name].index(column) for column in columns], np.int64)
    for name, columns in OPERAND_COLUMNS.items()
}


def number_by_use(operands: Table, lists: Mapping[str, tuple[Ints, Ints]]) -> Table:
    """The operands, with other numbers, which are written into the lists: name -> int64 [ranks + 1], where the rows of
    each rank begin, and [columns, rows], in the order of `isa.TABLES`."""
    begin = operands.ptr.astype(np.int64, copy=False)
    new, ptr = np.full(len(operands), -1, np.int32), np.zeros(operands.ranks + 1, np.int64)
    used = ptr[1:]  # of each rank, then of all up to it
    _take_none(new, begin, used)
    for name, places in _PLACES.items():
        _number(*lists[name], places, begin, new, used)
    np.cumsum(used, out=used)
    old = np.empty(int(ptr[-1]), np.int64)
    _place(new, begin, ptr, old)
    return Table(ptr, {name: np.take(column, old) for name, column in operands.columns.items()})


@jit
def _take_none(new: Ints, begin: Ints, used: Ints) -> None:
    """Operand 0 of each rank keeps its number."""
    for rank in range(len(used)):
        if begin[rank + 1] > begin[rank]:
            new[begin[rank]], used[rank] = 0, 1


@jit
def _number(ptr: Ints, rows: Ints, places: Ints, begin: Ints, new: Ints, used: Ints) -> None:
    """Numbers the columns at `places`; new: by old number, -1 where there is none yet."""
    for rank in range(len(used)):
        for place in places:
            for row in range(ptr[rank], ptr[rank + 1]):
                at = begin[rank] + rows[place, row]
                if new[at] < 0:
                    new[at] = used[rank]
                    used[rank] += 1
                rows[place, row] = new[at]


@jit
def _place(new: Ints, begin: Ints, ptr: Ints, old: Ints) -> None:
    """Where each operand was, by new numbers."""
    for rank in range(len(begin) - 1):
        for at in range(begin[rank], begin[rank + 1]):
            if new[at] >= 0:
                old[ptr[rank] + new[at]] = at
