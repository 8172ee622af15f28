"""The greedy migration of DistCA (section 4.2): items of attention move from surplus servers to deficit servers.

An item is a range [a, b) of a sequence's walk (see `distca_homes`) that one server computes. Servers are filled in the
order of their deficits. For each, every item of a surplus server could give

    dF_max = min(the item's work, its server's surplus, the deficit)

by its cheapest share of that work, V bytes (Appendix B); the item with the largest E = dF_max / V gives it.

    causal        items are head-tail pairs and the innermost rows are the cheapest (`distca_communication`)
    other masks   items are ranges of query rows, cut where their exact work says: from the bands, summed up for grains
                  of `granularity` rows. The share is the item's first rows or its last rows, whichever is cheaper; the
                  keys of a range are counted from above, by the hull of what it sees and by the sum over its grains.

KV that the destination has already, of its own home or for other items, can be free. Integers and IEEE arithmetic only,
so compiled and plain Python agree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apportion.ir.jit import jit, lean
from apportion.planner.passes.distca_communication import head_tail_rows

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Bytes of a move that costs nothing: its E is beyond any other's.
FREE = 1e-30
# How often a share is halved until it fits the caps.
HALVINGS = 6


class Walks(NamedTuple):
    """The sequences under one mask.

    folded: bool, length: int64 [sequences]. Of sequences that are not folded, steps are grains [grain[i], grain[i +
    1]) of all sequences' tokens, int64 [grains + 1]; work, keys, outside: int64 [grains + 1], pairs, key rows seen,
    and those that are not rows of the grain itself, summed up before each grain; low, high: int64 [grains], hull of
    the keys seen by this and later (earlier) grains of the sequence.
    """

    folded: Bools
    length: Ints
    grain: Ints
    work: Ints
    keys: Ints
    outside: Ints
    low: Ints
    high: Ints


class Items(NamedTuple):
    """Columns int64 [room]: sequence, steps [a, b), the server of its rows and the one that computes, work in pairs."""

    seq: Ints
    a: Ints
    b: Ints
    home: Ints
    at: Ints
    work: Ints


class Servers(NamedTuple):
    """load: int64 [ranks] pairs; target: float64 [ranks] pairs; sent, received, held: int64 [ranks] bytes."""

    load: Ints
    target: Floats
    sent: Ints
    received: Ints
    held: Ints


class Holders(NamedTuple):
    """Homes by rank and by sequence: seq, a, b, rank int64 [ranges] in order of sequence; of_seq int64 [sequences + 1];
    by_rank int64 [ranges], the ranges in order of rank; of_rank int64 [ranks + 1]."""

    seq: Ints
    a: Ints
    b: Ints
    rank: Ints
    of_seq: Ints
    by_rank: Ints
    of_rank: Ints


class Near(NamedTuple):
    """What the server at hand has of each sequence: int64 [sequences]; keys [low, high) of its items, and of its home
    rows the steps [a, b) (empty: a = b)."""

    low: Ints
    high: Ints
    a: Ints
    b: Ints


class Rules(NamedTuple):
    """Parameters of one pass. grain: steps that a cut is a multiple of (of causal sequences); shares of a target: how
    short a server may stay (tolerance), beyond what a server gives (excess), how much more than was asked for a share
    may have (spare). Bytes a row; caps in bytes."""

    grain: int
    tolerance: float
    excess: float
    spare: float
    threshold: float
    q_bytes: int
    o_bytes: int
    kv_bytes: int
    priced_q: int
    paper: bool
    kv_free: bool
    capped: bool
    send_cap: int
    receive_cap: int
    buffer_cap: int


class Lists(NamedTuple):
    """Items of each server as linked lists: first int64 [ranks], item and next int64 [room]; size int64 [2]: items, and
    nodes used. A node counts while its item is still there."""

    first: Ints
    item: Ints
    next: Ints
    size: Ints


class Board(NamedTuple):
    """All that the passes over one kind look at and change. near: of the server at hand; other: of one looked at
    aside."""

    walks: Walks
    items: Items
    servers: Servers
    holders: Holders
    lists: Lists
    near: Near
    other: Near


# ------------------------------------------------------------------------------------------------- work and keys


@lean
def step_pairs(length: int, step: int) -> int:
    """Pairs of the first `step` steps of a causal walk."""
    half = step // 2
    return half * (length + 1) + (step % 2) * (half + 1)


@lean
def work_of(walks: Walks, seq: int, a: int, b: int) -> int:
    """Pairs of steps [a, b)."""
    if walks.folded[seq]:
        return step_pairs(walks.length[seq], b) - step_pairs(walks.length[seq], a)
    work: int = walks.work[b] - walks.work[a]
    return work


@lean
def _rows_of(walks: Walks, seq: int, a: int, b: int) -> int:
    if walks.folded[seq]:
        return b - a
    rows: int = walks.grain[b] - walks.grain[a]
    return rows


@lean
def _hull(walks: Walks, seq: int, a: int, b: int) -> tuple[int, int]:
    """Keys [low, high) among which those of steps [a, b) are: of the sequence where it is folded, else global."""
    if walks.folded[seq]:
        return 0, max((b + 1) // 2, walks.length[seq] - a // 2)
    return walks.low[a], walks.high[b - 1]


@lean
def _within(low: int, high: int, a: int, b: int) -> int:
    return max(0, min(high, b) - max(low, a))


@lean
def _home_keys(walks: Walks, seq: int, a: int, b: int, low: int, high: int) -> int:
    """Keys of home steps [a, b) in [low, high)."""
    if not walks.folded[seq]:
        return _within(low, high, walks.grain[a], walks.grain[b])
    head = _within(low, high, (a + 1) // 2, (b + 1) // 2)
    length = walks.length[seq]
    return head + _within(low, high, length - b // 2, length - a // 2)


@lean
def _new_keys(walks: Walks, near: Near, kv_free: bool, seq: int, a: int, b: int) -> int:
    """Key rows that must come for steps [a, b), at most."""
    low, high = _hull(walks, seq, a, b)
    seen = high - low
    if not walks.folded[seq]:
        at_home = kv_free and near.a[seq] <= a and b <= near.b[seq]
        column = walks.outside if at_home else walks.keys
        seen = min(seen, column[b] - column[a])
    if not kv_free:
        return seen
    missing = high - low - _within(low, high, near.low[seq], near.high[seq])
    if near.a[seq] < near.b[seq]:
        left = _home_keys(walks, seq, near.a[seq], near.b[seq], low, min(high, near.low[seq]))
        right = _home_keys(walks, seq, near.a[seq], near.b[seq], max(low, near.high[seq]), high)
        missing -= left + right
    return min(missing, seen)


@lean
def _price(walks: Walks, near: Near, rules: Rules, seq: int, a: int, b: int, foreign: bool) -> float:
    """Bytes of a move of steps [a, b); foreign: its rows do not live at the destination."""
    rows = _rows_of(walks, seq, a, b) if foreign else 0
    return max(
        FREE, float(rows * rules.priced_q + _new_keys(walks, near, rules.kv_free, seq, a, b) * rules.kv_bytes)
    )


# ------------------------------------------------------------------------------------------------- shares of items


@lean
def _innermost(walks: Walks, rules: Rules, seq: int, a: int, b: int, work: float, spare: float) -> int:
    """The step x for which [x, b) has about `work` pairs, at most `spare` more, on a multiple of the grain; b: none."""
    length = walks.length[seq]
    wanted = 2.0 * work / (length + 1)
    if rules.paper:
        l_q, l_kv = (b - a) / 2.0, b / 2.0
        alpha = min(1.0, work / work_of(walks, seq, a, b))
        rows, _ = head_tail_rows(alpha, l_q, l_kv, length, rules.priced_q, rules.kv_bytes, True)
        wanted = 2.0 * rows
    x = int((b - wanted) / rules.grain + 0.5) * rules.grain
    if x >= b:
        x = (b - 1) // rules.grain * rules.grain
    x = max(x, a)
    if work_of(walks, seq, x, b) > work + spare:
        x = (x // rules.grain + 1) * rules.grain
    return min(x, b)


@lean
def _first_at_least(work: Ints, a: int, b: int, value: float) -> int:
    """The first x in [a, b] with work[x] >= value, b where there is none."""
    while a < b:
        middle = (a + b) // 2
        if work[middle] < value:
            a = middle + 1
        else:
            b = middle
    return b


@lean
def _last_rows(walks: Walks, a: int, b: int, work: float, spare: float) -> int:
    """The grain x for which [x, b) has about `work` pairs, at most `spare` more; b: none."""
    x = _first_at_least(walks.work, a, b, walks.work[b] - work)
    if x > a and walks.work[b] - walks.work[x - 1] <= work + spare:
        less, more = work - (walks.work[b] - walks.work[x]), walks.work[b] - walks.work[x - 1] - work
        return x - 1 if more < less or x == b else x
    return x


@lean
def _first_rows(walks: Walks, a: int, b: int, work: float, spare: float) -> int:
    """The grain y for which [a, y) has about `work` pairs, at most `spare` more; a: none."""
    y = _first_at_least(walks.work, a, b, walks.work[a] + work)
    if walks.work[y] - walks.work[a] <= work + spare:
        return y
    return y - 1


@lean
def _share(
    walks: Walks, near: Near, rules: Rules, seq: int, a: int, b: int, work: float, spare: float, foreign: bool
) -> tuple[int, int]:
    """The cheapest steps [x, y) of the item [a, b) with about `work` pairs; empty where there are none."""
    whole = work_of(walks, seq, a, b)
    if whole <= work:
        return a, b
    if walks.folded[seq]:
        return _innermost(walks, rules, seq, a, b, work, spare), b
    x, y = _last_rows(walks, a, b, work, spare), _first_rows(walks, a, b, work, spare)
    if x >= b or y <= a:
        return (x, b) if x < b else (a, y)
    last = _price(walks, near, rules, seq, x, b, foreign) * (walks.work[y] - walks.work[a])
    first = _price(walks, near, rules, seq, a, y, foreign) * (walks.work[b] - walks.work[x])
    return (a, y) if first < last else (x, b)


@lean
def _estimate(
    walks: Walks, near: Near, rules: Rules, seq: int, a: int, b: int, whole: int, work: float, foreign: bool
) -> float:
    """E of a head-tail item before its cut is rounded; `whole`: its work."""
    length, start = walks.length[seq], float(a)
    if work < whole:
        if rules.paper:
            l_q, l_kv = (b - a) / 2.0, b / 2.0
            rows, printed = head_tail_rows(
                work / whole, l_q, l_kv, length, rules.priced_q, rules.kv_bytes, True
            )
            if not rules.kv_free:
                return work / max(printed, FREE)
            start = b - 2.0 * rows
        else:
            start = b - 2.0 * work / (length + 1)
    reach = max(length - start * 0.5, b * 0.5)
    if rules.kv_free:
        missing = reach - near.high[seq]
        if near.a[seq] < near.b[seq]:
            missing -= _home_keys(walks, seq, near.a[seq], near.b[seq], near.high[seq], int(reach))
        reach = max(0.0, missing)
    price: float = (b - start) * rules.priced_q * foreign + reach * rules.kv_bytes
    return work / max(price, FREE)


# ------------------------------------------------------------------------------------------------- what servers have


@lean
def _open(board: Board, near: Near, server: int) -> None:
    """Note what the server has."""
    _open_homes(board.holders, near, server)
    node = board.lists.first[server]
    while node >= 0:
        item = board.lists.item[node]
        if board.items.at[item] == server:
            _widen(board.walks, near, board.items.seq[item], board.items.a[item], board.items.b[item])
        node = board.lists.next[node]


@lean
def _open_homes(holders: Holders, near: Near, server: int) -> None:
    for place in range(holders.of_rank[server], holders.of_rank[server + 1]):
        index = holders.by_rank[place]
        seq = holders.seq[index]
        if near.a[seq] == near.b[seq]:
            near.a[seq], near.b[seq] = holders.a[index], holders.b[index]


@lean
def _close(board: Board, near: Near, server: int) -> None:
    holders, lists = board.holders, board.lists
    for place in range(holders.of_rank[server], holders.of_rank[server + 1]):
        _forget(near, holders.seq[holders.by_rank[place]])
    node = lists.first[server]
    while node >= 0:
        _forget(near, board.items.seq[lists.item[node]])
        node = lists.next[node]


@lean
def _forget(near: Near, seq: int) -> None:
    near.low[seq], near.high[seq], near.a[seq], near.b[seq] = 0, 0, 0, 0


@lean
def _widen(walks: Walks, near: Near, seq: int, a: int, b: int) -> None:
    """The server has the keys of steps [a, b) now. One range of them is remembered: what lies apart from it, or has
    gaps, is not."""
    low, high = _hull(walks, seq, a, b)
    if not walks.folded[seq] and walks.keys[b] - walks.keys[a] < high - low:
        return
    if near.low[seq] == near.high[seq]:
        near.low[seq], near.high[seq] = low, high
    elif low <= near.high[seq] and high >= near.low[seq]:
        near.low[seq], near.high[seq] = min(low, near.low[seq]), max(high, near.high[seq])


@lean
def put(lists: Lists, server: int, item: int) -> None:
    """The item is on the server's list now."""
    node = lists.size[1]
    lists.item[node], lists.next[node] = item, lists.first[server]
    lists.first[server] = node
    lists.size[1] = node + 1


