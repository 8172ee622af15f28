"""From list rows of all ranks to programs: one template of steps, filtered for each rank by what it takes part in.

All ranks run the same template; a rank skips the steps for which it has no rows. Because every rank keeps the order
of the template, rounds are launched in the same order everywhere, which is what rules out deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.errors import CapacityError
from apportion.ir.isa import ALL_TO_ALL, KV_SIDE, OPERAND_COLUMNS, P2P, TABLES, Op, Space, Tensor
from apportion.ir.jit import jit
from apportion.ir.plan import ProgramSet, Table
from apportion.ir.sorting import distinct_in_lanes
from apportion.planner.passes.groups import Groups, HeadSets
from apportion.planner.passes.use_order import number_by_use

Ints = NDArray[np.integer[Any]]
Column = Ints | int
#: rows of a list: ranks, steps and columns
Part = tuple[Ints, Ints, tuple[Column, ...]]


@dataclass(frozen=True)
class Ranges:
    """Ranges of rows on ranks, integers [n] each, sorted by rank. heads: their head sets, 0: all heads."""

    rank: Ints
    row: Ints
    rows: Ints
    heads: Ints | int = 0

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, index: Ints) -> Ranges:
        """Some of the ranges."""
        heads = self.heads if isinstance(self.heads, int) else self.heads[index]
        return Ranges(self.rank[index], self.row[index], self.rows[index], heads)


_ROWS = 2**31  # of a rank, at most: half of a key's bits


@dataclass(frozen=True)
class RangeSet:
    """Distinct ranges of several requests; `index[i]` says which range each entry of request i is."""

    ranges: Ranges
    index: tuple[Ints, ...]

    def without(self, request: int) -> RangeSet:
        """The same without the ranges that only this request asked for; it has no entries then."""
        rest = (*self.index[:request], self.index[request][:0], *self.index[request + 1 :])
        asked = np.zeros(len(self.ranges), bool)
        for index in rest:
            asked[index] = True
        if asked.all():
            return RangeSet(self.ranges, rest)
        place = np.cumsum(asked) - 1
        return RangeSet(self.ranges.take(np.flatnonzero(asked)), tuple(place[index] for index in rest))


def range_set(*requests: tuple[Ints, Ints, Ints], heads: Sequence[Ints | int] | None = None) -> RangeSet:
    """The distinct ranges of requests (rank, row, rows), integers [n] each; heads: the head sets of each request."""
    rank, row, rows = (np.concatenate(column) for column in zip(*requests, strict=True))
    cuts = np.cumsum([len(ranks) for ranks, _, _ in requests])
    sets = 1
    if heads is not None:
        held = np.concatenate([_full(sets, len(of[0])) for sets, of in zip(heads, requests, strict=True)])
        sets = int(held.max(initial=0)) + 1
        rank = rank * sets + held
    if int((row + rows).max(initial=0)) >= _ROWS:
        raise CapacityError(f"{int((row + rows).max())} rows on one rank: at most {_ROWS - 1}")
    lanes = int(rank.max(initial=-1)) + 1
    keys, ptr, index = distinct_in_lanes(rank, row * np.int64(_ROWS) + rows, lanes)
    lane, row, rows = _unpack(keys, ptr)
    ranges = Ranges(lane, row, rows) if heads is None else Ranges(lane // sets, row, rows, lane % sets)
    return RangeSet(ranges, tuple(np.split(index, cuts[:-1])))


@jit
def _unpack(keys: Ints, ptr: Ints) -> tuple[Ints, Ints, Ints]:
    """int32 [n] each: lane, first row and number of rows of each key."""
    lane, row, rows = (
        np.empty(len(keys), np.int32),
        np.empty(len(keys), np.int32),
        np.empty(len(keys), np.int32),
    )
    for one in range(len(ptr) - 1):
        for index in range(ptr[one], ptr[one + 1]):
            lane[index], row[index], rows[index] = one, keys[index] // _ROWS, keys[index] % _ROWS
    return lane, row, rows


@dataclass(frozen=True)
class Numbers:
    """Operand numbers of one tensor for the requests of a `RangeSet`."""

    numbers: Ints
    index: tuple[Ints, ...]

    def __getitem__(self, request: int) -> Ints:
        return self.numbers[self.index[request]]


@dataclass(frozen=True)
class OperandRows:
    """Operands of one tensor: ranges on ranks, each rank's in the order of their numbers."""

    tensor: Tensor
    space: Space
    ranges: Ranges


