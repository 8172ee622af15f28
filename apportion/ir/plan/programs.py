"""Quantities derived from program tables: owners of rows, matching transfers, head counts, arena sizes.

Used by verifier, simulator, messages and executors. Indexes are not checked again, since `ir.plan.wellformed` has done
so.
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
class LaunchRounds:
    """Launches sorted by (round, rank).

    order: int64 [launches] instructions. ptr: int64 [rounds + 1] start of each round in `order`. rounds: int64
    [rounds], ascending.
    """

    order: Ints
    ptr: Ints
    rounds: Ints


@dataclass(frozen=True, eq=False)
class TransferMatches:
    """Matched transfers. mate: int64 [transfers], the transfer on the other side, or -1. agreed: bool [transfers], True
    if the tiles of both sides fit each other."""

    mate: Ints
    agreed: Bools


class ProgramView:
    """Read-only view of the programs of all ranks for one kind and phase. Instructions, launches and rows are numbered
    over all ranks, rank after rank."""

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
    def launch_rounds(self) -> LaunchRounds:
        number = self.instructions.wide("round")[self.launches]
        order = stable_order(number)
        sorted_number = number[order]
        starts = np.flatnonzero(changes(sorted_number))
        return LaunchRounds(self.launches[order], np.append(starts, len(number)), sorted_number[starts])

    @cached_property
    def partner(self) -> Ints:
        """int64 [instructions]: for a wait, the launch that it completes; for a launch, its first wait; else -1."""
        round_, launches = self.instructions.wide("round"), self.launches
        key = self.rank_of * (int(round_.max(initial=0)) + 1) + round_
        partner = np.full(len(key), -1, np.int64)
        if len(launches) == 0:
            return partner
        order = launches[np.argsort(key[launches], kind="stable")]
        waits = np.flatnonzero(self.instructions["op"] == Op.WAIT)
        index = np.minimum(np.searchsorted(key[order], key[waits]), len(order) - 1)
        launch = order[index]
        paired = key[launch] == key[waits]
        partner[waits[paired]] = launch[paired]
        partner[launch[paired][::-1]] = waits[paired][::-1]  # reversed: the first wait is written last
        return partner

    def match(self, tile: Ints) -> TransferMatches:
        """Matches the k-th send i -> j of a round with the k-th receive of j from i. tile: int64 [operands], equal
        numbers for operands that fit each other."""
        return TransferMatches(*core.match(self.source.arrays, tile))

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
    """int64 [2, 1 + head sets]: the head counts of operands, on the query and the KV side, for all heads and for each
    head set."""
    sets = [len(members) for members in head_sets]
    return np.array([[q_heads, *sets], [kv_heads, *sets]], np.int64)
