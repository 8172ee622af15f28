"""Cuts into tiles, with one owner each, the accumulator rows that an instruction's tasks write.

    task A  ├───────────────┤              rows that tasks write (first: marked *)
    task B*         ├───────────────┤
    tiles   ├──┼──┼─┼──┼──┼──┼──┼───┤      of one height, with cuts where marked rows begin or end
    entries  A  A  A AB AB AB B  B

The tasks of a tile are its entries, in program order. A tile is *fresh* if one of its tasks is the first on its rows:
then it overwrites; it is *complete* if its rows are results after its tasks have run, and has *statistics* if it
computes the statistics of its rows. Plain numpy columns, one pass for all instructions of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apportion.ir.arrays import Bools, Ints, group_of, index_in_group, offsets

_ROW_BITS = 40


class KeyedRows(NamedTuple):
    """Ranges of rows [row0, row1) by key, int64 [ranges]."""

    key: Ints
    row0: Ints
    row1: Ints

    @property
    def ends(self) -> tuple[Ints, Ints]:
        return (self.key << _ROW_BITS) + self.row0, (self.key << _ROW_BITS) + self.row1


class Tiles(NamedTuple):
    """Tiles sorted by key and row. key, row0, row1: int64, fresh, complete, statistics: bool, all [tiles]. ptr: int64
    [tiles + 1] into task: int64 [entries], the tasks of each tile in order."""

    key: Ints
    row0: Ints
    row1: Ints
    fresh: Bools
    complete: Bools
    statistics: Bools
    ptr: Ints
    task: Ints

    @property
    def of_entry(self) -> Ints:
        """int64 [entries]: the tile of each entry."""
        return group_of(np.diff(self.ptr))


_NOWHERE = KeyedRows(*(np.zeros(0, np.int64),) * 3)


def cut_tiles(
    key: Ints,
    start: Ints,
    stop: Ints,
    first: NDArray[Any],
    height: int,
    complete: KeyedRows = _NOWHERE,
    cuts: KeyedRows = _NOWHERE,
    statistics: KeyedRows = _NOWHERE,
) -> Tiles:
    """Tiles of at most `height` rows, which cover the rows that each key's tasks write. key, start, stop: int64
    [tasks], rows [start, stop); first: bool [tasks]; cuts: ranges whose ends no tile may cross."""
    begin, end = written = KeyedRows(key, start, stop).ends
    fresh_ones = np.flatnonzero(first)
    marks = (begin[fresh_ones], end[fresh_ones]), complete.ends, statistics.ends
    lo, hi, (fresh, done, early) = _uniform_ranges(written, marks, np.concatenate(cuts.ends))
    count = -(-(hi - lo) // height)
    run = group_of(count)
    row0 = lo[run] + index_in_group(count) * height
    row1 = np.minimum(row0 + height, hi[run])
    ptr, task = _entries(begin, end, row0, row1)
    mask = (1 << _ROW_BITS) - 1
    row, row_end = row0 & mask, ((row1 - 1) & mask) + 1
    return Tiles(row0 >> _ROW_BITS, row, row_end, fresh[run], done[run], early[run], ptr, task)


def _uniform_ranges(
    written: tuple[Ints, Ints], marks: tuple[tuple[Ints, Ints], ...], cuts: Ints
) -> tuple[Ints, Ints, Bools]:
    """Maximal ranges in which every row is written, all rows have the same marks, and no cut lies inside. marks: each
    as begins and ends of its ranges. Returns begins, ends, and bool [marks, ranges]: whether the range is marked."""
    points = np.unique(np.concatenate([*written, *(end for mark in marks for end in mark), cuts]))
    depth = np.stack([_depth(points, *mark) for mark in (written, *marks)])
    marked = depth[1:, :-1] > 0
    keep = np.flatnonzero(depth[0, :-1] > 0)
    lo, hi, marked = points[keep], points[keep + 1], marked[:, keep]
    is_start = np.ones(len(keep), bool)
    is_start[1:] = (lo[1:] != hi[:-1]) | (marked[:, 1:] != marked[:, :-1]).any(axis=0)
    is_start |= np.isin(lo, cuts)
    firsts = np.flatnonzero(is_start)
    return lo[firsts], hi[np.append(firsts[1:], len(keep)) - 1] if len(firsts) else hi, marked[:, firsts]


def _depth(points: Ints, begin: Ints, end: Ints) -> Ints:
    """int64 [points]: the number of ranges that cover the row at each point."""
    change = np.zeros(len(points), np.int64)
    np.add.at(change, np.searchsorted(points, begin), 1)
    np.subtract.at(change, np.searchsorted(points, end), 1)
    return np.cumsum(change)


def _entries(begin: Ints, end: Ints, row0: Ints, row1: Ints) -> tuple[Ints, Ints]:
    """(ptr, task) of the tasks that overlap each tile."""
    low, high = np.searchsorted(row1, begin, "right"), np.searchsorted(row0, end, "left")
    count = high - low
    task = group_of(count)
    tile = np.repeat(low, count) + index_in_group(count)
    order = np.argsort(tile, kind="stable")
    return offsets(np.bincount(tile, minlength=len(row0))), task[order]


def column_groups(instruction: Ints, signature: Ints, columns: Sequence[tuple[int, ...]]) -> Ints:
    """int64 [tasks]: equal for tasks of an instruction that share a head column, directly or transitively. signature:
    int64 [tasks], index into `columns` of the columns that each task writes."""
    pairs, which = np.unique(np.stack([instruction, signature], axis=1), axis=0, return_inverse=True)
    group_number = np.arange(len(pairs))
    for i, (group, signature_) in enumerate(pairs.tolist()):
        for j in range(i - 1, -1, -1):
            if pairs[j, 0] != group:
                break
            if not set(columns[signature_]).isdisjoint(columns[pairs[j, 1]]):
                group_number[group_number == group_number[i]] = group_number[j]
    return group_number[which]


def waves(instruction: Ints, slot: Ints, start: Ints, stop: Ints, owner: Ints) -> Ints:
    """int64 [tasks]: which launch of its instruction runs each task; nearly always 0.

    Tasks of an instruction that write rows [start, stop) of one slot may share a launch if they have the same owner; if
    ranges of two owners overlap, the later task in the program is launched later. Different slots never conflict.
    """
    wave = np.zeros(len(instruction), np.int64)
    clashes = _clashes(instruction, slot, start, stop, owner)
    for number, slot_number in set(zip(instruction[clashes].tolist(), slot[clashes].tolist(), strict=True)):
        members = np.flatnonzero((instruction == number) & (slot == slot_number))
        wave[members] = _serial_waves(slot[members], start[members], stop[members], owner[members])
    return wave


def _clashes(instruction: Ints, slot: Ints, start: Ints, stop: Ints, owner: Ints) -> Ints:
    """Tasks that may overlap another owner's rows: sorted by start, one begins before an earlier one has ended."""
    order: Ints = np.lexsort((start, slot, instruction))
    group = offsets(np.diff(instruction[order]) | np.diff(slot[order]) != 0)
    ends = np.maximum.accumulate((group << _ROW_BITS) + stop[order])
    overlaps = np.zeros(len(order), bool)
    overlaps[1:] = (group[1:] << _ROW_BITS) + start[order][1:] < ends[:-1]
    mixed = np.zeros(int(group[-1]) + 1 if len(group) else 0, bool)
    np.logical_or.at(mixed, group[1:], (np.diff(owner[order]) != 0) & (np.diff(group) == 0))
    result: Ints = order[overlaps & mixed[group]]
    return result


def _serial_waves(slot: Ints, start: Ints, stop: Ints, owner: Ints) -> list[int]:
    """The wave of each task in order; a task that overlaps rows of another owner in the wave starts a new one."""
    wave, current = [], 0
    active: list[tuple[int, ...]] = []
    for place, low, high, key in zip(*(part.tolist() for part in (slot, start, stop, owner)), strict=True):
        if any(place == p and key != k and low < end and begin < high for p, begin, end, k in active):
            current, active = current + 1, []
        active.append((place, low, high, key))
        wave.append(current)
    return wave