class Operands:
    """The operand tables of all ranks, grown by groups of distinct ranges; operand 0 is `none` everywhere."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._count = np.ones(ranks, np.int64)
        self._reach: dict[Tensor, Ints] = {}
        every, none = np.arange(ranks, dtype=np.int32), np.zeros(ranks, np.int32)
        self._rows = [OperandRows(Tensor.NONE, Space.HOME, Ranges(every, none, none))]

    def number(self, tensors: Sequence[Tensor], space: Space, ranges: RangeSet) -> list[Numbers]:
        """Operand numbers, for each tensor, of all ranges that `ranges` was asked for. A range of a tensor may be
        added once."""
        found = ranges.ranges
        self._count = self._count.copy()
        numbers, reach = _number(found.rank, found.row, found.rows, self._count, len(tensors))
        for tensor in tensors:
            self._rows.append(OperandRows(tensor, space, found))
            if space == Space.WORK and len(found):
                self._extend(tensor, reach)
        return [Numbers(number, ranges.index) for number in numbers]

    def _extend(self, tensor: Tensor, reach: Ints) -> None:
        before = self._reach.get(tensor)
        self._reach[tensor] = reach if before is None else np.maximum(before, reach)

    @property
    def counts(self) -> Ints:
        """int64 [ranks]: operands of each rank, `none` included."""
        return self._count

    def blocks(self) -> Iterator[tuple[OperandRows, Ints]]:
        """All operands but `none` in the order in which they were added, with the number of each rank's first, int64
        [ranks]."""
        first = np.ones(self.ranks, np.int64)
        for held in self._rows[1:]:
            yield held, first
            first = first + np.bincount(held.ranges.rank, minlength=self.ranks)

    def add(self, held: OperandRows, per_rank: Ints) -> Ints:
        """Append operands of work rows, `per_rank` of each rank; int64 [ranks], the number of each rank's first."""
        first = self._count
        self._rows.append(held)
        self._count = first + per_rank
        if len(held.ranges):
            self._extend(held.tensor, _reach(held.ranges.rank, held.ranges.row, held.ranges.rows, self.ranks))
        return first

    def reach(self, tensor: Tensor) -> Ints:
        """int64 [ranks]: work rows of the tensor so far."""
        return self._reach.get(tensor, np.zeros(self.ranks, np.int64))

    def spread(self, groups: Groups, sets: HeadSets) -> Operands:
        """The operands of every member of each group, numbered as the group's; work rows hold the member's heads."""
        spread = Operands(groups.ranks)
        spread._count = self._count[groups.of_rank]
        spread._reach = {tensor: rows[groups.of_rank] for tensor, rows in self._reach.items()}
        for held in self._rows[1:]:
            index, rank = groups.spread(held.ranges.rank)
            heads = (sets.key if held.tensor in KV_SIDE else sets.query)[rank]
            ranges = Ranges(rank, held.ranges.row[index], held.ranges.rows[index], heads)
            spread._rows.append(replace(held, ranges=ranges))
        return spread

    def arenas(self, sets: HeadSets) -> Table:
        """Every rank's work arenas: for each tensor the rows that its operands reach, and columns for its heads."""
        tensors = sorted(self._reach)
        reach = np.array([self._reach[tensor] for tensor in tensors], np.int64).reshape(-1, self.ranks).T
        width = np.array(
            [sets.key_columns if tensor in KV_SIDE else sets.query_heads for tensor in tensors], np.int64
        )
        rank, index = np.nonzero(reach)
        width = width.reshape(-1, self.ranks)[index, rank]
        columns = (np.array(tensors, np.int64)[index], reach[rank, index], width)
        ptr = np.concatenate([[0], np.cumsum(np.count_nonzero(reach, axis=1))])
        return Table(ptr, dict(zip(TABLES["arenas"], columns, strict=True)))

    def table(self) -> Table:
        ptr = np.concatenate([[0], np.cumsum(self._count)])
        columns, at = np.zeros((len(TABLES["operands"]), int(ptr[-1])), np.int32), ptr[:-1].copy()
        for held in self._rows:
            ranges, kind, space = held.ranges, int(held.tensor), int(held.space)
            rank, row = np.asarray(ranges.rank, np.int32), np.asarray(ranges.row, np.int32)
            rows, heads = np.asarray(ranges.rows, np.int32), _full(ranges.heads, len(ranges))
            _place(rank, row, rows, np.asarray(heads, np.int32), kind, space, at, columns)
        return Table(ptr, dict(zip(TABLES["operands"], columns, strict=True)))


