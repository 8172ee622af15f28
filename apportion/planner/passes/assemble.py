"""From list rows of all ranks to programs: one template of steps, filtered for each rank by what it takes part in.

All ranks run the same template; a rank skips the steps for which it has no rows. Because every rank keeps the order
of the template, rounds are launched in the same order everywhere, which is what rules out deadlock.

List rows name operands by what they are, ranges of rows of a tensor; operands get their numbers in the end, when the
rows of a rank are all there. Numbers follow the lists, column after column (`isa.OPERAND_COLUMNS`), in each its rows:
what the format writes in fewest bytes (`ir.predictions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apportion.ir.errors import CapacityError
from apportion.ir.isa import ALL_TO_ALL, KV_SIDE, OPERAND_COLUMNS, P2P, TABLES, Op, Space, Tensor
from apportion.ir.jit import jit, lean, unlocked
from apportion.ir.plan import ProgramSet, Table
from apportion.planner.passes.groups import Groups, HeadSets

Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]

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


@dataclass(frozen=True)
class Step:
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
            replace(step, round=step.round + rounds) if step.op in (Op.LAUNCH, Op.WAIT) else step
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
        steps = len(self.steps)
        if self.ranks * steps >= 2**31:
            raise CapacityError(f"{self.ranks} ranks x {steps} steps: use larger blocks or a larger coalesce")
        count = np.zeros(self.ranks * steps, np.int64)
        lists = {name: self._list(name, parts, count) for name, parts in self._parts.items()}
        operands, reach = _numbered(tuple(lists.values()), self.ranks)
        tables = {"arenas": _arenas(reach, sets), "operands": operands}
        for name, one in lists.items():
            tables[name] = Table(one.ptr, dict(zip(TABLES[name], one.rows.plain[1:], strict=True)))
        tables["instructions"] = self._instructions(count)
        return ProgramSet({name: tables[name] for name in TABLES})

    def _list(self, name: str, parts: list[Part], count: Ints) -> _List:
        """A list of all ranks, sorted, its operands not numbered yet. count: int64 [ranks * steps], to which its rows
        are added."""
        size, ranges = sum(map(len, parts)), max((len(part.ranges) for part in parts), default=0)
        wide = any(not isinstance(held.heads, int) or held.heads for part in parts for held in part.ranges)
        named, plain = _PLACES[name]
        given = _Rows.empty(1 + len(plain), ranges, size, wide)
        key, at = np.empty(size, np.int32), 0
        for number, part in enumerate(parts):
            some = slice(at, at + len(part))
            np.multiply(part.rank, len(self.steps), out=key[some], casting="unsafe")
            key[some] += part.position
            for column, values in zip(given.plain, (number, *part.plain), strict=True):
                column[some] = values
            for one, held in enumerate(part.ranges):
                given.packed[one, some] = held.packed
                if wide:
                    given.heads[one, some] = held.heads
            given.packed[len(part.ranges) :, some] = -1
            at = some.stop
        rows = _Rows.empty(1 + len(TABLES[name]), ranges, size, wide)
        ptr = np.zeros(self.ranks + 1, np.int64)
        _sort(key, np.append(0, 1 + plain), given, count, rows, ptr)
        forms = np.array([part.named for part in parts], np.int64).reshape(-1, len(named), 2)
        return _List(ptr, rows, forms, 1 + named)

    def _instructions(self, count: Ints) -> Table:
        steps = np.array([(step.op, step.round, step.channel, step.mode) for step in self.steps], np.int64)
        launch = np.full(len(self.steps), -1)
        for wait, of in self._waits:
            launch[wait] = of
        ptr = np.zeros(self.ranks + 1, np.int64)
        _count_steps(steps, launch, count, ptr)
        out = np.empty((len(TABLES["instructions"]), int(ptr[-1])), np.int32)
        _fill_steps(steps, launch, count, out)
        return Table(ptr, dict(zip(TABLES["instructions"], out, strict=True)))


def _places(name: str, columns: tuple[str, ...]) -> Ints:
    """int64: where columns of a list stand among all of them."""
    return np.array([TABLES[name].index(column) for column in columns], np.int64)


#: list -> where its operands stand among its columns, and where the others
_PLACES = {
    name: (_places(name, columns), _places(name, _PLAIN[name])) for name, columns in OPERAND_COLUMNS.items()
}


class _Rows(NamedTuple):
    """Rows of a list. plain: int32 [columns, rows], the first says how the row was given; packed and heads: int64
    and int32 [ranges, rows], as in `Ranges`; heads: [ranges, 0] where all are 0."""

    plain: Ints
    packed: Ints
    heads: Ints

    @staticmethod
    def empty(columns: int, ranges: int, rows: int, wide: bool) -> _Rows:
        heads = np.zeros((ranges, rows if wide else 0), np.int32)
        return _Rows(np.empty((columns, rows), np.int32), np.empty((ranges, rows), np.int64), heads)


class _List(NamedTuple):
    """A list, sorted. ptr: int64 [ranks + 1], where the rows of each rank begin. rows: behind the first column as in
    `isa.TABLES`. forms: int64 [ways in which rows are given, columns of operands, 2], the tensor, and which of the
    ranges it is; named: int64, where these columns stand."""

    ptr: Ints
    rows: _Rows
    forms: Ints
    named: Ints


class _Found(NamedTuple):
    """What one rank's rows have named so far, in memory that is used again for each.

    key, heads, owner, place: int64 and three int32 [slots], a hash table of ranges: those of `owner` count, and are
    the `place`-th distinct one. number: int32 [ranges, tensors], the operand's number, -1: none yet. ids: int32
    [ranges of a list, rows], the place of each range of its rows. state: int64 [2], ranges and operands so far.
    """

    key: Ints
    heads: Ints
    owner: Ints
    place: Ints
    number: Ints
    ids: Ints
    state: Ints


def _numbered(lists: tuple[_List, ...], ranks: int) -> tuple[Table, Ints]:
    """Writes the lists' columns; the operands that they name, and int64 [tensors, ranks], work rows of each."""
    held = [(np.diff(one.ptr), len(one.rows.packed)) for one in lists]
    most, slots = int(np.sum([rows * ranges for rows, ranges in held], 0).max(initial=0)), 2
    while slots < 2 * most:
        slots *= 2
    longest = max(int(rows.max(initial=0)) for rows, _ in held)
    found = _Found(
        np.empty(slots, np.int64),
        np.empty(slots, np.int32),
        np.full(slots, -1, np.int32),
        np.empty(slots, np.int32),
        np.empty((most, len(Tensor)), np.int32),
        np.empty((max(ranges for _, ranges in held), longest), np.int32),
        np.zeros(2, np.int64),
    )
    room = ranks + sum(len(one.named) * int(one.ptr[-1]) for one in lists)
    operands, ptr = np.empty((len(TABLES["operands"]), room), np.int32), np.zeros(ranks + 1, np.int64)
    reach = np.zeros((len(Tensor), ranks), np.int64)
    _number(lists, found, operands, ptr, reach)
    columns = operands[:, : ptr[-1]].copy()
    return Table(ptr, dict(zip(TABLES["operands"], columns, strict=True))), reach


