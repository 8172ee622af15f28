"""Between the rows that the caller holds and those that attention is computed on, inside the program.

Home rows move where they must: from the loader's contiguous shares into attention order (reshuffling; FCP, section
4.3), from every rank of a group to those that compute its heads (Ulysses), or both at once. A *piece* is a run of rows
that has one home and one group. It goes to every rank of the group, with the heads of that rank: as a transfer, or as
a copy where home and rank are the same. The way back is the reverse; where several ranks of a group use one KV head,
its gradients are added up at home.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.isa import ALL_TO_ALL, P2P, RESULTS, Op
from apportion.ir.tensors import KV_SIDE, SIDES, Side, Space, Tensor
from apportion.planner.inner.groups import Groups, HeadSets
from apportion.planner.lower.assemble import Assembler, Column, Operands, Ranges, taken
from apportion.planner.schedule.rounds import Matchings, Slots
from apportion.planner.solvers.colouring.matching import max_degree
from apportion.planner.tasks.rows import Rows, whole_ranges

CHANNEL = 0
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
    """home: rows of every rank, behind the `first`, int64 [ranks], that are not exchanged; attention: rows of every
    group. turns: None where all rows move at the same time."""

    home: Rows
    first: Ints
    attention: Rows
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

    @cached_property
    def kept(self) -> Ints:
        """Indexes of the copies whose ranks are the same."""
        return np.flatnonzero(self.src == self.dst)

    @property
    def sums(self) -> bool:
        """Whether several ranks of a group bring gradients of the same KV heads home, where they are added up."""
        return bool(self.sets.shared.any())

    def results(self, phase: str) -> int:
        """RESULTS where what leaves in a phase is complete: nobody adds it up at home, or pushes it back further."""
        stages = self.sets.stages
        summed = self.sums or (stages is not None and stages.project)
        return 0 if phase == "backward" and summed else RESULTS

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

    @cached_property
    def home_rows(self) -> tuple[Ints, Ints]:
        """int64 [copies]: the first row of each copy at home, and its rows."""
        return self.pieces.src_row[self.piece] + self.first[self.src], self.pieces.rows[self.piece]

    @cached_property
    def at_home(self) -> Mapping[Side, Ranges]:
        """Home rows of the copies, with the heads of the rank that they are for."""
        return {side: Ranges.of(Space.HOME, *self.home_rows, self.heads(side)) for side in SIDES}

    @cached_property
    def in_attention(self) -> Mapping[Side, Ranges]:
        """Attention rows of the copies."""
        row, rows = self.pieces.row[self.piece], self.pieces.rows[self.piece]
        return {side: Ranges.of(Space.WORK, row, rows, self.heads(side)) for side in SIDES}

    def heads(self, side: Side) -> Column:
        """int64 [copies]: the head set of the rank that each is for; 0: they all have all heads."""
        sets = self.sets.key if side == "key" else self.sets.query
        return sets[self.dst] if sets.any() else 0


def _copies(pieces: Pieces, groups: Groups) -> tuple[Ints, Ints]:
    index, rank = groups.spread(pieces.group)
    if not groups.split:
        return index, rank
    # every rank begins with its next neighbour, so that nobody is everybody's first
    order = np.lexsort((pieces.src[index], (rank - pieces.src[index]) % groups.ranks))
    return index[order], rank[order]


@dataclass(frozen=True)
class ExchangeSteps:
    """Positions of one exchange in the template. launches: int64 [parts, rounds], a part of tensors each; attend: where
    what lies beside it is computed."""

    launches: Ints
    clear: int
    copy: int
    attend: int
    add: int
    other: int


def launch_other(asm: Assembler, exchange: Exchange | None, channel: int, results: int = 0) -> int:
    """Append the launch of the part that goes by itself; returns its position, -1 where all rows go at once. results:
    RESULTS where these are."""
    return -1 if exchange is None or exchange.turns is None else asm.launch(channel, exchange.mode | results)


def reserve(
    asm: Assembler,
    exchange: Exchange | None,
    attend: Op,
    channel: int | None = None,
    launched: int = -1,
    results: int = 0,
    parts: int = 1,
) -> ExchangeSteps | None:
    """Append the steps of an exchange. attend: the op of what is computed meanwhile; channel: where a part of it goes
    by itself, launched behind the rest and waited for elsewhere; launched: the launch of such a part that is waited
    for here; results: RESULTS where rows leave as such; parts: of tensors, in rounds of their own."""
    if exchange is None:
        return None
    clear, other = asm.step(Op.CLEAR), launched
    mode = exchange.mode | results
    launches = [[asm.launch(CHANNEL, mode) for _ in range(exchange.slots.rounds)] for _ in range(parts)]
    copy, beside = asm.step(Op.DELIVER if results else Op.COPY), asm.step(attend)
    for part in launches:
        for launch in part:
            asm.wait(launch)
    if channel is not None:  # not before: both would share the links
        other = launch_other(asm, exchange, channel)
    if launched >= 0:
        asm.wait(launched)
    return ExchangeSteps(np.array(launches, np.int64), clear, copy, beside, asm.step(Op.ADD), other)


def bring_in(
    asm: Assembler,
    exchange: Exchange,
    steps: ExchangeSteps,
    tensor: Tensor,
    apart: Bools | None = None,
    part: int = 0,
) -> None:
    """Home rows of a tensor, which goes in a part of the rounds, into attention rows; apart: bool [pieces], those that
    go by themselves."""
    home, there = _places(exchange, tensor)
    _move(asm, exchange, steps.copy, _steps_of(exchange, steps, apart, part), tensor, home, there)


def take_out(
    asm: Assembler, exchange: Exchange, steps: ExchangeSteps, tensor: Tensor, apart: Bools | None = None
) -> None:
    """Attention rows of a tensor back home; apart: see `bring_in`."""
    home, there = _places(exchange, tensor)
    _move(asm, exchange, steps.copy, _steps_of(exchange, steps, apart), tensor, there, home)


#: the ranks of the copies, and their rows there
Place = tuple[Ints, Ranges]


def _places(exchange: Exchange, tensor: Tensor) -> tuple[Place, Place]:
    """At home, and where attention is computed."""
    side: Side = "key" if tensor in KV_SIDE else "query"
    return (exchange.src, exchange.at_home[side]), (exchange.dst, exchange.in_attention[side])


def take_out_shared(
    asm: Assembler, exchange: Exchange, steps: ExchangeSteps, tensor: Tensor, apart: Bools | None = None
) -> None:
    """Gradients of KV rows back home, where several ranks of a group may bring some of the same head."""
    if not exchange.sums:
        take_out(asm, exchange, steps, tensor, apart)
        return
    rank, row, rows = whole_ranges(exchange.home)
    whole = Ranges.of(Space.HOME, row + exchange.first[rank], rows)
    asm.rows("rowops", rank, steps.clear, c=Operands(tensor, whole))
    given, home = exchange.in_attention["key"], exchange.at_home["key"]
    kept, moved = exchange.kept, exchange.moved
    arriving = _staged(asm, exchange, tensor)
    at = _steps_of(exchange, steps, apart)
    _transfer(asm, tensor, exchange.dst[moved], exchange.src[moved], at, given.take(moved), arriving)
    for copies, partial in ((kept, given.take(kept)), (moved, arriving)):
        into = Operands(tensor, home.take(copies))
        asm.rows("rowops", exchange.src[copies], steps.add, a=Operands(tensor, partial), c=into)


def _staged(asm: Assembler, exchange: Exchange, tensor: Tensor) -> Ranges:
    """Work rows, beyond all others, for what arrives: for each copy that moves."""
    moved = exchange.moved
    rank, rows = exchange.src[moved], exchange.home_rows[1][moved]
    held = exchange.attention.per_rank[exchange.groups.of_rank]
    row = np.maximum(held, asm.reach(tensor))[rank] + side_by_side(rank, rows)
    return Ranges.of(Space.WORK, row, rows, taken(exchange.heads("key"), moved))


def side_by_side(rank: Ints, rows: Ints) -> Ints:
    """int64 [n]: first rows of ranges that lie one after another on each rank, in the order given."""
    order = np.argsort(rank, kind="stable")
    before = np.cumsum(rows[order]) - rows[order]
    row = np.empty(len(rank), np.int64)
    row[order] = before - before[np.searchsorted(rank[order], rank[order], "left")]
    return row


def _move(
    asm: Assembler, exchange: Exchange, copy: int, at: Ints, tensor: Tensor, given: Place, taken: Place
) -> None:
    """Transfers at steps `at`, int64 [copies that move], and at step `copy` the copies that stay on their rank."""
    moved, kept, (src, out), (dst, into) = exchange.moved, exchange.kept, given, taken
    _transfer(asm, tensor, src[moved], dst[moved], at, out.take(moved), into.take(moved))
    stays, comes = Operands(tensor, out.take(kept)), Operands(tensor, into.take(kept))
    asm.rows("rowops", src[kept], copy, a=stays, c=comes, first=1)


def _steps_of(exchange: Exchange, steps: ExchangeSteps, apart: Bools | None, part: int = 0) -> Ints:
    """int64 [copies that move]: the launch that each goes with."""
    moved = exchange.moved
    at = steps.launches[part][exchange.slots.round] if len(moved) else np.zeros(0, np.int64)
    return at if apart is None else np.where(apart[exchange.piece[moved]], steps.other, at)


def _transfer(
    asm: Assembler, tensor: Tensor, src: Ints, dst: Ints, at: Ints, out: Ranges, into: Ranges
) -> None:
    asm.rows("transfers", src, at, send=1, peer=dst, operand=Operands(tensor, out))
    asm.rows("transfers", dst, at, send=0, peer=src, operand=Operands(tensor, into))


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
    exchange = Exchange(home, first, attention, groups, sets, pieces, Slots(away, 0, 0, 1))
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
