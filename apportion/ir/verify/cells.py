"""Memory of all ranks, cut where operands begin and end, so that an operand is a whole number of cells.

A *lane* is one column of a tensor's home or work rows on a rank: `unit` heads wide, the widest that all head sets
and columns of the program allow (all heads side by side, where the program never splits them). A lane is a linked
list of *cells*, row ranges whose rows share one state:

    lane (rank 3, KV, work, column 0)    [0, 512) ─► [512, 2048) ─► [2048, 4096) ─► end

An operand is one *piece* a lane: the cell where it begins. Cells are only ever split, and the left part keeps its
number, so pieces stay right.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from apportion.ir.errors import CapacityError
from apportion.ir.isa import HEADLESS, KV_SIDE, Tensor
from apportion.ir.plan import Ints, Layout
from apportion.ir.verify.view import HOME, HeadSets, Program

# columns of `Cells.cells`; eight of them are one line of a processor's cache
ROW, NEXT, OFFSET, UNIT, STATE, BUSY, HOME_OFFSET, LANE = range(8)

# states
EMPTY = 0  # never written
SPENT = 1  # held a partial that was merged, added or sent
VALUE = 2  # holds the tensor's value for the tokens row + offset
LIVE = 3  # accumulator with at least one contribution
CLEARED = 4  # accumulator that holds the identity
UNKNOWN = 5  # written by something that broke a rule, which was reported

NOWHERE = -(2**62)  # offset of a cell without tokens

# BUSY: bit 0 a receive into the cell is in flight, bit 1 nobody has read it yet; above, sends in flight
IN_FLIGHT, UNREAD, ONE_SEND = 1, 2, 4

_SPACES = 2
_PLACES = _SPACES * (max(Tensor) + 1)
_MOST_PIECES = 2**26
_SPARE = 4096


@dataclass(frozen=True, eq=False)
class Cells:
    """cells: int64 [capacity, 8], the first `count` in use. pieces: int64 [2, pieces] (cell, unit), those of operand
    x from `ptr[x]` to `ptr[x + 1]`. columns: lanes of one place; a lane's number is
    (rank * _PLACES + tensor * 2 + space) * columns + column."""

    cells: Ints
    count: int
    pieces: Ints
    ptr: Ints
    columns: int

    def place(self, lane: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """(rank, tensor, space, column) of each lane."""
        place, column = lane // self.columns, lane % self.columns
        return place // _PLACES, place % _PLACES // _SPACES, place % _SPACES, column

    def all_at_home(self, tensor: Tensor) -> bool:
        """Whether every home row of the tensor that a program touches holds a value; False where it touches none."""
        _, tensors, space, _ = self.place(self.cells[:, LANE])
        here = (tensors == tensor) & (space == HOME) & (self.cells[:, NEXT] >= 0)
        return bool(here.any() and (self.cells[here, STATE] == VALUE).all())


def home_runs(layout: Layout) -> tuple[Ints, Ints, Ints, Ints]:
    """(rank, row, rows, token) of each run of consecutive tokens in a layout, spans in row order."""
    spans = layout.spans
    rank = spans.rank_of_row()
    row, token, length = (np.asarray(spans[name], np.int64) for name in ("row", "token", "length"))
    order = np.lexsort((row, rank))
    rank, row, token, length = rank[order], row[order], token[order], length[order]
    joined = (rank[1:] == rank[:-1]) & (token[1:] == (token + length)[:-1])
    begins = np.flatnonzero(np.append(True, ~joined)[: len(rank)])
    rows = np.add.reduceat(length, begins) if len(begins) else length
    return rank[begins], row[begins], rows, token[begins]


def build(program: Program, layout: Layout, given: frozenset[Tensor], owed: frozenset[Tensor]) -> Cells:
    """The memory of a program at its start.

    given: tensors whose home rows hold values. owed: tensors whose home rows the program must produce.
    Raises CapacityError where lanes, rows and ranks are too many to number, which no real plan reaches.
    """
    units = _Units(_unit(program, False), _unit(program, True))
    pieces = _pieces(program, units)
    bits = max(int(max(program.home_rows.max(), program.arena_rows.max())).bit_length(), 1)
    lanes = program.ranks * _PLACES * pieces.columns
    if lanes.bit_length() + bits > 62:
        raise CapacityError(f"{lanes} lanes of up to 2**{bits} rows are too many to verify")
    home = _home_edges(program, layout, given | owed, pieces.columns, units)
    edges = (pieces.lane << bits) + pieces.start
    home_edges = (home.lane << bits) + home.start
    keys = np.concatenate([edges, home_edges, edges + pieces.rows, home_edges + home.rows])
    keys.sort(kind="stable")  # runs that are sorted already cost little
    keys = keys[np.append(True, keys[1:] != keys[:-1])[: len(keys)]]
    cells = _cells(keys, bits)
    ptr = np.append(0, np.cumsum(np.bincount(pieces.operand, minlength=len(program["operands"]))))
    memory = Cells(
        cells, len(keys), np.stack([np.searchsorted(keys, edges), pieces.unit]), ptr, pieces.columns
    )
    _fill_home(memory, np.searchsorted(keys, home_edges), home.token - home.start, given)
    return memory


@dataclass(frozen=True)
class _Units:
    """Heads in a lane of a query-side and of a KV-side tensor."""

    q: int
    kv: int

    def of(self, program: Program) -> Ints:
        """int64 [operands]"""
        return np.where(program.kv_side, self.kv, self.q)


@dataclass(frozen=True, eq=False)
class _Pieces:
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
    token: Ints


def _unit(program: Program, kv_side: bool) -> int:
    """The widest unit in heads: it divides every run of consecutive heads, its first head and its column."""
    sets = program.kv_sets if kv_side else program.q_sets
    table = program["operands"]
    mine = (program.kv_side == kv_side) & (table["tensor"] != Tensor.NONE) & ~_headless(table["tensor"])
    unit = math.gcd(sets.heads, int(np.gcd.reduce(table["col"][mine], initial=0)))
    for number in np.flatnonzero(np.bincount(table["heads"][mine])).tolist():
        members = sets.members[number]
        begins = np.flatnonzero(np.append(True, np.diff(members) != 1))
        unit = math.gcd(unit, int(np.gcd.reduce(begins)), len(members), int(np.gcd.reduce(members[begins])))
    return unit


def _pieces(program: Program, units: _Units) -> _Pieces:
    table = program["operands"]
    width, headless = units.of(program), _headless(table["tensor"])
    count = np.where(headless, 1, program.head_count // width) * (table["tensor"] != Tensor.NONE)
    if count.sum() > _MOST_PIECES:
        raise CapacityError(f"the operands have {count.sum()} head columns, more than {_MOST_PIECES}")
    first_column = table["col"] // width
    lanes_at_home = max(program.q_sets.heads // units.q, program.kv_sets.heads // units.kv)
    columns = max(lanes_at_home, int((first_column + count).max(initial=1)))
    operand = np.repeat(np.arange(len(table)), count)
    column = unit = np.zeros(len(operand), np.int64)
    if columns > 1:
        index = np.arange(len(operand)) - np.repeat(np.cumsum(count) - count, count)
        unit = _unit_of(program, operand, index, units)
        column = np.where(table["space"][operand] == HOME, unit, first_column[operand] + index)
    place = (table.rank * _PLACES + table["tensor"] * _SPACES + table["space"])[operand]
    return _Pieces(
        operand, place * columns + column, table["row"][operand], table["rows"][operand], unit, columns
    )


def _headless(tensor: Ints) -> Ints:
    return (tensor == Tensor.X) | (tensor == Tensor.DX)


def _unit_of(program: Program, operand: Ints, index: Ints, units: _Units) -> Ints:
    """int64 [pieces]: the unit (its first head / unit width) of piece `index` of an operand's head set."""
    table = program["operands"]
    heads = table["heads"][operand]
    unit = np.zeros(len(operand), np.int64)
    with_heads = ~_headless(table["tensor"])[operand]
    for kv_side, sets, width in ((False, program.q_sets, units.q), (True, program.kv_sets, units.kv)):
        flat, begin = _flat_units(sets, width)
        mine = with_heads & (program.kv_side[operand] == kv_side)
        unit[mine] = flat[begin[heads[mine]] + index[mine]]
    return unit