def _arenas(reach: Ints, sets: HeadSets) -> Table:
    """Every rank's work arenas: for each tensor the rows that its operands reach, int64 [tensors, ranks], and columns
    for its heads."""
    rank, tensor = np.nonzero(reach.T)
    side = np.array([tensor in KV_SIDE for tensor in Tensor])
    width = np.where(side[tensor], sets.key_columns[rank], sets.query_heads[rank])
    ptr = np.concatenate([[0], np.cumsum(np.count_nonzero(reach, axis=0))])
    return Table(ptr, dict(zip(TABLES["arenas"], (tensor, reach[tensor, rank], width), strict=True)))


@unlocked
def _sort(key: Ints, places: Ints, given: _Rows, count: Ints, rows: _Rows, ptr: Ints) -> None:
    """Rows sorted by `key`, rank * steps + step, those of one key as given, into `rows`, plain columns at `places`;
    into `ptr`, where those of each rank begin; and adds the rows of each key to `count`."""
    at, ranks = np.zeros(len(count) + 1, np.int32), len(ptr) - 1
    steps = len(count) // ranks
    for row in range(len(key)):
        at[key[row] + 1] += 1
    for one in range(len(count)):
        count[one] += at[one + 1]
        at[one + 1] += at[one]
    for rank in range(ranks):
        ptr[rank + 1] = at[(rank + 1) * steps]
    place = np.empty(len(key), np.int32)
    for row in range(len(key)):
        place[row] = at[key[row]]
        at[key[row]] += 1
    for column in range(len(places)):
        _put(given.plain[column], place, rows.plain[places[column]])
    for kind in range(len(given.packed)):
        _put(given.packed[kind], place, rows.packed[kind])
        if given.heads.shape[1] > 0:
            _put(given.heads[kind], place, rows.heads[kind])


@lean
def _put(column: Ints, place: Ints, out: Ints) -> None:
    for row in range(len(place)):
        out[place[row]] = column[row]