# ------------------------------------------------------------------------------------------------- caps


@lean
def _book(
    board: Board, near: Near, rules: Rules, seq: int, a: int, b: int, home: int, to: int, sign: int
) -> None:
    """Book (sign 1) or take back (-1) what computing steps [a, b) of rows at `home` on `to` sends."""
    servers, walks = board.servers, board.walks
    rows = sign * _rows_of(walks, seq, a, b) if home != to else 0
    keys = _new_keys(walks, near, True, seq, a, b)
    servers.received[to] += rows * rules.q_bytes + sign * keys * rules.kv_bytes
    servers.held[to] += rows * rules.q_bytes + sign * keys * rules.kv_bytes
    servers.sent[to] += rows * rules.o_bytes
    servers.sent[home] += rows * rules.q_bytes
    servers.received[home] += rows * rules.o_bytes
    for index in range(board.holders.of_seq[seq], board.holders.of_seq[seq + 1]):
        leave = _leaving(board, near, index, seq, a, b, to, keys)
        servers.sent[board.holders.rank[index]] += sign * leave * rules.kv_bytes


@lean
def _leaving(board: Board, near: Near, index: int, seq: int, a: int, b: int, to: int, keys: int) -> int:
    """KV rows that a home range sends to `to` for steps [a, b), of `keys` rows in all."""
    holders = board.holders
    if holders.rank[index] == to:
        return 0
    low, high = _hull(board.walks, seq, a, b)
    x, y = holders.a[index], holders.b[index]
    known = _home_keys(board.walks, seq, x, y, max(low, near.low[seq]), min(high, near.high[seq]))
    return min(_home_keys(board.walks, seq, x, y, low, high) - known, keys)


