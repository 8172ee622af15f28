"""Ports and who waits for them.

A port carries one transfer at a time. A transfer that waits stands in three queues, each in the order in which the
transfers became ready (those of one time in the order of `Traffic`): its out port's, its in port's, and that of the
pair. A port that becomes free takes the first transfer of its queue whose other port is free. Where the queue is long,
as in a large all-to-all, almost all other ports are busy, and it is quicker to ask the few that are not for the first
transfer of the pair (512 ranks and unequal sizes: 1 s instead of 16). Both ways find the same one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Floats, Ints, changes
from apportion.ir.loops.jit import lean
from apportion.ir.loops.sorting import stable_order
from apportion.planner.simulate.program import Traffic

NONE = -1
OUT, IN, PAIR = range(3)
#: so far a queue is walked before the free ports are asked
WALK = 16


class Ports(NamedTuple):
    """All ports, out and in.

    user: int64 [ports], the transfer on the wire; of a free port -2 less the transfer that left last, NONE before the
    first. side: int8 [ports], OUT or IN. waiting: int64 [ports], transfers in its queue.
    head, tail: int64 [ports + pairs] and after, before: int64 [3, transfers], the queues of out ports, in ports, pairs.
    pair: int64 [transfers], and pair_key: int64 [pairs], rising, of (out port, in port).
    idle: int64 [2, ports], the free ports of each side that somebody waits for, idle_count: int64 [2] of them; place:
    int64 [ports], where a port stands among them, or NONE.
    """

    user: Ints
    side: Ints
    waiting: Ints
    head: Ints
    tail: Ints
    after: Ints
    before: Ints
    pair: Ints
    pair_key: Ints
    idle: Ints
    idle_count: Ints
    place: Ints


def free_ports(traffic: Traffic, count: int) -> Ports:
    """`count` ports that nobody has used yet."""
    transfers = len(traffic.out_port)
    key, pair = _numbered(traffic.out_port * count + traffic.in_port)
    side = np.full(count, OUT, np.int8)
    side[traffic.in_port] = IN
    return Ports(
        np.full(count, NONE),
        side,
        np.zeros(count, np.int64),
        np.full(count + len(key), NONE),
        np.full(count + len(key), NONE),
        np.full((3, transfers), NONE),
        np.full((3, transfers), NONE),
        pair,
        key,
        np.zeros((2, count), np.int64),
        np.zeros(2, np.int64),
        np.full(count, NONE),
    )


def _numbered(keys: Ints) -> tuple[Ints, Ints]:
    """(the different keys, rising; which of them each is)."""
    order = stable_order(keys)
    rising = keys[order]
    new = changes(rising)
    number = np.empty(len(keys), np.int64)
    number[order] = np.cumsum(new) - 1
    return rising[new], number


@lean
def can_start(ports: Ports, traffic: Traffic, transfer: int) -> bool:
    """Whether both ports are free."""
    return bool(ports.user[traffic.out_port[transfer]] < 0 and ports.user[traffic.in_port[transfer]] < 0)


@lean
def occupy(ports: Ports, traffic: Traffic, transfer: int) -> None:
    """Both ports are the transfer's."""
    for port in (traffic.out_port[transfer], traffic.in_port[transfer]):
        ports.user[port] = transfer
        if ports.place[port] >= 0:
            _drop_idle(ports, port)


@lean
def release(ports: Ports, port: int) -> None:
    """The port is free; who left it is not forgotten."""
    ports.user[port] = -2 - ports.user[port]
    if ports.waiting[port] > 0:
        _add_idle(ports, port)


@lean
def left_by(ports: Ports, port: int) -> int:
    """The transfer that used a free port last."""
    return int(-2 - ports.user[port])


@lean
def enqueue(ports: Ports, traffic: Traffic, transfer: int) -> None:
    """A transfer that cannot start waits."""
    out, into = traffic.out_port[transfer], traffic.in_port[transfer]
    _append(ports, OUT, out, transfer)
    _append(ports, IN, into, transfer)
    _append(ports, PAIR, len(ports.user) + ports.pair[transfer], transfer)
    for port in (out, into):
        ports.waiting[port] += 1
        if ports.user[port] < 0 and ports.place[port] < 0:
            _add_idle(ports, port)


@lean
def dequeue(ports: Ports, traffic: Traffic, transfer: int) -> None:
    """A transfer that starts waits no longer."""
    out, into = traffic.out_port[transfer], traffic.in_port[transfer]
    _remove(ports, OUT, out, transfer)
    _remove(ports, IN, into, transfer)
    _remove(ports, PAIR, len(ports.user) + ports.pair[transfer], transfer)
    ports.waiting[out] -= 1
    ports.waiting[into] -= 1


@lean
def first_startable(ports: Ports, traffic: Traffic, ready: Floats, port: int) -> int:
    """The first transfer in a free port's queue whose other port is free, or NONE."""
    side, walked = ports.side[port], 0
    transfer = ports.head[port]
    while transfer >= 0:
        other = traffic.in_port[transfer] if side == OUT else traffic.out_port[transfer]
        if ports.user[other] < 0:
            return int(transfer)
        if walked == WALK and ports.idle_count[1 - side] < ports.waiting[port]:
            return int(_first_of_idle(ports, ready, port))
        transfer = ports.after[side, transfer]
        walked += 1
    return NONE


@lean
def _first_of_idle(ports: Ports, ready: Floats, port: int) -> int:
    side, count, best = ports.side[port], len(ports.user), NONE
    for number in range(ports.idle_count[1 - side]):
        other = ports.idle[1 - side, number]
        key = port * count + other if side == OUT else other * count + port
        pair = np.searchsorted(ports.pair_key, key)
        if pair == len(ports.pair_key) or ports.pair_key[pair] != key:
            continue
        transfer = ports.head[count + pair]
        if transfer >= 0 and (best < 0 or _before(ready, transfer, best)):
            best = transfer
    return int(best)


@lean
def _before(ready: Floats, first: int, second: int) -> bool:
    return bool(ready[first] < ready[second] or (ready[first] == ready[second] and first < second))


@lean
def _add_idle(ports: Ports, port: int) -> None:
    side = ports.side[port]
    ports.place[port] = ports.idle_count[side]
    ports.idle[side, ports.idle_count[side]] = port
    ports.idle_count[side] += 1


@lean
def _drop_idle(ports: Ports, port: int) -> None:
    side = ports.side[port]
    ports.idle_count[side] -= 1
    last = ports.idle[side, ports.idle_count[side]]
    ports.idle[side, ports.place[port]] = last
    ports.place[last] = ports.place[port]
    ports.place[port] = NONE


@lean
def _append(ports: Ports, kind: int, queue: int, transfer: int) -> None:
    last = ports.tail[queue]
    ports.before[kind, transfer] = last
    if last < 0:
        ports.head[queue] = transfer
    else:
        ports.after[kind, last] = transfer
    ports.tail[queue] = transfer


@lean
def _remove(ports: Ports, kind: int, queue: int, transfer: int) -> None:
    before, after = ports.before[kind, transfer], ports.after[kind, transfer]
    if before < 0:
        ports.head[queue] = after
    else:
        ports.after[kind, before] = after
    if after < 0:
        ports.tail[queue] = before
    else:
        ports.before[kind, after] = before
