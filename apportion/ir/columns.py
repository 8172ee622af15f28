"""Tables as cells, one a rank, and back: `schemas/FORMAT.md` describes the bytes.

A cell has the number of rows, and column after column what its numbers are above what was predicted
(`ir.predictions`), as bytes (`ir.numbers`). A rank without rows has an empty cell. A cell has at least a byte for
`DENSEST` rows, zeros if need be: few bytes cannot claim many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.isa import LIMIT
from apportion.ir.jit import jit
from apportion.ir.numbers import LONGEST, Bytes, read_counts, read_numbers, write_number, write_numbers
from apportion.ir.plan import Ints, Table
from apportion.ir.predictions import BEYOND, Columns, Named, Rule, columns_of, walk

Cell = bytes  # one rank's rows of a table

#: rows of a cell, at most, and for each of its bytes
MAX_ROWS, DENSEST = 1 << 24, 2


class Encoded(NamedTuple):
    """The cells of all ranks, end to end. data: uint8; stops: int64 [ranks], where each ends."""

    data: Bytes
    stops: Ints


def encode_table(table: Table, rules: tuple[Rule, ...], ranks: int, named: Named) -> Encoded:
    """The table's cells; ranks: of the plan. Raises ConfigError for numbers that no plan can hold."""
    values = np.empty((len(rules), len(table)), np.int64)
    for column, rule in zip(values, rules, strict=True):
        column[:] = checked(rule.column, table[rule.column])
    ptr = np.ascontiguousarray(table.ptr, np.int64)
    return encode_columns(columns_of(values, ptr[:-1], ptr[1:], rules, ranks, named))


def encode_columns(table: Columns) -> Encoded:
    """As `encode_table`, of `checked` numbers."""
    rows, columns, ranks = table.ends - table.begins, len(table.kinds), len(table.begins)
    total, longest = int(rows.sum()), int(rows.max(initial=0))
    if longest > MAX_ROWS:
        raise ConfigError("rows", longest, f"a rank has at most {MAX_ROWS} in a table", "use larger blocks")
    room = ranks * (LONGEST + columns) + total * (LONGEST * columns + 1)
    data, stops = np.empty(room, np.uint8), np.empty(ranks, np.int64)
    end = _write_cells(table, np.empty(longest, np.int64), data, stops)
    return Encoded(data[:end], stops)


def checked(name: str, column: Ints) -> Ints:
    """The column. Raises ConfigError for what no plan can hold."""
    if column.dtype.kind not in "iu":
        raise ConfigError(name, column.dtype, "is no dtype of integers", "convert the column")
    if column.dtype.itemsize > 4 and len(column) and (column.min() < -LIMIT or column.max() > LIMIT):
        row = int(np.flatnonzero((column < -LIMIT) | (column > LIMIT))[0])
        rule = f"is outside [-2**48, 2**48] in row {row}"
        raise ConfigError(name, int(column[row]), rule, "use smaller numbers")
    return column


@jit
def _write_cells(table: Columns, numbers: Ints, data: Bytes, stops: Ints) -> int:
    at = 0
    for rank in range(len(stops)):
        rows = table.ends[rank] - table.begins[rank]
        if rows > 0:
            cell = at
            at = write_number(rows, data, at)
            for column in range(len(table.kinds)):
                walk(table, rank, column, numbers, False)
                at = write_numbers(numbers, rows, data, at)
            while (at - cell) * DENSEST < rows:
                data[at] = 0
                at += 1
        stops[rank] = at
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
        """The table; ranks: of the plan; lenient: cells may have more columns. Raises DecodeError."""
        ptr = np.concatenate([[0], np.cumsum(self.rows)])
        values = np.empty((len(rules), int(ptr[-1])), np.int64)
        self.fill(columns_of(values, ptr[:-1], ptr[1:], rules, ranks, named), rules, lenient)
        return Table(ptr, {rule.column: column for rule, column in zip(rules, values, strict=True)})

    def fill(self, columns: Columns, rules: tuple[Rule, ...], lenient: bool) -> None:
        """Writes the values of the columns, of these rules; else as `table`."""
        numbers, fault = np.empty(int(self.rows.max(initial=0)), np.int64), np.zeros(3, np.int64)
        _read_cells(columns, self._data, self._at, self._stops, numbers, lenient, fault)
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


@jit
def _read_cells(
    table: Columns, data: Bytes, begins: Ints, stops: Ints, numbers: Ints, lenient: bool, fault: Ints
) -> None:
    """Fills the columns; begins: where each cell's first column begins in `data`. The first fault's code, its rank, and
    its column or number of bytes go into `fault`."""
    cell = 0
    for rank in range(len(stops)):
        at, stop, begin = begins[rank], stops[rank], table.begins[rank]
        rows = table.ends[rank] - begin
        for column in range(len(table.kinds) if rows > 0 else 0):
            at = read_numbers(data, at, stop, rows, numbers)
            if at < 0:
                fault[:] = _BROKEN, rank, column
                return
            walk(table, rank, column, numbers, True)
            for row in range(begin, begin + rows):
                if table.values[column, row] == BEYOND:
                    fault[:] = _FAR, rank, column
                    return
        for place in range(at, stop):
            if not lenient and (data[place] != 0 or (place - cell) * DENSEST >= rows):
                fault[:] = _LEFT, rank, stop - at
                return
        cell = stop