@lean
def _fits(board: Board, rules: Rules, seq: int, a: int, b: int, home: int, to: int) -> bool:
    """Whether the caps allow `to` to compute steps [a, b) of rows at `home`."""
    servers = board.servers
    rows = _rows_of(board.walks, seq, a, b) if home != to else 0
    keys = _new_keys(board.walks, board.near, True, seq, a, b)
    arrive, back = rows * rules.q_bytes + keys * rules.kv_bytes, rows * rules.o_bytes
    if servers.received[to] + arrive > rules.receive_cap or servers.held[to] + arrive > rules.buffer_cap:
        return False
    if servers.sent[to] + back > rules.send_cap or servers.received[home] + back > rules.receive_cap:
        return False
    for index in range(board.holders.of_seq[seq], board.holders.of_seq[seq + 1]):
        server = board.holders.rank[index]
        leave = _leaving(board, board.near, index, seq, a, b, to, keys) * rules.kv_bytes
        leave += rows * rules.q_bytes if server == home else 0
        if leave > 0 and servers.sent[server] + leave > rules.send_cap:
            return False
    return True


@lean
def _recount(board: Board, rules: Rules, server: int, sign: int) -> None:
    """Book, or take back, all that the server computes. What it computes changes between the two only."""
    items, lists, near = board.items, board.lists, board.other
    _open_homes(board.holders, near, server)
    node = lists.first[server]
    while node >= 0:
        item = lists.item[node]
        if items.at[item] == server:
            seq, a, b = items.seq[item], items.a[item], items.b[item]
            _book(board, near, rules, seq, a, b, items.home[item], server, sign)
            _widen(board.walks, near, seq, a, b)
        node = lists.next[node]
    _close(board, near, server)


