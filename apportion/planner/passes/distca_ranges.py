"""Tasks with a part of their rows' keys (DistCA, section 8: what its scheduler does not do).

    a rank's rows x the keys of one home = one pair; any rows of a pair may be computed anywhere

                keys of    A     B     C
    rows of C           |     | ### | ##  |     a server that holds B computes C's rows against B's keys: it gets rows
    of
                                                C, sends back partial O, and no key travels

Pairs move as head-tail items do (`distca_greedy`): deficit servers by descending deficit, dF_max, the largest E first,
and their last rows where a part is enough. What a server holds, or got for another pair, is free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apportion.ir.jit import jit, lean
from apportion.planner.passes.cells import Cells, cut_cells
from apportion.planner.passes.distca_balance import ROOM, Ended, Limits, fill, new_lists
from apportion.planner.passes.distca_greedy import FREE, HALVINGS, Lists, Rules, Servers, put
from apportion.planner.problem import exact_sums

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]

# After so many servers the list of candidates is swept of those that are none any more.
SWEEP = 32


class Pairs(NamedTuple):
    """Rows of one block against keys of another, sorted by (q, k): blocks q, k int64 [pairs]; their cells are
    [first[i], first[i + 1]) of the columns q0, q1, k0, k1, dmin, dmax, int64 [cells], diagonals in global tokens."""

    q: Ints
    k: Ints
    first: Ints
    q0: Ints
    q1: Ints
    k0: Ints
    k1: Ints
    dmin: Ints
    dmax: Ints


class Shares(NamedTuple):
    """Columns int64 [room]: the pair, its rows [low, high), the server, work in pairs of tokens; size int64 [1]."""

    pair: Ints
    low: Ints
    high: Ints
    at: Ints
    work: Ints
    size: Ints


class Index(NamedTuple):
    """Where things are: pairs of query block b are [of_q[b], of_q[b + 1]), of key block b by_k[of_k[b]: of_k[b + 1]],
    blocks of rank r by_home[of_home[r]: of_home[r + 1]]. int64."""

    of_q: Ints
    by_k: Ints
    of_k: Ints
    by_home: Ints
    of_home: Ints


class Holding(NamedTuple):
    """What the server at hand got of each block, int64 [blocks]: query rows [q_low, q_high), key rows [k_low, k_high);
    and the blocks of which it got any: got_q[: counts[0]], got_k[: counts[1]]."""

    q_low: Ints
    q_high: Ints
    k_low: Ints
    k_high: Ints
    got_q: Ints
    got_k: Ints
    counts: Ints


class Board(NamedTuple):
    """All that the passes over one kind look at and change. home, origin: int64 [blocks], the rank of each block and
    the first token of its sequence. holding: of the server at hand; other: of one looked at aside."""

    pairs: Pairs
    shares: Shares
    lists: Lists
    servers: Servers
    where: Index
    home: Ints
    origin: Ints
    holding: Holding
    other: Holding


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


# ------------------------------------------------------------------------------------------------- geometry


@lean
def _below(q: int, k: int, m: int) -> int:
    """Pairs (a, b) of [0, q) x [0, k) with a + b < m."""
    m = min(max(m, 0), q + k)
    all_, beyond_q, beyond_k = m, max(m - q, 0), max(m - k, 0)
    return (all_ * (all_ + 1) - beyond_q * (beyond_q + 1) - beyond_k * (beyond_k + 1)) // 2


@lean
def _work(pairs: Pairs, pair: int, low: int, high: int) -> int:
    """Pairs of tokens of rows [low, high)."""
    total = 0
    for c in range(pairs.first[pair], pairs.first[pair + 1]):
        q0, q1 = max(low, pairs.q0[c]), min(high, pairs.q1[c])
        rows, keys = q1 - q0, pairs.k1[c] - pairs.k0[c]
        if rows > 0:
            offset = pairs.k1[c] - q0
            upto = _below(rows, keys, pairs.dmax[c] + offset)
            total += upto - _below(rows, keys, pairs.dmin[c] - 1 + offset)
    return total


@lean
def _keys(pairs: Pairs, pair: int, low: int, high: int) -> tuple[int, int]:
    """Hull of the keys that rows [low, high) see, empty where they see none."""
    first, last = 2**62, 0
    for c in range(pairs.first[pair], pairs.first[pair + 1]):
        q0, q1 = max(low, pairs.q0[c]), min(high, pairs.q1[c])
        k0, k1 = max(pairs.k0[c], q0 - pairs.dmax[c]), min(pairs.k1[c], q1 - pairs.dmin[c])
        if q0 < q1 and k0 < k1:
            first, last = min(first, k0), max(last, k1)
    return min(first, last), last


@lean
def _rows(pairs: Pairs, pair: int, low: int, high: int) -> tuple[int, int]:
    """Hull of the rows of [low, high) that see a key."""
    first, last = 2**62, 0
    for c in range(pairs.first[pair], pairs.first[pair + 1]):
        q0, q1 = max(low, pairs.q0[c]), min(high, pairs.q1[c])
        if q0 < q1:
            first, last = min(first, q0), max(last, q1)
    return min(first, last), last


@jit
def first_work(pairs: Pairs, shares: Shares) -> None:
    """Fill in the work of all shares."""
    for i in range(shares.size[0]):
        shares.work[i] = _work(pairs, shares.pair[i], shares.low[i], shares.high[i])


@lean
def _cut(
    pairs: Pairs, pair: int, low: int, high: int, origin: int, grain: int, work: float, spare: float
) -> int:
    """The row x for which [x, high) has about `work`, at most `spare` more, a multiple of `grain` rows from `origin`;
    `high` where there is none."""
    a, b = low, high
    while a < b:
        middle = (a + b) // 2
        if _work(pairs, pair, middle, high) > work:
            a = middle + 1
        else:
            b = middle
    x = max(low, origin + (a - origin) // grain * grain)
    if _work(pairs, pair, x, high) > work + spare:
        x = origin + ((a - origin) // grain + 1) * grain
    return min(x, high)


# ------------------------------------------------------------------------------------------------- what is there


@lean
def _missing(low: int, high: int, have_low: int, have_high: int) -> int:
    """Rows that come when [low, high) is wanted beside [have_low, have_high): blocks arrive as one range of rows."""
    if low >= high:
        return 0
    if have_low >= have_high:
        return high - low
    return max(high, have_high) - min(low, have_low) - (have_high - have_low)


@lean
def _needs(
    pairs: Pairs, holding: Holding, home: Ints, kv_free: bool, pair: int, low: int, high: int, to: int
) -> tuple[int, int]:
    """(query rows, key rows) that must come to `to`, the server at hand, for rows [low, high) of a pair."""
    q, k = pairs.q[pair], pairs.k[pair]
    rows, keys = 0, 0
    if home[q] != to:
        first, last = _rows(pairs, pair, low, high)
        rows = _missing(first, last, holding.q_low[q], holding.q_high[q])
    if not kv_free:
        first, last = _keys(pairs, pair, low, high)
        keys = last - first
    elif home[k] != to:
        first, last = _keys(pairs, pair, low, high)
        keys = _missing(first, last, holding.k_low[k], holding.k_high[k])
    return rows, keys


@lean
def _hold(pairs: Pairs, holding: Holding, pair: int, low: int, high: int) -> None:
    q, k = pairs.q[pair], pairs.k[pair]
    first, last = _rows(pairs, pair, low, high)
    if first < last:
        _extend(holding.q_low, holding.q_high, holding.got_q, holding.counts, 0, q, first, last)
    first, last = _keys(pairs, pair, low, high)
    if first < last:
        _extend(holding.k_low, holding.k_high, holding.got_k, holding.counts, 1, k, first, last)


@lean
def _extend(
    low: Ints, high: Ints, got: Ints, counts: Ints, side: int, block: int, first: int, last: int
) -> None:
    if low[block] == high[block]:
        low[block], high[block] = first, last
        got[counts[side]] = block
        counts[side] += 1
    else:
        low[block], high[block] = min(first, low[block]), max(last, high[block])


@lean
def _open(board: Board, holding: Holding, server: int) -> None:
    """Note what the server has, instead of what another had."""
    for place in range(holding.counts[0]):
        block = holding.got_q[place]
        holding.q_low[block], holding.q_high[block] = 0, 0
    for place in range(holding.counts[1]):
        block = holding.got_k[place]
        holding.k_low[block], holding.k_high[block] = 0, 0
    holding.counts[0], holding.counts[1] = 0, 0
    shares, lists = board.shares, board.lists
    node = lists.first[server]
    while node >= 0:
        i = lists.item[node]
        if shares.at[i] == server:
            _hold(board.pairs, holding, shares.pair[i], shares.low[i], shares.high[i])
        node = lists.next[node]


# ------------------------------------------------------------------------------------------------- caps


@lean
def _recount(board: Board, rules: Rules, server: int, sign: int) -> None:
    """Book (sign 1), or take back (-1), the rows that the server gets and what it returns."""
    other, servers, home = board.other, board.servers, board.home
    _open(board, other, server)
    for place in range(other.counts[0]):
        block = other.got_q[place]
        if home[block] != server:
            rows = sign * (other.q_high[block] - other.q_low[block])
            servers.received[server] += rows * rules.q_bytes
            servers.held[server] += rows * rules.q_bytes
            servers.sent[server] += rows * rules.o_bytes
            servers.sent[home[block]] += rows * rules.q_bytes
            servers.received[home[block]] += rows * rules.o_bytes
    for place in range(other.counts[1]):
        block = other.got_k[place]
        if home[block] != server:
            bytes_ = sign * (other.k_high[block] - other.k_low[block]) * rules.kv_bytes
            servers.received[server] += bytes_
            servers.held[server] += bytes_
            servers.sent[home[block]] += bytes_


@lean
def _fits(board: Board, rules: Rules, pair: int, low: int, high: int, to: int) -> bool:
    """Whether the caps allow `to` to compute rows [low, high) of a pair."""
    servers = board.servers
    rows, keys = _needs(board.pairs, board.holding, board.home, True, pair, low, high, to)
    of_q, of_k = board.home[board.pairs.q[pair]], board.home[board.pairs.k[pair]]
    arrive, back = rows * rules.q_bytes + keys * rules.kv_bytes, rows * rules.o_bytes
    if servers.received[to] + arrive > rules.receive_cap or servers.held[to] + arrive > rules.buffer_cap:
        return False
    if servers.sent[to] + back > rules.send_cap or servers.received[of_q] + back > rules.receive_cap:
        return False
    from_q, from_k = rows * rules.q_bytes, keys * rules.kv_bytes
    if of_q == of_k:
        from_q, from_k = from_q + from_k, from_q + from_k
    q_fits = from_q == 0 or servers.sent[of_q] + from_q <= rules.send_cap
    return q_fits and (from_k == 0 or servers.sent[of_k] + from_k <= rules.send_cap)


@jit
def book_pairs(board: Board, rules: Rules) -> None:
    """Book what queries at home need from elsewhere, before anything moves."""
    for server in range(len(board.servers.load)):
        _recount(board, rules, server, 1)


# ------------------------------------------------------------------------------------------------- migration


@lean
def _score(
    pairs: Pairs,
    shares: Shares,
    servers: Servers,
    holding: Holding,
    home: Ints,
    rules: Rules,
    i: int,
    to: int,
    stamp: Ints,
) -> float:
    """E of share i for server `to`, 0.0 where it is no candidate; stamp[i] == to: tried in vain. (Not of a `Board`: to
    pass one costs more than the work done here.)"""
    server = shares.at[i]
    surplus = servers.load[server] - servers.target[server]
    if surplus <= rules.excess * servers.target[server] or stamp[i] == to or shares.work[i] == 0:
        return 0.0
    whole = float(shares.work[i])
    work = min(whole, surplus, servers.target[to] - servers.load[to])
    low, high = shares.low[i], shares.high[i]
    if work < whole:
        low = high - max(1, int((high - low) * (work / whole)))
    rows, keys = _needs(pairs, holding, home, rules.kv_free, shares.pair[i], low, high, to)
    score: float = work / max(FREE, float(rows * rules.priced_q + keys * rules.kv_bytes))
    return score


@lean
def _best_at_hand(board: Board, rules: Rules, to: int, stamp: Ints, side: int) -> tuple[int, float]:
    """The best share of pairs whose queries (side 0) or keys (1) `to` has some of. Of every pair the first share is
    looked at, whose number is the pair's: others went to servers that had too little."""
    pairs, shares, servers, holding, home = (
        board.pairs,
        board.shares,
        board.servers,
        board.holding,
        board.home,
    )
    where, best, most = board.where, -1, 0.0
    got = holding.got_k if side else holding.got_q
    first, last = where.of_home[to], where.of_home[to + 1]
    for place in range(first, last + holding.counts[side]):
        block = where.by_home[place] if place < last else got[place - last]
        begin, end = where.of_q[block], where.of_q[block + 1]
        if side:
            begin, end = where.of_k[block], where.of_k[block + 1]
        for at in range(begin, end):
            pair = where.by_k[at] if side else at
            server = shares.at[pair]
            if servers.load[server] <= (1 + rules.excess) * servers.target[server]:
                continue  # most are: not worth a call
            score = _score(pairs, shares, servers, holding, home, rules, pair, to, stamp)
            if score > most:
                best, most = pair, score
    return best, most


