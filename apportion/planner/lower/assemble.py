"""From list rows of all ranks to programs: one template of steps, filtered for each rank by what it takes part in.

All ranks run the same template; a rank skips the steps for which it has no rows. Because every rank keeps the order
of the template, rounds are launched in the same order everywhere, which is what rules out deadlock.

List rows name operands by what they are, ranges of rows of a tensor; operands get their numbers in the end, when the
rows of a rank are all there. Numbers follow the lists, column after column (`isa.OPERAND_COLUMNS`), in each its rows:
what the format writes in few bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from apportion._core import write_tables as core
from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.ir.isa import ALL_TO_ALL, OPERAND_COLUMNS, P2P, TABLES, Op
from apportion.ir.plan.tables import ProgramSet, Table
from apportion.ir.tensors import KV_SIDE, Space, Tensor
from apportion.planner.inner.groups import Groups, HeadSets

#: list -> its columns that are no operands
PLAIN = {
    name: tuple(column for column in TABLES[name] if column not in columns)
    for name, columns in OPERAND_COLUMNS.items()
}
#: of each list, where the columns of `ListPart.plain` and `ListPart.named` stand in its table
_PLACES = [
    ([TABLES[name].index(column) for column in PLAIN[name]], [TABLES[name].index(column) for column in named])
    for name, named in OPERAND_COLUMNS.items()
]
#: bool [tensors]: whether arenas have columns for key heads, else for query heads
_OF_KEYS = np.array([tensor in KV_SIDE for tensor in Tensor])
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
        launch = np.full(len(self.steps), -1)
        for wait, of in self._waits:
            launch[wait] = of
        steps = np.fromiter(chain.from_iterable(self.steps), np.int64, 4 * len(self.steps)).reshape(-1, 4)
        lists = [(*places, parts) for places, parts in zip(_PLACES, self._parts.values(), strict=True)]
        heads = np.stack([sets.query_heads, sets.key_columns])
        ptr, *tables = core.write(lists, steps, launch, ALL_TO_ALL, heads, _OF_KEYS)
        return ProgramSet(
            {
                name: Table(held.copy(), TABLES[name], made)
                for name, held, made in zip(TABLES, ptr, tables, strict=True)
            }
        )