@unlocked
def _number(lists: tuple[_List, ...], found: _Found, operands: Ints, ptr: Ints, reach: Ints) -> None:
    """Rank after rank: `operands`, the columns of the lists, and the rows that operands in work rows reach."""
    at = 0
    for rank in range(len(ptr) - 1):
        found.state[0], found.state[1] = 0, 1
        operands[:, at] = 0  # none
        for one in lists:
            if one.ptr[rank + 1] > one.ptr[rank]:
                _find_ranges(one, rank, found)
                _name_ranges(one, rank, found, operands, at, reach)
        at += found.state[1]
        ptr[rank + 1] = at


@lean
def _find_ranges(one: _List, rank: int, found: _Found) -> None:
    """Of each range of a rank's rows its place among the rank's distinct ones, -1 for none."""
    rows, wide, mask = one.rows, one.rows.heads.shape[1] > 0, len(found.key) - 1
    first, end = one.ptr[rank], one.ptr[rank + 1]
    for kind in range(len(rows.packed)):
        packed, ids = rows.packed[kind], found.ids[kind]
        for row in range(first, end):
            key, heads = packed[row], rows.heads[kind, row] if wide else 0
            if key < 0:
                ids[row - first] = -1
                continue
            slot = _slot(key, heads) & mask
            while found.owner[slot] == rank and (found.key[slot] != key or found.heads[slot] != heads):
                slot = (slot + 1) & mask
            if found.owner[slot] != rank:
                place = found.state[0]
                found.owner[slot], found.key[slot], found.heads[slot] = rank, key, heads
                found.place[slot] = place
                found.number[place] = -1
                found.state[0] = place + 1
            ids[row - first] = found.place[slot]


@lean
def _name_ranges(one: _List, rank: int, found: _Found, operands: Ints, at: int, reach: Ints) -> None:
    """The columns of operands of a rank's rows, and the operands, from `at` on."""
    rows, form, wide = one.rows, one.rows.plain[0], one.rows.heads.shape[1] > 0
    first, count = one.ptr[rank], found.state[1]
    for column in range(len(one.named)):
        out = rows.plain[one.named[column]]
        for row in range(first, one.ptr[rank + 1]):
            tensor, kind = one.forms[form[row], column, 0], one.forms[form[row], column, 1]
            place = found.ids[kind, row - first] if tensor > 0 else -1
            number = found.number[place, tensor] if place >= 0 else 0
            if number < 0:
                number, key = count, rows.packed[kind, row]
                _write(operands, at + number, tensor, key, rows.heads[kind, row] if wide else 0)
                if key & 1:
                    reach[tensor, rank] = max(reach[tensor, rank], (key >> 32) + (key >> 1 & 0x7FFFFFFF))
                found.number[place, tensor] = number
                count += 1
            out[row] = number
    found.state[1] = count


@lean
def _write(operands: Ints, at: int, tensor: int, key: int, heads: int) -> None:
    """An operand, of work rows from column 0 on."""
    operands[0, at], operands[1, at] = tensor, key & 1
    operands[2, at], operands[3, at] = key >> 32, key >> 1 & 0x7FFFFFFF
    operands[4, at], operands[5, at] = 0, heads


@lean
def _slot(key: int, heads: int) -> int:
    """Where a range is looked for first: the middle of a product, as rows are multiples of many things (Knuth, vol. 3,
    section 6.4). No step leaves 63 bits."""
    folded = ((key & 0x7FFFFFFF) ^ (40503 * (key >> 32)) ^ (heads << 13)) & 0x3FFFFFFF
    return (folded * 0x9E3779B1) >> 20


@jit
def _count_steps(steps: Ints, launch: Ints, count: Ints, ptr: Ints) -> None:
    """How many steps each rank has, and those before it, into `ptr`."""
    for rank in range(len(ptr) - 1):
        here = 0
        for step in range(len(steps)):
            here += _has(steps, launch, count, rank, step)
        ptr[rank + 1] = ptr[rank] + here


@jit
def _fill_steps(steps: Ints, launch: Ints, count: Ints, out: Ints) -> None:
    """The instructions of all ranks: op, round, channel, mode and count."""
    at = 0
    for rank in range(len(count) // max(len(steps), 1)):
        for step in range(len(steps)):
            if _has(steps, launch, count, rank, step):
                for column in range(4):
                    out[column, at] = steps[step, column]
                out[4, at] = count[rank * len(steps) + step]
                at += 1


@lean
def _has(steps: Ints, launch: Ints, count: Ints, rank: int, step: int) -> bool:
    """Whether a rank takes part in a step: it has rows, waits for what it launched, or all ranks do."""
    of = launch[step] if launch[step] >= 0 else step
    return bool(count[rank * len(steps) + of] > 0 or steps[of, 3] & ALL_TO_ALL)