@lean
def _best(
    board: Board, rules: Rules, chosen: Ints, most_e: Floats, count: int, to: int, stamp: Ints
) -> tuple[int, float]:
    """(share, E) of the best candidate for server `to`, -1 where there is none: of pairs of which it has a side, then
    of the others until none can be better."""
    best, most = _best_at_hand(board, rules, to, stamp, 0)
    by_keys, score = _best_at_hand(board, rules, to, stamp, 1)
    if score > most:
        best, most = by_keys, score
    pairs, shares, servers = board.pairs, board.shares, board.servers
    for place in range(count):
        if most_e[chosen[place]] <= most:
            break
        score = _score(pairs, shares, servers, board.holding, board.home, rules, chosen[place], to, stamp)
        if score > most:
            best, most = chosen[place], score
    return best, most


@lean
def _give(board: Board, rules: Rules, share: int, to: int) -> int:
    """Move rows of the share to server `to`: 1 where they moved, 0 where no cut is fine enough, -1 where the caps
    forbid."""
    shares, servers = board.shares, board.servers
    server, pair = shares.at[share], shares.pair[share]
    low, high, whole = shares.low[share], shares.high[share], shares.work[share]
    surplus, deficit = servers.load[server] - servers.target[server], servers.target[to] - servers.load[to]
    work = min(float(whole), surplus, deficit)
    spare = rules.spare * min(servers.target[server], servers.target[to])
    origin = board.origin[board.pairs.q[pair]]
    for halving in range(HALVINGS):
        x = low
        if work < whole:
            x = _cut(board.pairs, pair, low, high, origin, rules.grain, work, spare if halving == 0 else 0.0)
        moved = _work(board.pairs, pair, x, high)
        if moved == 0:
            return 0 if halving == 0 else -1
        if not rules.capped:
            _move(board, share, x, moved, to)
            return 1
        if _fits(board, rules, pair, x, high, to):
            _recount(board, rules, server, -1)
            _recount(board, rules, to, -1)
            _move(board, share, x, moved, to)
            _recount(board, rules, server, 1)
            _recount(board, rules, to, 1)
            return 1
        work *= 0.5
    return -1


