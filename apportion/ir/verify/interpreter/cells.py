"""Memory of all ranks, cut where operands begin and end, so that an operand is a whole number of cells.

A *lane* is one column of a tensor's home or work rows on a rank: `unit` heads wide, the widest that all head sets
and columns of the program allow (all heads side by side, where the program never splits them). A lane is a linked
list of *cells*, row ranges whose rows share one state:

    lane (rank 3, KV, work, column 0)    [0, 512) ─► [512, 2048) ─► [2048, 4096) ─► end

An operand is one *piece* a lane: the cell where it begins. At first a lane is one cell. Cells that operands need are
cut out of those that hold their rows; the left part keeps its number. Cells of work rows that have become alike are
joined, and cut out again when they are needed again: pieces stay right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Ints, changes, group_of, offsets, within
from apportion.ir.errors import CapacityError
from apportion.ir.loops.jit import lean
from apportion.ir.plan.ops import IS_HEADLESS
from apportion.ir.tensors import HEADLESS, KV_SIDE, Tensor
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.interpreter.machine import (
    BEGIN,
    CELL,
    COUNTERS,
    EMPTY,
    END,
    FIRST_CELL,
    GONE,
    HOME_OFFSET,
    LANES,
    NEW_CELL,
    NEXT,
    NOWHERE,
    OFFSET,
    PART_LINE,
    PIECE,
    ROW,
    RUN_LINE,
    STATE,
    STOP,
    TENSOR,
    UNIT,
    VALUE,
    behind,
)
from apportion.ir.verify.view import HOME, HeadSets, Program

_SPACES = 2
PLACES = _SPACES * (max(Tensor) + 1)
_MOST_PIECES = 2**26
_SPARE = 4096


@dataclass(frozen=True, eq=False)
class MemoryCells:
    """lines: int64 [lines, 8], all that the interpreter reads and writes of memory:

        counters │ faults │ suspects │ full │ hints │ cells │ slots │ pieces, 4 a line │ runs ─►  ◄─ parts │ ◄ new cells
        0        1                                    68      slots                               part_line         end

    A slot is an operand: where it begins in its first lane; a piece, the same in its other lanes (a cell's line and
    a unit). The last cell of a lane only marks its end (NEXT is -1). A new cell has a second line: the cell it was
    cut from. lanes: int64 [count], the lane of each cell at the start. columns: lanes of one place; a lane's number
    is (rank * PLACES + tensor * 2 + space) * columns + column.
    """

    lines: Ints
    lanes: Ints
    slots: int
    columns: int

    def now(self) -> tuple[Ints, Ints]:
        """(the lines of all cells, the lane of each) with those that were cut off."""
        old = np.arange(FIRST_CELL, FIRST_CELL + len(self.lanes))
        new = np.arange(self.lines[COUNTERS, NEW_CELL] + 2, len(self.lines), 2)
        if not len(new):
            return old, self.lanes
        return np.append(old, new), np.append(self.lanes, self.lanes[self.lines[new + 1, 0] - FIRST_CELL])

    def place(self, lane: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """(rank, tensor, space, column) of each lane."""
        place, column = lane // self.columns, lane % self.columns
        return place // PLACES, place % PLACES // _SPACES, place % _SPACES, column

    def all_at_home(self, tensor: Tensor) -> bool:
        """Whether every home row of the tensor that a program touches holds a value; False where it touches none."""
        at, lanes = self.now()
        cells, (_, tensors, space, _) = self.lines[at], self.place(lanes)
        here = (tensors == tensor) & (space == HOME) & (cells[:, NEXT] >= 0)
        return bool(here.any() and (cells[here, STATE] == VALUE).all())


def build(
    program: Program, homes: Homes, given: frozenset[Tensor], owed: frozenset[Tensor], room: int
) -> MemoryCells:
    """The memory of a program at its start, with room for so many runs of home rows a task or transfer.

    homes: of the layout of home rows.
    given: tensors whose home rows hold values. owed: tensors whose home rows the program must produce.
    Raises CapacityError where lanes, rows and ranks are too many to number, which no real plan reaches.
    """
    if program["operands"]["heads"].any() or program["operands"]["col"].any():
        units = _Units(_unit(program, False), _unit(program, True))
        pieces = _pieces(program, units)
    else:
        units = _Units(program.q_sets.heads, program.kv_sets.heads)
        pieces = _whole_pieces(program)
    bits = max(int(max(program.home_rows.max(), program.arena_rows.max())).bit_length(), 1)
    lanes = program.ranks * PLACES * pieces.columns
    if lanes.bit_length() + bits > 62 or bits > 30:
        raise CapacityError(f"{lanes} lanes of up to 2**{bits} rows are too many to verify")
    home = _home_edges(program, homes, given | owed, pieces.columns, units)
    edges = (pieces.lane << bits) + pieces.start
    home_edges = (home.lane << bits) + home.start
    keys = np.concatenate([edges, home_edges, edges + pieces.rows, home_edges + home.rows])
    keys.sort(kind="stable")  # runs that are sorted already cost little
    keys = keys[changes(keys)]
    lane = keys >> bits
    memory = _allocate(program, pieces, lane, room)
    offsets = np.full(len(keys), NOWHERE)
    offsets[np.searchsorted(keys, home_edges)] = home.address - home.start
    bits_given = sum(1 << tensor for tensor in given)
    _fill_cells(memory.lines, lane, keys, (1 << bits) - 1, offsets, pieces.columns, bits_given)
    table = program["operands"]
    lanes_of = np.bincount(pieces.operand, minlength=len(table))
    _fill_slots(memory.lines, memory.slots, table.data, lanes_of, keys, edges, pieces.unit)
    return memory


def _allocate(program: Program, pieces: _CutPieces, lanes: Ints, room: int) -> MemoryCells:
    """Lines, most of which are never touched and so cost nothing."""
    slots = FIRST_CELL + len(lanes)
    runs = slots + len(program["operands"]) + len(pieces.operand) // 4 + 1
    items = sum(len(program[name]) for name in ("transfers", "tasks", "grads"))
    parts = runs + min(room * items, _MOST_PIECES) + _SPARE
    lines = _zero_lines(parts + 2 * len(lanes) + _SPARE)
    lines[COUNTERS, [RUN_LINE, PART_LINE, NEW_CELL]] = runs, parts, len(lines) - 2
    return MemoryCells(lines, lanes, slots, pieces.columns)


def _zero_lines(count: int) -> Ints:
    """int64 [count, 8], each line within one line of the processor's cache: most of them are read alone."""
    flat = np.zeros(8 * (count + 1), np.int64)
    skipped = -flat.ctypes.data % 64 // 8
    return flat[skipped : skipped + 8 * count].reshape(count, 8)


