"""Homes exchanged inside nodes, so that no rank's links are busy for long.

A tile that many ranks of other nodes need leaves its node from its home, whichever rank of the node that is. So blocks
change places inside a node: what the busiest rank sends for one of another rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Bools, Floats, Ints, offsets
from apportion.ir.loops.jit import jit, lean
from apportion.planner.problem import Problem, exact_sums
from apportion.planner.solvers.contracts import HypergraphProblem

# an exchange shortens the longer of the two ranks' times by at least this share of it
GAIN = 0.01
# and what it adds to what travels inside the node counts so much more than its time on one rank's links: of 0 to 16,
# more bytes are saved with more, and little time lost up to here
DEAR = 8.0
# exchanges a block, at most
_TURNS = 2


class LinkTraffic(NamedTuple):
    """What ranks send and receive, of a compute placement. By rank, int64 [2, ranks]: sent and received, inside the
    node and to others. By block, int64: away [blocks], bytes to other nodes; near [blocks], to all ranks of its node
    that need it; here [blocks, ranks a node], to each of these."""

    sent: Ints
    received: Ints
    away: Ints
    near: Ints
    here: Ints

    def times(self, gbs: tuple[float, float]) -> Floats:
        """float64 [ranks]: time on the links, of (inside, between) GB/s."""
        within, between = np.maximum(self.sent, self.received)
        return np.asarray(within / gbs[0] + between / gbs[1])


#: a case whose hyperedges begin with the block that they come from, the first vertices, and ranks of all vertices
Placed = tuple[HypergraphProblem, Ints]


def link_gbs(problem: Problem) -> tuple[float, float]:
    """GB/s of a rank's links inside its node, and of its share of the NICs."""
    cluster = problem.cluster
    return cluster.intra_gbs, cluster.inter_gbs * cluster.nics_per_node / cluster.ranks_per_node


def traffic_of(placed: Sequence[Placed], blocks: int) -> LinkTraffic:
    """Of so many blocks, all cases together."""
    case = placed[0][0]
    sent, received = np.zeros((2, 2, case.ranks), np.int64)
    away, near = np.zeros((2, blocks), np.int64)
    made = LinkTraffic(sent, received, away, near, np.zeros((blocks, case.ranks_per_node), np.int64))
    for each, rank in placed:
        _count(each.ptr, each.pins, each.price, rank, case.ranks_per_node, made)
    return made


def exchanged(placed: Sequence[Placed], free: Bools, gbs: tuple[float, float]) -> Ints:
    """int64 [blocks]: the homes of blocks, free ones exchanged inside nodes within the caps of tokens. placed: cases of
    the same blocks and homes. gbs: see `link_gbs`."""
    (case, rank), made = placed[0], traffic_of(placed, len(free))
    home, tokens = rank[: len(free)].copy(), case.tokens[: len(free)]
    node, cap = home // case.ranks_per_node, case.tokens_caps[1]
    start = offsets(np.bincount(node, minlength=case.nodes))
    used = exact_sums(home, tokens, case.ranks)
    order = np.argsort(node, kind="stable")
    _exchange(_HomeBoard(home, free, tokens, cap, used, start, order, made.times(gbs)), made, gbs)
    return home


@jit
def _count(ptr: Ints, pins: Ints, price: Ints, rank: Ints, per_node: int, made: LinkTraffic) -> None:
    seen = np.full(made.sent.shape[1], -1, np.int64)
    for edge in range(len(price)):
        block = pins[ptr[edge]]
        home = rank[block]
        low = home // per_node * per_node
        for at in range(ptr[edge] + 1, ptr[edge + 1]):
            to = rank[pins[at]]
            if seen[to] == edge:
                continue
            seen[to] = edge
            if to // per_node == home // per_node:
                made.here[block, to - low] += price[edge]
                made.near[block] += price[edge]
                if to != home:
                    made.sent[0, home] += price[edge]
                    made.received[0, to] += price[edge]
            else:
                made.away[block] += price[edge]
                made.sent[1, home] += price[edge]
                made.received[1, to] += price[edge]