@lean
def _move(board: Board, share: int, x: int, moved: int, to: int) -> None:
    """Rows from x on, which have `moved` work, go to server `to`."""
    shares, servers, gone = board.shares, board.servers, share
    servers.load[shares.at[share]] -= moved
    servers.load[to] += moved
    _hold(board.pairs, board.holding, shares.pair[share], x, shares.high[share])
    if x > shares.low[share]:
        gone = shares.size[0]
        shares.size[0] = gone + 1
        shares.pair[gone], shares.low[gone], shares.high[gone] = shares.pair[share], x, shares.high[share]
        shares.high[share] = x
        shares.work[share] -= moved
        shares.work[gone] = moved
    shares.at[gone] = to
    put(board.lists, to, gone)


@lean
def _still_surplus(shares: Shares, servers: Servers, rules: Rules, chosen: Ints, count: int) -> int:
    kept = 0
    for place in range(count):
        server = shares.at[chosen[place]]
        if servers.load[server] > (1 + rules.excess) * servers.target[server]:
            chosen[kept] = chosen[place]
            kept += 1
    return kept


@jit
def migrate_pairs(
    board: Board, rules: Rules, order: Ints, chosen: Ints, most_e: Floats
) -> tuple[int, int, int]:
    """One pass over the deficit servers in `order`: as `distca_greedy.migrate`."""
    shares, servers, lists = board.shares, board.servers, board.lists
    stamp, count = np.full(len(shares.pair), -1, np.int64), len(chosen)
    moves, forbidden, below = 0, 0, 0
    for turn, to in enumerate(order):
        if servers.load[to] >= (1 - rules.tolerance) * servers.target[to]:
            continue
        if turn % SWEEP == 0:
            count = _still_surplus(shares, servers, rules, chosen, count)
        if count == 0:
            break
        _open(board, board.holding, to)
        while servers.load[to] < (1 - rules.tolerance) * servers.target[to]:
            if shares.size[0] == len(shares.pair) or lists.size[1] == len(lists.item):
                return -1, forbidden, below
            share, score = _best(board, rules, chosen, most_e, count, to, stamp)
            if share < 0:
                break
            if score < rules.threshold:
                below += 1
                break
            given = _give(board, rules, share, to)
            if given == 1:
                moves += 1
            else:
                stamp[share] = to
                forbidden -= min(given, 0)
    return moves, forbidden, below
