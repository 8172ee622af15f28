"""Builds the tables of the row kernels from the steps of a rank's program.

    move           panels: strided rows of bytes from one place to another                       (copy, clear, messages)
    add, merge     tiles of the accumulator's rows; their entries are partial results, in program order
    delta, finish  consecutive tiles of rows

A place is a slot (an array whose address a launch takes) and a byte offset in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from apportion.backends.interp import Operand, Step
from apportion.backends.torch.memory.arrays import Array
from apportion.backends.torch.memory.rounds import Message
from apportion.backends.torch.stage.tiles import column_groups, cut_tiles, waves
from apportion.backends.torch.stage.worklists import ENTRY, TILE
from apportion.ir.arrays import Ints, group_of, index_in_group
from apportion.ir.isa import Op
from apportion.ir.tensors import Tensor as Name

COPY, CLEAR, MINUS_INF, NARROW, WIDEN, ROUND, EXTEND = range(7)
#: numbers of a panel, int64: slot, byte and stride of the source; the same of the target; rows, bytes per row, action
PANEL = 9
#: addresses that a launch takes
SLOTS = 12
#: 4-byte units that a program moves at a time
UNITS = 4096

#: one of the machine's arrays: (tensor, is home, number among the tensor's arrays)
ArraySlot = tuple[Name, bool, int]
#: an array, or None for the staging arena
Slot = ArraySlot | None


class Place(NamedTuple):
    """Rows of head columns in a slot. at: byte offset of row 0, column 0; columns: the heads' columns; of: number of
    columns of the array; pitch: bytes from one column to the next; size: bytes per number."""

    slot: Slot
    at: int
    columns: tuple[int, ...]
    of: int
    pitch: int
    size: int

    @property
    def is_whole(self) -> bool:
        return self.columns == tuple(range(self.of))


#: a part's place, and the bytes of a column
Part = tuple[Place, int]


class Panel(NamedTuple):
    """Rows of bytes from one place to another."""

    source: Slot
    source_at: int
    source_row: int
    target: Slot
    target_at: int
    target_row: int
    rows: int
    width: int
    action: int


def panels(source: Place, target: Place, rows: int, width: int, action: int = COPY) -> Iterator[Panel]:
    """Panels that move rows of `width` bytes (of the target) per column."""
    a, b = source, target
    if a.is_whole and b.is_whole:  # (row, column) pairs count as rows, or as one row if contiguous
        dense = b.pitch == width and a.pitch * b.size == width * a.size
        step, count = (a.of, rows) if dense else (1, rows * a.of)
        yield Panel(a.slot, a.at, a.pitch * step, b.slot, b.at, b.pitch * step, count, width * step, action)
        return
    for i, j in zip(a.columns, b.columns, strict=True):
        ends = (a.slot, a.at + i * a.pitch, a.of * a.pitch, b.slot, b.at + j * b.pitch, b.of * b.pitch)
        yield Panel(*ends, rows, width, action)


def parts_of(slot: Slot, offset: int, columns: tuple[int, ...], array: Array) -> list[Part]:
    """The parts of an array's rows, as places from byte `offset` of the slot on."""
    size, pitch = array.dtype.itemsize, max(array.width, 1) * array.dtype.itemsize
    parts = []
    for width in array.parts:
        parts.append((Place(slot, offset, columns, max(array.columns, 1), pitch, size), max(width, 1) * size))
        offset += max(width, 1) * size
    return parts


def message_parts(
    message: Message, tile: int, operand: Operand, arrays: Iterable[tuple[int, Array]], row: int = 0
) -> list[Part]:
    """The parts of a staged tile as places in the staging arena, from the tile's row `row` on."""
    columns = tuple(range(max(len(operand.heads), 1)))
    start = message.at + message.tiles[tile][1]
    return [
        part
        for offset, array in arrays
        for part in parts_of(None, start + offset + row * array.row_bytes, columns, array)
    ]


def move_panels(source: list[Part], target: list[Part], rows: int) -> Iterator[Panel]:
    """Panels that move all parts; numbers are converted if the dtypes differ."""
    for (a, _), (b, width) in _join_pairs(zip(source, target, strict=True)):
        action = COPY if a.size == b.size else _CONVERTED[a.size, b.size]
        yield from panels(a, b, rows, width, action)


def _join_pairs(pairs: Iterable[tuple[Part, Part]]) -> list[tuple[Part, Part]]:
    """Joins parts that are contiguous on both sides."""
    result: list[tuple[Part, Part]] = []
    for pair in pairs:
        if result and all(_follows(*sides) for sides in zip(result[-1], pair, strict=True)):
            (a, width), (b, other) = result[-1]
            result[-1] = (a, width + pair[0][1]), (b, other + pair[1][1])
        else:
            result.append(pair)
    return result


