"""From list rows of all ranks to programs: one template of steps, filtered for each rank by what it takes part in.

All ranks run the same template; a rank skips the steps for which it has no rows. Because every rank keeps the order
of the template, rounds are launched in the same order everywhere, which is what rules out deadlock.

List rows name operands by what they are, ranges of rows of a tensor; operands get their numbers in the end, when the
rows of a rank are all there. Numbers follow the lists, column after column (`isa.OPERAND_COLUMNS`), in each its rows:
what the format writes in fewest bytes (`ir.predictions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.ir.isa import ALL_TO_ALL, KV_SIDE, OPERAND_COLUMNS, P2P, TABLES, Op, Space, Tensor
from apportion.ir.loops.jit import jit, lean, unlocked
from apportion.ir.plan.tables import ProgramSet, Table
from apportion.planner.inner.groups import Groups, HeadSets

_ROWS = 2**31  # of a rank, at most


class Ranges(NamedTuple):
    """Ranges of rows of a tensor that is named elsewhere. packed: int64 [n], row << 32 | rows << 1 | space; -1: none.
    heads: integers [n], their head sets; 0: all heads."""

    packed: Ints
    heads: Ints | int = 0

    @staticmethod
    def of(space: Space, row: Ints, rows: Ints, heads: Ints | int = 0) -> Ranges:
        """row, rows: integers [n]. Raises CapacityError for more rows than operands can name."""
        if space == Space.WORK and row.size and int(row.max()) + int(rows.max()) >= _ROWS:
            most = int(np.add(row, rows, dtype=np.int64).max())
            if most >= _ROWS:
                raise CapacityError(f"{most} rows on one rank: at most {_ROWS - 1}")
        packed: Ints = np.left_shift(row, 32, dtype=np.int64)
        packed |= np.left_shift(rows, 1, dtype=np.int64)
        if space:
            packed |= int(space)
        return Ranges(packed, heads)

    @property
    def row(self) -> Ints:
        return self.packed >> 32

    @property
    def rows(self) -> Ints:
        return self.packed >> 1 & _ROWS - 1

    def each(self, change: Callable[[Ints], Ints]) -> Ranges:
        """Both columns changed in one way."""
        return Ranges(change(self.packed), self.heads if isinstance(self.heads, int) else change(self.heads))

    def take(self, index: Ints) -> Ranges:
        """Some of the ranges."""
        return self.each(lambda column: column[index])


class Operands(NamedTuple):
    """A column of operands: in each row a range of a tensor."""

    tensor: Tensor
    ranges: Ranges


Column = Ints | int
#: operands, in columns where a list has them; 0: none
Cell = Column | Operands


@dataclass(frozen=True)
class Part:
    """Rows of a list. rank, position: integers [rows], who, and at which step. plain: the columns that are no operands;
    named: of each column of operands the tensor, and which of `ranges` they are."""

    rank: Ints
    position: Column
    plain: tuple[Column, ...]
    named: tuple[tuple[Tensor, int], ...]
    ranges: tuple[Ranges, ...]

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, index: Ints) -> Part:
        """Some of the rows."""
        return replace(
            self,
            rank=self.rank[index],
            position=taken(self.position, index),
            plain=tuple(taken(column, index) for column in self.plain),
            ranges=tuple(ranges.take(index) for ranges in self.ranges),
        )

    def operand(self, table: str, column: str) -> tuple[Tensor, Ranges]:
        """What stands in a column of operands."""
        tensor, number = self.named[OPERAND_COLUMNS[table].index(column)]
        return tensor, self.ranges[number]

    def tensors(self) -> list[Tensor]:
        """A tensor that each of the ranges is of."""
        of = {number: tensor for tensor, number in self.named if tensor != Tensor.NONE}
        return [of[number] for number in range(len(self.ranges))]


def taken(column: Column, index: Ints) -> Column:
    """Some rows of a column."""
    return column if isinstance(column, int) else column[index]


class Step(NamedTuple):
    """One instruction of the template."""

    op: Op
    round: int = 0
    channel: int = 0
    mode: int = 0


#: list -> its columns that are no operands
_PLAIN = {
    name: tuple(column for column in TABLES[name] if column not in columns)
    for name, columns in OPERAND_COLUMNS.items()
}


@dataclass
class Assembler:
    """Collects the template and the list rows, then builds the tables of all ranks."""

    ranks: int
    steps: list[Step] = field(default_factory=list)
    rounds: int = 0
    _parts: dict[str, list[Part]] = field(default_factory=lambda: {name: [] for name in OPERAND_COLUMNS})
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

    def rows(self, table: str, rank: Ints, position: Column, **columns: Cell) -> None:
        """Rows of a list: who, at which step, and its columns, 0 where they are not named. Rows of one rank and step
        keep the order in which they are given."""
        if not len(rank):
            return
        ranges: list[Ranges] = []
        named = []
        for name in OPERAND_COLUMNS[table]:
            cell = columns.get(name, 0)
            if not isinstance(cell, Operands):
                named.append((Tensor.NONE, 0))
                continue
            number = next((n for n, held in enumerate(ranges) if held is cell.ranges), len(ranges))
            ranges += [cell.ranges] if number == len(ranges) else []
            named.append((cell.tensor, number))
        plain = tuple(columns.get(name, 0) for name in _PLAIN[table])
        self.add(table, Part(rank, position, plain, tuple(named), tuple(ranges)))  # type: ignore[arg-type]

    def add(self, table: str, part: Part) -> None:
        """The same, of a part."""
        self._parts[table].append(part)

    def append(self, other: Assembler) -> int:
        """Append the steps of another, with rounds of their own and no rows; returns the position of the first."""
        first, rounds = len(self.steps), self.rounds
        self.steps += [
            Step(step.op, step.round + rounds, *step[2:]) if step.op in (Op.LAUNCH, Op.WAIT) else step
            for step in other.steps
        ]
        self.rounds += other.rounds
        self._waits += [(first + wait, first + launch) for wait, launch in other._waits]
        return first

    def parts(self) -> Iterator[tuple[str, Part]]:
        """All rows of all lists, as they were given."""
        for table, parts in self._parts.items():
            for part in parts:
                yield table, part

    def reach(self, tensor: Tensor) -> Ints:
        """int64 [ranks]: the work rows of a tensor that rows have named so far."""
        reach = np.zeros(self.ranks, np.int64)
        for _, part in self.parts():
            for own, number in part.named:
                if own == tensor:
                    held, packed = part.ranges[number], part.ranges[number].packed
                    np.maximum.at(reach, part.rank, np.where(packed & 1, held.row + held.rows, 0))
        return reach

    def spread(self, groups: Groups, sets: HeadSets) -> Assembler:
        """The same for every member of each group, with its heads; members talk to those at their place in other
        groups."""
        spread = Assembler(groups.ranks, self.steps, self.rounds, _waits=self._waits)
        peer = _PLAIN["transfers"].index("peer")
        for table, part in self.parts():
            index, rank = groups.spread(part.rank)
            taken = part.take(index)
            ranges = tuple(
                Ranges(held.packed, (sets.key if tensor in KV_SIDE else sets.query)[rank])
                for held, tensor in zip(taken.ranges, part.tensors(), strict=True)
            )
            plain = list(taken.plain)
            if table == "transfers":
                plain[peer] = groups.first[plain[peer]] + groups.member[rank]
            spread.add(table, replace(taken, rank=rank, plain=tuple(plain), ranges=ranges))
        return spread

    def build(self, sets: HeadSets) -> ProgramSet:
        """The tables of all ranks."""
        if self.ranks * len(self.steps) >= 2**31:
            raise CapacityError(
                f"{self.ranks} ranks x {len(self.steps)} steps: use larger blocks or a larger coalesce"
            )
        given, sizes = _given(self._parts)
        launch = np.full(len(self.steps), -1)
        for wait, of in self._waits:
            launch[wait] = of
        steps = np.fromiter(chain.from_iterable(self.steps), np.int64, 4 * len(self.steps))
        template = _Template(steps.reshape(-1, 4), launch)
        count = np.zeros((self.ranks, len(self.steps)), np.int64)
        ptr = np.zeros((len(TABLES), self.ranks + 1), np.int64)
        rows = tuple(np.empty((size, 1 + ranges), np.int64) for size, ranges in sizes)
        _arrange(given, template, count, ptr, rows)
        lists = tuple(
            np.empty((len(TABLES[name]), len(held)), np.int32)
            for name, held in zip(_LISTS, rows, strict=True)
        )
        cells = sum(len(OPERAND_COLUMNS[name]) * len(held) for name, held in zip(_LISTS, rows, strict=True))
        operands = np.empty((len(TABLES["operands"]), self.ranks + cells), np.int32)
        arenas = np.empty((len(TABLES["arenas"]), self.ranks * len(_SIDE)), np.int64)
        _write(given, rows, ptr, lists, operands, arenas, np.stack([sets.query_heads, sets.key_columns]))
        instructions = np.empty((len(TABLES["instructions"]), ptr[_INSTRUCTIONS, -1]), np.int32)
        _write_instructions(template, count, instructions)
        few = arenas[:, : ptr[_ARENAS, -1]].copy(), operands[:, : ptr[_OPERANDS, -1]].copy()
        tables: tuple[Ints, ...] = (*few, instructions, *lists)
        return ProgramSet(
            {
                name: Table(held, dict(zip(TABLES[name], made, strict=True)))
                for name, held, made in zip(TABLES, ptr, tables, strict=True)
            }
        )


_ARENAS, _OPERANDS, _INSTRUCTIONS, _FIRST = range(4)  # of `isa.TABLES`; the lists are the others
_LISTS = tuple(TABLES)[_FIRST:]
_MOST_PLAIN, _MOST_NAMED = max(map(len, _PLAIN.values())), max(map(len, OPERAND_COLUMNS.values()))
_NAMED = 4 + _MOST_PLAIN  # where operands begin among the numbers of a part


def _places(of: Mapping[str, tuple[str, ...]], most: int) -> Ints:
    """int64 [lists, most]: where columns of each list stand among all of them, -1 behind the last."""
    found = np.full((len(_LISTS), most), -1)
    for number, name in enumerate(_LISTS):
        found[number, : len(of[name])] = [TABLES[name].index(column) for column in of[name]]
    return found


_PLAIN_AT, _NAMED_AT = _places(_PLAIN, _MOST_PLAIN), _places(OPERAND_COLUMNS, _MOST_NAMED)
#: int64 [tensors]: whether its arenas have columns for query heads (0) or for key heads (1)
_SIDE = np.array([tensor in KV_SIDE for tensor in Tensor], np.int64)


class _Template(NamedTuple):
    """steps: int64 [steps, 4], op, round, channel, mode; launch: int64 [steps], of what a step waits for, or -1."""

    steps: Ints
    launch: Ints


class _Given(NamedTuple):
    """All rows as they were given. numbers: int32, packed: int64, columns one behind the other, each once. parts: int64
    [parts, ..], of each part its list, its rows, then its columns: rank, position, the plain ones, each where it begins
    in `numbers`, or -1 - what stands in every row; then of each column of operands the tensor, which of the part's
    ranges it is, where that begins in `packed` (-1: an earlier column has it) and its head sets, as the others."""

    numbers: Ints
    packed: Ints
    parts: Ints


def _given(parts_of: Mapping[str, list[Part]]) -> tuple[_Given, list[tuple[int, int]]]:
    """All rows; and of each list how many, and how many ranges one has at most."""
    numbers, packed, said, sizes = _Columns(), _Columns(), list[int](), []
    for one, (parts, room) in enumerate(zip(parts_of.values(), _NO_COLUMNS, strict=True)):
        count = most = 0
        for part in parts:
            rows, ranges = len(part.rank), part.ranges
            count, most = count + rows, max(most, len(ranges))
            said += (one, rows)
            columns = (part.rank, part.position, *part.plain)
            said += [-1 - held if isinstance(held, int) else numbers.add(held) for held in columns]
            said += room
            begin = [packed.add(held.packed) for held in ranges]
            for tensor, number in part.named:
                if not tensor.value:
                    said += _NO_CELL
                    continue
                heads = ranges[number].heads
                sets = -1 - heads if isinstance(heads, int) else numbers.add(heads)
                said += (tensor, number, begin[number], sets)
                begin[number] = -1
            said += _NO_CELL * (_MOST_NAMED - len(part.named))
        sizes.append((count, most))
    laid = np.array(said, np.int64).reshape(-1, _NAMED + 4 * _MOST_NAMED)
    return _Given(numbers.joined(np.int32), packed.joined(np.int64), laid), sizes


_NO_CELL = (0, 0, -1, -1)
_NO_COLUMNS = tuple((-1,) * (_MOST_PLAIN - len(columns)) for columns in _PLAIN.values())


class _Columns:
    """Columns that are put one behind the other, each once."""

    def __init__(self) -> None:
        self._size, self._columns, self._begin = 0, list[Ints]([np.zeros(0, np.int64)]), dict[int, int]()

    def add(self, column: Ints) -> int:
        """Where it begins."""
        begin = self._begin.setdefault(id(column), self._size)
        if begin == self._size:
            self._columns.append(column)
            self._size += len(column)
        return begin

    def joined(self, kind: type[np.integer[Any]]) -> Ints:
        """All of them, each number of this kind."""
        return np.concatenate(self._columns, dtype=kind, casting="unsafe")


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
def _arrange(given: _Given, template: _Template, count: Ints, ptr: Ints, rows: tuple[Ints, ...]) -> None:
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
            for cell in range(_NAMED, len(part), 4):
                if part[cell + 2] >= 0:
                    for row in range(part[1]):
                        out[place[row], 1 + part[cell + 1]] = given.packed[part[cell + 2] + row]
    for rank in range(ranks):
        here = 0
        for step in range(steps):
            here += _has(template, count[rank], step)
        ptr[_INSTRUCTIONS, rank + 1] = ptr[_INSTRUCTIONS, rank] + here


@lean
def _number(numbers: Ints, begin: int, row: int) -> int:
    """What stands in a row of a column."""
    return int(numbers[begin + row]) if begin >= 0 else -1 - begin


@lean
def _has(template: _Template, count: Ints, step: int) -> bool:
    """Whether a rank takes part in a step: it has rows, waits for what it launched, or all ranks do."""
    of = template.launch[step] if template.launch[step] >= 0 else step
    return bool(count[of] > 0 or template.steps[of, 3] & ALL_TO_ALL)


@jit
def _write_instructions(template: _Template, count: Ints, out: Ints) -> None:
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
def _write(
    given: _Given,
    rows: tuple[Ints, ...],
    ptr: Ints,
    lists: tuple[Ints, ...],
    operands: Ints,
    arenas: Ints,
    heads: Ints,
) -> None:
    """Rank after rank: the columns of the lists, the operands that these name, and arenas as large as what operands in
    work rows reach. heads: int64 [2, ranks], columns of query and of key heads in arenas."""
    ranks, tensors = ptr.shape[1] - 1, len(_SIDE)
    found, at, arena = _room(rows, ptr), 0, 0
    for rank in range(ranks):
        found.state[0], found.state[1], found.reach[:] = 0, 1, 0
        operands[:, at] = 0  # none
        for one in range(len(lists)):
            first, end = ptr[_FIRST + one, rank], ptr[_FIRST + one, rank + 1]
            if end > first:
                _write_list(given, one, rows[one], first, end, lists[one], rank, found, operands, at)
        at += found.state[1]
        ptr[_OPERANDS, rank + 1] = at
        for tensor in range(tensors):
            if found.reach[tensor] > 0:
                arenas[0, arena], arenas[1, arena] = tensor, found.reach[tensor]
                arenas[2, arena] = heads[_SIDE[tensor], rank]
                arena += 1
        ptr[_ARENAS, rank + 1] = arena


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
        np.full((most, len(_SIDE)), -1, np.int32),
        np.zeros(2, np.int64),
        np.empty(len(_SIDE), np.int64),
    )


@lean
def _write_list(
    given: _Given,
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
    for column in range(_MOST_PLAIN + _MOST_NAMED):
        plain, row = column < _MOST_PLAIN, first
        to = _PLAIN_AT[one, column] if plain else _NAMED_AT[one, column - _MOST_PLAIN]
        while to >= 0 and row < end:  # rows of one part after rows of one part
            part, last = rows[row, 0] >> 32, row + 1
            while last < end and rows[last, 0] >> 32 == part:
                last += 1
            said = given.parts[part]
            if plain:
                _write_plain(given.numbers, said[4 + column], rows, row, last, out[to])
            else:
                cell = said[_NAMED + 4 * (column - _MOST_PLAIN) :]
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
