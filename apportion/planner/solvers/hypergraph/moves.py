"""Parts for the vertices without tokens, once those with tokens have theirs (after Fiduccia and Mattheyses, 1982).

settle  each vertex to the part where it adds least
repair  while a part is above its cap, the vertex that costs least a flop goes from the fullest part to one with room;
        what a hyperedge costs to open there is shared by the vertices that can follow it
refine  moves that gain, within the caps
regroup the same for all vertices at once that a hyperedge has on one part
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.loops.jit import jit, lean
from apportion.planner.solvers.hypergraph.graph import Graph

# Among so many vertices, what costs a flop at most so much more than the cheapest moves along with it: 150 times
# faster for a document of 256 blocks in 8 head groups, for a tenth more bytes.
MANY, NEAR = 20_000, 0.1
# passes of `refine` and `regroup`: later ones gain next to nothing
PASSES = 3


class Board(NamedTuple):
    """By vertex, int64: part; base, the first of the `span` parts it may have; movable, 0 or 1; flops. By part, int64:
    cap, load. pins: int32 [E, parts], vertices of each hyperedge in each part. head, after, before: the movable
    vertices of each part as a list."""

    part: Ints
    base: Ints
    movable: Ints
    flops: Ints
    cap: Ints
    load: Ints
    pins: Ints
    head: Ints
    after: Ints
    before: Ints


def board_of(graph: Graph, part: Ints, base: Ints, movable: Ints, flops: Ints, cap: Ints) -> Board:
    """A Board of vertices with parts, and without (-1) where they are movable."""
    count, parts = len(part), len(cap)
    board = Board(
        part.copy(),
        base,
        movable,
        flops,
        cap,
        np.zeros(parts, np.int64),
        np.zeros((len(graph.price), parts), np.int32),
        np.full(parts, -1, np.int64),
        np.full(count, -1, np.int64),
        np.full(count, -1, np.int64),
    )
    _fill(graph, board)
    return board


@jit
def _fill(graph: Graph, board: Board) -> None:
    for v in range(len(board.part)):
        if board.part[v] >= 0:
            p = board.part[v]
            board.part[v] = -1
            _enter(graph, board, v, p)


@lean
def _enter(graph: Graph, board: Board, v: int, p: int) -> None:
    board.part[v] = p
    board.load[p] += board.flops[v]
    for at in range(graph.of_ptr[v], graph.of_ptr[v + 1]):
        board.pins[graph.of[at], p] += 1
    if board.movable[v]:
        first = board.head[p]
        board.after[v], board.before[v], board.head[p] = first, -1, v
        if first >= 0:
            board.before[first] = v


@lean
def _leave(graph: Graph, board: Board, v: int) -> None:
    p, before, after = board.part[v], board.before[v], board.after[v]
    board.load[p] -= board.flops[v]
    for at in range(graph.of_ptr[v], graph.of_ptr[v + 1]):
        board.pins[graph.of[at], p] -= 1
    if before >= 0:
        board.after[before] = after
    else:
        board.head[p] = after
    if after >= 0:
        board.before[after] = before


@jit
def settle(graph: Graph, board: Board, span: int, order: Ints) -> None:
    """Gives every movable vertex without a part the one where it adds least; among equals the least full. order: int64
    [E], hyperedges, whose vertices are taken together."""
    for index in range(len(order)):
        for at in range(graph.ptr[order[index]], graph.ptr[order[index] + 1]):
            _settle_one(graph, board, span, graph.pins[at])
    for v in range(len(board.part)):
        _settle_one(graph, board, span, v)


@lean
def _settle_one(graph: Graph, board: Board, span: int, v: int) -> None:
    if board.part[v] >= 0 or not board.movable[v]:
        return
    best, least = -1, 0
    for p in range(board.base[v], board.base[v] + span):
        added = _added(graph, board, v, p)
        if best < 0 or added < least or (added == least and _emptier(board, p, best)):
            best, least = p, added
    _enter(graph, board, v, best)


@lean
def _emptier(board: Board, p: int, than: int) -> bool:
    return bool(board.load[p] * board.cap[than] < board.load[than] * board.cap[p])


@lean
def _added(graph: Graph, board: Board, v: int, p: int) -> int:
    """What the hyperedges of v cost more once v is on p, its part left aside."""
    added = 0
    for at in range(graph.of_ptr[v], graph.of_ptr[v + 1]):
        if board.pins[graph.of[at], p] == 0:
            added += graph.price[graph.of[at]]
    return added


@lean
def _saved(graph: Graph, board: Board, v: int) -> int:
    """What the hyperedges of v cost less once v leaves its part."""
    saved = 0
    for at in range(graph.of_ptr[v], graph.of_ptr[v + 1]):
        if board.pins[graph.of[at], board.part[v]] == 1:
            saved += graph.price[graph.of[at]]
    return saved


@jit
def repair(graph: Graph, board: Board, span: int, rounds: int) -> None:
    """Moves vertices out of parts above their cap, until none is, none can leave, or so many rounds are over."""
    group = np.zeros(len(graph.price), np.int64)
    for _ in range(rounds):
        full = int(np.argmax(board.load - board.cap))
        if board.load[full] <= board.cap[full]:
            return
        _weigh(graph, board, full, group)
        v, to, rate = _cheapest(graph, board, span, full, group)
        if v < 0:
            return
        _follow(graph, board, full, v, to, rate, group)


@lean
def _weigh(graph: Graph, board: Board, full: int, group: Ints) -> None:
    """Into group, int64 [E]: the flops of each hyperedge that may leave `full`."""
    group[:] = 0
    v = board.head[full]
    while v >= 0:
        for at in range(graph.of_ptr[v], graph.of_ptr[v + 1]):
            group[graph.of[at]] += board.flops[v]
        v = board.after[v]


@lean
def _cheapest(graph: Graph, board: Board, span: int, full: int, group: Ints) -> tuple[int, int, float]:
    """The vertex that leaves `full`, the part it goes to, and what that costs a flop; -1 where none does. First what
    fits; else what makes the fuller of the two less full than `full` is."""
    excess = board.load[full] - board.cap[full]
    best, to, least, least_over, most = -1, -1, 0.0, 0, 0
    v = board.head[full]
    if v >= 0:  # vertices of one part have one base
        for p in range(board.base[v], board.base[v] + span):
            most = max(most, board.cap[p] - board.load[p])
    while v >= 0:
        if board.flops[v] > 0:
            for p in range(board.base[v], board.base[v] + span):
                room = board.cap[p] - board.load[p]
                over = max(0, board.flops[v] - room)
                if p == full or 4 * room < most or over >= excess:
                    continue
                cost = _rate(graph, board, v, full, p, min(excess, room), group)
                if best < 0 or over < least_over or (over == least_over and cost < least):
                    best, to, least, least_over = v, p, cost, over
        v = board.after[v]
    return best, to, least


@lean
def _rate(graph: Graph, board: Board, v: int, full: int, p: int, wanted: int, group: Ints) -> float:
    """Cost a flop of moving v to p, where others may follow up to `wanted` flops."""
    cost, flops = 0.0, board.flops[v]
    for at in range(graph.of_ptr[v], graph.of_ptr[v + 1]):
        edge = graph.of[at]
        if board.pins[edge, p] == 0:
            cost += graph.price[edge] * flops / max(flops, min(group[edge], wanted))
        if board.pins[edge, full] == 1:
            cost -= graph.price[edge]
    return float(cost / flops)


@lean
def _follow(graph: Graph, board: Board, full: int, v: int, p: int, rate: float, group: Ints) -> None:
    """Moves v to p and, as long as it helps, what shares its dearest new hyperedge and costs no more; or `MANY`."""
    opened = _dearest_new(graph, board, v, p)
    _leave(graph, board, v)
    _enter(graph, board, v, p)
    if opened >= 0:
        for at in range(graph.ptr[opened], graph.ptr[opened + 1]):
            w = graph.pins[at]
            if board.part[w] == full and board.movable[w]:
                _try(graph, board, full, w, p, rate, group)
    if len(board.part) > MANY:
        w = board.head[full]
        while w >= 0:
            after = board.after[w]
            _try(graph, board, full, w, p, rate + NEAR * abs(rate), group)
            w = after


@lean
def _dearest_new(graph: Graph, board: Board, v: int, p: int) -> int:
    """The dearest hyperedge of v that is not on p yet, -1: none."""
    opened, dearest = -1, -1
    for at in range(graph.of_ptr[v], graph.of_ptr[v + 1]):
        edge = graph.of[at]
        if board.pins[edge, p] == 0 and graph.price[edge] > dearest:
            opened, dearest = edge, graph.price[edge]
    return opened


@lean
def _try(graph: Graph, board: Board, full: int, w: int, p: int, limit: float, group: Ints) -> None:
    excess, room = board.load[full] - board.cap[full], board.cap[p] - board.load[p]
    if excess <= 0 or board.flops[w] > room or board.flops[w] == 0:
        return
    if _rate(graph, board, w, full, p, min(excess, room), group) <= limit:
        _leave(graph, board, w)
        _enter(graph, board, w, p)


@jit
def refine(graph: Graph, board: Board, span: int, passes: int) -> None:
    """Moves single vertices where that gains and the cap allows it."""
    for _ in range(passes):
        moved = 0
        for v in range(len(board.part)):
            if not board.movable[v]:
                continue
            saved, best, most = _saved(graph, board, v), -1, 0
            if saved == 0:
                continue
            for p in range(board.base[v], board.base[v] + span):
                if p == board.part[v] or board.load[p] + board.flops[v] > board.cap[p]:
                    continue
                gain = saved - _added(graph, board, v, p)
                if gain > most:
                    best, most = p, gain
            if best >= 0:
                _leave(graph, board, v)
                _enter(graph, board, v, best)
                moved += 1
        if moved == 0:
            return


@jit
def regroup(graph: Graph, board: Board, span: int, passes: int) -> None:
    """Moves what a hyperedge has on one part to another, all at once, where that gains and the cap allows it."""
    added, seen = np.zeros(len(board.cap), np.int64), np.full(len(board.cap), -1, np.int64)
    for _ in range(passes):
        moved = 0
        seen[:] = -1
        for edge in range(len(graph.price)):
            for at in range(graph.ptr[edge], graph.ptr[edge + 1]):
                v = graph.pins[at]
                if not board.movable[v] or seen[board.part[v]] == edge:
                    continue
                seen[board.part[v]] = edge
                to = _better_for_all(graph, board, span, edge, at, added)
                if to >= 0:
                    _move_all(graph, board, edge, at, to)
                    moved += 1
        if moved == 0:
            return


@lean
def _better_for_all(graph: Graph, board: Board, span: int, edge: int, first: int, added: Ints) -> int:
    """The part that is best for the movable vertices that the hyperedge has where its vertex at `first` is, -1: that
    one. Hyperedges that two of them share are counted against it. added: of parts, to work in."""
    p, low = board.part[graph.pins[first]], board.base[graph.pins[first]]
    saved, weight, count = 0, 0, 0
    for at in range(first, graph.ptr[edge + 1]):
        v = graph.pins[at]
        if board.part[v] == p and board.movable[v]:
            saved, weight, count = saved + _saved(graph, board, v), weight + board.flops[v], count + 1
    alone = count == board.pins[edge, p]
    if alone and count > 1:
        saved += graph.price[edge]
    if saved == 0:
        return -1
    added[low : low + span] = 0
    for at in range(first, graph.ptr[edge + 1]):
        v = graph.pins[at]
        if board.part[v] == p and board.movable[v]:
            for index in range(graph.of_ptr[v], graph.of_ptr[v + 1]):
                other = graph.of[index]
                if other != edge:
                    for q in range(low, low + span):
                        if board.pins[other, q] == 0:
                            added[q] += graph.price[other]
    best, most = -1, 0
    for q in range(low, low + span):
        if q == p or board.load[q] + weight > board.cap[q]:
            continue
        gain = saved - added[q] - (graph.price[edge] if board.pins[edge, q] == 0 else 0)
        if gain > most:
            best, most = q, gain
    return best


@lean
def _move_all(graph: Graph, board: Board, edge: int, first: int, to: int) -> None:
    p = board.part[graph.pins[first]]
    for at in range(first, graph.ptr[edge + 1]):
        v = graph.pins[at]
        if board.part[v] == p and board.movable[v]:
            _leave(graph, board, v)
            _enter(graph, board, v, to)