def _follows(previous: Part, part: Part) -> bool:
    (a, width), (b, _) = previous, part
    return b == a._replace(at=a.at + width)


def clear_panels(target: list[Part], rows: int, tensor: Name) -> Iterator[Panel]:
    """Panels that write the identity of accumulation."""
    for number, (part, width) in enumerate(target):
        yield from panels(part, part, rows, width, MINUS_INF if tensor == Name.O and number == 1 else CLEAR)


#: conversions, bytes per number before and after: LSE between memory and messages, gradients in results or messages
_CONVERTED = {(8, 4): NARROW, (4, 8): WIDEN, (4, 2): ROUND, (2, 4): EXTEND}


class Move(NamedTuple):
    """A launch of `move`. slots: arrays whose addresses it takes; grain: unit of all bytes in `panels`."""

    panels: Ints  # int64 [panels, PANEL], in grains
    chunks: Ints  # int32 [chunks, 2]: panel, first row
    slots: tuple[Slot, ...]
    grain: int
    rows: int
    columns: int

    def constants(self, dtype: str) -> dict[str, int | bool]:
        """The compile-time arguments, for models of a dtype."""
        return {"GRAIN": self.grain, "BF16": dtype == "bf16", "R": self.rows, "C": self.columns}


def move(items: Sequence[Panel]) -> Move:
    slots = tuple(dict.fromkeys(slot for panel in items for slot in (panel.source, panel.target)))
    number = {slot: i for i, slot in enumerate(slots)}
    table = np.array(
        [(number[p.source], *p[1:3], number[p.target], *p[4:6], *p[6:]) for p in items], np.int64
    ).reshape(-1, PANEL)
    table = table[(table[:, 6] > 0) & (table[:, 7] > 0)]
    strides = table[:, [1, 2, 4, 5, 7]]
    grain = math.gcd(16, *np.unique(strides).tolist())
    table[:, [1, 2, 4, 5, 7]] //= grain
    widest = int(table[:, 7].max(initial=1)) * grain // 4
    columns = min(1024, max(16, 1 << max(widest - 1, 1).bit_length()))
    rows = max(1, UNITS // columns)
    count = -(-table[:, 6] // rows)
    panel = group_of(count)
    first = index_in_group(count) * rows
    return Move(table, np.stack([panel, first], axis=1).astype(np.int32), slots, grain, rows, columns)


class Fold(NamedTuple):
    """A launch of `add` or `merge`: tiles and entries as in attention. An entry has: owner rows it adds to (from, to),
    shift to its rows, slot, heads; a tile has its slot in place of the first shift. heads: the column of each lane."""

    tiles: Ints
    entries: Ints
    heads: Ints
    slots: tuple[ArraySlot, ...]
    lanes: int


class _Term(NamedTuple):
    """A partial result and its accumulator."""

    part: Operand
    whole: Operand
    first: bool

    @property
    def owner(self) -> tuple[object, ...]:
        return self.whole.tensor, self.whole.is_home, self.whole.column_list

    def lanes(self) -> Iterator[_Term]:
        """A term for each head column."""
        for number, columns in enumerate(zip(self.part.column_list, self.whole.column_list, strict=True)):
            heads = self.part.heads[number : number + 1]
            part, total = (
                replace(operand, heads=heads, columns=(column,))
                for operand, column in zip(self[:2], columns, strict=True)
            )
            yield _Term(part, total, self.first)


def folds(step: Step, operands: Sequence[Operand], height: int) -> Iterator[Fold]:
    """The launches of an add or merge: one, unless it reads rows that it accumulates into."""
    terms = [_Term(operands[row.a], operands[row.c], row.first) for row in step.rowops]
    if owners_meet([term.whole for term in terms], _number_keys([term.owner for term in terms])):
        terms = [lane for term in terms for lane in term.lanes()]
    for group in _split_dependent(terms):
        yield _fold(group, height)


def owners_meet(written: Sequence[Operand], owner: Ints) -> bool:
    """True if two owners, int64 [operands], write the same row and column."""
    columns = list(dict.fromkeys(operand.column_list for operand in written))
    group = column_groups(
        np.zeros_like(owner), np.array([columns.index(operand.column_list) for operand in written]), columns
    )
    slot = 32 * group + np.array([2 * operand.tensor + operand.is_home for operand in written])
    start = np.array([operand.row for operand in written])
    stop = start + np.array([operand.rows for operand in written])
    return bool(waves(np.zeros_like(owner), slot, start, stop, owner).any())


def _number_keys(keys: Sequence[object]) -> Ints:
    number_of = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([number_of[key] for key in keys])


def _split_dependent(terms: list[_Term]) -> Iterator[list[_Term]]:
    """Splits terms into runs in which no term reads rows that another term writes."""
    reads, writes = (
        np.array(
            [
                (2 * operand.tensor + operand.is_home, operand.row, operand.row + operand.rows)
                for operand in side
            ]
        )
        for side in zip(*((term.part, term.whole) for term in terms), strict=True)
    )
    a, b = reads[:, None], writes[None, :]
    overlaps = (a[..., 0] == b[..., 0]) & (a[..., 1] < b[..., 2]) & (b[..., 1] < a[..., 2])
    overlaps = (overlaps | overlaps.T) & ~np.eye(len(terms), dtype=bool)
    start = 0
    for number in range(len(terms)):
        if overlaps[number, start:number].any():
            yield terms[start:number]
            start = number
    yield terms[start:]


def _fold(terms: list[_Term], height: int) -> Fold:
    parts, wholes = [term.part for term in terms], [term.whole for term in terms]
    owner, start = _number_keys([term.owner for term in terms]), np.array([operand.row for operand in wholes])
    stop = start + np.array([operand.rows for operand in wholes])
    cuts = cut_tiles(owner, start, stop, np.array([term.first for term in terms]), height)
    slots = tuple(dict.fromkeys((operand.tensor, operand.is_home, 0) for operand in (*wholes, *parts)))
    of_whole, of_part = (
        np.array([slots.index((operand.tensor, operand.is_home, 0)) for operand in side])
        for side in (wholes, parts)
    )
    heads = HeadColumns()
    at_whole, at_part = (
        np.array([heads.offset_of(operand.column_list) for operand in side]) for side in (wholes, parts)
    )
    task, tile = cuts.task, cuts.of_entry
    shift = np.array([operand.row for operand in parts]) - start
    from_, to = np.maximum(cuts.row0[tile], start[task]), np.minimum(cuts.row1[tile], stop[task])
    entries = np.zeros((len(task), ENTRY), np.int32)
    entries[:, :5] = np.stack([from_, to, shift[task], of_part[task], at_part[task]], axis=1)
    sample = task[cuts.ptr[:-1]]
    lanes = np.array([len(operand.column_list) for operand in wholes])
    fields = (cuts.row0, cuts.row1, cuts.ptr[:-1], cuts.ptr[1:], cuts.fresh, lanes[sample], at_whole[sample])
    tiles = np.zeros((len(sample), TILE), np.int32)
    tiles[:, :8] = np.stack([*fields, of_whole[sample]], axis=1)
    return Fold(tiles, entries, np.array(heads.numbers, np.int32), slots, int(lanes.max()))


@dataclass
class HeadColumns:
    """Lists of head columns, end to end, without duplicates."""

    numbers: list[int] = field(default_factory=list)
    _offsets: dict[tuple[int, ...], int] = field(default_factory=dict)

    def offset_of(self, columns: tuple[int, ...]) -> int:
        if columns not in self._offsets:
            self._offsets[columns] = len(self.numbers)
            self.numbers += columns
        return self._offsets[columns]


class RowTiles(NamedTuple):
    """A launch of `delta` or `finish`: tiles of rows, without entries."""

    tiles: Ints
    heads: Ints
    lanes: int


def row_tiles(
    step: Step,
    operands: Sequence[Operand],
    height: int,
    rows_of: Callable[[Operand], list[tuple[int, int]]] = lambda first: [(first.row, first.row + first.rows)],
) -> RowTiles:
    """Tiles of the rows that a delta or finish writes. rows_of: the rows to compute. Flags of a tile: if these rows,
    and for delta those of dO and O, are work rows; shifts: to dO's and O's rows; heads: columns of delta, dO and O, or
    only of O."""
    heads, tiles = HeadColumns(), []
    for row in step.rowops:
        sides = [operands[i] for i in ((row.c, row.a, row.b) if step.op == Op.DELTA else (row.c,))]
        first = sides[0]
        flags = sum(2 << i for i, operand in enumerate(sides) if not operand.is_home)
        shifts = [operand.row - first.row for operand in sides[1:]] or [0, 0]
        columns = [list(operand.column_list) for operand in sides]
        index = heads.offset_of(tuple(x for lane in zip(*columns, strict=True) for x in (*lane, 0, 0, 0)[:4]))
        for begin, end in rows_of(first):
            for start in range(begin, end, height):
                stop = min(start + height, end)
                tiles.append((start, stop, 0, 0, flags, len(columns[0]), index, *shifts))
    table = np.zeros((len(tiles), TILE), np.int32)
    table[:, :9] = np.array(tiles, np.int32).reshape(-1, 9)
    return RowTiles(table, np.array(heads.numbers, np.int32), int(table[:, 5].max(initial=0)))