def _flat_units(sets: HeadSets, width: int) -> tuple[Ints, Ints]:
    units = [members[::width] // width for members in sets.members]
    sizes = [len(item) for item in units]
    return np.concatenate(units), np.append(0, np.cumsum(sizes))[:-1]


def _home_edges(
    program: Program, layout: Layout, tensors: frozenset[Tensor], columns: int, units: _Units
) -> _Edges:
    """Every home run of consecutive tokens in every lane of the tensors and of those that operands name."""
    table = program["operands"]
    named = np.flatnonzero(np.bincount(table["tensor"][table["space"] == HOME]))
    lanes = [
        (tensor * _SPACES + HOME) * columns + np.arange(_home_lanes(program, Tensor(tensor), units))
        for tensor in sorted(tensors.union(map(Tensor, named.tolist())) - {Tensor.NONE})
    ]
    every = np.concatenate(lanes) if lanes else np.zeros(0, np.int64)
    rank, row, rows, token = home_runs(layout)
    if len(every) * len(rank) > _MOST_PIECES:
        raise CapacityError(
            f"home rows have {len(every) * len(rank)} runs and heads, more than {_MOST_PIECES}"
        )
    lane = (rank * _PLACES * columns)[None, :] + every[:, None]
    return _Edges(lane.ravel(), *(np.tile(item, len(every)) for item in (row, rows, token)))


def _home_lanes(program: Program, tensor: Tensor, units: _Units) -> int:
    if tensor in HEADLESS:
        return 1
    return program.kv_sets.heads // units.kv if tensor in KV_SIDE else program.q_sets.heads // units.q


def _cells(keys: Ints, bits: int) -> Ints:
    count = len(keys)
    cells = np.zeros((count + count // 2 + _SPARE, 8), np.int64)
    lane = keys >> bits
    cells[:count, ROW] = keys & ((1 << bits) - 1)
    ends = np.append(lane[1:] != lane[:-1], True)[:count]
    cells[:count, NEXT] = np.where(ends, -1, np.arange(1, count + 1))
    cells[:count, LANE] = lane
    return cells


def _fill_home(memory: Cells, first: Ints, offset: Ints, given: frozenset[Tensor]) -> None:
    """Every home cell knows the tokens that its rows stand for; given tensors hold their values.

    first: the cell where each home run begins; home lanes are covered by runs, work lanes hold none.
    """
    cells = memory.cells[: memory.count]
    run_offset = np.zeros(memory.count, np.int64)
    run_offset[first] = offset
    marks = np.zeros(memory.count, np.int64)
    marks[first] = first
    begin = np.maximum.accumulate(marks)
    _, tensor, space, column = memory.place(cells[:, LANE])
    home = space == HOME
    full = home & np.isin(tensor, sorted(given))
    cells[:, HOME_OFFSET] = np.where(home, run_offset[begin], NOWHERE)
    cells[:, UNIT] = np.where(home, column, 0)
    cells[:, STATE] = np.where(full, VALUE, EMPTY)
    cells[:, OFFSET] = np.where(full, run_offset[begin], NOWHERE)
