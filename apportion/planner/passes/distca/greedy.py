"""The greedy migration of DistCA (section 4.2): items of attention move from surplus servers to deficit servers.

An item is a range [a, b) of a sequence's walk (see `distca.homes`) that one server computes. Servers are filled in the
order of their deficits. For each, every item of a surplus server could give

    dF_max = min(the item's work, its server's surplus, the deficit)

by its cheapest share of that work, V bytes (Appendix B); the item with the largest E = dF_max / V gives it.

    causal        items are head-tail pairs and the innermost rows are the cheapest (`distca.communication`)
    other masks   items are ranges of query rows, cut where their exact work says: from the bands, summed up for grains
                  of `granularity` rows. The share is the item's first rows or its last rows, whichever is cheaper; the
                  keys of a range are counted from above, by the hull of what it sees and by the sum over its grains.

KV that the destination has already, of its own home or for other items, can be free. Integers and IEEE arithmetic only,
so compiled and plain Python agree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.jit import jit, lean
from apportion.planner.passes.distca.board import (
    Board,
    Items,
    Rules,
    Walks,
    close_server,
    open_server,
    put,
    still_surplus,
    widen,
)
from apportion.planner.passes.distca.caps import fits, recount
from apportion.planner.passes.distca.shares import cheapest, estimate, price_of, work_of

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]

# How often a share is halved until it fits the caps.
HALVINGS = 6


@jit
def first_work(walks: Walks, items: Items, count: int) -> None:
    """Fill in the work of the first `count` items."""
    for item in range(count):
        items.work[item] = work_of(walks, items.seq[item], items.a[item], items.b[item])


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
            score = estimate(walks, near, rules, seq, a, b, whole, work, foreign)
        else:
            x, y = cheapest(walks, near, rules, seq, a, b, work, 0.0, foreign)
            work = float(walks.work[y] - walks.work[x])
            score = work / price_of(walks, near, rules, seq, x, y, foreign) if x < y else 0.0
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
        x, y = cheapest(walks, board.near, rules, seq, a, b, work, spare if halving == 0 else 0.0, foreign)
        if x >= y or work_of(walks, seq, x, y) == 0:
            return 0 if halving == 0 else -1
        if not rules.capped:
            _move(board, item, x, y, to)
            return 1
        if fits(board, rules, seq, x, y, items.home[item], to):
            recount(board, rules, server, -1)
            recount(board, rules, to, -1)
            _move(board, item, x, y, to)
            recount(board, rules, server, 1)
            recount(board, rules, to, 1)
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
    widen(board.walks, board.near, seq, x, y)


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
        count = still_surplus(items.at, servers, rules, chosen, count)
        if count == 0:
            break
        open_server(board, board.near, to)
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
        close_server(board, board.near, to)
    return moves, forbidden, below
