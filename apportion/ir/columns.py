"""Tables as blobs per rank and column, and back.

Columns are encoded for the whole plan at once and cut per rank; on the way back the ranks' blobs are joined, and a
column is spelled out as int64 when it is first asked for (`ir.packed`), so that arithmetic on it needs no care about
overflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apportion.ir.errors import DecodeError
from apportion.ir.jit import jit
from apportion.ir.packed import Bits, Column, Constant, Offset, Packed, Plain, pack_bits
from apportion.ir.plan import Ints, Table, empty_table

Bytes = NDArray[np.uint8]

#: column code -> dtype of columns that are written out, and of nothing else
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
#: codes of columns that are not: one integer per rank, one bit per row, one integer per rank above the first column
CONSTANT, BITS, OFFSET = 9, 10, 11
_SINGLE = (CONSTANT, OFFSET)
_SINGLE_WIDTHS = (1, 2, 4, 8)
#: offsets are within this either way, so that what they are added to (2**48 at most) stays an int64
_MAX_OFFSET = 2**49

#: value of a column that an older minor version does not have; empty while there is one version
DEFAULTS: Mapping[str, int] = MappingProxyType({})

Cell = Sequence[bytes]  # one rank's rows of a table: codes, then one blob per column; () without rows


class Encoded(NamedTuple):
    """A table's columns, encoded alike in all ranks.

    rows: int64 [ranks]. codes: one byte a column, empty where there are no rows. widths: bytes of a row, or of the
    number that a rank has; 0 for bits. blobs: uint8, one a column, the ranks' blobs side by side.
    """

    rows: Ints
    codes: bytes
    widths: tuple[int, ...]
    blobs: tuple[Bytes, ...]


class _Blob(NamedTuple):
    code: int
    width: int
    data: Bytes


def encode_table(table: Table, names: tuple[str, ...]) -> Encoded:
    """The table's columns. At least one is written out: it tells how many rows there are."""
    ptr = np.ascontiguousarray(table.ptr, np.int64)
    rows = ptr[1:] - ptr[:-1]
    if not len(table):
        return Encoded(rows, b"", (), ())
    ranks = _Ranks(ptr, rows)
    columns = [_native(table[name]) for name in names]
    found = [_encode_column(columns[0], None, ranks)]
    base = columns[0] if found[0].code in DTYPES else None
    found += [_encode_column(column, base, ranks) for column in columns[1:]]
    if not any(blob.code in DTYPES for blob in found):
        found[0] = _numbers(columns[0], *_survey(columns[0], ptr)[:2])
    codes, widths, blobs = zip(*found, strict=True)
    return Encoded(rows, bytes(codes), widths, blobs)


def _native(column: Ints) -> Ints:
    """As the loops below take it."""
    kind = np.int32 if column.dtype == np.int32 else np.int64
    return np.ascontiguousarray(column, kind)


def _encode_column(column: Ints, base: Ints | None, ranks: _Ranks) -> _Blob:
    """The first encoding that fits and takes less than a byte per row, else a number per row."""
    low, high, alike = _survey(column, ranks.ptr)
    found = None
    if alike:
        found = ranks.singles(CONSTANT, column[ranks.begins], low, high)
    if found is None and base is not None and ranks.perhaps_above(column, base):
        above = ranks.above(column, base)
        found = None if above is None else ranks.singles(OFFSET, above, int(above.min()), int(above.max()))
    if found is None and low >= 0 and high <= 1:
        found = ranks.bits(column)
    return found or _numbers(column, low, high)


def _numbers(column: Ints, low: int, high: int) -> _Blob:
    """One number per row, in the narrowest dtype."""
    signed = low < 0
    bits = max(~low if signed else low, high).bit_length() + signed
    size = 0 if bits <= 8 else 1 if bits <= 16 else 2 if bits <= 32 else 3
    code = size + (5 if signed else 1)
    return _Blob(code, 1 << size, column.astype(DTYPES[code]).view(np.uint8))


