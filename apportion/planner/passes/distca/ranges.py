"""Tasks with a part of their rows' keys (DistCA, section 8: what its scheduler does not do).

    a rank's rows x the keys of one home = one pair; any rows of a pair may be computed anywhere

    keys of      A     B     C
    rows of C  |     | ### | ##  |    a server that holds B computes C's rows against B's keys: it gets rows of C and
                                      sends back partial O; no key travels

Pairs move as head-tail items do (`distca.greedy`): deficit servers by descending deficit, dF_max, the largest E first,
and their last rows where a part is enough. What a server holds, or got for another pair, is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.planner.passes.cells import Cells, cut_cells
from apportion.planner.passes.distca.balance import ROOM, Ended, Limits, fill, new_lists
from apportion.planner.passes.distca.board import Rules, Servers
from apportion.planner.passes.distca.pair_moves import book_pairs, migrate_pairs
from apportion.planner.passes.distca.pairs import Board, Holding, Index, Pairs, Shares, first_work
from apportion.planner.problem import exact_sums

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RangeBalance:
    """Who computes the rows of each pair. starts: int64 [blocks + 1]; servers: loads, targets and, under caps,
    bytes."""

    starts: Ints
    pairs: Pairs
    shares: Shares
    servers: Servers
    ended: Ended

    @property
    def cuts(self) -> Ints:
        """int64: tokens at which shares begin."""
        return self.shares.low[: self.shares.size[0]]

    def ranks(self, cells: Cells) -> Ints:
        """int32 [cells]: the server of each cell of blocks that are cut at `cuts`."""
        count, blocks = int(self.shares.size[0]), len(self.starts) - 1
        share = _key(self.pairs, self.shares.pair[:count], blocks), self.shares.low[:count]
        order = np.lexsort((share[1], share[0]))
        q, k = (np.searchsorted(self.starts, tokens, "right") - 1 for tokens in (cells.q0, cells.k0))
        tokens = int(self.starts[-1])
        names, whole = np.unique(share[0], return_inverse=True)
        sorted_names = whole[order] * (tokens + 1) + share[1][order]
        wanted = np.searchsorted(names, q * blocks + k) * (tokens + 1) + cells.q0
        found: Ints = self.shares.at[order[np.searchsorted(sorted_names, wanted, "right") - 1]]
        return found.astype(np.int32)


def _key(pairs: Pairs, index: Ints, blocks: int) -> Ints:
    key: Ints = pairs.q[index] * blocks + pairs.k[index]
    return key


def balance_ranges(
    bands: Ints, starts: Ints, home: Ints, origin: Ints, speeds: Floats, limits: Limits
) -> RangeBalance:
    """Migrate pairs of one kind until the limits hold. starts: int64 [blocks + 1], no block of several sequences; home:
    int64 [blocks]; origin: int64 [blocks], the first token of each block's sequence; speeds: float64 [ranks]."""
    pairs, room = _find_pairs(bands, starts), ROOM
    while True:
        state = _begin(pairs, starts, home, origin, speeds, limits, room * len(speeds))
        ended = fill(state.board.servers, limits, state.run, state.refine)
        if ended is not None:
            return RangeBalance(starts, pairs, state.board.shares, state.board.servers, ended)
        room *= 2


@dataclass
class _State:
    """What the passes change; rows: that cuts are multiples of."""

    starts: Ints
    board: Board
    rows: int

    def run(self, rules: Rules, order: Ints) -> tuple[int, int, int]:
        chosen, most_e = self._candidates(rules)
        return migrate_pairs(self.board, rules._replace(grain=self.rows), order, chosen, most_e)

    def _candidates(self, rules: Rules) -> tuple[Ints, Floats]:
        """Shares of surplus servers, and of every share the E that it has as a whole where nothing is there yet, which
        no part of it exceeds by much. Largest first."""
        servers, shares = self.board.servers, self.board.shares
        count = int(shares.size[0])
        surplus = servers.load > (1 + rules.excess) * servers.target
        keys = np.diff(self.starts)[self.board.pairs.k[shares.pair[:count]]]
        price = (shares.high - shares.low)[:count] * rules.priced_q + keys * rules.kv_bytes
        most_e = np.full(len(shares.pair), np.inf)
        most_e[:count] = shares.work[:count] / np.maximum(price, 1)
        chosen = np.flatnonzero(surplus[shares.at[:count]] & (shares.work[:count] > 0))
        return chosen[np.argsort(-most_e[chosen], kind="stable")], most_e

    def refine(self) -> bool:
        """Halve what cuts are multiples of; False where it is a single row already."""
        if self.rows == 1:
            return False
        self.rows //= 2
        return True


def _begin(
    pairs: Pairs, starts: Ints, home: Ints, origin: Ints, speeds: Floats, limits: Limits, room: int
) -> _State:
    count, blocks, ranks = len(pairs.q), len(home), len(speeds)
    shares = Shares(*[*np.zeros((5, count + room), np.int64), np.array([count])])
    shares.pair[:count] = np.arange(count)
    shares.low[:count], shares.high[:count] = starts[pairs.q], starts[pairs.q + 1]
    shares.at[:count] = home[pairs.q]
    first_work(pairs, shares)
    load = exact_sums(shares.at[:count], shares.work[:count], ranks)
    servers = Servers(load, load.sum() / speeds.sum() * speeds, *np.zeros((3, ranks), np.int64))
    lists = new_lists(shares.at[:count], ranks, count + 2 * room)
    holding, other = (Holding(*[*np.zeros((6, blocks), np.int64), np.zeros(2, np.int64)]) for _ in range(2))
    index = _find_index(pairs, home, ranks)
    board = Board(pairs, shares, lists, servers, index, home, origin, holding, other)
    if limits.rules.capped:
        book_pairs(board, limits.rules)
    return _State(starts, board, limits.granularity)


def _find_index(pairs: Pairs, home: Ints, ranks: int) -> Index:
    blocks = np.arange(len(home) + 1)
    by_k, by_home = np.argsort(pairs.k, kind="stable"), np.argsort(home, kind="stable")
    of_k, of_home = (
        np.searchsorted(pairs.k[by_k], blocks),
        np.searchsorted(home[by_home], np.arange(ranks + 1)),
    )
    return Index(np.searchsorted(pairs.q, blocks), by_k, of_k, by_home, of_home)


def _find_pairs(bands: Ints, starts: Ints) -> Pairs:
    cells = cut_cells(bands, starts)
    order = np.lexsort((np.arange(len(cells)), cells.k, cells.q))
    q, k, q0, q1, k0, k1, dmin, dmax = cells.columns[:, order].astype(np.int64)
    new = np.append(True, (q[1:] != q[:-1]) | (k[1:] != k[:-1]))
    first = np.flatnonzero(new)
    apart = q0 - k0
    return Pairs(q[first], k[first], np.append(first, len(q)), q0, q1, k0, k1, dmin + apart, dmax + apart)
