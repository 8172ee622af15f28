"""What the greedy migration of DistCA looks at and changes beside the pairs: servers, their lists, its rules."""

from __future__ import annotations

from typing import NamedTuple

from apportion.ir.arrays import Floats, Ints
from apportion.ir.loops.jit import lean


class Servers(NamedTuple):
    """load: int64 [ranks] pairs; target: float64 [ranks] pairs; sent, received, held: int64 [ranks] bytes."""

    load: Ints
    target: Floats
    sent: Ints
    received: Ints
    held: Ints


class Rules(NamedTuple):
    """Parameters of one pass. grain: rows that a cut is a multiple of; shares of a target: how
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


@lean
def put(lists: Lists, server: int, item: int) -> None:
    """The item is on the server's list now."""
    node = lists.size[1]
    lists.item[node], lists.next[node] = item, lists.first[server]
    lists.first[server] = node
    lists.size[1] = node + 1