@dataclass(frozen=True)
class _Units:
    """Heads in a lane of a query-side and of a KV-side tensor."""

    q: int
    kv: int

    def of(self, program: Program) -> Ints:
        """int64 [operands]"""
        return np.where(program.kv_side, self.kv, self.q)


@dataclass(frozen=True, eq=False)
class _CutPieces:
    operand: Ints
    lane: Ints
    start: Ints
    rows: Ints
    unit: Ints
    columns: int


@dataclass(frozen=True, eq=False)
class _Edges:
    lane: Ints
    start: Ints
    rows: Ints
    address: Ints


def _unit(program: Program, kv_side: bool) -> int:
    """The widest unit in heads: it divides every run of consecutive heads, its first head and its column."""
    sets = program.kv_sets if kv_side else program.q_sets
    table = program["operands"]
    mine = (program.kv_side == kv_side) & (table["tensor"] != Tensor.NONE) & ~IS_HEADLESS[table["tensor"]]
    unit = math.gcd(sets.heads, int(np.gcd.reduce(table["col"][mine], initial=0)))
    for number in np.flatnonzero(np.bincount(table["heads"][mine])).tolist():
        members = sets.members[number]
        begins = np.flatnonzero(np.append(True, np.diff(members) != 1))
        unit = math.gcd(unit, int(np.gcd.reduce(begins)), len(members), int(np.gcd.reduce(members[begins])))
    return unit


def _whole_pieces(program: Program) -> _CutPieces:
    """As `_pieces`, where all operands have all heads: one piece each."""
    table = program["operands"]
    tensor, space, row, rows = table.data[:4]
    operand = np.flatnonzero(tensor != Tensor.NONE)
    place = table.rank * PLACES + tensor * _SPACES + space
    return _CutPieces(
        operand, place[operand], row[operand], rows[operand], np.zeros(len(operand), np.int64), 1
    )


