"""The greedy migration of DistCA (section 4.2): shares of pairs (`distca.parts`) go from surplus to deficit servers.

Servers are filled in the order of their deficits. For each, every share of a pair that a surplus server has could give

    dF_max = min(the share's work, its server's surplus, the deficit)

by its last rows or its first, V bytes (Appendix B); the share with the largest E = dF_max / V gives them. What the
server has already, at home or for other pairs, can be free. Integers and IEEE arithmetic only, so compiled and plain
Python agree.
"""

from __future__ import annotations

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.loops.jit import jit, lean
from apportion.planner.place.distca.board import Rules, Servers, put
from apportion.planner.place.distca.candidates import Candidates, note_price, sweep
from apportion.planner.place.distca.pairs import (
    Board,
    Holding,
    Pairs,
    Shares,
    cut_first,
    cut_last,
    hold,
    keys_from,
    keys_of,
    needs,
    open_pairs,
    pair_work,
)

# Bytes of a move that costs nothing: its E is beyond any other's.
FREE = 1e-30
# What is not more than so much of another E is certainly less, however it is rounded.
SURELY = 1 - 1e-9
# Candidates are like the best that was found last so far before and behind it.
BESIDE = 4
# How often a share is halved until it fits the caps.
HALVINGS = 6
# After so many servers the list of candidates is swept of those that are none any more.
SWEEP = 32


@lean
def _recount(board: Board, rules: Rules, server: int, sign: int) -> None:
    """Book (sign 1), or take back (-1), the rows that the server gets and what it returns."""
    other, servers, home = board.other, board.servers, board.home
    open_pairs(board, other, server)
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
    pairs, servers, home = board.pairs, board.servers, board.home
    rows, keys = needs(pairs, board.holding, home, True, pair, low, high, to)
    of_q, back, from_q = home[pairs.q[pair]], rows * rules.o_bytes, rows * rules.q_bytes
    arrive = from_q + keys * rules.kv_bytes
    if servers.received[to] + arrive > rules.receive_cap or servers.held[to] + arrive > rules.buffer_cap:
        return False
    if servers.sent[to] + back > rules.send_cap or servers.received[of_q] + back > rules.receive_cap:
        return False
    _leave(board, rules, pair, low, high, to, 1)
    servers.sent[of_q] += from_q
    fit = from_q == 0 or servers.sent[of_q] <= rules.send_cap
    for k in range(pairs.k[pair], pairs.k_end[pair]):
        fit = fit and (home[k] == to or servers.sent[home[k]] <= rules.send_cap)
    servers.sent[of_q] -= from_q
    _leave(board, rules, pair, low, high, to, -1)
    return fit


@lean
def _leave(board: Board, rules: Rules, pair: int, low: int, high: int, to: int, sign: int) -> None:
    """Book (sign 1), or take back (-1), the keys that leave their homes for rows [low, high) of a pair on `to`."""
    pairs = board.pairs
    first, last = keys_of(pairs, pair, low, high)
    for k in range(pairs.k[pair], pairs.k_end[pair]):
        if board.home[k] != to:
            keys = keys_from(pairs, board.holding, k, first, last)
            board.servers.sent[board.home[k]] += sign * keys * rules.kv_bytes


@jit
def book_pairs(board: Board, rules: Rules) -> None:
    """Book what queries at home need from elsewhere, before anything moves."""
    for server in range(len(board.servers.load)):
        _recount(board, rules, server, 1)


@lean
def _price(
    pairs: Pairs, holding: Holding, home: Ints, rules: Rules, pair: int, low: int, high: int, to: int
) -> float:
    """Bytes that rows [low, high) of a pair cost server `to`. Of a head and its mirror image the head's rows count, as
    in the authors' code."""
    rows, keys = needs(pairs, holding, home, rules.kv_free, pair, low, high, to)
    counted = 0.5 * rows if pairs.length[pair] > 0 else 1.0 * rows
    return max(FREE, counted * rules.priced_q + keys * rules.kv_bytes)


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
    score: float = work / _price(pairs, holding, home, rules, shares.pair[i], low, high, to)
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
            if servers.load[server] - servers.target[server] <= rules.excess * servers.target[server]:
                continue  # most are: not worth a call
            score = _score(pairs, shares, servers, holding, home, rules, pair, to, stamp)
            if score > most:
                best, most = pair, score
    return best, most


@lean
def _best(
    board: Board, rules: Rules, candidates: Candidates, count: int, to: int, stamp: Ints
) -> tuple[int, float]:
    """(share, E) of the best candidate for server `to`, -1 where there is none: of pairs of which it has a side, then
    of the first `count` others until none can be better. Passed over are those that are certainly worse than the best
    so far, or than one beside the best that was found last, which comes in its turn: most are."""
    best, most = _best_at_hand(board, rules, to, stamp, 0)
    by_keys, score = _best_at_hand(board, rules, to, stamp, 1)
    if score > most:
        best, most = by_keys, score
    pairs, shares, servers, holding, home = (
        board.pairs,
        board.shares,
        board.servers,
        board.holding,
        board.home,
    )
    deficit, last, floor = servers.target[to] - servers.load[to], candidates.last[0], most
    near = candidates.place[last] if last >= 0 else -1
    if near >= 0:
        for place in range(max(near - BESIDE, 0), min(near + BESIDE + 1, count)):
            score = _score(pairs, shares, servers, holding, home, rules, candidates.share[place], to, stamp)
            # what is beyond `most_e` might not be come to
            floor = max(floor, min(score, candidates.most_e[place]))
    floor *= SURELY
    for place in range(count):
        if candidates.most_e[place] <= most:
            break
        once, a_pair = candidates.once[place], candidates.a_pair[place]
        work = min(deficit, candidates.work[place])
        if work < floor * (once + a_pair * work):
            continue
        share = candidates.share[place]
        server = shares.at[share]
        work = min(work, servers.load[server] - servers.target[server])
        if work < floor * (once + a_pair * work):
            continue
        score = _score(pairs, shares, servers, holding, home, rules, share, to, stamp)
        if score > most:
            best, most, candidates.last[0] = share, score, share
            floor = max(floor, SURELY * most)
    return best, most