@jit
def _number(rank: Ints, row: Ints, rows: Ints, count: Ints, tensors: int) -> tuple[Ints, Ints]:
    """int32 [tensors, n]: numbers of ranges sorted by rank, for one tensor after another, from count[rank] on, which is
    moved on; and int64 [ranks], the rows that they reach."""
    numbers, begin = np.empty((tensors, len(rank)), np.int32), 0
    while begin < len(rank):
        owner, end = rank[begin], begin
        while end < len(rank) and rank[end] == owner:
            end += 1
        for tensor in range(tensors):
            for index in range(begin, end):
                numbers[tensor, index] = count[owner] + index - begin
            count[owner] += end - begin
        begin = end
    return numbers, _reach(rank, row, rows, len(count))


@jit
def _reach(rank: Ints, row: Ints, rows: Ints, ranks: int) -> Ints:
    """int64 [ranks]: the rows that ranges reach on each."""
    reach = np.zeros(ranks, np.int64)
    for index in range(len(rank)):
        reach[rank[index]] = max(reach[rank[index]], row[index] + rows[index])
    return reach


@jit
def _place(
    rank: Ints, row: Ints, rows: Ints, heads: Ints, tensor: int, space: int, at: Ints, columns: Ints
) -> None:
    """The next operands of each rank, from at[rank] on, into `columns`; both in place."""
    for index in range(len(rank)):
        place = at[rank[index]]
        at[rank[index]] += 1
        columns[0, place], columns[1, place] = tensor, space
        columns[2, place], columns[3, place] = row[index], rows[index]
        columns[5, place] = heads[index]


@dataclass(frozen=True)
class Step:
    """One instruction of the template."""

    op: Op
    round: int = 0
    channel: int = 0
    mode: int = 0


