"""From the loader's rows to attention order and back, inside the program (FCP, section 4.3).

The pieces of the token axis that have one loader rank and one attention rank move as units: a transfer of each tensor
where the ranks differ, a copy where they are the same. The way back reverses the same matchings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import Op
from apportion.planner.passes.assemble import Assembler, RangeSet, range_set
from apportion.planner.passes.layouts import Rows, whole_ranges
from apportion.planner.passes.schedule import Matchings, Slots

Ints = NDArray[np.integer[Any]]

CHANNEL = 0
PIECE, WHOLE = 0, 1


@dataclass(frozen=True)
class Reshuffle:
    """Pieces, int64 [pieces]: tokens [token, token + rows) go from rank `src` (loader) to rank `dst` (attention)."""

    loader: Rows
    attention: Rows
    token: Ints
    rows: Ints
    slots: Slots  # of the pieces whose ranks differ, in order

    @cached_property
    def src(self) -> Ints:
        return self.loader.home[self.loader.block_of(self.token)]

    @cached_property
    def dst(self) -> Ints:
        return self.attention.home[self.attention.block_of(self.token)]

    @cached_property
    def moved(self) -> Ints:
        """Indexes of the pieces whose ranks differ."""
        return np.flatnonzero(self.src != self.dst)

    @cached_property
    def kept(self) -> Ints:
        """Indexes of the pieces whose ranks are the same."""
        return np.flatnonzero(self.src == self.dst)

    @cached_property
    def attention_ranges(self) -> tuple[Ints, Ints, Ints]:
        """Attention rows of the pieces, as ranges."""
        return self.dst, self.attention.row_of(self.token), self.rows

    @cached_property
    def loader_ranges(self) -> RangeSet:
        """Home rows of the pieces, and all home rows of each rank."""
        return range_set((self.src, self.loader.row_of(self.token), self.rows), whole_ranges(self.loader))

    def bring_in(self, asm: Assembler, tensors: list[tuple[Ints, Ints]]) -> None:
        """Steps that fill the attention rows; tensors: (home, attention) operand numbers of the pieces."""
        self._exchange(asm, self.src, self.dst, tensors)

    def take_out(self, asm: Assembler, tensors: list[tuple[Ints, Ints]]) -> None:
        """Steps that send attention rows back home; tensors: (attention, home) operand numbers of the pieces."""
        self._exchange(asm, self.dst, self.src, tensors)

    def _exchange(self, asm: Assembler, src: Ints, dst: Ints, tensors: list[tuple[Ints, Ints]]) -> None:
        moved, kept = self.moved, self.kept
        launches = np.array([asm.launch(CHANNEL) for _ in range(self.slots.rounds)], np.int64)
        at = launches[self.slots.round] if len(moved) else np.zeros(0, np.int64)
        copy = asm.step(Op.COPY)
        for given, taken in tensors:
            asm.rows("transfers", src[moved], at, 1, dst[moved], given[moved])
            asm.rows("transfers", dst[moved], at, 0, src[moved], taken[moved])
            asm.rows("rowops", src[kept], copy, given[kept], 0, taken[kept], 0, 1)
        for launch in launches.tolist():
            asm.wait(launch)


def plan_reshuffle(tokens: int, attention: Rows, matchings: Matchings) -> Reshuffle:
    """The reshuffle between the loader's contiguous shares and the attention layout."""
    loader = contiguous_rows(tokens, attention.ranks)
    cuts = np.union1d(loader.starts, attention.starts)[:-1]
    src, dst = loader.home[loader.block_of(cuts)], attention.home[attention.block_of(cuts)]
    fresh = np.ones(len(cuts), bool)
    fresh[1:] = (src[1:] != src[:-1]) | (dst[1:] != dst[:-1])
    token = cuts[fresh]
    src, dst = src[fresh], dst[fresh]
    rows = np.diff(np.append(token, tokens))
    away = src != dst
    slots = matchings(src[away], dst[away], rows[away], attention.ranks)
    return Reshuffle(loader, attention, token, rows, slots)


def contiguous_rows(tokens: int, ranks: int) -> Rows:
    """The loader's layout: contiguous shares of the token axis, as even as they can be."""
    starts = np.arange(ranks + 1) * tokens // ranks
    full = np.flatnonzero(np.diff(starts))
    return Rows(np.append(starts[full], tokens), full, ranks)