@lean
def _give(board: Board, rules: Rules, share: int, to: int) -> int:
    """Move rows of the share to server `to`: 1 where they moved, 0 where no cut is fine enough, -1 where the caps
    forbid."""
    shares, servers = board.shares, board.servers
    server, pair = shares.at[share], shares.pair[share]
    whole, x, y = shares.work[share], shares.low[share], shares.high[share]
    surplus, deficit = servers.load[server] - servers.target[server], servers.target[to] - servers.load[to]
    work = min(float(whole), surplus, deficit)
    spare = rules.spare * min(servers.target[server], servers.target[to])
    for halving in range(HALVINGS):
        if work < whole:
            x, y = _part(board, rules, share, work, spare if halving == 0 else 0.0, to)
        moved = pair_work(board.pairs, pair, x, y)
        if moved == 0:
            return 0 if halving == 0 else -1
        if not rules.capped:
            _move(board, share, x, y, moved, to)
            return 1
        if _fits(board, rules, pair, x, y, to):
            _recount(board, rules, server, -1)
            _recount(board, rules, to, -1)
            _move(board, share, x, y, moved, to)
            _recount(board, rules, server, 1)
            _recount(board, rules, to, 1)
            return 1
        work *= 0.5
    return -1


@lean
def _part(board: Board, rules: Rules, share: int, work: float, spare: float, to: int) -> tuple[int, int]:
    """The share's last rows or its first that have about `work`, whichever cost fewer bytes a pair: [x, y), empty where
    no cut is fine enough. Under caps the last, which are the fewest; of a head and its mirror image the innermost."""
    pairs, pair = board.pairs, board.shares.pair[share]
    low, high, origin = board.shares.low[share], board.shares.high[share], board.origin[board.pairs.q[pair]]
    if pairs.length[pair] > 0:
        return cut_last(pairs, pair, low, high, 0, 2 * rules.grain, work, spare), high
    x = cut_last(pairs, pair, low, high, origin, rules.grain, work, spare)
    y = cut_first(pairs, pair, low, high, origin, rules.grain, work, spare)
    first, last = pair_work(pairs, pair, low, y), pair_work(pairs, pair, x, high)
    if first == 0 or (rules.capped and last > 0):
        return x, high
    if last > 0:
        price = _price(pairs, board.holding, board.home, rules, pair, low, y, to) * last
        if _price(pairs, board.holding, board.home, rules, pair, x, high, to) * first <= price:
            return x, high
    return low, y


@lean
def _move(board: Board, share: int, x: int, y: int, moved: int, to: int) -> None:
    """Rows [x, y), the first or the last of the share or all, which have `moved` work, go to server `to`."""
    shares, servers, gone = board.shares, board.servers, share
    servers.load[shares.at[share]] -= moved
    servers.load[to] += moved
    hold(board.pairs, board.holding, shares.pair[share], x, y)
    if x > shares.low[share] or y < shares.high[share]:
        gone = shares.size[0]
        shares.size[0] = gone + 1
        shares.pair[gone], shares.low[gone], shares.high[gone] = shares.pair[share], x, y
        shares.work[share] -= moved
        shares.work[gone] = moved
        if x > shares.low[share]:
            shares.high[share] = x
        else:
            shares.low[share] = y
    shares.at[gone] = to
    put(board.lists, to, gone)


@jit
def migrate(board: Board, rules: Rules, order: Ints, candidates: Candidates) -> tuple[int, int, int]:
    """One pass over the deficit servers in `order` (int64, by descending deficit). Returns moves made, shares that caps
    forbade, and servers left because E fell below the threshold; -1 moves, unfinished, where columns have no room."""
    pairs, shares, servers, lists = board.pairs, board.shares, board.servers, board.lists
    stamp, count = np.full(len(shares.pair), -1, np.int64), len(candidates.share)
    moves, forbidden, below = 0, 0, 0
    for place in range(count):
        note_price(pairs, shares, rules, candidates, place)
    for turn, to in enumerate(order):
        if servers.load[to] >= (1 - rules.tolerance) * servers.target[to]:
            continue
        if turn % SWEEP == 0:
            count = sweep(shares.at, servers, rules, candidates, count)
        if count == 0:
            break
        open_pairs(board, board.holding, to)
        while servers.load[to] < (1 - rules.tolerance) * servers.target[to]:
            if shares.size[0] == len(shares.pair) or lists.size[1] == len(lists.item):
                return -1, forbidden, below
            share, score = _best(board, rules, candidates, count, to, stamp)
            if share < 0:
                break
            if score < rules.threshold:
                below += 1
                break
            given = _give(board, rules, share, to)
            if given == 1:
                moves += 1
                if candidates.place[share] >= 0:
                    note_price(pairs, shares, rules, candidates, candidates.place[share])
            else:
                stamp[share] = to
                forbidden -= min(given, 0)
    return moves, forbidden, below
