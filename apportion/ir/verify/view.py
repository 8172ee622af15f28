"""Programs with int64 columns for the rules, and shared derived quantities."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.isa import TASK_LIST, Op
from apportion.ir.plan.ops import IS_HEADLESS, IS_KEY
from apportion.ir.plan.programs import ProgramView, TransferMatches
from apportion.ir.plan.tables import ProgramSet, Table
from apportion.ir.tensors import Space, Tensor

HOME, WORK = int(Space.HOME), int(Space.WORK)


@dataclass(frozen=True, eq=False)
class HeadSets:
    """The head sets of a plan, in heads of query-side or KV-side tensors. Set 0 is all heads.

    members[i]: heads of set i. size: int64 [sets]. canonical: int64 [sets], equal for equal sets.
    """

    heads: int
    members: tuple[Ints, ...]
    size: Ints
    canonical: Ints


def head_sets(heads: int, sets: tuple[tuple[int, ...], ...]) -> HeadSets:
    all_sets = (tuple(range(heads)), *sets)
    first: dict[tuple[int, ...], int] = {}
    canonical = [first.setdefault(tuple(members), i) for i, members in enumerate(all_sets)]
    members = tuple(np.array(item, np.int64) for item in all_sets)
    return HeadSets(heads, members, np.array([len(item) for item in all_sets]), np.array(canonical))


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
    def _wide_tables(self) -> dict[str, Table]:
        return {}

    def __getitem__(self, name: str) -> Table:
        """A table with int64 columns, whose sums and products do not overflow."""
        if name not in self._wide_tables:
            table = self.source[name]
            self._wide_tables[name] = replace(table, values=table.values.astype(np.int64, copy=False))
        return self._wide_tables[name]

    @cached_property
    def splits_heads(self) -> bool:
        """True if some operand has only some of the heads."""
        return len(self.q_sets.members) > 1 and bool(self.source["operands"]["heads"].any())

    @property
    def ranks(self) -> int:
        return len(self.home_rows)

    @cached_property
    def kv_side(self) -> Bools:
        """bool [operands]: True for operands with KV heads."""
        return IS_KEY[self["operands"]["tensor"]]

    @cached_property
    def head_count(self) -> Ints:
        """int64 [operands]: heads of each operand (1 for X and dX)."""
        table = self["operands"]
        heads = np.where(self.kv_side, self.kv_sets.size[table["heads"]], self.q_sets.size[table["heads"]])
        return np.where(IS_HEADLESS[table["tensor"]], 1, heads)

    @cached_property
    def same_heads(self) -> Ints:
        """int64 [operands]: equal numbers for operands with the same heads in the same order."""
        heads = self["operands"]["heads"]
        result: Ints = np.where(self.kv_side, self.kv_sets.canonical[heads], self.q_sets.canonical[heads])
        return result

    def list_name(self, instruction: int) -> str | None:
        """The list that an instruction consumes, or None; also None for -1."""
        return Op(int(self["instructions"]["op"][instruction])).rule.list if instruction >= 0 else None

    @cached_property
    def clock(self) -> Ints:
        """int64 [instructions]: the progress of its rank in rounds, a clock comparable between ranks."""
        table = self["instructions"]
        stride = int(table["round"].max(initial=0)) + 2
        launched = np.where(table["op"] == Op.LAUNCH, table["round"] + 1, 0)
        return np.maximum.accumulate(self.rank_of * stride + launched) - self.rank_of * stride

    @property
    def task_list(self) -> str:
        """The list of this phase's attention tasks."""
        return TASK_LIST[self.phase]

    def uses(self, op: Op) -> bool:
        return bool((self.source["instructions"]["op"] == op).any())

    @cached_property
    def outputs(self) -> frozenset[Tensor]:
        """Tensors whose home rows the program must all produce."""
        if self.phase == "forward":
            return frozenset({Tensor.O})
        gradients = {Tensor.DX} if self.uses(Op.PROJECT_GRAD) else {Tensor.DQ, Tensor.DKV}
        return frozenset({Tensor.DELTA} | gradients)

    @property
    def transfers(self) -> Ints:
        return self["transfers"].values

    @cached_property
    def matches(self) -> TransferMatches:
        """Matched transfers: both sides must have the same tensor, number of rows and heads."""
        table = self["operands"]
        tile = (table["rows"] * (max(Tensor) + 1) + table["tensor"]) * len(self.q_sets.size) + self.same_heads
        return self.match(tile)
