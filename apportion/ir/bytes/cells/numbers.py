"""Rows of small integers as bytes: mostly zeros, for they say how a column departs from what was predicted.

    SAME   nothing: all are 0
    FEW    how many are not, and for each the zeros before it and the number
    BITS   a bit per row, least significant first, 1 where the number is not 0; then these numbers
    EACH   every number

Numbers have 7 bits a byte, low bits first, the highest bit of a byte set where more follow (LEB128), 8 bytes at most.
What may be negative is folded before: 0, -1, 1, -2 become 0, 1, 2, 3.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apportion.ir.arrays import Ints
from apportion.ir.loops.jit import inlined, jit, lean

Bytes = NDArray[np.uint8]

SAME, FEW, BITS, EACH = range(4)
#: bytes that a number takes at most
LONGEST = 8


@lean
def size_of(number: int) -> int:
    """Bytes of a number that is not negative."""
    size = 1
    while number >= 128:
        number >>= 7
        size += 1
    return size


@lean
def write_number(number: int, out: Bytes, at: int) -> int:
    """Writes a number that is not negative; returns where the next byte goes."""
    while number >= 128:
        out[at] = 128 | (number & 127)
        number >>= 7
        at += 1
    out[at] = number
    return at + 1


@lean
def read_number(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """A number, and where the next byte is; -1 where it does not end before `end`, or is too long."""
    number, shift = 0, 0
    while at < end and shift < 7 * LONGEST:
        byte = int(data[at])
        number |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return number, at
    return 0, -1


@lean
def folded(number: int) -> int:
    return (number << 1) ^ (number >> 63)


@lean
def unfolded(number: int) -> int:
    return (number >> 1) ^ -(number & 1)


@inlined
def write_numbers(places: Ints, numbers: Ints, found: int, rows: int, out: Bytes, at: int) -> int:
    """Writes the form of `rows` numbers, one byte, and what it says: the shortest, of equals the first. All are 0 but
    the first `found` of `numbers`, which are at `places`, rising. Returns where the next byte goes."""
    if found == 0:
        out[at] = SAME
        return at + 1
    few, each, last = size_of(found), rows, -1
    for n in range(found):
        size = size_of(folded(numbers[n]))
        few, each, last = few + size + size_of(places[n] - last - 1), each + size - 1, places[n]
    bits = ((rows + 7) >> 3) + each - (rows - found)  # a 0 takes a byte in EACH
    if few <= bits and few <= each:
        return _write_few(places, numbers, found, out, at)
    if bits <= each:
        return _write_bits(places, numbers, found, rows, out, at)
    return _write_each(places, numbers, found, rows, out, at)


@inlined
def _write_few(places: Ints, numbers: Ints, found: int, out: Bytes, at: int) -> int:
    out[at] = FEW
    at = write_number(found, out, at + 1)
    last = -1
    for n in range(found):
        at = write_number(places[n] - last - 1, out, at)
        at = write_number(folded(numbers[n]), out, at)
        last = places[n]
    return at


@inlined
def _write_bits(places: Ints, numbers: Ints, found: int, rows: int, out: Bytes, at: int) -> int:
    out[at] = BITS
    first, at = at + 1, at + 1 + ((rows + 7) >> 3)
    for place in range(first, at):
        out[place] = 0
    for n in range(found):
        out[first + (places[n] >> 3)] |= 1 << (places[n] & 7)
        at = write_number(folded(numbers[n]), out, at)
    return at


@inlined
def _write_each(places: Ints, numbers: Ints, found: int, rows: int, out: Bytes, at: int) -> int:
    out[at] = EACH
    at, row = at + 1, 0
    for n in range(found):
        for _ in range(row, places[n]):
            out[at] = 0
            at += 1
        at, row = write_number(folded(numbers[n]), out, at), places[n] + 1
    for _ in range(row, rows):
        out[at] = 0
        at += 1
    return at


@lean
def read_numbers(data: Bytes, at: int, end: int, rows: int, places: Ints, numbers: Ints) -> int:
    """Reads what `write_numbers` wrote: those that are not 0, perhaps some that are, and a place of -1 behind them.
    Returns where the next byte is; -1 where it is none of this. places, numbers: room for more than `rows`."""
    places[0] = -1
    if at >= end or data[at] > EACH:
        return -1
    form, at = data[at], at + 1
    if form == FEW:
        return _read_few(data, at, end, rows, places, numbers)
    if form == BITS:
        return _read_bits(data, at, end, rows, places, numbers)
    if form == EACH:
        for row in range(rows):
            number, at = read_number(data, at, end)
            if at < 0:
                return -1
            places[row], numbers[row] = row, unfolded(number)
        places[rows] = -1
    return at


@lean
def _read_few(data: Bytes, at: int, end: int, rows: int, places: Ints, numbers: Ints) -> int:
    found, at = read_number(data, at, end)
    row = -1
    if found > rows:
        return -1
    for n in range(found):
        zeros, at = read_number(data, at, end)
        if at >= 0:
            row += zeros + 1
            number, at = read_number(data, at, end)
        if at < 0 or row >= rows:
            return -1
        places[n], numbers[n] = row, unfolded(number)
    places[found] = -1
    return at


@lean
def _read_bits(data: Bytes, at: int, end: int, rows: int, places: Ints, numbers: Ints) -> int:
    first, at = at, at + ((rows + 7) >> 3)
    if at > end or (rows & 7 and data[at - 1] >> (rows & 7)):
        return -1
    found = 0
    for row in range(rows):
        if data[first + (row >> 3)] >> (row & 7) & 1:
            number, at = read_number(data, at, end)
            if at < 0:
                return -1
            places[found], numbers[found] = row, unfolded(number)
            found += 1
    places[found] = -1
    return at


@jit
def read_counts(data: Bytes, stops: Ints, counts: Ints, begins: Ints) -> int:
    """The number that each of several texts begins with, into `counts`, and where it ends, into `begins`; `stops`:
    where the texts end. Texts without bytes have 0. Returns the first that begins with none; -1 where all do."""
    begin = 0
    for text in range(len(stops)):
        counts[text], begins[text] = 0, begin
        if stops[text] > begin:
            counts[text], begins[text] = read_number(data, begin, stops[text])
            if begins[text] < 0:
                return text
        begin = stops[text]
    return -1
