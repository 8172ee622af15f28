"""From list rows of all ranks to programs: one template of steps, filtered for each rank by what it takes part in.

All ranks run the same template; a rank skips the steps for which it has no rows. Because every rank keeps the order
of the template, rounds are launched in the same order everywhere, which is what rules out deadlock.

List rows name operands by what they are, ranges of rows of a tensor; operands get their numbers in the end, when the
rows of a rank are all there. Numbers follow the lists, column after column (`isa.OPERAND_COLUMNS`), in each its rows:
what the format writes in few bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.ir.isa import OPERAND_COLUMNS, P2P, TABLES, Op
from apportion.ir.plan.tables import ProgramSet, Table
from apportion.ir.tensors import KV_SIDE, Space, Tensor
from apportion.planner.inner.groups import Groups, HeadSets
from apportion.planner.lower.write_tables import (
    ARENAS,
    INSTRUCTIONS,
    LISTS,
    MOST_NAMED,
    MOST_PLAIN,
    NAMED,
    OPERANDS,
    PLAIN,
    SIDE,
    Given,
    Template,
    arrange,
    write_instructions,
    write_lists,
)

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
class ListPart:
    """Rows of a list. rank, position: integers [rows], who, and at which step. plain: the columns that are no operands;
    named: of each column of operands the tensor, and which of `ranges` they are."""

    rank: Ints
    position: Column
    plain: tuple[Column, ...]
    named: tuple[tuple[Tensor, int], ...]
    ranges: tuple[Ranges, ...]

    def __len__(self) -> int:
        return len(self.rank)

    def take(self, index: Ints) -> ListPart:
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


class TemplateStep(NamedTuple):
    """One instruction of the template."""

    op: Op
    round: int = 0
    channel: int = 0
    mode: int = 0


@dataclass
class Assembler:
    """Collects the template and the list rows, then builds the tables of all ranks."""

    ranks: int
    steps: list[TemplateStep] = field(default_factory=list)
    rounds: int = 0
    _parts: dict[str, list[ListPart]] = field(default_factory=lambda: {name: [] for name in OPERAND_COLUMNS})
    _waits: list[tuple[int, int]] = field(default_factory=list)

    def step(self, op: Op) -> int:
        """Append a step to the template; returns its position."""
        self.steps.append(TemplateStep(op))
        return len(self.steps) - 1

    def launch(self, channel: int, mode: int = P2P) -> int:
        """Append the launch of a new round; returns its position."""
        self.steps.append(TemplateStep(Op.LAUNCH, self.rounds, channel, mode))
        self.rounds += 1
        return len(self.steps) - 1

    def wait(self, launch: int) -> int:
        """Append the wait for the round launched at position `launch`."""
        self.steps.append(TemplateStep(Op.WAIT, self.steps[launch].round))
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
        plain = tuple(columns.get(name, 0) for name in PLAIN[table])
        self.add(table, ListPart(rank, position, plain, tuple(named), tuple(ranges)))  # type: ignore[arg-type]

    def add(self, table: str, part: ListPart) -> None:
        """The same, of a part."""
        self._parts[table].append(part)

    def append(self, other: Assembler) -> int:
        """Append the steps of another, with rounds of their own and no rows; returns the position of the first."""
        first, rounds = len(self.steps), self.rounds
        self.steps += [
            TemplateStep(step.op, step.round + rounds, *step[2:]) if step.op in (Op.LAUNCH, Op.WAIT) else step
            for step in other.steps
        ]
        self.rounds += other.rounds
        self._waits += [(first + wait, first + launch) for wait, launch in other._waits]
        return first

    def parts(self) -> Iterator[tuple[str, ListPart]]:
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
        peer = PLAIN["transfers"].index("peer")
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
        template = Template(steps.reshape(-1, 4), launch)
        count = np.zeros((self.ranks, len(self.steps)), np.int64)
        ptr = np.zeros((len(TABLES), self.ranks + 1), np.int64)
        rows = tuple(np.empty((size, 1 + ranges), np.int64) for size, ranges in sizes)
        arrange(given, template, count, ptr, rows)
        lists = tuple(
            np.empty((len(TABLES[name]), len(held)), np.int32) for name, held in zip(LISTS, rows, strict=True)
        )
        cells = sum(len(OPERAND_COLUMNS[name]) * len(held) for name, held in zip(LISTS, rows, strict=True))
        operands = np.empty((len(TABLES["operands"]), self.ranks + cells), np.int32)
        arenas = np.empty((len(TABLES["arenas"]), self.ranks * len(SIDE)), np.int64)
        write_lists(given, rows, ptr, lists, operands, arenas, np.stack([sets.query_heads, sets.key_columns]))
        instructions = np.empty((len(TABLES["instructions"]), ptr[INSTRUCTIONS, -1]), np.int32)
        write_instructions(template, count, instructions)
        few = arenas[:, : ptr[ARENAS, -1]].copy(), operands[:, : ptr[OPERANDS, -1]].copy()
        tables: tuple[Ints, ...] = (*few, instructions, *lists)
        return ProgramSet(
            {
                name: Table(held.copy(), TABLES[name], made)
                for name, held, made in zip(TABLES, ptr, tables, strict=True)
            }
        )


def _given(parts_of: Mapping[str, list[ListPart]]) -> tuple[Given, list[tuple[int, int]]]:
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
            said += _NO_CELL * (MOST_NAMED - len(part.named))
        sizes.append((count, most))
    laid = np.array(said, np.int64).reshape(-1, NAMED + 4 * MOST_NAMED)
    return Given(numbers.joined(np.int32), packed.joined(np.int64), laid), sizes


_NO_CELL = (0, 0, -1, -1)
_NO_COLUMNS = tuple((-1,) * (MOST_PLAIN - len(columns)) for columns in PLAIN.values())


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
