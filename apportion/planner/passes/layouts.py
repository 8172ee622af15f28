"""Layouts: which rank holds which tokens in which rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.batch import Batch
from apportion.ir.isa import SPAN_COLUMNS
from apportion.ir.plan import Layout, Table
from apportion.planner.passes.sorting import sort_order

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Rows:
    """Rows of blocks: each rank holds its blocks by rising token. starts: int64 [blocks + 1], home: int64 [blocks]."""

    starts: Ints
    home: Ints
    ranks: int

    @cached_property
    def lengths(self) -> Ints:
        return np.diff(self.starts)

    @cached_property
    def order(self) -> Ints:
        """Blocks by (rank, token)."""
        return sort_order(self.home, self.ranks)

    @cached_property
    def per_rank(self) -> Ints:
        """int64 [ranks]: rows of each rank."""
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
        """Spans: cut where the next row holds another sequence, or a token or position that does not follow."""
        previous, following = self.order[:-1], self.order[1:]
        joined = (self.home[previous] == self.home[following]) & (previous + 1 == following)
        heads = self.starts[:-1][self.order[np.concatenate([[True], ~joined])]]
        token = np.union1d(heads, batch.position_breaks())
        block = self.block_of(token)
        rank, row = self.home[block], self.row[block] + token - self.starts[block]
        order = np.lexsort((row, rank))
        token, rank, row = token[order], rank[order], row[order]
        last = np.append(rank[1:] != rank[:-1], True)
        length = np.where(last, self.per_rank[rank], np.append(row[1:], 0)) - row
        sequence = np.searchsorted(batch.starts, token, "right") - 1
        columns = (row, token, length, sequence, batch.position_at(token))
        ptr = np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=self.ranks))])
        return Layout(name, Table(ptr, dict(zip(SPAN_COLUMNS, columns, strict=True))))


def whole_ranges(rows: Rows) -> tuple[Ints, Ints, Ints]:
    """All rows of each rank that has any, as ranges (rank, row, rows)."""
    rank = np.flatnonzero(rows.per_rank)
    return rank, np.zeros(len(rank), np.int64), rows.per_rank[rank]