class _HomeBoard(NamedTuple):
    """home: int64 [blocks]; free: bool [blocks]; tokens: int64 [blocks]; cap, used: int64 [ranks], tokens; start: int64
    [nodes + 1], of the blocks of each node in `order`, int64 [blocks]; time: float64 [ranks]."""

    home: Ints
    free: Bools
    tokens: Ints
    cap: Ints
    used: Ints
    start: Ints
    order: Ints
    time: Floats


@jit
def _exchange(board: _HomeBoard, made: LinkTraffic, gbs: tuple[float, float]) -> None:
    ranks = len(board.cap)
    stuck = np.zeros(ranks, np.bool_)
    for _ in range(_TURNS * len(board.home)):
        busy = -1
        for rank in range(ranks):
            if not stuck[rank] and (busy < 0 or board.time[rank] > board.time[busy]):
                busy = rank
        if busy < 0:
            return
        one, other = _best(board, made, busy, gbs)
        if one < 0:
            stuck[busy] = True
            continue
        to, grown = board.home[other], board.tokens[one] - board.tokens[other]
        _swap(board.home, made, one, other)
        board.used[busy] -= grown
        board.used[to] += grown
        for rank in (busy, to):
            board.time[rank] = _time(made, rank, gbs, 0, 0, 0)
        stuck[to] = False


@lean
def _best(board: _HomeBoard, made: LinkTraffic, busy: int, gbs: tuple[float, float]) -> tuple[int, int]:
    """The block of `busy` and the one of another rank of its node whose exchange leaves the longer of the two ranks'
    times the shortest; -1, -1 where none gains."""
    per_node = made.here.shape[1]
    node, local, least = busy // per_node, busy % per_node, (1 - GAIN) * board.time[busy]
    best, with_it = -1, -1
    for i in range(board.start[node], board.start[node + 1]):
        one = board.order[i]
        if board.home[one] != busy or not board.free[one] or made.away[one] + made.near[one] == 0:
            continue
        for j in range(board.start[node], board.start[node + 1]):
            other = board.order[j]
            to, grown = board.home[other], board.tokens[one] - board.tokens[other]
            if to == busy or not board.free[other]:
                continue
            if board.used[to] + grown > board.cap[to] or board.used[busy] - grown > board.cap[busy]:
                continue
            away = made.away[other] - made.away[one]
            more, less = _change(made, one, other, local)
            longer = _time(made, busy, gbs, more, less, away)
            if longer >= least:
                continue
            sent, got = _change(made, other, one, to % per_node)
            longer = max(longer, _time(made, to, gbs, sent, got, -away))
            longer += DEAR * max(0, more + sent) / gbs[0]
            if longer < least:
                best, with_it, least = one, other, longer
    return best, with_it


@lean
def _change(made: LinkTraffic, gone: int, come: int, local: int) -> tuple[int, int]:
    """What a rank, by its number in its node, sends and receives more in its node, with one block for another."""
    leaves, enters = made.here[gone, local], made.here[come, local]
    return (made.near[come] - enters) - (made.near[gone] - leaves), leaves - enters


@lean
def _time(
    made: LinkTraffic, rank: int, gbs: tuple[float, float], sent: int, received: int, away: int
) -> float:
    """Time on a rank's links, with changes of what it sends and receives in its node, and sends to others."""
    within = max(made.sent[0, rank] + sent, made.received[0, rank] + received)
    between = max(made.sent[1, rank] + away, made.received[1, rank])
    return float(within / gbs[0] + between / gbs[1])


@lean
def _swap(home: Ints, made: LinkTraffic, one: int, other: int) -> None:
    for gone, come in ((one, other), (other, one)):
        rank = home[gone]
        near, left = _change(made, gone, come, rank % made.here.shape[1])
        made.sent[0, rank] += near
        made.received[0, rank] += left
        made.sent[1, rank] += made.away[come] - made.away[gone]
    home[one], home[other] = home[other], home[one]
