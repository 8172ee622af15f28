"""Rows of ranks: the rows that each block takes on its home rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from apportion._core import tasks as core
from apportion.ir.arrays import Bools, Ints
from apportion.ir.isa import SPAN_COLUMNS
from apportion.ir.orders import sort_order
from apportion.ir.plan.tables import Layout, Table
from apportion.ir.request.batch import Batch


@dataclass(frozen=True)
class Rows:
    """Rows of blocks: each rank holds its blocks in token order. starts: int64 [blocks + 1], home: int64 [blocks];
    later: bool [blocks], True for blocks placed after the others of their rank."""

    starts: Ints
    home: Ints
    ranks: int
    later: Bools | None = None

    def __post_init__(self) -> None:
        for name in ("starts", "home"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), np.int64))

    @cached_property
    def lengths(self) -> Ints:
        return np.diff(self.starts)

    @cached_property
    def order(self) -> Ints:
        """Blocks by (rank, token), later ones after the others."""
        if self.later is None:
            return sort_order(self.home, self.ranks)
        return sort_order(2 * self.home + self.later, 2 * self.ranks)

    @cached_property
    def per_rank(self) -> Ints:
        """int64 [ranks]: number of rows of each rank."""
        return np.bincount(self.home, self.lengths, self.ranks).astype(np.int64)

    @cached_property
    def row(self) -> Ints:
        """int64 [blocks]: first row of each block on its home."""
        ends = np.cumsum(self.lengths[self.order])
        first_of_rank = np.cumsum(self.per_rank) - self.per_rank
        row = np.empty(len(self.home), np.int64)
        row[self.order] = ends - self.lengths[self.order] - first_of_rank[self.home[self.order]]
        return row

    def block_of(self, tokens: Ints) -> Ints:
        """int64 [n]: the block of each global token."""
        return np.searchsorted(self.starts, tokens, "right") - 1

    def row_of(self, tokens: Ints) -> Ints:
        """int64 [n]: the row of each global token on its rank."""
        block = self.block_of(tokens)
        return self.row[block] + tokens - self.starts[block]

    def layout(self, name: str, batch: Batch) -> Layout:
        """Spans of the layout, cut at changes of sequence and at jumps of token or position."""
        breaks = batch.position_breaks()
        ptr, (row, token, length) = core.cut_spans(self.order, self.starts, self.home, breaks, self.ranks)
        sequence = np.searchsorted(batch.starts, token, "right") - 1
        columns = (row, token, length, sequence, batch.position_at(token))
        return Layout(name, Table(ptr.copy(), SPAN_COLUMNS, np.stack(columns)))  # its own memory: see `Parts`
