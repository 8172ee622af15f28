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

from apportion.ir.jit import jit, lean
from apportion.ir.plan import Ints

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


@lean
def write_numbers(numbers: Ints, rows: int, out: Bytes, at: int) -> int:
    """Writes the first `rows` of `numbers`: the form, one byte, and what it says; the shortest, of equals the first.
    Returns where the next byte goes."""
    found, few, each, last = 0, 0, rows, -1
    for row in range(rows):
        if numbers[row] != 0:
            size = size_of(folded(numbers[row]))
            few, each = few + size + size_of(row - last - 1), each + size - 1
            found, last = found + 1, row
    few += size_of(found)
    bits = ((rows + 7) >> 3) + each - (rows - found)  # a 0 takes a byte in EACH
    if found == 0:
        out[at] = SAME
        return at + 1
    if few <= bits and few <= each:
        return _write_few(numbers, rows, found, out, at)
    if bits <= each:
        return _write_bits(numbers, rows, out, at)
    out[at] = EACH
    at += 1
    for row in range(rows):
        at = write_number(folded(numbers[row]), out, at)
    return at


@lean
def _write_few(numbers: Ints, rows: int, found: int, out: Bytes, at: int) -> int:
    out[at] = FEW
    at = write_number(found, out, at + 1)
    last = -1
    for row in range(rows):
        if numbers[row] != 0:
            at = write_number(row - last - 1, out, at)
            at = write_number(folded(numbers[row]), out, at)
            last = row
    return at


@lean
def _write_bits(numbers: Ints, rows: int, out: Bytes, at: int) -> int:
    out[at] = BITS
    first, at = at + 1, at + 1 + ((rows + 7) >> 3)
    for place in range(first, at):
        out[place] = 0
    for row in range(rows):
        if numbers[row] != 0:
            out[first + (row >> 3)] |= 1 << (row & 7)
            at = write_number(folded(numbers[row]), out, at)
    return at


@lean
def read_numbers(data: Bytes, at: int, end: int, rows: int, numbers: Ints) -> int:
    """Reads what `write_numbers` wrote into the first `rows` of `numbers`. Returns where the next byte is; -1 where it
    is none of this."""
    if at >= end or data[at] > EACH:
        return -1
    form, at = data[at], at + 1
    if form != EACH:
        for row in range(rows):
            numbers[row] = 0
    if form == FEW:
        return _read_few(data, at, end, rows, numbers)
    if form == BITS:
        return _read_bits(data, at, end, rows, numbers)
    if form == EACH:
        for row in range(rows):
            number, at = read_number(data, at, end)
            if at < 0:
                return -1
            numbers[row] = unfolded(number)
    return at


@lean
def _read_few(data: Bytes, at: int, end: int, rows: int, numbers: Ints) -> int:
    found, at = read_number(data, at, end)
    row = -1
    while at >= 0 and found > 0:
        zeros, at = read_number(data, at, end)
        if at >= 0:
            row += zeros + 1
            number, at = read_number(data, at, end)
        if at < 0 or row >= rows:
            return -1
        numbers[row] = unfolded(number)
        found -= 1
    return at


@lean
def _read_bits(data: Bytes, at: int, end: int, rows: int, numbers: Ints) -> int:
    first, at = at, at + ((rows + 7) >> 3)
    if at > end or (rows & 7 and data[at - 1] >> (rows & 7)):
        return -1
    for row in range(rows):
        if data[first + (row >> 3)] >> (row & 7) & 1:
            number, at = read_number(data, at, end)
            if at < 0:
                return -1
            numbers[row] = unfolded(number)
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