def _pieces(program: Program, units: _Units) -> _CutPieces:
    table = program["operands"]
    width, headless = units.of(program), IS_HEADLESS[table["tensor"]]
    count = np.where(headless, 1, program.head_count // width) * (table["tensor"] != Tensor.NONE)
    if count.sum() > _MOST_PIECES:
        raise CapacityError(f"the operands have {count.sum()} head columns, more than {_MOST_PIECES}")
    first_column = table["col"] // width
    lanes_at_home = max(program.q_sets.heads // units.q, program.kv_sets.heads // units.kv)
    columns = max(lanes_at_home, int((first_column + count).max(initial=1)))
    operand = group_of(count)
    unit: Ints = np.zeros(len(operand), np.int64)
    column = unit
    if columns > 1:
        index = within(count)
        unit = _unit_of(program, operand, index, units)
        column = np.where(table["space"][operand] == HOME, unit, first_column[operand] + index)
    place = (table.rank * PLACES + table["tensor"] * _SPACES + table["space"])[operand]
    return _CutPieces(
        operand, place * columns + column, table["row"][operand], table["rows"][operand], unit, columns
    )


def _unit_of(program: Program, operand: Ints, index: Ints, units: _Units) -> Ints:
    """int64 [pieces]: the unit (its first head / unit width) of piece `index` of an operand's head set."""
    table = program["operands"]
    heads = table["heads"][operand]
    unit = np.zeros(len(operand), np.int64)
    with_heads = ~IS_HEADLESS[table["tensor"]][operand]
    for kv_side, sets, width in ((False, program.q_sets, units.q), (True, program.kv_sets, units.kv)):
        flat, begin = _flat_units(sets, width)
        mine = with_heads & (program.kv_side[operand] == kv_side)
        unit[mine] = flat[begin[heads[mine]] + index[mine]]
    return unit


def _flat_units(sets: HeadSets, width: int) -> tuple[Ints, Ints]:
    units = [members[::width] // width for members in sets.members]
    sizes = [len(item) for item in units]
    return np.concatenate(units), offsets(sizes)[:-1]


def _home_edges(
    program: Program, homes: Homes, tensors: frozenset[Tensor], columns: int, units: _Units
) -> _Edges:
    """The home rows of every rank in every lane of the tensors and of those that operands name."""
    table = program["operands"]
    named = np.flatnonzero(np.bincount(table["tensor"][table["space"] == HOME]))
    lanes = [
        (tensor * _SPACES + HOME) * columns + np.arange(_home_lanes(program, Tensor(tensor), units))
        for tensor in sorted(tensors.union(map(Tensor, named.tolist())) - {Tensor.NONE})
    ]
    every = np.concatenate(lanes) if lanes else np.zeros(0, np.int64)
    rank = np.flatnonzero(homes.rows)
    if len(every) * len(rank) > _MOST_PIECES:
        raise CapacityError(f"home rows have {len(every) * len(rank)} lanes, more than {_MOST_PIECES}")
    lane = (rank * PLACES * columns)[None, :] + every[:, None]
    ends = (np.zeros(len(rank), np.int64), homes.rows[rank], homes.first[rank])
    return _Edges(lane.ravel(), *(np.tile(item, len(every)) for item in ends))


def _home_lanes(program: Program, tensor: Tensor, units: _Units) -> int:
    if tensor in HEADLESS:
        return 1
    return program.kv_sets.heads // units.kv if tensor in KV_SIDE else program.q_sets.heads // units.q


@lean
def _fill_cells(
    lines: Ints, lanes: Ints, keys: Ints, row_bits: int, offsets: Ints, columns: int, given: int
) -> None:
    """Each lane is one cell, the others are cut out of it when they are needed. Home cells know the addresses of their
    rows, those of given tensors hold their values.

    offsets: address - row where a cell begins a home lane, else NOWHERE.
    """
    begin = 0
    while begin < len(lanes):
        end = begin + 1
        while end < len(lanes) and lanes[end] == lanes[begin]:
            end += 1
        place, column = lanes[begin] // columns % PLACES, lanes[begin] % columns
        home = place % _SPACES == HOME
        holds = home and (given >> (place // _SPACES)) & 1 == 1
        first, last, offset = FIRST_CELL + begin, FIRST_CELL + end - 1, offsets[begin] if home else NOWHERE
        for i in range(begin, end):
            line = FIRST_CELL + i
            lines[line, ROW], lines[line, STOP], lines[line, NEXT] = keys[i] & row_bits, GONE, behind(first)
            lines[line, UNIT], lines[line, HOME_OFFSET] = column if home else 0, offset
            lines[line, OFFSET] = offset if holds else NOWHERE
            lines[line, STATE] = VALUE if holds else EMPTY
        lines[first, STOP], lines[first, NEXT] = keys[end - 1] & row_bits, last
        lines[last, STOP], lines[last, NEXT] = keys[end - 1] & row_bits, -1
        begin = end


@lean
def _fill_slots(
    lines: Ints, slots: int, operands: Ints, lanes: Ints, keys: Ints, edges: Ints, unit: Ints
) -> None:
    """edges: where each piece begins, which is among the sorted keys of the cells; pieces come operand after
    operand."""
    first, at, pieces = 0, 0, 4 * (slots + operands.shape[1])
    for x in range(operands.shape[1]):
        line = slots + x
        lines[line, PIECE], lines[line, LANES], lines[line, TENSOR] = first + pieces, lanes[x], operands[0, x]
        lines[line, BEGIN], lines[line, END] = operands[2, x], operands[2, x] + operands[3, x]
        for i in range(first, first + lanes[x]):
            at = _seek(keys, edges[i], at)
            if i == first:
                lines[line, CELL], lines[line, UNIT] = FIRST_CELL + at, unit[i]
            if lanes[x] > 1:
                piece = pieces + i
                lines[piece >> 2, (piece & 3) * 2] = FIRST_CELL + at
                lines[piece >> 2, (piece & 3) * 2 + 1] = unit[i]
        first += lanes[x]


@lean
def _seek(keys: Ints, key: int, at: int) -> int:
    """Where `key` is among sorted keys, sought from `at` on in growing steps: mostly it is the next one."""
    low, high, step = at, at + 1, 1
    while low > 0 and keys[low] > key:
        low, high, step = max(low - step, 0), low, 2 * step
    while high < len(keys) and keys[high] <= key:
        low, high, step = high, min(high + step, len(keys)), 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        if keys[middle] <= key:
            low = middle
        else:
            high = middle
    return low
