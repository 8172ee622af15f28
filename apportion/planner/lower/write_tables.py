"""The compiled walk that writes the tables of all ranks: rows by rank and step, operands each once, arenas to fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.isa import ALL_TO_ALL, OPERAND_COLUMNS, TABLES
from apportion.ir.loops.jit import jit, lean, unlocked
from apportion.ir.tensors import KV_SIDE, Tensor

#: list -> its columns that are no operands
PLAIN = {
    name: tuple(column for column in TABLES[name] if column not in columns)
    for name, columns in OPERAND_COLUMNS.items()
}


ARENAS, OPERANDS, INSTRUCTIONS, _FIRST = range(4)  # of `isa.TABLES`; the lists are the others
LISTS = tuple(TABLES)[_FIRST:]
MOST_PLAIN, MOST_NAMED = max(map(len, PLAIN.values())), max(map(len, OPERAND_COLUMNS.values()))
NAMED = 4 + MOST_PLAIN  # where operands begin among the numbers of a part


def _places(of: Mapping[str, tuple[str, ...]], most: int) -> Ints:
    """int64 [lists, most]: where columns of each list stand among all of them, -1 behind the last."""
    found = np.full((len(LISTS), most), -1)
    for number, name in enumerate(LISTS):
        found[number, : len(of[name])] = [TABLES[name].index(column) for column in of[name]]
    return found


_PLAIN_AT, _NAMED_AT = _places(PLAIN, MOST_PLAIN), _places(OPERAND_COLUMNS, MOST_NAMED)
#: int64 [tensors]: whether its arenas have columns for query heads (0) or for key heads (1)
SIDE = np.array([tensor in KV_SIDE for tensor in Tensor], np.int64)


class Template(NamedTuple):
    """steps: int64 [steps, 4], op, round, channel, mode; launch: int64 [steps], of what a step waits for, or -1."""

    steps: Ints
    launch: Ints


class Given(NamedTuple):
    """All rows as they were given. numbers: int32, packed: int64, columns one behind the other, each once. parts: int64
    [parts, ..], of each part its list, its rows, then its columns: rank, position, the plain ones, each where it begins
    in `numbers`, or -1 - what stands in every row; then of each column of operands the tensor, which of the part's
    ranges it is, where that begins in `packed` (-1: an earlier column has it) and its head sets, as the others."""

    numbers: Ints
    packed: Ints
    parts: Ints


class _Found(NamedTuple):
    """What one rank's rows have named so far, in memory that is used again for each.

    slots: int64 [slots, 2], a hash table of ranges: what is packed, and rank << 32 | place, the place-th distinct one
    of that rank. packed: int64 [ranges], the same by place; number: int32 [ranges, tensors], the operand among those of
    all ranks, which counts if it is one of the rank's; of no tensor the head set. state: int64 [2], ranges and operands
    so far. reach: int64 [tensors], work rows that operands reach.
    """

    slots: Ints
    packed: Ints
    number: Ints
    state: Ints
    reach: Ints


@unlocked
def arrange(given: Given, template: Template, count: Ints, ptr: Ints, rows: tuple[Ints, ...]) -> None:
    """Rows of each list by rank and step, those of one step as given: into `rows`, int64 [rows, 1 + ranges] each, its
    part << 32 | which of the part's it is, and its ranges; into `count`, int64 [ranks, steps], how many there are; into
    `ptr`, where those of each rank begin."""
    (ranks, steps), numbers, parts, longest = count.shape, given.numbers, given.parts, 0
    for part in parts:
        longest = max(longest, part[1])
    at, place = np.empty(ranks * steps + 1, np.int32), np.empty(longest, np.int32)
    for one in range(len(rows)):
        out = rows[one]
        if len(out) == 0:
            continue
        at[:] = 0
        for part in parts:
            if part[0] == one:
                for row in range(part[1]):
                    at[_number(numbers, part[2], row) * steps + _number(numbers, part[3], row) + 1] += 1
        for rank in range(ranks):
            for step in range(steps):
                key = rank * steps + step
                count[rank, step] += at[key + 1]
                at[key + 1] += at[key]
            ptr[_FIRST + one, rank + 1] = at[(rank + 1) * steps]
        for index in range(len(parts)):
            part = parts[index]
            if part[0] != one:
                continue
            for row in range(part[1]):
                key = _number(numbers, part[2], row) * steps + _number(numbers, part[3], row)
                place[row] = at[key]
                at[key] += 1
                out[place[row], 0] = index << 32 | row
            for cell in range(NAMED, len(part), 4):
                if part[cell + 2] >= 0:
                    for row in range(part[1]):
                        out[place[row], 1 + part[cell + 1]] = given.packed[part[cell + 2] + row]
    for rank in range(ranks):
        here = 0
        for step in range(steps):
            here += _has(template, count[rank], step)
        ptr[INSTRUCTIONS, rank + 1] = ptr[INSTRUCTIONS, rank] + here


@lean
def _number(numbers: Ints, begin: int, row: int) -> int:
    """What stands in a row of a column."""
    return int(numbers[begin + row]) if begin >= 0 else -1 - begin


@lean
def _has(template: Template, count: Ints, step: int) -> bool:
    """Whether a rank takes part in a step: it has rows, waits for what it launched, or all ranks do."""
    of = template.launch[step] if template.launch[step] >= 0 else step
    return bool(count[of] > 0 or template.steps[of, 3] & ALL_TO_ALL)


@jit
def write_instructions(template: Template, count: Ints, out: Ints) -> None:
    """The instructions of all ranks: op, round, channel, mode and count."""
    at = 0
    for rank in range(len(count)):
        for step in range(len(template.steps)):
            if _has(template, count[rank], step):
                for column in range(4):
                    out[column, at] = template.steps[step, column]
                out[4, at] = count[rank, step]
                at += 1


@unlocked
def write_lists(
    given: Given,
    rows: tuple[Ints, ...],
    ptr: Ints,
    lists: tuple[Ints, ...],
    operands: Ints,
    arenas: Ints,
    heads: Ints,
) -> None:
    """Rank after rank: the columns of the lists, the operands that these name, and arenas as large as what operands in
    work rows reach. heads: int64 [2, ranks], columns of query and of key heads in arenas."""
    ranks, tensors = ptr.shape[1] - 1, len(SIDE)
    found, at, arena = _room(rows, ptr), 0, 0
    for rank in range(ranks):
        found.state[0], found.state[1], found.reach[:] = 0, 1, 0
        operands[:, at] = 0  # none
        for one in range(len(lists)):
            first, end = ptr[_FIRST + one, rank], ptr[_FIRST + one, rank + 1]
            if end > first:
                _write_list(given, one, rows[one], first, end, lists[one], rank, found, operands, at)
        at += found.state[1]
        ptr[OPERANDS, rank + 1] = at
        for tensor in range(tensors):
            if found.reach[tensor] > 0:
                arenas[0, arena], arenas[1, arena] = tensor, found.reach[tensor]
                arenas[2, arena] = heads[SIDE[tensor], rank]
                arena += 1
        ptr[ARENAS, rank + 1] = arena


@jit
def _room(rows: tuple[Ints, ...], ptr: Ints) -> _Found:
    """For the rank that names most."""
    most, slots = 0, 2
    for rank in range(ptr.shape[1] - 1):
        here = 0
        for one in range(len(rows)):
            here += (ptr[_FIRST + one, rank + 1] - ptr[_FIRST + one, rank]) * (rows[one].shape[1] - 1)
        most = max(most, here)
    while slots < 2 * most:
        slots *= 2
    return _Found(
        np.full((slots, 2), -1, np.int64),
        np.empty(most, np.int64),
        np.full((most, len(SIDE)), -1, np.int32),
        np.zeros(2, np.int64),
        np.empty(len(SIDE), np.int64),
    )


@lean
def _write_list(
    given: Given,
    one: int,
    rows: Ints,
    first: int,
    end: int,
    out: Ints,
    rank: int,
    found: _Found,
    operands: Ints,
    at: int,
) -> None:
    """A rank's rows [first, end) of list `one`, and the operands that are new, the rank's from `at` on."""
    for column in range(MOST_PLAIN + MOST_NAMED):
        plain, row = column < MOST_PLAIN, first
        to = _PLAIN_AT[one, column] if plain else _NAMED_AT[one, column - MOST_PLAIN]
        while to >= 0 and row < end:  # rows of one part after rows of one part
            part, last = rows[row, 0] >> 32, row + 1
            while last < end and rows[last, 0] >> 32 == part:
                last += 1
            said = given.parts[part]
            if plain:
                _write_plain(given.numbers, said[4 + column], rows, row, last, out[to])
            else:
                cell = said[NAMED + 4 * (column - MOST_PLAIN) :]
                _write_named(given.numbers, cell, rows, row, last, out[to], rank, found, operands, at)
            row = last


@lean
def _write_plain(numbers: Ints, begin: int, rows: Ints, first: int, end: int, out: Ints) -> None:
    """A column that is none of operands, of rows of one part."""
    for row in range(first, end):
        out[row] = _number(numbers, begin, rows[row, 0] & 0x7FFFFFFF)


@lean
def _write_named(
    numbers: Ints,
    cell: Ints,
    rows: Ints,
    first: int,
    end: int,
    out: Ints,
    rank: int,
    found: _Found,
    operands: Ints,
    at: int,
) -> None:
    """A column of operands. Puts places of ranges where these were."""
    tensor, kind, fresh, heads = cell[0], 1 + cell[1], cell[2] >= 0, cell[3]
    number, packed = found.number, found.packed
    if tensor == 0:
        for row in range(first, end):
            out[row] = 0
        return
    if fresh:
        for row in range(first, end):
            sets = _number(numbers, heads, rows[row, 0] & 0x7FFFFFFF)
            rows[row, kind] = _place(found, rank, rows[row, kind], sets)
    count, reach = found.state[1], found.reach[tensor]
    for row in range(first, end):
        place = rows[row, kind]
        if place < 0:
            out[row] = 0
            continue
        if number[place, tensor] <= at:
            number[place, tensor] = at + count
            key = packed[place]
            _write_operand(operands, at + count, tensor, key, number[place, 0])
            if key & 1:
                reach = max(reach, (key >> 32) + (key >> 1 & 0x7FFFFFFF))
            count += 1
        out[row] = number[place, tensor] - at
    found.state[1], found.reach[tensor] = count, reach


@lean
def _place(found: _Found, rank: int, packed: int, heads: int) -> int:
    """The place of a range among the rank's distinct ones, -1 for none."""
    if packed < 0:
        return -1
    slots, mask = found.slots, len(found.slots) - 1
    slot = _slot(packed, heads) & mask
    while slots[slot, 1] >> 32 == rank:
        place: int = slots[slot, 1] & 0x7FFFFFFF
        if slots[slot, 0] == packed and found.number[place, 0] == heads:
            return place
        slot = (slot + 1) & mask
    place = found.state[0]
    found.state[0] = place + 1
    slots[slot, 0], slots[slot, 1] = packed, rank << 32 | place
    found.packed[place] = packed
    found.number[place, 0] = heads
    return place


@lean
def _write_operand(operands: Ints, at: int, tensor: int, packed: int, heads: int) -> None:
    """An operand, of work rows from column 0 on."""
    operands[0, at], operands[1, at] = tensor, packed & 1
    operands[2, at], operands[3, at] = packed >> 32, packed >> 1 & 0x7FFFFFFF
    operands[4, at], operands[5, at] = 0, heads


@lean
def _slot(packed: int, heads: int) -> int:
    """Where a range is looked for first: the middle of a product, as rows are multiples of many things (Knuth, vol. 3,
    section 6.4). No step leaves 63 bits."""
    folded = ((packed & 0x7FFFFFFF) ^ (40503 * (packed >> 32)) ^ (heads << 13)) & 0x3FFFFFFF
    return (folded * 0x9E3779B1) >> 20
