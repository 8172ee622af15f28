"""Tables as cells, one a rank, and back: `schemas/FORMAT.md` describes the bytes.

A cell has the number of rows, and column after column what its numbers are above what was predicted
(`ir.bytes.cells.predictions`), as bytes (`ir.bytes.cells.numbers`). A rank without rows has an empty cell. A cell has
at least a byte for `DENSEST` rows, zeros if need be: few bytes cannot claim many rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.ir.arrays import Ints, offsets
from apportion.ir.bytes.cells.numbers import (
    LONGEST,
    Bytes,
    read_counts,
    read_numbers,
    write_number,
    write_numbers,
)
from apportion.ir.bytes.cells.predictions import Named, Rule, WalkedRows, memory_for, numbered, walk
from apportion.ir.errors import DecodeError
from apportion.ir.loops.jit import inlined, lean
from apportion.ir.plan.tables import Table

Cell = bytes  # one rank's rows of a table

#: rows of a cell, at most, and for each of its bytes
MAX_ROWS, DENSEST = 1 << 24, 2


@inlined
def most_bytes(cells: int, columns: int, rows: int) -> int:
    """What cells of so many columns, with so many rows in all, take at most."""
    return cells * (LONGEST + columns) + rows * (LONGEST * columns + 1)


@inlined
def write_cell(rows: WalkedRows, out: Bytes, at: int) -> int:
    """Writes the cell of a rank's rows. Returns where the next byte goes."""
    cell, size = at, rows.end - rows.begin
    if size <= 0:
        return at
    at = write_number(size, out, at)
    for column in range(len(rows.rules)):
        found = walk(rows, column, False)
        at = write_numbers(rows.places, rows.departs, found, size, out, at)
    while (at - cell) * DENSEST < size:
        out[at] = 0
        at += 1
    return at


class Cells:
    """The cells of one table of all ranks, as they are read. rows: int64 [ranks]."""

    def __init__(self, cells: Sequence[Cell], where: str, first: int) -> None:
        """where: in which program or layout, and first: of which rank is the first cell, for messages. Raises
        DecodeError where a cell says that it has more rows than it can."""
        self.where, self.first = where, first
        self._data = np.frombuffer(b"".join(cells), np.uint8)
        sizes = np.fromiter(map(len, cells), np.int64, len(cells))
        self._stops = np.cumsum(sizes)
        self.rows, self._at = np.empty((2, len(cells)), np.int64)
        wrong = read_counts(self._data, self._stops, self.rows, self._at)
        if wrong >= 0:
            raise self._fault(wrong, "does not begin with its number of rows")
        too_many = (self.rows > MAX_ROWS) | (self.rows > DENSEST * sizes) | ((self.rows == 0) & (sizes > 0))
        if too_many.any():
            rank = int(too_many.argmax())
            raise self._fault(rank, f"{self.rows[rank]} rows in {sizes[rank]} bytes")

    def table(self, rules: tuple[Rule, ...], ranks: int, named: Named, lenient: bool) -> Table:
        """The table; ranks: of the plan; named: what its rows refer to; lenient: cells may have more columns. Raises
        DecodeError."""
        ptr = offsets(self.rows)
        values = np.empty((len(rules), int(ptr[-1])), np.int64)
        self.fill(values, ptr[:-1], rules, ranks, named, lenient)
        return Table(ptr, {rule.column: column for rule, column in zip(rules, values, strict=True)})

    def fill(
        self, values: Ints, begins: Ints, rules: tuple[Rule, ...], ranks: int, named: Named, lenient: bool
    ) -> None:
        """Reads the table into `values`, int64 [columns, rows], the rows of each rank from where `begins` says. named:
        of operands, `first` is where their sources may be. Else as `table`."""
        places = np.empty((2, int(self.rows.max(initial=0)) + 1), np.int64)
        memory, fault = memory_for(ranks, int(named.counts.max(initial=0))), np.zeros(3, np.int64)
        cells = (self._data, self._at, self._stops)
        flat = values.reshape(-1)
        _read_cells(
            flat, begins, self.rows, numbered(rules), ranks, named, memory, places, *cells, lenient, fault
        )
        code, rank, place = fault.tolist()
        if code == _BROKEN:
            raise self._fault(rank, f"column {rules[place].column!r} is not written as the format says")
        if code == _FAR:
            raise self._fault(rank, f"column {rules[place].column!r} has a number outside what it may hold")
        if code == _LEFT:
            raise self._fault(rank, f"{place} bytes are left over")

    def _fault(self, rank: int, what: str) -> DecodeError:
        return DecodeError(f"rank {self.first + rank}, {self.where}: {what}")


_BROKEN, _FAR, _LEFT = 1, 2, 3  # of a cell: a column, one of its numbers, what follows them


@lean
def _read_cells(
    values: Ints,
    begins: Ints,
    sizes: Ints,
    rules: Ints,
    ranks: int,
    named: Named,
    memory: Ints,
    places: Ints,
    data: Bytes,
    starts: Ints,
    stops: Ints,
    lenient: bool,
    fault: Ints,
) -> None:
    """Fills the columns; starts: where each cell's first column begins in `data`. The first fault's code, its rank, and
    its column or number of bytes go into `fault`."""
    columns, cell = len(rules), 0
    for rank in range(len(stops)):
        at, stop, begin, size, first = starts[rank], stops[rank], begins[rank], sizes[rank], named.first[rank]
        rows = WalkedRows(
            values,
            0,
            len(values) // columns,
            begin,
            begin + size,
            rules,
            ranks,
            first,
            named.held[first : first + named.counts[rank]],
            named.newest,
            rank,
            memory,
            rank * columns + 1,
            places[0],
            places[1],
        )
        for column in range(columns if size > 0 else 0):
            at = read_numbers(data, at, stop, size, places[0], places[1])
            if at < 0:
                fault[:] = _BROKEN, rank, column
                return
            if walk(rows, column, True) < 0:
                fault[:] = _FAR, rank, column
                return
        for place in range(at, stop):
            if not lenient and (data[place] != 0 or (place - cell) * DENSEST >= size):
                fault[:] = _LEFT, rank, stop - at
                return
        cell = stop
