"""Columns as they are encoded, and as int64 once they are asked for.

    Plain      one number per row, of any integer dtype
    Constant   one number per rank
    Bits       one bit per row; each rank begins a byte
    Offset     the table's first column plus one number per rank

`ir.structure` checks columns as they are: most need not be spelled out for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from apportion.ir.jit import jit
from apportion.ir.plan import Ints, Table


class Column(Protocol):
    """A column over the rows of all ranks. Ranks without rows do not count."""

    def narrow(self) -> Ints:
        """[rows] the values, in the integer dtype that costs least."""

    def within(self, low: int, high: int) -> bool:
        """Whether all values are known to lie in [low, high]. A False may mean that it was not looked up."""

    def peaks(self, begins: Ints) -> Ints:
        """[ranks] no value of a rank, whose first row is `begins`, is above."""


@cache
def _bounds(kind: np.dtype[Any]) -> tuple[int, int]:
    """The least and the greatest number of a dtype; numpy takes its time to tell."""
    return int(np.iinfo(kind).min), int(np.iinfo(kind).max)


@dataclass(frozen=True)
class Plain:
    """`values` [rows]."""

    values: Ints

    def narrow(self) -> Ints:
        return self.values

    def within(self, low: int, high: int) -> bool:
        least, most = _bounds(self.values.dtype)
        return bool(
            (low <= least or low <= self.values.min()) and (most <= high or self.values.max() <= high)
        )

    def peaks(self, begins: Ints) -> Ints:
        peaks: Ints = np.maximum.reduceat(self.values, begins)
        return peaks


@dataclass(frozen=True)
class Constant:
    """`values` [ranks], each for as many rows as `rows` [ranks] says."""

    values: Ints
    rows: Ints

    def narrow(self) -> Ints:
        if (self.values == self.values[0]).all():  # 10 times faster, and most are
            return np.full(int(self.rows.sum()), self.values[0])
        return np.repeat(self.values, self.rows)

    def within(self, low: int, high: int) -> bool:
        return bool(low <= self.values.min() and self.values.max() <= high)

    def peaks(self, begins: Ints) -> Ints:
        return self.values


@dataclass(frozen=True)
class Bits:
    """`packed` uint8: per rank the bits of its `rows` [ranks], least significant first, then zeros to a byte."""

    packed: NDArray[np.uint8]
    rows: Ints

    def narrow(self) -> Ints:
        return np.unpackbits(self.packed, bitorder="little")[self._used()]

    def _used(self) -> NDArray[np.bool_]:
        """[bits] bool: those of rows."""
        ends = np.cumsum((self.rows + 7) >> 3) << 3
        padding = -self.rows & 7
        used = np.ones(len(self.packed) << 3, bool)
        for place in range(1, 8):
            used[ends[padding >= place] - place] = False
        return used

    def padded(self) -> bool:
        """Whether all bits beyond the rows are zeros."""
        last = self.packed[np.cumsum((self.rows + 7) >> 3) - 1]
        return not (last.astype(np.int64) >> (((self.rows - 1) & 7) + 1)).any()

    def within(self, low: int, high: int) -> bool:
        return low <= 0 and high >= 1

    def peaks(self, begins: Ints) -> Ints:
        return np.ones(len(begins), np.int64)


@dataclass(frozen=True)
class Offset:
    """`base` and what `values` [ranks] adds to the rows of each."""

    base: Plain
    values: Ints
    rows: Ints

    def narrow(self) -> Ints:
        shifts = np.repeat(self.values, self.rows)
        values: Ints = np.add(self.base.values, shifts, dtype=np.int64, casting="unsafe")
        return values

    def within(self, low: int, high: int) -> bool:
        base, values = self.base.values, self.values
        return low <= int(base.min()) + int(values.min()) and int(base.max()) + int(values.max()) <= high

    def peaks(self, begins: Ints) -> Ints:
        return self.base.peaks(begins).astype(np.int64) + self.values


@jit
def pack_bits(column: Ints, ptr: Ints, packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The zeros and ones of `column` as in `Bits`, written into zeros; ptr: int64 [ranks + 1] rows of each rank."""
    byte = 0
    for rank in range(len(ptr) - 1):
        for row in range(ptr[rank], ptr[rank + 1]):
            place = row - ptr[rank]
            packed[byte + (place >> 3)] |= column[row] << (place & 7)
        byte += (ptr[rank + 1] - ptr[rank] + 7) >> 3
    return packed


class Packed(Mapping[str, Ints]):
    """Columns by name, each made int64 when it is first asked for. `encoded` has them as they are.

    No value may exceed the int64 range by then.
    """

    def __init__(self, encoded: Mapping[str, Column]) -> None:
        self.encoded = dict(encoded)

    def __getitem__(self, name: str) -> Ints:
        column = self.encoded[name]
        if not isinstance(column, Plain) or column.values.dtype != np.int64:
            self.encoded[name] = column = Plain(column.narrow().astype(np.int64, copy=False))
        return column.values

    def __iter__(self) -> Iterator[str]:
        return iter(self.encoded)

    def __len__(self) -> int:
        return len(self.encoded)


def encoded(table: Table) -> Mapping[str, Column]:
    """The table's columns as they are."""
    if isinstance(table.columns, Packed):
        return table.columns.encoded
    return {name: Plain(column) for name, column in table.columns.items()}
