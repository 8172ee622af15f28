"""Tables as blobs per rank and column, and back.

Columns are narrowed for the whole plan at once and cut per rank; on the way back the ranks' blobs are joined, and
a column is widened to int64 when it is first asked for, so that arithmetic on it needs no care about overflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from itertools import repeat
from types import MappingProxyType
from typing import Any

import numpy as np

from apportion.ir.errors import DecodeError
from apportion.ir.plan import Ints, Table, empty_table

#: column code -> dtype; the only dtypes there are
DTYPES: Mapping[int, np.dtype[Any]] = MappingProxyType(
    {
        1: np.dtype("<u1"),
        2: np.dtype("<u2"),
        3: np.dtype("<u4"),
        4: np.dtype("<u8"),
        5: np.dtype("<i1"),
        6: np.dtype("<i2"),
        7: np.dtype("<i4"),
        8: np.dtype("<i8"),
    }
)
#: narrowest first, unsigned before signed
_CANDIDATES = tuple((code, np.iinfo(DTYPES[code])) for code in (1, 5, 2, 6, 3, 7, 4, 8))

#: value of a column that an older minor version does not have; empty while there is one version
DEFAULTS: Mapping[str, int] = MappingProxyType({})

Cell = Sequence[bytes]  # one rank's rows of a table: dtype codes, then one blob per column; () without rows


def cells(table: Table, names: tuple[str, ...]) -> Iterator[Cell]:
    """The cell of each rank, cut when it is read."""
    if len(table) == 0:
        return repeat((), table.ranks)
    columns = [_narrow(table[name]) for name in names]
    codes = bytes(code for code, _ in columns)
    rows = np.diff(np.asarray(table.ptr, np.int64))
    sizes = {width: (rows * width).tolist() for width in {DTYPES[code].itemsize for code in codes}}
    blobs = [map(BytesIO(data).read, sizes[DTYPES[code].itemsize]) for code, data in columns]
    return (cell if cell[1] else () for cell in zip(repeat(codes), *blobs, strict=False))


def _narrow(column: Ints) -> tuple[int, bytes]:
    low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
    code = next(code for code, kind in _CANDIDATES if kind.min <= low and high <= kind.max)
    return code, np.asarray(column, DTYPES[code]).tobytes()


class Gather:
    """One table of all ranks, from the cells of some ranks after those of others."""

    def __init__(self, names: tuple[str, ...], where: str) -> None:
        self.names, self.where = names, where
        self.codes = b""
        self.rows: list[Ints] = []
        self.blobs: list[list[bytes]] = []

    def add(self, cells: list[Cell]) -> None:
        """The next ranks. Raises DecodeError where they differ from the others or within."""
        rows = np.zeros(len(cells), np.int64)
        self.rows.append(rows)
        filled = [cell for cell in cells if cell]
        if not filled:
            return
        self.codes = self.codes or self._codes(filled[0])
        columns = self._columns(filled)
        rows[np.fromiter(map(bool, cells), bool, len(cells))] = self._count(columns, len(filled))
        self.blobs.append([b"".join(column) for column in columns[: len(self.names)]])

    def _codes(self, cell: Cell) -> bytes:
        codes = bytes(cell[0])
        unknown = set(codes) - set(DTYPES)
        if unknown:
            raise DecodeError(f"{self.where}: dtype code {min(unknown)} is not among 1 to {max(DTYPES)}")
        missing = [name for name in self.names[len(codes) :] if name not in DEFAULTS]
        if missing or not codes:
            raise DecodeError(f"{self.where}: column {(missing or self.names)[0]!r} is missing")
        return codes

    def _columns(self, cells: list[Cell]) -> list[tuple[bytes, ...]]:
        """[columns][ranks] blobs; those of unknown later columns too."""
        try:
            codes, *columns = zip(*cells, strict=True)
        except ValueError:
            raise DecodeError(f"{self.where}: ranks differ in their number of columns") from None
        if set(codes) != {self.codes} or len(columns) != len(self.codes):
            raise DecodeError(f"{self.where}: ranks differ in dtypes, or these in number from the columns")
        return columns

    def _count(self, columns: list[tuple[bytes, ...]], ranks: int) -> Ints:
        """[ranks] rows, the same by every column."""
        widths = [DTYPES[code].itemsize for code in self.codes]
        rows: Ints = np.fromiter(map(len, columns[0]), np.int64, ranks) // widths[0]
        sizes = {width: (rows * width).tolist() for width in set(widths)}
        if not rows.all() or any(list(map(len, c)) != sizes[w] for c, w in zip(columns, widths, strict=True)):
            raise DecodeError(f"{self.where}: columns of a rank differ in length or hold no rows")
        return rows

    def table(self) -> Table:
        """The whole table, its columns as narrow as they were encoded."""
        ptr = np.concatenate([[0], np.cumsum(np.concatenate(self.rows))])
        if not self.codes:
            return empty_table(self.names, len(ptr) - 1)
        columns: dict[str, Ints] = {
            name: np.frombuffer(b"".join(blobs), DTYPES[code])
            for name, code, blobs in zip(self.names, self.codes, zip(*self.blobs, strict=True), strict=False)
        }
        for name in self.names[len(columns) :]:
            columns[name] = np.full(int(ptr[-1]), DEFAULTS[name], np.int64)
        return Table(ptr, columns)


class _Widening(Mapping[str, Ints]):
    """Columns as they were encoded, each widened to int64 when it is first asked for."""

    def __init__(self, narrow: Mapping[str, Ints]) -> None:
        self._columns = dict(narrow)

    def __getitem__(self, name: str) -> Ints:
        column = self._columns[name]
        if column.dtype != np.int64:
            column = self._columns[name] = column.astype(np.int64)
        return column

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def widening(table: Table) -> Table:
    """The table with columns that become int64 on first use. No value may exceed the int64 range."""
    return Table(table.ptr, _Widening(table.columns))