class _Ranks:
    """Where the rows of each rank are: `ptr` [ranks + 1], `rows` [ranks], `begins` [ranks with rows]."""

    def __init__(self, ptr: Ints, rows: Ints) -> None:
        self.ptr, self.rows = ptr, rows
        self.begins: Ints = ptr[:-1][rows > 0]
        self.total = int(ptr[-1])
        longest = int(rows.argmax())
        self.ends = int(ptr[longest]), int(ptr[longest + 1]) - 1

    def perhaps_above(self, column: Ints, base: Ints) -> bool:
        """Whether the first and the last row of the longest rank are one number above `base`."""
        first, last = self.ends
        return bool(int(column[last]) - int(base[last]) == int(column[first]) - int(base[first]))

    def above(self, column: Ints, base: Ints) -> Ints | None:
        """int64 [ranks with rows]: the number that all rows of a rank are above `base`; None where rows differ."""
        if column.dtype != base.dtype:
            column, base = column.astype(np.int64), base.astype(np.int64)
        if not _one_step_above(column, base, self.ptr):
            return None
        return column[self.begins].astype(np.int64) - base[self.begins]

    def singles(self, code: int, values: Ints, low: int, high: int) -> _Blob | None:
        """One number per rank with rows: `values`, between `low` and `high`; None where that is not smaller."""
        fits = (width for width in _SINGLE_WIDTHS if -low <= 1 << 8 * width - 1 > high)
        width = next(fits, self.total)
        if width * len(values) >= self.total or (code == OFFSET and max(-low, high) > _MAX_OFFSET):
            return None
        return _Blob(code, width, values.astype(f"<i{width}").view(np.uint8))

    def bits(self, column: Ints) -> _Blob | None:
        """One bit per row of zeros and ones; None where that is not smaller."""
        size = int(((self.rows + 7) >> 3).sum())
        if size >= self.total:
            return None
        return _Blob(BITS, 0, pack_bits(column, self.ptr, np.zeros(size, np.uint8)))


@jit
def _survey(column: Ints, ptr: Ints) -> tuple[int, int, bool]:
    """The least and the greatest number, and whether all rows of each rank hold the same."""
    alike = True
    for rank in range(len(ptr) - 1):
        for row in range(ptr[rank] + 1, ptr[rank + 1]):
            if column[row] != column[ptr[rank]]:
                alike = False
                break
        if not alike:
            break
    return int(column.min()), int(column.max()), alike


@jit
def _one_step_above(column: Ints, base: Ints, ptr: Ints) -> bool:
    """Whether all rows of each rank are the same number above those of `base`."""
    for rank in range(len(ptr) - 1):
        for row in range(ptr[rank] + 1, ptr[rank + 1]):
            if column[row] - base[row] != column[ptr[rank]] - base[ptr[rank]]:
                return False
    return True