@jit
def book_homes(board: Board, rules: Rules) -> None:
    """Book what queries at home need from elsewhere, before anything moves."""
    for server in range(len(board.servers.load)):
        _recount(board, rules, server, 1)


# ------------------------------------------------------------------------------------------------- migration


@jit
def first_work(walks: Walks, items: Items, count: int) -> None:
    """Fill in the work of the first `count` items."""
    for item in range(count):
        items.work[item] = work_of(walks, items.seq[item], items.a[item], items.b[item])


@lean
def _still_surplus(items: Items, servers: Servers, rules: Rules, chosen: Ints, count: int) -> int:
    kept = 0
    for place in range(count):
        server = items.at[chosen[place]]
        if servers.load[server] > (1 + rules.excess) * servers.target[server]:
            chosen[kept] = chosen[place]
            kept += 1
    return kept


@lean
def _best(
    board: Board, rules: Rules, chosen: Ints, most_e: Floats, count: int, to: int, stamp: Ints
) -> tuple[int, float]:
    """(item, E) of the best candidate for server `to`, -1 where there is none; stamp[item] == to: tried in vain."""
    walks, items, servers, near = board.walks, board.items, board.servers, board.near
    best, most = -1, 0.0
    deficit = servers.target[to] - servers.load[to]
    for place in range(count):
        item = chosen[place]
        server = items.at[item]
        surplus = servers.load[server] - servers.target[server]
        if most_e[item] <= most:
            break
        if surplus <= 0.0 or stamp[item] == to:
            continue
        whole, seq, a, b = items.work[item], items.seq[item], items.a[item], items.b[item]
        work, foreign = min(float(whole), surplus, deficit), items.home[item] != to
        if walks.folded[seq]:
            score = _estimate(walks, near, rules, seq, a, b, whole, work, foreign)
        else:
            x, y = _share(walks, near, rules, seq, a, b, work, 0.0, foreign)
            work = float(walks.work[y] - walks.work[x])
            score = work / _price(walks, near, rules, seq, x, y, foreign) if x < y else 0.0
        if score > most:
            best, most = item, score
    return best, most


