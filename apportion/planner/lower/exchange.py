"""Between the rows that the caller holds and those that attention is computed on, inside the program.

Home rows move where they must: from the loader's contiguous shares into attention order (reshuffling; FCP, section
4.3), from every rank of a group to those that compute its heads (Ulysses), or both at once. A *piece* is a run of rows
that has one home and one group. It goes to every rank of the group, with the heads of that rank: as a transfer, or as
a copy where home and rank are the same. The way back is the reverse; where several ranks of a group use one KV head,
its gradients are added up at home.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.isa import ALL_TO_ALL, P2P, RESULTS
from apportion.ir.tensors import Side
from apportion.planner.inner.groups import Groups, HeadSets
from apportion.planner.schedule.rounds import Matchings, Slots
from apportion.planner.solvers.colouring.matching import max_degree
from apportion.planner.tasks.rows import Rows

# Of a rank: from so many rows on, unpacking costs more than rounds by tensor do.
DIRECT_ROWS = 2048


@dataclass(frozen=True)
class Pieces:
    """int64 [pieces]: `rows` rows, from `src_row` on rank `src`, are the rows from `row` of group `group`."""

    src: Ints
    src_row: Ints
    group: Ints
    row: Ints
    rows: Ints


@dataclass(frozen=True)
class Turns:
    """bool [pieces]. late: query rows arrive while the first stage computes; early, early_keys: results, and gradients
    of KV rows, leave before the last stage."""

    late: Bools
    early: Bools
    early_keys: Bools


@dataclass(frozen=True)
class Exchange:
    """home: rows of every rank, behind the `first`, int64 [ranks], that are not exchanged. turns: None where all rows
    move at the same time."""

    home: Rows
    first: Ints
    groups: Groups
    sets: HeadSets
    pieces: Pieces
    slots: Slots  # of the copies that move, in order
    turns: Turns | None = None

    @cached_property
    def _copies(self) -> tuple[Ints, Ints]:
        return _copies(self.pieces, self.groups)

    @property
    def piece(self) -> Ints:
        """int64 [copies]: the piece of each copy. One copy goes to each member of the piece's group."""
        return self._copies[0]

    @property
    def dst(self) -> Ints:
        """int64 [copies]: the rank that attention is computed on."""
        return self._copies[1]

    @property
    def src(self) -> Ints:
        """int64 [copies]: the home rank."""
        return self.pieces.src[self.piece]

    @cached_property
    def moved(self) -> Ints:
        """Indexes of the copies whose ranks differ."""
        return np.flatnonzero(self.src != self.dst)

    @property
    def sums(self) -> bool:
        """Whether several ranks of a group bring gradients of the same KV heads home, where they are added up."""
        return bool(self.sets.shared.any())

    def results(self, phase: str) -> int:
        """RESULTS where all that leaves in a phase is complete: nobody adds it up at home."""
        return 0 if phase == "backward" and self.sums else RESULTS

    def are_results(self, phase: str, side: Side) -> bool:
        """Whether what leaves of a side is; in head stages what is added up at home has rounds of its own."""
        alone = side == "query" and self.sets.stages is not None
        return alone or self.results(phase) == RESULTS

    @property
    def mode(self) -> int:
        """All ranks take part where they are one group."""
        return ALL_TO_ALL if self.groups.split and len(self.groups) == 1 and not self.direct else P2P

    @cached_property
    def direct(self) -> bool:
        """Whether each tensor that comes in has rounds of its own. What a rank gets from another then lies in its work
        rows as it travels, and need not be unpacked; worth it where rows are many."""
        moved = self.moved
        if not self.groups.split or self.turns is not None or self.sets.stages is not None:
            return False
        pairs = self.src[moved] * self.groups.ranks + self.dst[moved]
        many = self.pieces.rows.sum() >= DIRECT_ROWS * self.groups.ranks
        return bool(many) and len(np.unique(pairs)) == len(pairs)


def _copies(pieces: Pieces, groups: Groups) -> tuple[Ints, Ints]:
    index, rank = groups.spread(pieces.group)
    if not groups.split:
        return index, rank
    # every rank begins with its next neighbour, so that nobody is everybody's first
    order = np.lexsort((pieces.src[index], (rank - pieces.src[index]) % groups.ranks))
    return index[order], rank[order]


def plan_exchange(
    tokens: int,
    attention: Rows,
    groups: Groups,
    shares: Ints,
    sets: HeadSets,
    matchings: Matchings,
    reshuffle: bool,
    first: Ints | None = None,
) -> Exchange | None:
    """The exchange around attention on these rows of groups; None where home rows are attention rows.

    shares: int64 [ranks], see `Groups.member_rows`. first: int64 [ranks], home rows that stay as they are, if any.
    reshuffle: whether home rows are the loader's contiguous shares of the token axis. Where heads take turns, attention
    rows hold those of one stage at a time, and so are never home rows.
    """
    if not reshuffle and not groups.split and sets.stages is None:
        return None
    home = contiguous_rows(tokens, groups.ranks) if reshuffle else groups.member_rows(attention, shares)
    pieces = _pieces(home, attention)
    piece, dst = _copies(pieces, groups)
    src, rows = pieces.src[piece], pieces.rows[piece]
    away = np.flatnonzero(src != dst)
    first = np.zeros(groups.ranks, np.int64) if first is None else first
    exchange = Exchange(home, first, groups, sets, pieces, Slots(away, 0, 0, 1))
    if groups.split:
        return replace(exchange, slots=at_once(exchange))
    return replace(exchange, slots=matchings.slots(src[away], dst[away], rows[away], groups.ranks))


def at_once(exchange: Exchange) -> Slots:
    """All copies that move in one round, of as many slots as the busiest rank has."""
    moved = exchange.moved
    degree = max_degree(exchange.src[moved], exchange.dst[moved], exchange.groups.ranks)
    return Slots(np.zeros(len(moved), np.int32), degree, degree, max(1, degree))


def _pieces(home: Rows, attention: Rows) -> Pieces:
    """Longest runs of rows that follow each other on both sides, by group and row."""
    token = np.union1d(home.starts, attention.starts)
    rows, token = np.diff(token), token[:-1]
    at_home, at_attention = home.block_of(token), attention.block_of(token)
    src, group = home.home[at_home], attention.home[at_attention]
    src_row, row = home.row_of(token), attention.row_of(token)
    order = np.lexsort((row, group))
    src, src_row, group, row, rows = (column[order] for column in (src, src_row, group, row, rows))
    fresh = np.ones(len(order), bool)
    fresh[1:] = (group[1:] != group[:-1]) | (src[1:] != src[:-1]) | (src_row[1:] != src_row[:-1] + rows[:-1])
    first = np.flatnonzero(fresh)
    return Pieces(src[first], src_row[first], group[first], row[first], np.add.reduceat(rows, first))


def contiguous_rows(tokens: int, ranks: int) -> Rows:
    """The loader's layout: contiguous shares of the token axis, as even as they can be."""
    starts = np.arange(ranks + 1) * tokens // ranks
    full = np.flatnonzero(np.diff(starts))
    return Rows(np.append(starts[full], tokens), full, ranks)