class Gather:
    """One table of all ranks, from the cells of some ranks after those of others."""

    def __init__(self, names: tuple[str, ...], where: str) -> None:
        self.names, self.where = names, where
        self.codes = b""
        self.widths: list[int] = []  # of a row, or of the number that a rank has; 0 for bits
        self.rows: list[Ints] = []
        self.blobs: list[list[bytes]] = []

    def add(self, cells: list[Cell]) -> None:
        """The next ranks. Raises DecodeError where they differ from the others or within."""
        rows = np.zeros(len(cells), np.int64)
        self.rows.append(rows)
        filled = [cell for cell in cells if cell]
        if not filled:
            return
        if not self.codes:
            self._begin(filled[0])
        columns = self._columns(filled)
        rows[np.fromiter(map(bool, cells), bool, len(cells))] = self._count(columns, len(filled))
        self.blobs.append([b"".join(column) for column in columns[: len(self.names)]])

    def _begin(self, cell: Cell) -> None:
        """Codes and widths, which all ranks share."""
        codes = bytes(cell[0])
        unknown = set(codes) - {*DTYPES, CONSTANT, BITS, OFFSET}
        if unknown:
            raise DecodeError(f"{self.where}: column code {min(unknown)} is not among 1 to {OFFSET}")
        missing = [name for name in self.names[len(codes) :] if name not in DEFAULTS]
        if missing or not codes:
            raise DecodeError(f"{self.where}: column {(missing or self.names)[0]!r} is missing")
        if not set(codes) & DTYPES.keys():
            raise DecodeError(f"{self.where}: no column is written out and says how many rows there are")
        if OFFSET in codes and codes[0] not in DTYPES:
            raise DecodeError(f"{self.where}: offsets from a first column that is not written out")
        self.codes = codes
        self.widths = [self._width(code, blob) for code, blob in zip(codes, cell[1:], strict=False)]

    def _width(self, code: int, blob: bytes) -> int:
        if code not in _SINGLE:
            return DTYPES[code].itemsize if code in DTYPES else 0
        if len(blob) not in _SINGLE_WIDTHS:
            raise DecodeError(f"{self.where}: a rank's only number has {len(blob)} bytes, not 1, 2, 4 or 8")
        return len(blob)

    def _columns(self, cells: list[Cell]) -> list[tuple[bytes, ...]]:
        """[columns][ranks] blobs; those of unknown later columns too."""
        try:
            codes, *columns = zip(*cells, strict=True)
        except ValueError:
            raise DecodeError(f"{self.where}: ranks differ in their number of columns") from None
        if set(codes) != {self.codes} or len(columns) != len(self.codes):
            raise DecodeError(f"{self.where}: ranks differ in codes, or these in number from the columns")
        return columns

    def _count(self, columns: list[tuple[bytes, ...]], ranks: int) -> Ints:
        """[ranks] rows, the same by every column."""
        first = next(number for number, code in enumerate(self.codes) if code in DTYPES)
        rows: Ints = np.fromiter(map(len, columns[first]), np.int64, ranks) // self.widths[first]
        kinds = list(zip(self.codes, self.widths, strict=True))
        sizes = {kind: _sizes(*kind, rows) for kind in set(kinds)}
        if not rows.all() or any(list(map(len, c)) != sizes[k] for c, k in zip(columns, kinds, strict=True)):
            raise DecodeError(f"{self.where}: columns of a rank differ in length or hold no rows")
        return rows

    def table(self) -> Table:
        """The whole table, its columns as they were encoded until they are asked for. Raises DecodeError."""
        rows = np.concatenate(self.rows)
        if not self.codes:
            return empty_table(self.names, len(rows))
        ptr = np.concatenate([[0], np.cumsum(rows)])
        rows = rows[rows > 0]
        columns = list(self._decoded(rows))
        columns += [Constant(np.full(len(rows), DEFAULTS[name]), rows) for name in self.names[len(columns) :]]
        return Table(ptr, Packed(dict(zip(self.names, columns, strict=True))))

    def _decoded(self, rows: Ints) -> Iterator[Column]:
        """The known columns that the plan has; `rows` of ranks with rows."""
        blobs = map(b"".join, zip(*self.blobs, strict=True))
        base: Column | None = None
        for code, width, data in zip(self.codes, self.widths, blobs, strict=False):
            column = self._column(code, width, data, rows, base)
            base = base or column
            yield column

    def _column(self, code: int, width: int, data: bytes, rows: Ints, base: Column | None) -> Column:
        if code in DTYPES:
            return Plain(np.frombuffer(data, DTYPES[code]))
        if code == BITS:
            return self._bits(Bits(np.frombuffer(data, np.uint8), rows))
        values: Ints = np.frombuffer(data, f"<i{width}")
        if code == CONSTANT or not isinstance(base, Plain):
            return Constant(values, rows)
        if values.min() < -_MAX_OFFSET or values.max() > _MAX_OFFSET:
            raise DecodeError(f"{self.where}: an offset is beyond 2**49")
        return Offset(base, values, rows)

    def _bits(self, bits: Bits) -> Bits:
        if bits.padded():
            return bits
        raise DecodeError(f"{self.where}: bits after those of a rank's rows are not zero")


def _sizes(code: int, width: int, rows: Ints) -> list[int]:
    """[ranks] bytes of a rank's blob; `width`: of a row, or of the number that a rank has."""
    if code in _SINGLE:
        rows = np.minimum(rows, 1)
    sizes: list[int] = (rows * width if width else (rows + 7) >> 3).tolist()
    return sizes
