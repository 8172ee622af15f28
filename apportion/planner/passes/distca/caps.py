"""Caps of DistCA's greedy migration: bytes that ranks send, receive and hold, booked row by row."""

from __future__ import annotations

from apportion.ir.jit import jit, lean
from apportion.planner.passes.distca.board import Board, Near, Rules, close_server, hull, open_homes, widen
from apportion.planner.passes.distca.shares import home_keys, new_keys, rows_of


@lean
def _book(
    board: Board, near: Near, rules: Rules, seq: int, a: int, b: int, home: int, to: int, sign: int
) -> None:
    """Book (sign 1) or take back (-1) what computing steps [a, b) of rows at `home` on `to` sends."""
    servers, walks = board.servers, board.walks
    rows = sign * rows_of(walks, seq, a, b) if home != to else 0
    keys = new_keys(walks, near, True, seq, a, b)
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
    low, high = hull(board.walks, seq, a, b)
    x, y = holders.a[index], holders.b[index]
    known = home_keys(board.walks, seq, x, y, max(low, near.low[seq]), min(high, near.high[seq]))
    return min(home_keys(board.walks, seq, x, y, low, high) - known, keys)


@lean
def fits(board: Board, rules: Rules, seq: int, a: int, b: int, home: int, to: int) -> bool:
    """Whether the caps allow `to` to compute steps [a, b) of rows at `home`."""
    servers = board.servers
    rows = rows_of(board.walks, seq, a, b) if home != to else 0
    keys = new_keys(board.walks, board.near, True, seq, a, b)
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
def recount(board: Board, rules: Rules, server: int, sign: int) -> None:
    """Book, or take back, all that the server computes. What it computes changes between the two only."""
    items, lists, near = board.items, board.lists, board.other
    open_homes(board.holders, near, server)
    node = lists.first[server]
    while node >= 0:
        item = lists.item[node]
        if items.at[item] == server:
            seq, a, b = items.seq[item], items.a[item], items.b[item]
            _book(board, near, rules, seq, a, b, items.home[item], server, sign)
            widen(board.walks, near, seq, a, b)
        node = lists.next[node]
    close_server(board, near, server)


@jit
def book_homes(board: Board, rules: Rules) -> None:
    """Book what queries at home need from elsewhere, before anything moves."""
    for server in range(len(board.servers.load)):
        recount(board, rules, server, 1)
