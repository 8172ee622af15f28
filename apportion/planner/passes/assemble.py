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
from apportion.ir.isa import ALL_TO_ALL, KV_SIDE, P2P, TABLES, Op, Space, Tensor
from apportion.ir.jit import HAS_NUMBA, jit
from apportion.ir.plan import ProgramSet, Table, empty_table
from apportion.ir.sorting import sort_order
from apportion.planner.passes.groups import Groups, HeadSets

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


def distinct(rank: Ints, row: Ints, rows: Ints) -> tuple[Ranges, Ints]:
    """The distinct ranges, sorted, and for each given range its index among them."""
    if not len(rank):
        return Ranges(rank, row, rows), np.zeros(0, np.int64)
    span = int((row + rows).max()) + 1
    if (int(rank.max()) + 1) * span * span >= 2**63:
        raise CapacityError(f"{span} rows on one rank: at most {int((2**63 / (int(rank.max()) + 1)) ** 0.5)}")
    found, index = _distinct_keys(rank, row, rows, span)
    rest, rows = np.divmod(found, span)
    rank, row = np.divmod(rest, span)
    return Ranges(rank.astype(np.int32), row.astype(np.int32), rows.astype(np.int32)), index


def _distinct_keys(rank: Ints, row: Ints, rows: Ints, span: int) -> tuple[Ints, Ints]:
    """The distinct keys (rank * span + row) * span + rows, sorted, and the index of each range's among them. Hashed
    first where that is compiled, because few of many are distinct."""
    if not HAS_NUMBA:
        found, index = np.unique((rank.astype(np.int64) * span + row) * span + rows, return_inverse=True)
        return found, index.reshape(-1)
    first_seen, number = _hash(rank, row, rows, span, 1 << (2 * len(rank)).bit_length())
    order = sort_order(first_seen // (span * span), int(rank.max()) + 1)
    _sort_runs(first_seen, order, span * span)
    place = np.empty(len(order), np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return first_seen[order], place[number]


@jit
def _sort_runs(keys: Ints, order: Ints, width: int) -> None:
    """Sorts `order`, by which keys // width rise, by the keys; in place."""
    begin = 0
    while begin < len(order):
        end = begin + 1
        while end < len(order) and keys[order[end]] // width == keys[order[begin]] // width:
            end += 1
        run = order[begin:end].copy()
        order[begin:end] = run[np.argsort(keys[run])]
        begin = end


@jit
def _hash(rank: Ints, row: Ints, rows: Ints, span: int, size: int) -> tuple[Ints, Ints]:
    """Open addressing: distinct keys in order of first use, and the number of each range's key among them."""
    slot = np.full(size, -1, np.int32)
    found, number, count = np.empty(len(rank), np.int64), np.empty(len(rank), np.int32), 0
    for index in range(len(rank)):
        key = (np.int64(rank[index]) * span + row[index]) * span + rows[index]
        at = (key ^ (key >> 17) ^ (key >> 33)) * 40503 & (size - 1)
        while slot[at] >= 0 and found[slot[at]] != key:
            at = (at + 1) & (size - 1)
        if slot[at] < 0:
            slot[at], found[count] = count, key
            count += 1
        number[index] = slot[at]
    return found[:count].copy(), number


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
    if heads is None:
        ranges, index = distinct(rank, row, rows)
    else:
        held = np.concatenate([_full(sets, len(of[0])) for sets, of in zip(heads, requests, strict=True)])
        sets = int(held.max(initial=0)) + 1
        found, index = distinct(rank * sets + held, row, rows)
        ranges = Ranges(found.rank // sets, found.row, found.rows, found.rank % sets)
    return RangeSet(ranges, tuple(np.split(index, cuts[:-1])))


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
        per_rank = np.bincount(found.rank, minlength=self.ranks)
        first = np.cumsum(per_rank) - per_rank
        number = ((self._count - first)[found.rank] + np.arange(len(found))).astype(np.int32)
        step = per_rank[found.rank].astype(np.int32)
        self._count += len(tensors) * per_rank
        numbers = []
        for tensor in tensors:
            self._rows.append(OperandRows(tensor, space, found))
            if space == Space.WORK and len(found):
                self._extend(tensor, found, first[per_rank > 0], np.flatnonzero(per_rank))
            numbers.append(Numbers(number, ranges.index))
            number = number + step
        return numbers

    def _extend(self, tensor: Tensor, ranges: Ranges, first: Ints, ranks: Ints) -> None:
        reach = self._reach.setdefault(tensor, np.zeros(self.ranks, np.int64))
        reach[ranks] = np.maximum(reach[ranks], np.maximum.reduceat(ranges.row + ranges.rows, first))

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
            begins = np.cumsum(per_rank) - per_rank
            self._extend(held.tensor, held.ranges, begins[per_rank > 0], np.flatnonzero(per_rank))
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
        tables = {"arenas": operands.arenas(sets), "operands": operands.table()}
        for name in ("transfers", "tasks", "grads", "rowops"):
            tables[name] = self._list(name, count)
        tables["instructions"] = self._instructions(count.reshape(self.ranks, len(self.steps)))
        return ProgramSet({name: tables[name] for name in TABLES})

    def _list(self, name: str, count: Ints) -> Table:
        parts = [part for part in self._rows.get(name, []) if len(part[0])]
        if not parts:
            return empty_table(TABLES[name], self.ranks)
        key = np.concatenate(
            [rank * np.int32(len(self.steps)) + position for rank, position, _ in parts],
            dtype=np.int32,
            casting="unsafe",
        )
        per_step = np.bincount(key, minlength=len(count))
        count += per_step
        sorted_already = len(parts) == 1 and bool((key[1:] >= key[:-1]).all())
        order = None if sorted_already else sort_order(key, len(count))
        columns = {column: _column(parts, index, order) for index, column in enumerate(TABLES[name])}
        per_rank = per_step.reshape(self.ranks, len(self.steps)).sum(1)
        return Table(np.concatenate([[0], np.cumsum(per_rank)]), columns)

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


def _column(parts: Sequence[Part], index: int, order: Ints | None) -> Ints:
    """One column of all parts, one after another, then in `order`; int32, which every column of a list fits."""
    size, alike = 0, True
    for rank, _, columns in parts:
        size += len(rank)
        alike = alike and isinstance(columns[index], int) and columns[index] == parts[0][2][index]
    joined, at = np.empty(size, np.int32), 0
    for rank, _, columns in parts:
        joined[at : at + len(rank)] = columns[index]
        at += len(rank)
    return joined if order is None or alike else np.take(joined, order)


def _full(value: Column, size: int) -> Ints:
    return np.full(size, value, np.int32) if isinstance(value, int) else value
