"""A plan as the rules read it: int64 matrices of all ranks, and what several rules derive from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apportion.ir.arrays import Bools, Ints, group_of
from apportion.ir.isa import TABLES, TASK_LIST, Op
from apportion.ir.loops.jit import lean
from apportion.ir.plan.ops import IS_KEY, LIST_OF_OP
from apportion.ir.plan.programs import Met, ProgramView
from apportion.ir.plan.tables import ProgramSet, Table
from apportion.ir.tensors import HEADLESS, KV_SIDE, Space, Tensor

HOME, WORK = int(Space.HOME), int(Space.WORK)
_KV_BITS, _HEADLESS_BITS = (sum(1 << tensor for tensor in some) for some in (KV_SIDE, HEADLESS))
_TENSORS = max(Tensor) + 1


@dataclass(frozen=True, eq=False)
class TableRows:
    """A table as one matrix: `data` int64 [columns, rows] in the order of `isa.TABLES`, `ptr` int64 [ranks + 1]."""

    name: str
    data: Ints
    ptr: Ints

    def __getitem__(self, column: str) -> Ints:
        return self.data[TABLES[self.name].index(column)]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return int(self.data.shape[1])

    @cached_property
    def rank(self) -> Ints:
        """int64 [rows]: the rank that owns each row."""
        return group_of(np.diff(self.ptr))

    def at(self, row: int) -> dict[str, int]:
        """One row, for messages."""
        return {name: int(self.data[i, row]) for i, name in enumerate(TABLES[self.name])}

    def local(self, row: int) -> int:
        """A row's number on its rank."""
        return row - int(self.ptr[self.rank[row]])


def matrix(name: str, table: Table) -> TableRows:
    return TableRows(
        name, np.array(table.values, np.int64, order="C"), np.ascontiguousarray(table.ptr, np.int64)
    )


@dataclass(frozen=True, eq=False)
class HeadSets:
    """The head sets of a plan as the heads of query-side or KV-side tensors. Set 0 is all heads.

    members[i]: heads of set i. size: int64 [sets]. canonical: int64 [sets], equal for equal sets.
    """

    heads: int
    members: tuple[Ints, ...]
    size: Ints
    canonical: Ints


def head_sets(heads: int, sets: tuple[tuple[int, ...], ...]) -> HeadSets:
    every = (tuple(range(heads)), *sets)
    first: dict[tuple[int, ...], int] = {}
    canonical = [first.setdefault(tuple(members), i) for i, members in enumerate(every)]
    members = tuple(np.array(item, np.int64) for item in every)
    return HeadSets(heads, members, np.array([len(item) for item in every]), np.array(canonical))