@lean
def _give(board: Board, rules: Rules, item: int, to: int) -> int:
    """Move the best share of the item to server `to`: 1 where it moved, 0 where no cut is fine enough, -1 where the
    caps forbid."""
    walks, items, servers = board.walks, board.items, board.servers
    server, seq, a, b = items.at[item], items.seq[item], items.a[item], items.b[item]
    surplus, deficit = servers.load[server] - servers.target[server], servers.target[to] - servers.load[to]
    work, foreign = min(float(items.work[item]), surplus, deficit), items.home[item] != to
    spare = rules.spare * min(servers.target[server], servers.target[to])
    for halving in range(HALVINGS):
        x, y = _share(walks, board.near, rules, seq, a, b, work, spare if halving == 0 else 0.0, foreign)
        if x >= y or work_of(walks, seq, x, y) == 0:
            return 0 if halving == 0 else -1
        if not rules.capped:
            _move(board, item, x, y, to)
            return 1
        if _fits(board, rules, seq, x, y, items.home[item], to):
            _recount(board, rules, server, -1)
            _recount(board, rules, to, -1)
            _move(board, item, x, y, to)
            _recount(board, rules, server, 1)
            _recount(board, rules, to, 1)
            return 1
        work *= 0.5
    return -1


@lean
def _move(board: Board, item: int, x: int, y: int, to: int) -> None:
    """Steps [x, y) of the item, its first or its last, go to server `to`."""
    items, lists = board.items, board.lists
    seq, a, b, server = items.seq[item], items.a[item], items.b[item], items.at[item]
    work = work_of(board.walks, seq, x, y)
    board.servers.load[server] -= work
    board.servers.load[to] += work
    moved = item
    if x > a or y < b:
        moved = lists.size[0]
        lists.size[0] = moved + 1
        items.seq[moved], items.home[moved] = seq, items.home[item]
        items.a[moved], items.b[moved], items.work[moved] = x, y, work
        items.work[item] -= work
        if x > a:
            items.b[item] = x
        else:
            items.a[item] = y
    items.at[moved] = to
    put(lists, to, moved)
    _widen(board.walks, board.near, seq, x, y)


@jit
def migrate(board: Board, rules: Rules, order: Ints, chosen: Ints, most_e: Floats) -> tuple[int, int, int]:
    """One pass over the deficit servers in `order` (int64, by descending deficit) and the items `chosen` (int64), those
    with the largest E that they can have, most_e float64 [items], before others. Returns moves made, shares that caps
    forbade, and servers left because E fell below the threshold; -1 moves, unfinished, where columns have no room."""
    items, servers, lists = board.items, board.servers, board.lists
    room, count = len(items.seq) - 2, len(chosen)
    stamp = np.full(len(items.seq), -1, np.int64)
    moves, forbidden, below = 0, 0, 0
    for to in order:
        if servers.load[to] >= (1 - rules.tolerance) * servers.target[to]:
            continue
        count = _still_surplus(items, servers, rules, chosen, count)
        if count == 0:
            break
        _open(board, board.near, to)
        while servers.load[to] < (1 - rules.tolerance) * servers.target[to]:
            if lists.size[0] > room or lists.size[1] > room:
                return -1, forbidden, below
            item, score = _best(board, rules, chosen, most_e, count, to, stamp)
            if item < 0:
                break
            if score < rules.threshold:
                below += 1
                break
            given = _give(board, rules, item, to)
            if given == 1:
                moves += 1
            else:
                stamp[item] = to
                forbidden -= min(given, 0)
        _close(board, board.near, to)
    return moves, forbidden, below
