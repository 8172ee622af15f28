"""Between the rows that the caller holds and those that attention is computed on, inside the program.

Home rows move where they must: from the loader's contiguous shares into attention order (reshuffling; FCP, section
4.3), from every rank of a group to those that compute its heads (Ulysses), or both at once. A *piece* is a run of rows
that has one home and one group. It goes to every rank of the group, with the heads of that rank: as a transfer, or as
a copy where home and rank are the same. The way back is the reverse; where several ranks of a group use one KV head,
its gradients are added up at home.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import ALL_TO_ALL, KV_SIDE, P2P, RESULTS, Op, Space, Tensor
from apportion.planner.passes.assemble import Assembler, Numbers, Operands, RangeSet, range_set
from apportion.planner.passes.groups import Groups, HeadSets
from apportion.planner.passes.rows import Rows, whole_ranges
from apportion.planner.passes.schedule import Matchings, Slots
from apportion.planner.solvers.matching import max_degree

Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]

CHANNEL = 0
# Of a rank: from so many rows on, unpacking costs more than rounds by tensor do.
DIRECT_ROWS = 2048
# Requests of the home ranges, in the order in which they are made.
COPIES, WHOLE = range(REQUESTS := 2)
#: rank, row, rows of each: integers [n]
Requests = Sequence[tuple[Ints, Ints, Ints]]


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

    @property
    def ranges(self) -> tuple[Ints, Ints, Ints]:
        """Attention rows of the pieces, as ranges on groups."""
        return self.pieces.group, self.pieces.row, self.pieces.rows

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

    def home_ranges(self, tensor: Tensor, beside: Requests = ()) -> RangeSet:
        """Home rows of the copies with the heads of their rank, and all home rows of each rank; and behind these what
        else is asked `beside`, of all heads."""
        heads = (self.sets.key if tensor in KV_SIDE else self.sets.query)[self.dst]
        src_row = self.pieces.src_row[self.piece] + self.first[self.src]
        rank, row, rows = whole_ranges(self.home)
        requests = [(self.src, src_row, self.pieces.rows[self.piece]), (rank, row + self.first[rank], rows)]
        return range_set(*requests, *beside, heads=(heads, 0, *(0 for _ in beside)))

    def homes(self, ops: Operands, tensors: Sequence[Tensor], beside: Requests = ()) -> dict[Tensor, Numbers]:
        """Numbers of the home operands of tensors of one side; request COPIES has one for each copy."""
        numbers = ops.number(tensors, Space.HOME, self.home_ranges(tensors[0], beside))
        return dict(zip(tensors, numbers, strict=True))


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
    home: Numbers,
    attention: Ints,
    apart: Bools | None = None,
    part: int = 0,
) -> None:
    """Home rows of one tensor, which goes in a part of the rounds, into attention rows; attention: operand numbers of
    the pieces; apart: bool [pieces], those that go by themselves."""
    given, taken = home[COPIES], attention[exchange.piece]
    _move(asm, exchange, steps, (exchange.src, given), (exchange.dst, taken), apart, part)


def take_out(
    asm: Assembler,
    exchange: Exchange,
    steps: ExchangeSteps,
    attention: Ints,
    home: Numbers,
    apart: Bools | None = None,
) -> None:
    """Attention rows of one tensor back home; attention, apart: see `bring_in`."""
    given, taken = attention[exchange.piece], home[COPIES]
    _move(asm, exchange, steps, (exchange.dst, given), (exchange.src, taken), apart)


def take_out_shared(
    asm: Assembler,
    ops: Operands,
    exchange: Exchange,
    steps: ExchangeSteps,
    attention: Ints,
    home: Numbers,
    apart: Bools | None = None,
) -> None:
    """Gradients of KV rows back home, where several ranks of a group may bring some of the same head."""
    if not exchange.sums:
        take_out(asm, exchange, steps, attention, home, apart)
        return
    arriving = _staged(ops, exchange)
    whole = whole_ranges(exchange.home)[0]
    asm.rows("rowops", whole, steps.clear, 0, 0, home[WHOLE], 0, 0)
    given, moved, kept = attention[exchange.piece], exchange.moved, exchange.kept
    _transfer(asm, exchange, steps, (exchange.dst, given), (exchange.src, arriving), apart)
    for copies, partial in ((kept, given), (moved, arriving)):
        asm.rows("rowops", exchange.src[copies], steps.add, partial[copies], 0, home[COPIES][copies], 0, 0)


def _staged(ops: Operands, exchange: Exchange) -> Ints:
    """int32 [copies]: operands of work rows, beyond all others, for what arrives."""
    moved = exchange.moved
    rank, rows = exchange.src[moved], exchange.pieces.rows[exchange.piece[moved]]
    row = ops.reach(Tensor.DKV)[rank] + side_by_side(rank, rows)
    (numbers,) = ops.number(
        (Tensor.DKV,),
        Space.WORK,
        range_set((rank, row, rows), heads=(exchange.sets.key[exchange.dst[moved]],)),
    )
    staged = np.zeros(len(exchange.piece), np.int32)
    staged[moved] = numbers[0]
    return staged


def side_by_side(rank: Ints, rows: Ints) -> Ints:
    """int64 [n]: first rows of ranges that lie one after another on each rank, in the order given."""
    order = np.argsort(rank, kind="stable")
    before = np.cumsum(rows[order]) - rows[order]
    row = np.empty(len(rank), np.int64)
    row[order] = before - before[np.searchsorted(rank[order], rank[order], "left")]
    return row


Side = tuple[Ints, Ints]  # ranks and operand numbers of the copies


def _move(
    asm: Assembler,
    exchange: Exchange,
    steps: ExchangeSteps,
    given: Side,
    taken: Side,
    apart: Bools | None,
    part: int = 0,
) -> None:
    _transfer(asm, exchange, steps, given, taken, apart, part)
    kept = exchange.kept
    asm.rows("rowops", given[0][kept], steps.copy, given[1][kept], 0, taken[1][kept], 0, 1)


def _transfer(
    asm: Assembler,
    exchange: Exchange,
    steps: ExchangeSteps,
    given: Side,
    taken: Side,
    apart: Bools | None,
    part: int = 0,
) -> None:
    moved = exchange.moved
    at = steps.launches[part][exchange.slots.round] if len(moved) else np.zeros(0, np.int64)
    if apart is not None:
        at = np.where(apart[exchange.piece[moved]], steps.other, at)
    (src, out), (dst, arriving) = given, taken
    asm.rows("transfers", src[moved], at, 1, dst[moved], out[moved])
    asm.rows("transfers", dst[moved], at, 0, src[moved], arriving[moved])


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