@dataclass(frozen=True, eq=False)
class Program(ProgramView):
    """The programs of all ranks for one kind and phase."""

    kind: str
    phase: str
    source: ProgramSet
    q_sets: HeadSets
    kv_sets: HeadSets
    home_rows: Ints  # int64 [ranks]

    @cached_property
    def _rows(self) -> dict[str, TableRows]:
        return {}

    def __getitem__(self, name: str) -> TableRows:
        if name not in self._rows:
            self._rows[name] = matrix(name, self.source[name])
        return self._rows[name]

    @cached_property
    def splits_heads(self) -> bool:
        """Whether an operand has some of the heads only."""
        return len(self.q_sets.members) > 1 and bool(self.source["operands"]["heads"].any())

    @property
    def ranks(self) -> int:
        return len(self.home_rows)

    @cached_property
    def kv_side(self) -> Bools:
        """bool [operands]: whether an operand's heads are KV heads."""
        return IS_KEY[self["operands"]["tensor"]]

    @cached_property
    def head_count(self) -> Ints:
        """int64 [operands]: heads of each operand (1 for X and dX)."""
        return self.facts.head_count

    @cached_property
    def facts(self) -> OperandFacts:
        """What the tables say of each operand. Looks at arenas and home rows too."""
        table, sets = self["operands"], (self.q_sets, self.kv_sets)
        packed, tile = np.empty((len(table), 4), np.int64), np.empty(len(table), np.int64)
        head_count = np.empty(len(table), np.int64)
        misplaced = _look_up(
            table.data,
            table.ptr,
            np.array([side.size for side in sets]),
            np.array([side.canonical for side in sets]),
            self.home_rows,
            self.arena_rows,
            self.arena_heads,
            packed,
            head_count,
            tile,
        )
        return OperandFacts(packed, head_count, tile, misplaced)

    @cached_property
    def list_of(self) -> Ints:
        """int64 [instructions]: the list that each instruction consumes."""
        return LIST_OF_OP[self["instructions"]["op"]]

    @cached_property
    def clock(self) -> Ints:
        """int64 [instructions]: how far its rank has come, in rounds: a time that ranks can be compared by."""
        table = self["instructions"]
        day = int(table["round"].max(initial=0)) + 2
        launched = np.where(table["op"] == Op.LAUNCH, table["round"] + 1, 0)
        return np.maximum.accumulate(table.rank * day + launched) - table.rank * day

    @property
    def task_list(self) -> str:
        """The list of this phase's attention tasks."""
        return TASK_LIST[self.phase]

    def task_operand(self, column: str, task: Ints | None = None) -> Ints:
        """int64 [tasks]: the number, over all ranks, of an operand of each task, or of those given."""
        tasks = self[self.task_list]
        if task is not None:
            return tasks[column][task] + self["operands"].ptr[tasks.rank[task]]
        return tasks[column] + self["operands"].ptr[tasks.rank]

    def uses(self, op: Op) -> bool:
        return bool((self.source["instructions"]["op"] == op).any())

    @cached_property
    def owed(self) -> frozenset[Tensor]:
        """Tensors whose home rows the program must produce, all of them."""
        if self.phase == "forward":
            return frozenset({Tensor.O})
        gradients = {Tensor.DX} if self.uses(Op.PROJECT_GRAD) else {Tensor.DQ, Tensor.DKV}
        return frozenset({Tensor.DELTA} | gradients)

    @cached_property
    def rises(self) -> bool:
        """Whether every rank launches its rounds in rising order."""
        table = self["instructions"]
        at = np.flatnonzero(table["op"] == Op.LAUNCH)
        rank, number = table.rank[at], table["round"][at]
        return not ((rank[1:] == rank[:-1]) & (number[1:] <= number[:-1])).any()

    @property
    def transfers(self) -> Ints:
        return self["transfers"].data

    @cached_property
    def meeting(self) -> Met:
        """Whether both sides of a transfer name the same tensor, rows and heads, and which sides these are."""
        return self.met(self.facts.tile)


@dataclass(frozen=True, eq=False)
class OperandFacts:
    """packed: int64 [operands, 4], tensor, space, rows and a number that is equal for operands of a side with the
    same heads in the same order, in half a line of the cache. head_count: int64 [operands]. tile: int64 [operands],
    one number for tensor, rows and heads; equal numbers of different triples need 2**40 rows. misplaced: how many
    operands are outside their rows or heads.
    """

    packed: Ints
    head_count: Ints
    tile: Ints
    misplaced: int


@lean
def _look_up(
    operands: Ints,
    ptr: Ints,
    size: Ints,
    canonical: Ints,
    home_rows: Ints,
    arena_rows: Ints,
    arena_heads: Ints,
    packed: Ints,
    head_count: Ints,
    tile: Ints,
) -> int:
    """Fills packed, head_count and tile; size, canonical: int64 [2, sets], of query side and KV side."""
    misplaced = 0
    for rank in range(len(ptr) - 1):
        for x in range(ptr[rank], ptr[rank + 1]):
            tensor, space, heads = operands[0, x], operands[1, x], operands[5, x]
            end, column = operands[2, x] + operands[3, x], operands[4, x]
            side, headless = (_KV_BITS >> tensor) & 1, (_HEADLESS_BITS >> tensor) & 1
            head_count[x] = 1 if headless else size[side, heads]
            packed[x, 0], packed[x, 1], packed[x, 2] = tensor, space, operands[3, x]
            packed[x, 3] = canonical[side, heads]
            tile[x] = (operands[3, x] * _TENSORS + tensor) * size.shape[1] + canonical[side, heads]
            if space == WORK:
                wrong = end > arena_rows[rank, tensor]
                if not headless:
                    wrong = wrong or column + head_count[x] > arena_heads[rank, tensor]
            else:
                wrong = end > home_rows[rank] or column != 0
            if tensor != 0 and (wrong or (headless and column + heads != 0)):
                misplaced += 1
    return misplaced
