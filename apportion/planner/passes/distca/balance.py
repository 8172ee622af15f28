"""The passes of DistCA's greedy migration over one attention kind: tolerance halved, cuts refined, until loads agree on
both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.planner.passes.distca.board import Board, Holders, Items, Lists, Near, Rules, Servers
from apportion.planner.passes.distca.caps import book_homes
from apportion.planner.passes.distca.greedy import first_work, migrate
from apportion.planner.passes.distca.homes import Ranges
from apportion.planner.passes.distca.walks import find_walks, in_tokens, on_walks
from apportion.planner.problem import exact_sums

Ints = NDArray[np.integer[Any]]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]

#: (rules, deficit servers in order) -> moves made (-1: too little room), shares that caps forbade, servers below the
#: threshold
Run = Callable[[Rules, Ints], tuple[int, int, int]]

# Room for shares, times the number of ranks; doubled when it is used up.
ROOM = 16


@dataclass(frozen=True)
class Limits:
    """What the migration keeps to: parameters of `Distca`; granularity in rows."""

    tolerance: float
    two_sided: bool
    granularity: int
    rules: Rules


@dataclass(frozen=True)
class Site:
    """One kind's bands int64 [bands, 6] over sequences at `starts` int64 [sequences + 1], which are homed in `homes`.

    home_folded, folded: bool [sequences], which the homes, and this kind, walk from both ends; cuts: int64, tokens
    where homes begin; speeds: float64 [ranks].
    """

    bands: Ints
    starts: Ints
    homes: Ranges
    home_folded: Bools
    folded: Bools
    cuts: Ints
    speeds: Floats

    @property
    def sequences(self) -> int:
        return len(self.starts) - 1


@dataclass(frozen=True)
class Ended:
    """What it took, and why it stopped. forbidden: shares that caps kept back in the last pass; below: servers left
    short there as E fell below the threshold."""

    passes: int
    moves: int
    forbidden: int
    below: int


@dataclass(frozen=True)
class Balance:
    """Who computes the rows of one attention kind.

    low, high, rank: int64, global tokens [low, high) and their server, sorted. servers: loads, targets and, under caps,
    bytes. granularity: rows, of the finest cuts.
    """

    low: Ints
    high: Ints
    rank: Ints
    servers: Servers
    ended: Ended
    granularity: int


@dataclass
class _State:
    """What the passes change; steps: that cuts are multiples of, on folded walks."""

    board: Board
    steps: int

    def items_left(self) -> Ranges:
        items, count = self.board.items, int(self.board.lists.size[0])
        return Ranges(items.seq[:count], items.a[:count], items.b[:count], items.at[:count])


def balance(site: Site, limits: Limits) -> Balance:
    """Migrate until the limits hold, or nothing moves that would help."""
    room = ROOM
    while True:
        state = _begin(site, limits, room)
        servers = state.board.servers
        ended = fill(servers, limits, partial(_pass, state), partial(_refine, site, state))
        if ended is not None:
            found = in_tokens(state.board.walks, site.starts, state.items_left())
            return Balance(*found, servers, ended, -(-state.steps // 2))
        room *= 2


def fill(servers: Servers, limits: Limits, run: Run, refine: Callable[[], bool]) -> Ended | None:
    """Passes over the deficit servers: the paper's one, then, two-sided, with half the tolerance each and only from
    servers that still have more than the tolerance allows; finer cuts where nothing moves. None where there was too
    little room."""
    tolerance, excess, passes, moves = limits.tolerance, 0.0, 0, 0
    least = limits.tolerance / (2 * len(servers.load))
    while True:
        rules = limits.rules._replace(tolerance=tolerance, excess=excess)
        made, forbidden, below = run(rules, _by_deficit(servers, tolerance))
        if made < 0:
            return None
        passes, moves, excess = passes + 1, moves + made, limits.tolerance
        if not limits.two_sided or imbalance(servers) <= limits.tolerance or below:
            break
        if made or not _short(servers, tolerance):
            tolerance /= 2
            if tolerance < least:
                break
        elif forbidden or not refine():
            break
    return Ended(passes, moves, forbidden, below)


def _by_deficit(servers: Servers, tolerance: float) -> Ints:
    deficit = servers.target - servers.load
    return np.argsort(-deficit, kind="stable")[: int((deficit > tolerance * servers.target).sum())]


def _begin(site: Site, limits: Limits, room: int) -> _State:
    walks = find_walks(site.bands, site.starts, site.folded, site.cuts, limits.granularity)
    ranges = on_walks(walks, site.starts, site.home_folded, site.homes)
    count, ranks = len(ranges.seq), len(site.speeds)
    columns = np.zeros((6, count + room * ranks), np.int64)
    columns[:5, :count] = ranges.seq, ranges.a, ranges.b, ranges.rank, ranges.rank
    items = Items(*columns)
    first_work(walks, items, count)
    load = exact_sums(ranges.rank, items.work[:count], ranks)
    servers = Servers(load, load.sum() / site.speeds.sum() * site.speeds, *np.zeros((3, ranks), np.int64))
    lists = new_lists(ranges.rank, ranks, columns.shape[1])
    near, other = (Near(*np.zeros((4, site.sequences), np.int64)) for _ in range(2))
    board = Board(walks, items, servers, _holders(ranges, site.sequences, ranks), lists, near, other)
    if limits.rules.capped:
        book_homes(board, limits.rules)
    return _State(board, 2 * limits.granularity)


def _holders(ranges: Ranges, sequences: int, ranks: int) -> Holders:
    return Holders(
        ranges.seq,
        ranges.a,
        ranges.b,
        ranges.rank,
        np.searchsorted(ranges.seq, np.arange(sequences + 1)),
        np.argsort(ranges.rank, kind="stable"),
        np.append(0, np.cumsum(np.bincount(ranges.rank, minlength=ranks))),
    )


def new_lists(at: Ints, ranks: int, room: int) -> Lists:
    """Items 0, 1, ... on the servers `at`, int64 [items]."""
    count, order = len(at), np.argsort(at, kind="stable")
    first, item, after = np.full(ranks, -1, np.int64), np.zeros(room, np.int64), np.full(room, -1, np.int64)
    item[:count] = order
    after[: max(count - 1, 0)] = np.arange(1, count)
    begin = np.searchsorted(at[order], np.arange(ranks + 1))
    filled = np.flatnonzero(np.diff(begin))
    first[filled] = begin[filled]
    after[begin[filled + 1] - 1] = -1
    return Lists(first, item, after, np.array([count, count]))


def _pass(state: _State, rules: Rules, order: Ints) -> tuple[int, int, int]:
    chosen, most_e = _candidates(state.board, rules)
    return migrate(state.board, rules._replace(grain=state.steps), order, chosen, most_e)


def _candidates(board: Board, rules: Rules) -> tuple[Ints, Floats]:
    """Items of surplus servers, and for every item an E that none of its shares exceeds: two rows of a head-tail item
    have length + 1 pairs and cost two query rows at least. Largest first."""
    count, servers, items = int(board.lists.size[0]), board.servers, board.items
    surplus = servers.load > (1 + rules.excess) * servers.target
    most_e = np.full(len(items.seq), np.inf)
    seq = items.seq[:count]
    plain = board.walks.folded[seq] & (items.at[:count] == items.home[:count]) & (not rules.paper)
    most_e[:count][plain] = (board.walks.length[seq[plain]] + 1) * (1 + 1e-9) / (2 * rules.priced_q)
    chosen = np.flatnonzero(surplus[items.at[:count]] & (items.work[:count] > 0))
    return chosen[np.argsort(-most_e[chosen], kind="stable")], most_e


def imbalance(servers: Servers) -> float:
    """The busiest server's load over its target, less 1."""
    busy = servers.target > 0
    return float((servers.load[busy] / servers.target[busy]).max(initial=1.0)) - 1.0


def _short(servers: Servers, tolerance: float) -> bool:
    return bool((servers.load < (1 - tolerance) * servers.target).any())


def _refine(site: Site, state: _State) -> bool:
    """Halve what cuts are multiples of; False where it is a single row already."""
    if state.steps == 1:
        return False
    state.steps //= 2
    if site.folded.all() or state.steps == 1:
        return True
    board, cuts = state.board, np.append(site.cuts, _straight_cuts(state))
    old, new = board.walks, find_walks(site.bands, site.starts, site.folded, cuts, state.steps // 2)
    for columns in (board.items, board.holders):
        straight = ~site.folded[columns.seq]
        for column in (columns.a, columns.b):
            column[straight] = np.searchsorted(new.grain, old.grain[column[straight]])
    state.board = board._replace(walks=new)
    return True


def _straight_cuts(state: _State) -> Ints:
    """Tokens at which items of sequences walked row by row begin."""
    ranges = state.items_left()
    walks = state.board.walks
    return walks.grain[ranges.a[~walks.folded[ranges.seq]]]
