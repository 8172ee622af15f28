"""Tables of a part, read from the prose of FORMAT.md one number at a time: slow, and unlike the package's reader."""

from __future__ import annotations

import struct
from collections.abc import Sequence

FORMATS = dict(enumerate("BHIQbhiq", 1))
CONSTANT, BITS, OFFSET = 9, 10, 11


def rows_of(cell: Sequence[bytes]) -> int:
    """The number of rows, by the first column that is written out."""
    codes, *blobs = cell
    number = next(i for i, code in enumerate(codes) if code in FORMATS)
    return len(blobs[number]) // struct.calcsize(FORMATS[codes[number]])


def columns_of(cell: Sequence[bytes]) -> list[list[int]]:
    """The values of every column."""
    codes, *blobs = cell
    rows = rows_of(cell)
    columns: list[list[int]] = []
    for code, blob in zip(codes, blobs, strict=True):
        columns.append(_column(code, blob, rows, columns[0] if columns else []))
        assert len(columns[-1]) == rows
    return columns


def _column(code: int, blob: bytes, rows: int, first: list[int]) -> list[int]:
    if code in FORMATS:
        return list(struct.unpack(f"<{len(blob) // struct.calcsize(FORMATS[code])}{FORMATS[code]}", blob))
    if code == BITS:
        assert len(blob) == (rows + 7) // 8
        bits = int.from_bytes(blob, "little")
        assert bits >> rows == 0
        return [bits >> row & 1 for row in range(rows)]
    assert len(blob) in (1, 2, 4, 8)
    number = int.from_bytes(blob, "little", signed=True)
    return [number] * rows if code == CONSTANT else [value + number for value in first]
