"""What the greedy migration of DistCA looks at and changes, as columns, and what a server has."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apportion.ir.jit import lean

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


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


@lean
def hull(walks: Walks, seq: int, a: int, b: int) -> tuple[int, int]:
    """Keys [low, high) among which those of steps [a, b) are: of the sequence where it is folded, else global."""
    if walks.folded[seq]:
        return 0, max((b + 1) // 2, walks.length[seq] - a // 2)
    return walks.low[a], walks.high[b - 1]


@lean
def open_server(board: Board, near: Near, server: int) -> None:
    """Note what the server has."""
    open_homes(board.holders, near, server)
    node = board.lists.first[server]
    while node >= 0:
        item = board.lists.item[node]
        if board.items.at[item] == server:
            widen(board.walks, near, board.items.seq[item], board.items.a[item], board.items.b[item])
        node = board.lists.next[node]


@lean
def open_homes(holders: Holders, near: Near, server: int) -> None:
    for place in range(holders.of_rank[server], holders.of_rank[server + 1]):
        index = holders.by_rank[place]
        seq = holders.seq[index]
        if near.a[seq] == near.b[seq]:
            near.a[seq], near.b[seq] = holders.a[index], holders.b[index]


@lean
def close_server(board: Board, near: Near, server: int) -> None:
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
def widen(walks: Walks, near: Near, seq: int, a: int, b: int) -> None:
    """The server has the keys of steps [a, b) now. One range of them is remembered: what lies apart from it, or has
    gaps, is not."""
    low, high = hull(walks, seq, a, b)
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


@lean
def still_surplus(at: Ints, servers: Servers, rules: Rules, chosen: Ints, count: int) -> int:
    """Keeps of chosen[:count] those whose server has a surplus yet, in place; at: int64, the server of each item.
    Returns how many these are."""
    kept = 0
    for place in range(count):
        server = at[chosen[place]]
        if servers.load[server] > (1 + rules.excess) * servers.target[server]:
            chosen[kept] = chosen[place]
            kept += 1
    return kept
