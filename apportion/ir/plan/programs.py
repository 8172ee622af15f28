"""What follows from the tables of programs: whose rows are whose, what meets what, how many heads, what room.

Verifier, simulator, messages and executors ask here. Indexes are used as they stand: `ir.plan.wellformed` checked them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apportion._core import programs as core
from apportion.ir.arrays import Bools, Ints, changes
from apportion.ir.isa import Op
from apportion.ir.orders import stable_order
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.tables import ProgramSet, Table
from apportion.ir.tensors import Tensor


@dataclass(frozen=True, eq=False)
class Turns:
    """Launches in the order (round, rank).

    order: int64 [launches] instructions. ptr: int64 [rounds + 1] where each round begins in `order`. rounds: int64
    [rounds], rising.
    """

    order: Ints
    ptr: Ints
    rounds: Ints


@dataclass(frozen=True, eq=False)
class Met:
    """mate: int64 [transfers], the transfer that each one meets, or -1. agreed: bool [transfers], both sides
    name tiles of equal numbers."""

    mate: Ints
    agreed: Bools


class ProgramView:
    """The programs of all ranks of one kind and phase, read only. An instruction, a launch or a row is counted over all
    ranks, rank after rank."""

    source: ProgramSet

    @property
    def instructions(self) -> Table:
        return self.source["instructions"]

    @cached_property
    def rank_of(self) -> Ints:
        """int64 [instructions]: the rank of each instruction."""
        return self.instructions.rank_of_row()

    def instruction_of(self, name: str) -> Ints:
        """int64 [rows]: the instruction that consumes each row of a list."""
        return instruction_of(self.instructions["op"], self.instructions["count"], name)

    @cached_property
    def launches(self) -> Ints:
        """int64 [launches]: the launch instructions."""
        return np.flatnonzero(self.instructions["op"] == Op.LAUNCH)

    @cached_property
    def turns(self) -> Turns:
        number = self.instructions.wide("round")[self.launches]
        order = stable_order(number)
        sorted_number = number[order]
        begins = np.flatnonzero(changes(sorted_number))
        return Turns(self.launches[order], np.append(begins, len(number)), sorted_number[begins])

    @cached_property
    def partner(self) -> Ints:
        """int64 [instructions]: of a wait the launch that it completes, of a launch its first wait; -1 elsewhere and
        where there is none."""
        round_, at = self.instructions.wide("round"), self.launches
        key = self.rank_of * (int(round_.max(initial=0)) + 1) + round_
        partner = np.full(len(key), -1, np.int64)
        if len(at) == 0:
            return partner
        order = at[np.argsort(key[at], kind="stable")]
        waits = np.flatnonzero(self.instructions["op"] == Op.WAIT)
        found = np.minimum(np.searchsorted(key[order], key[waits]), len(order) - 1)
        launch = order[found]
        paired = key[launch] == key[waits]
        partner[waits[paired]] = launch[paired]
        partner[launch[paired][::-1]] = waits[paired][::-1]  # the first one is written last
        return partner

    def met(self, tile: Ints) -> Met:
        """The k-th send i -> j of a round meets the k-th receive of j from i. tile: int64 [operands], a number that is
        equal for operands that fit each other."""
        return Met(*core.match(self.source.arrays, tile))

    @cached_property
    def arena_rows(self) -> Ints:
        """int64 [ranks, tensors]: rows of each work arena."""
        return self._arena("rows")

    @cached_property
    def arena_heads(self) -> Ints:
        """int64 [ranks, tensors]: head columns of each work arena."""
        return self._arena("heads")

    def _arena(self, column: str) -> Ints:
        arenas = self.source["arenas"]
        table = np.zeros((arenas.ranks, len(Tensor)), np.int64)
        table[arenas.rank_of_row(), arenas["tensor"]] = arenas[column]
        return table


def head_counts(q_heads: int, kv_heads: int, head_sets: Sequence[Sequence[int]]) -> Ints:
    """int64 [2, none and head sets]: heads of an operand with the heads of a set, none for all; of the query and of the
    KV side."""
    sets = [len(members) for members in head_sets]
    return np.array([[q_heads, *sets], [kv_heads, *sets]], np.int64)
