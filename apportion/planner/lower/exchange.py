"""Exchange between the caller's home rows and the rows of attention, inside the program.

Home rows move from the loader's contiguous shares into attention order (reshuffling; FCP, section 4.3), from every rank
of a group to the ranks that compute its heads (Ulysses), or both at once. A *piece* is a run of rows with one home and
one group. It goes to every rank of the group, with the heads of that rank: as a transfer, or as a copy if home and rank
are the same. The return is the reverse; if several ranks of a group use one KV head, its gradients are summed at home.
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

# From this many rows per rank on, unpacking costs more than separate rounds per tensor.
DIRECT_ROWS = 2048


@dataclass(frozen=True)
class Pieces:
    """int64 [pieces]: `rows` rows that begin at `src_row` on rank `src`, and at `row` in group `group`."""

    src: Ints
    src_row: Ints
    group: Ints
    row: Ints
    rows: Ints


@dataclass(frozen=True)
class PieceTiming:
    """Timing of pieces, bool [pieces]. late: True if query rows arrive during the first stage; early, early_keys: True
    if results, and gradients of KV rows, leave before the last stage."""

    late: Bools
    early: Bools
    early_keys: Bools


@dataclass(frozen=True)
class Exchange:
    """The exchange of one attention kind. home: exchanged home rows of every rank, which follow `first` rows, int64
    [ranks], that are not exchanged. turns: None if all rows move at the same time."""

    home: Rows
    first: Ints
    groups: Groups
    sets: HeadSets
    pieces: Pieces
    slots: Slots  # of the moving copies, in order
    turns: PieceTiming | None = None

    @cached_property
    def _copies(self) -> tuple[Ints, Ints]:
        return _copies(self.pieces, self.groups)

    @property
    def piece(self) -> Ints:
        """int64 [copies]: the piece of each copy, one for each member of the piece's group."""
        return self._copies[0]

    @property
    def dst(self) -> Ints:
        """int64 [copies]: the rank that computes attention."""
        return self._copies[1]

    @property
    def src(self) -> Ints:
        """int64 [copies]: the home rank."""
        return self.pieces.src[self.piece]

    @cached_property
    def moved_copies(self) -> Ints:
        """Indexes of the copies between different ranks."""
        return np.flatnonzero(self.src != self.dst)

    @property
    def sums(self) -> bool:
        """True if several ranks of a group return gradients of the same KV heads, which are summed at home."""
        return bool(self.sets.shared.any())

    def results(self, phase: str) -> int:
        """RESULTS if all rows sent home in a phase are complete, so that nothing is summed at home."""
        return 0 if phase == "backward" and self.sums else RESULTS

    def sends_results(self, phase: str, side: Side) -> bool:
        """True if the rows of a side that are sent home are results; in head stages, sums at home have separate
        rounds."""
        is_staged = side == "query" and self.sets.stages is not None
        return is_staged or self.results(phase) == RESULTS

    @property
    def mode(self) -> int:
        """ALL_TO_ALL if all ranks are one group and tensors share rounds, else P2P."""
        return ALL_TO_ALL if self.groups.split and len(self.groups) == 1 and not self.direct else P2P

    @cached_property
    def direct(self) -> bool:
        """True if each incoming tensor has its own rounds. Rows from another rank then arrive in their final layout,
        without unpacking, which pays off for many rows."""
        index = self.moved_copies
        if not self.groups.split or self.turns is not None or self.sets.stages is not None:
            return False
        pairs = self.src[index] * self.groups.ranks + self.dst[index]
        is_large = self.pieces.rows.sum() >= DIRECT_ROWS * self.groups.ranks
        return bool(is_large) and len(np.unique(pairs)) == len(pairs)


def _copies(pieces: Pieces, groups: Groups) -> tuple[Ints, Ints]:
    index, rank = groups.spread(pieces.group)
    if not groups.split:
        return index, rank
    # each rank starts with its next neighbour, so that no rank is the first target of all
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
    """Plans the exchange around attention; None if home rows are attention rows. attention: the rows of groups.

    shares: int64 [ranks], see `Groups.member_rows`. first: int64 [ranks], numbers of home rows not exchanged, if any.
    reshuffle: True if home rows are the loader's contiguous shares of the token axis. With heads in stages, attention
    rows hold one stage at a time, and so are never home rows.
    """
    if not reshuffle and not groups.split and sets.stages is None:
        return None
    home = contiguous_rows(tokens, groups.ranks) if reshuffle else groups.member_rows(attention, shares)
    pieces = _pieces(home, attention)
    piece, dst = _copies(pieces, groups)
    src, rows = pieces.src[piece], pieces.rows[piece]
    remote = np.flatnonzero(src != dst)
    first = np.zeros(groups.ranks, np.int64) if first is None else first
    exchange = Exchange(home, first, groups, sets, pieces, Slots(remote, 0, 0, 1))
    if groups.split:
        return replace(exchange, slots=one_round(exchange))
    return replace(exchange, slots=matchings.slots(src[remote], dst[remote], rows[remote], groups.ranks))


def one_round(exchange: Exchange) -> Slots:
    """All moving copies in one round, with as many slots as the busiest rank has copies."""
    index = exchange.moved_copies
    degree = max_degree(exchange.src[index], exchange.dst[index], exchange.groups.ranks)
    return Slots(np.zeros(len(index), np.int32), degree, degree, max(1, degree))


def _pieces(home: Rows, attention: Rows) -> Pieces:
    """Maximal runs of rows that are consecutive on both sides, sorted by group and row."""
    token = np.union1d(home.starts, attention.starts)
    rows, token = np.diff(token), token[:-1]
    home_block, attention_block = home.block_of(token), attention.block_of(token)
    src, group = home.home[home_block], attention.home[attention_block]
    src_row, row = home.row_of(token), attention.row_of(token)
    order = np.lexsort((row, group))
    src, src_row, group, row, rows = (column[order] for column in (src, src_row, group, row, rows))
    starts = np.ones(len(order), bool)
    starts[1:] = (group[1:] != group[:-1]) | (src[1:] != src[:-1]) | (src_row[1:] != src_row[:-1] + rows[:-1])
    first = np.flatnonzero(starts)
    return Pieces(src[first], src_row[first], group[first], row[first], np.add.reduceat(rows, first))


def contiguous_rows(tokens: int, ranks: int) -> Rows:
    """The loader's layout: contiguous shares of the token axis, as even as possible."""
    starts = np.arange(ranks + 1) * tokens // ranks
    holders = np.flatnonzero(np.diff(starts))
    return Rows(np.append(starts[holders], tokens), holders, ranks)