@dataclass
class Assembler:
    """Collects the template and the list rows, then builds the tables of all ranks."""

    ranks: int
    steps: list[Step] = field(default_factory=list)
    rounds: int = 0
    _rows: dict[str, list[Part]] = field(default_factory=dict)
    _waits: list[tuple[int, int]] = field(default_factory=list)

    def step(self, op: Op) -> int:
        """Append a step to the template; returns its position."""
        self.steps.append(Step(op))
        return len(self.steps) - 1

    def launch(self, channel: int, mode: int = P2P) -> int:
        """Append the launch of a new round; returns its position."""
        self.steps.append(Step(Op.LAUNCH, self.rounds, channel, mode))
        self.rounds += 1
        return len(self.steps) - 1

    def wait(self, launch: int) -> int:
        """Append the wait for the round launched at position `launch`."""
        self.steps.append(Step(Op.WAIT, self.steps[launch].round))
        self._waits.append((len(self.steps) - 1, launch))
        return len(self.steps) - 1

    def rows(self, table: str, rank: Ints, position: Column, *columns: Column) -> None:
        """Rows of a list: who, at which step, and the columns of `isa.TABLES[table]`. Rows of one rank and step
        keep the order in which they are given."""
        self._rows.setdefault(table, []).append((rank, _full(position, len(rank)), columns))

    def append(self, other: Assembler) -> int:
        """Append the steps of another, with rounds of their own and no rows; returns the position of the first."""
        first, rounds = len(self.steps), self.rounds
        self.steps += [
            replace(step, round=step.round + rounds) if step.op in (Op.LAUNCH, Op.WAIT) else step
            for step in other.steps
        ]
        self.rounds += other.rounds
        self._waits += [(first + wait, first + launch) for wait, launch in other._waits]
        return first

    def parts(self) -> Iterator[tuple[str, Part]]:
        """All rows of all lists, as they were given."""
        for table, parts in self._rows.items():
            for part in parts:
                yield table, part

    def spread(self, groups: Groups) -> Assembler:
        """The same for every member of each group; members talk to those at their place in other groups."""
        spread = Assembler(groups.ranks, self.steps, self.rounds, {}, self._waits)
        peer = TABLES["transfers"].index("peer")
        for table, parts in self._rows.items():
            for group, position, columns in parts:
                index, rank = groups.spread(group)
                taken = [value if isinstance(value, int) else value[index] for value in columns]
                if table == "transfers":
                    taken[peer] = groups.first[taken[peer]] + groups.member[rank]
                spread.rows(table, rank, position[index], *taken)
        return spread

    def build(self, operands: Operands, sets: HeadSets) -> ProgramSet:
        """The tables of all ranks."""
        if self.ranks * len(self.steps) >= 2**31:
            raise CapacityError(
                f"{self.ranks} ranks x {len(self.steps)} steps: use larger blocks or a larger coalesce"
            )
        count = np.zeros(self.ranks * len(self.steps), np.int64)
        lists = {name: self._list(name, count) for name in OPERAND_COLUMNS}
        tables = {"arenas": operands.arenas(sets), "operands": number_by_use(operands.table(), lists)}
        for name, (ptr, rows) in lists.items():
            tables[name] = Table(ptr, dict(zip(TABLES[name], rows, strict=True)))
        tables["instructions"] = self._instructions(count.reshape(self.ranks, len(self.steps)))
        return ProgramSet({name: tables[name] for name in TABLES})

    def _list(self, name: str, count: Ints) -> tuple[Ints, Ints]:
        """A list of all ranks: int64 [ranks + 1], where the rows of each begin, and int32 [columns, rows]; count: int64
        [ranks * steps], to which its rows are added."""
        parts = [part for part in self._rows.get(name, []) if len(part[0])]
        names = TABLES[name]
        size = sum(len(rank) for rank, _, _ in parts)
        key, given, at = np.empty(size, np.int32), np.empty((len(names), size), np.int32), 0
        for rank, position, columns in parts:
            end = at + len(rank)
            np.multiply(rank, len(self.steps), out=key[at:end], casting="unsafe")
            key[at:end] += position
            for column, values in zip(given, columns, strict=True):
                column[at:end] = values
            at = end
        rows, ptr = np.empty_like(given), np.zeros(self.ranks + 1, np.int64)
        _sort_rows(key, given, count, rows, ptr)
        return ptr, rows

    def _instructions(self, count: Ints) -> Table:
        present = count > 0
        present[:, [step.mode & ALL_TO_ALL > 0 for step in self.steps]] = True
        for wait, launch in self._waits:
            present[:, wait] = present[:, launch]
        at = np.flatnonzero(present)
        position = at % len(self.steps)
        steps = np.array([(step.op, step.round, step.channel, step.mode) for step in self.steps], np.int32).T
        columns = [np.take(column, position) for column in steps] + [np.take(count.reshape(-1), at)]
        ptr = np.concatenate([[0], np.cumsum(present.sum(1))])
        return Table(ptr, dict(zip(TABLES["instructions"], columns, strict=True)))


@jit
def _sort_rows(key: Ints, given: Ints, count: Ints, rows: Ints, ptr: Ints) -> None:
    """Writes `given`, [columns, n], into `rows`, sorted by `key`, rank * steps + step, those of one key as given; into
    `ptr`, [ranks + 1], where those of each rank begin; and adds the rows of each key to `count`, [ranks * steps]."""
    at, ranks = np.zeros(len(count) + 1, np.int64), len(ptr) - 1
    steps = len(count) // ranks
    for index in range(len(key)):
        at[key[index] + 1] += 1
    for one in range(len(count)):
        count[one] += at[one + 1]
        at[one + 1] += at[one]
    for rank in range(ranks):
        ptr[rank + 1] = at[(rank + 1) * steps]
    place = np.empty(len(key), np.int32)
    for index in range(len(key)):
        place[index] = at[key[index]]
        at[key[index]] += 1
    for column in range(len(given)):
        for index in range(len(key)):
            rows[column, place[index]] = given[column, index]


def _full(value: Column, size: int) -> Ints:
    return np.full(size, value, np.int32) if isinstance(value, int) else value
