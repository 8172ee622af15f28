"""Tables as blobs per rank and column, and back.

Columns are encoded for the whole plan at once and cut per rank; on the way back the ranks' blobs are joined, and a
column is spelled out as int64 when it is first asked for (`ir.packed`), so that arithmetic on it needs no care about
overflow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from itertools import repeat
from types import MappingProxyType
from typing import Any

import numpy as np

from apportion.ir.errors import DecodeError
from apportion.ir.packed import Bits, Column, Constant, Offset, Packed, Plain, pack_bits
from apportion.ir.plan import Ints, Table, empty_table

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
#: narrowest first, unsigned before signed
_CANDIDATES = tuple((code, np.iinfo(DTYPES[code])) for code in (1, 5, 2, 6, 3, 7, 4, 8))

#: codes of columns that are not: one integer per rank, one bit per row, one integer per rank above the first column
CONSTANT, BITS, OFFSET = 9, 10, 11
_SINGLE = (CONSTANT, OFFSET)
_SINGLE_WIDTHS = (1, 2, 4, 8)
#: offsets are within this either way, so that what they are added to (2**48 at most) stays an int64
_MAX_OFFSET = 2**49
#: rows of one rank that are looked at before whole columns, and rows looked at at a time: they stay in cache
_SAMPLES, _PIECE = 8, 1 << 15

#: value of a column that an older minor version does not have; empty while there is one version
DEFAULTS: Mapping[str, int] = MappingProxyType({})

Cell = Sequence[bytes]  # one rank's rows of a table: codes, then one blob per column; () without rows


def cells(table: Table, names: tuple[str, ...]) -> Iterator[Cell]:
    """The cell of each rank, cut when it is read."""
    if len(table) == 0:
        return repeat((), table.ranks)
    ranks = _Ranks(np.asarray(table.ptr, np.int64))
    columns = _encode([table[name] for name in names], ranks)
    codes = bytes(column.code for column in columns)
    blobs = [map(BytesIO(column.data).read, column.sizes) for column in columns]
    found: Iterator[Cell] = zip(repeat(codes), *blobs, strict=False)
    return found if ranks.rows.all() else (cell if cell[1] else () for cell in found)


@dataclass(frozen=True)
class _Encoded:
    """A column of all ranks: `data` cut into `sizes` [ranks]."""

    code: int
    data: bytes
    sizes: list[int]


def _encode(columns: list[Ints], ranks: _Ranks) -> list[_Encoded]:
    """At least one column is written out: it tells how many rows there are."""
    found = [_encode_column(columns[0], None, ranks)]
    base = columns[0] if found[0].code in DTYPES else None
    found += [_encode_column(column, base, ranks) for column in columns[1:]]
    if not any(column.code in DTYPES for column in found):
        found[0] = ranks.numbers(columns[0])
    return found


def _encode_column(column: Ints, base: Ints | None, ranks: _Ranks) -> _Encoded:
    """The first encoding that fits and takes less than a byte per row, else a number per row.

    A few rows of one rank tell at once what most columns are not.
    """
    few = column[ranks.sample].tolist()
    found = ranks.singles(CONSTANT, ranks.values(column)) if len(set(few)) == 1 else None
    if found is None and base is not None:
        above = {value - first for value, first in zip(few, base[ranks.sample].tolist(), strict=True)}
        found = ranks.singles(OFFSET, ranks.values(column, base)) if len(above) == 1 else None
    if found is None and {0, 1}.issuperset(few):
        found = ranks.bits(column)
    return found or ranks.numbers(column)


class _Ranks:
    """Where the rows of each rank are: `rows` [ranks], `begins` [ranks with rows]."""

    def __init__(self, ptr: Ints) -> None:
        self.rows: Ints = np.diff(ptr)
        self.begins: Ints = ptr[:-1][self.rows > 0]
        self.total = int(ptr[-1])
        self.pieces = [(begin, min(begin + _PIECE, self.total)) for begin in range(0, self.total, _PIECE)]
        longest = int(self.rows.argmax())
        step = max(1, int(self.rows[longest]) // _SAMPLES)
        self.sample = slice(int(ptr[longest]), int(ptr[longest + 1]), step)

    @cached_property
    def owner(self) -> Ints:
        """[rows] which of the ranks with rows has each row."""
        counts = self.rows[self.rows > 0]
        return np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    def values(self, column: Ints, base: Ints | None = None) -> Ints | None:
        """[ranks with rows] the number that all rows of a rank hold, above `base`; None where rows differ."""
        values = _above(column, base, self.begins)
        for begin, end in self.pieces:
            if (_above(column, base, slice(begin, end)) != values[self.owner[begin:end]]).any():
                return None
        return values

    def singles(self, code: int, values: Ints | None) -> _Encoded | None:
        """One number per rank with rows: `values`, where there are such."""
        if values is None:
            return None
        low, high = int(values.min()), int(values.max())
        fits = (width for width in _SINGLE_WIDTHS if -low <= 1 << 8 * width - 1 > high)
        width = next(fits, self.total)
        if width * len(values) >= self.total or (code == OFFSET and max(-low, high) > _MAX_OFFSET):
            return None
        return _Encoded(code, values.astype(f"<i{width}").tobytes(), _sizes(code, width, self.rows))

    def bits(self, column: Ints) -> _Encoded | None:
        """One bit per row, where all are 0 or 1."""
        if column.min() < 0 or column.max() > 1:
            return None
        sizes = _sizes(BITS, 0, self.rows)
        if sum(sizes) >= self.total:
            return None
        return _Encoded(BITS, pack_bits(column, self.rows).tobytes(), sizes)

    def numbers(self, column: Ints) -> _Encoded:
        """One number per row, in the narrowest dtype."""
        low, high = int(column.min()), int(column.max())
        code = next(code for code, kind in _CANDIDATES if kind.min <= low and high <= kind.max)
        data = np.asarray(column, DTYPES[code]).tobytes()
        return _Encoded(code, data, _sizes(code, DTYPES[code].itemsize, self.rows))


def _above(column: Ints, base: Ints | None, rows: slice | Ints) -> Ints:
    if base is None:
        return column[rows]
    above: Ints = np.subtract(column[rows], base[rows], dtype=np.int64, casting="unsafe")
    return above


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
