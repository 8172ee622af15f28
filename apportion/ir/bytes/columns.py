"""Integer columns as differences in the narrowest width: the loops of writing and reading tables.

    rows u32 · column 0: width u8, rows differences · column 1 … · column n

A difference is what a number is above the one before it, the first one above 0: 0, 1, 2, 4 or 8 bytes for all rows of a
rank, the lowest byte first, negative ones as two's complement. Without rows nothing follows the count.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apportion.ir.arrays import Ints
from apportion.ir.loops.jit import inlined, unlocked

Bytes = NDArray[np.uint8]

COUNT = 4  # bytes of the number of rows
MAX_ROWS = 1 << 24  # of a rank in one table
#: faults of what is read: too few bytes, a width that is none, more rows than bytes, a width that is not the narrowest,
#: bytes behind the last table, a number that the table cannot hold
SHORT, WIDTH, ROWS, WIDE, LEFT, FAR = range(1, 7)


@inlined
def _width_of(low: int, high: int) -> int:
    """Bytes that hold all differences from `low` to `high`."""
    if low == 0 and high == 0:
        return 0
    if low >= -(1 << 7) and high < 1 << 7:
        return 1
    if low >= -(1 << 15) and high < 1 << 15:
        return 2
    return 4 if low >= -(1 << 31) and high < 1 << 31 else 8


@unlocked
def measure(values: Ints, ptr: Ints, widths: Bytes) -> None:
    """Fills widths: uint8 [columns, ranks]. values: int [columns, rows]; ptr: int64 [ranks + 1]."""
    for column in range(len(values)):
        own = values[column]
        for rank in range(len(ptr) - 1):
            last, low, high = 0, 0, 0
            for row in range(ptr[rank], ptr[rank + 1]):
                number = int(own[row])
                low, high, last = min(low, number - last), max(high, number - last), number
            widths[column, rank] = _width_of(low, high)


@unlocked
def write(values: Ints, ptr: Ints, widths: Bytes, begins: Ints, out: Bytes) -> None:
    """Writes a table's rows of each rank to `out`, from where `begins`, int64 [ranks], says."""
    for rank in range(len(ptr) - 1):
        at, first, end = begins[rank], ptr[rank], ptr[rank + 1]
        for place in range(COUNT):
            out[at + place] = (end - first) >> (8 * place) & 255
        at += COUNT
        for column in range(len(values) if end > first else 0):
            own, width, last = values[column], int(widths[column, rank]), 0
            out[at] = width
            at += 1
            for row in range(first, end if width else first):
                step, last = int(own[row]) - last, int(own[row])
                for place in range(width):
                    out[at + place] = step >> (8 * place) & 255
                at += width


@unlocked
def scan(data: Bytes, bounds: Ints, columns: Ints, rows: Ints, places: Ints, fault: Ints) -> None:
    """Fills rows and places, int64 [tables, ranks]: how many rows each rank has, and where its first column begins.
    bounds: int64 [ranks + 1], parts in `data`; columns: int64 [tables]. fault: kind, rank and table of the first."""
    for rank in range(len(bounds) - 1):
        at, end = bounds[rank], bounds[rank + 1]
        for table in range(len(columns)):
            if end - at < COUNT:
                fault[:] = SHORT, rank, table
                return
            count = 0
            for place in range(COUNT):
                count |= int(data[at + place]) << (8 * place)
            at += COUNT
            rows[table, rank], places[table, rank] = count, at
            most = 0
            for _ in range(columns[table] if count > 0 else 0):
                width = int(data[at]) if at < end else 0
                if at >= end or width * count > end - at - 1:
                    fault[:] = SHORT, rank, table
                    return
                if width > 8 or 0b100010111 >> width & 1 == 0:
                    fault[:] = WIDTH, rank, table
                    return
                at, most = at + 1 + width * count, max(most, width)
            if count > MAX_ROWS or (count > 1 and most == 0):
                fault[:] = ROWS, rank, table
                return
        if at != end:
            fault[:] = LEFT, rank, len(columns) - 1
            return


@unlocked
def read(data: Bytes, places: Ints, ptr: Ints, bound: int, values: Ints, fault: Ints) -> None:
    """Fills a table: values, int [columns, rows], of what `scan` found, from -bound to below bound. fault: kind, rank
    and column of the first."""
    for rank in range(len(ptr) - 1):
        at, first, end = places[rank], ptr[rank], ptr[rank + 1]
        for column in range(len(values) if end > first else 0):
            own, width, last, low, high = values[column], int(data[at]), 0, 0, 0
            at += 1
            for row in range(first, end):
                step = 0
                for place in range(width):
                    step |= int(data[at + place]) << (8 * place)
                if 0 < width < 8 and step >> (8 * width - 1):
                    step -= 1 << (8 * width)
                at += width
                last += step
                if last < -bound or last >= bound:
                    fault[:] = FAR, rank, column
                    return
                low, high = min(low, step), max(high, step)
                own[row] = last
            if width != _width_of(low, high):
                fault[:] = WIDE, rank, column
                return
