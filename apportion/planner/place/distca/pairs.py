"""Rows of one home against keys, all that they see or those of another home: the pairs that DistCA's migration moves.
Their geometry, and what a server has of them."""

from __future__ import annotations

from typing import NamedTuple

from apportion.ir.arrays import Ints
from apportion.ir.loops.jit import jit, lean
from apportion.planner.place.distca.board import Lists, Servers


class Pairs(NamedTuple):
    """Rows of one block against keys of blocks [k, k_end), sorted by (q, k): int64 [pairs]; their cells are [first[i],
    first[i + 1]) of the columns q0, q1, k0, k1, dmin, dmax, int64 [cells], diagonals in global tokens.

    length: int64 [pairs], of the sequence where rows are steps of a causal walk from both ends (see `distca.homes`),
    with one cell that says [q0, q1) steps and [k0, k1) tokens; else 0. starts: int64 [blocks + 1] tokens.
    """

    q: Ints
    k: Ints
    k_end: Ints
    length: Ints
    starts: Ints
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


@lean
def _below(q: int, k: int, m: int) -> int:
    """Pairs (a, b) of [0, q) x [0, k) with a + b < m."""
    m = min(max(m, 0), q + k)
    all_, beyond_q, beyond_k = m, max(m - q, 0), max(m - k, 0)
    return (all_ * (all_ + 1) - beyond_q * (beyond_q + 1) - beyond_k * (beyond_k + 1)) // 2


@lean
def _step_work(length: int, step: int) -> int:
    """Pairs of the first `step` steps of a causal walk: steps 2i and 2i + 1 see length + 1 keys together."""
    half = step // 2
    return half * (length + 1) + (step % 2) * (half + 1)


@lean
def pair_work(pairs: Pairs, pair: int, low: int, high: int) -> int:
    """Pairs of tokens of rows [low, high)."""
    length = pairs.length[pair]
    if length > 0:
        return _step_work(length, high) - _step_work(length, low)
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
def keys_of(pairs: Pairs, pair: int, low: int, high: int) -> tuple[int, int]:
    """Hull of the keys that rows [low, high) see, empty where they see none."""
    length = pairs.length[pair]
    if length > 0:
        begin = pairs.k0[pairs.first[pair]]
        return begin, begin + max((high + 1) // 2, length - low // 2)
    first, last = 2**62, 0
    for c in range(pairs.first[pair], pairs.first[pair + 1]):
        q0, q1 = max(low, pairs.q0[c]), min(high, pairs.q1[c])
        k0, k1 = max(pairs.k0[c], q0 - pairs.dmax[c]), min(pairs.k1[c], q1 - pairs.dmin[c])
        if q0 < q1 and k0 < k1:
            first, last = min(first, k0), max(last, k1)
    return min(first, last), last


@lean
def rows_of(pairs: Pairs, pair: int, low: int, high: int) -> tuple[int, int]:
    """Hull of the rows of [low, high) that see a key; steps are numbered as such."""
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
        shares.work[i] = pair_work(pairs, shares.pair[i], shares.low[i], shares.high[i])


@lean
def cut_last(
    pairs: Pairs, pair: int, low: int, high: int, origin: int, grain: int, work: float, spare: float
) -> int:
    """The row x for which [x, high) has about `work`, a multiple of `grain` rows from `origin`: the most of at most
    `spare` more, or without spare the nearest; `high` where there is none."""
    a, b = low, high
    while a < b:
        middle = (a + b) // 2
        if pair_work(pairs, pair, middle, high) > work:
            a = middle + 1
        else:
            b = middle
    below = max(low, origin + (a - origin) // grain * grain)
    above = min(origin + ((a - origin) // grain + 1) * grain, high)
    most = spare if spare > 0 else work - pair_work(pairs, pair, above, high)
    return below if pair_work(pairs, pair, below, high) - work <= most else above


@lean
def cut_first(
    pairs: Pairs, pair: int, low: int, high: int, origin: int, grain: int, work: float, spare: float
) -> int:
    """The row y for which [low, y) has about `work`: as `cut_last`, `low` where there is none."""
    a, b = low, high
    while a < b:
        middle = (a + b + 1) // 2
        if pair_work(pairs, pair, low, middle) > work:
            b = middle - 1
        else:
            a = middle
    above = min(origin - (origin - a) // grain * grain, high)
    below = max(low, origin + (a - origin) // grain * grain)
    most = spare if spare > 0 else work - pair_work(pairs, pair, low, below)
    return above if pair_work(pairs, pair, low, above) - work <= most else below


@lean
def _missing(low: int, high: int, have_low: int, have_high: int) -> int:
    """Rows that come when [low, high) is wanted beside [have_low, have_high): blocks arrive as one range of rows."""
    if low >= high:
        return 0
    if have_low >= have_high:
        return high - low
    return max(high, have_high) - min(low, have_low) - (have_high - have_low)


@lean
def needs(
    pairs: Pairs, holding: Holding, home: Ints, kv_free: bool, pair: int, low: int, high: int, to: int
) -> tuple[int, int]:
    """(query rows, key rows) that must come to `to`, the server at hand, for rows [low, high) of a pair."""
    q, rows, keys = pairs.q[pair], 0, 0
    if home[q] != to:
        first, last = rows_of(pairs, pair, low, high)
        rows = _missing(first, last, holding.q_low[q], holding.q_high[q])
    if kv_free and pairs.k_end[pair] == pairs.k[pair] + 1 and home[pairs.k[pair]] == to:
        return rows, 0
    first, last = keys_of(pairs, pair, low, high)
    if not kv_free:
        return rows, max(pairs.length[pair], last - first)
    for k in range(pairs.k[pair], pairs.k_end[pair]):
        if home[k] != to:
            keys += keys_from(pairs, holding, k, first, last)
    return rows, keys


@lean
def keys_from(pairs: Pairs, holding: Holding, k: int, first: int, last: int) -> int:
    """Key rows of block k that come when [first, last) are wanted."""
    low, high = max(first, pairs.starts[k]), min(last, pairs.starts[k + 1])
    return _missing(low, high, holding.k_low[k], holding.k_high[k])


@lean
def hold(pairs: Pairs, holding: Holding, pair: int, low: int, high: int) -> None:
    q = pairs.q[pair]
    first, last = rows_of(pairs, pair, low, high)
    if first < last:
        _extend(holding.q_low, holding.q_high, holding.got_q, holding.counts, 0, q, first, last)
    first, last = keys_of(pairs, pair, low, high)
    for k in range(pairs.k[pair], pairs.k_end[pair]):
        begin, end = max(first, pairs.starts[k]), min(last, pairs.starts[k + 1])
        if begin < end:
            _extend(holding.k_low, holding.k_high, holding.got_k, holding.counts, 1, k, begin, end)


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
def open_pairs(board: Board, holding: Holding, server: int) -> None:
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
            hold(board.pairs, holding, shares.pair[i], shares.low[i], shares.high[i])
        node = lists.next[node]
