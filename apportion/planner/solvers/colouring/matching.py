"""A bipartite multigraph into exactly as many matchings as its largest degree.

König (1916): the edges of a bipartite multigraph of largest degree D can be coloured with D colours, so that edges
that meet differ. Edge by edge: a colour free at both ends is taken; where there is none, a colour free at one end is
made free at the other by swapping two colours along an alternating path. FCP (section 4.2) reaches the same count
by repeated maximum matchings.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apportion.ir.arrays import Ints
from apportion.ir.loops.jit import jit, lean
from apportion.planner.solvers.contracts import Colouring, ColouringProblem
from apportion.planner.solvers.status import Budget, Status, Termination

#: colours of a word, and a word with all of them
BITS = 32
ALL = (1 << BITS) - 1


def max_degree(src: Ints, dst: Ints, ranks: int) -> int:
    """The largest number of edges that one rank sends or receives; no schedule has fewer slots."""
    return int(_most(src, dst, ranks)) if len(src) else 0


@jit
def _most(src: Ints, dst: Ints, ranks: int) -> int:
    sent, received = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
    for edge in range(len(src)):
        sent[src[edge]] += 1
        received[dst[edge]] += 1
    return int(max(sent.max(), received.max()))


def matchings(src: Ints, dst: Ints, ranks: int) -> Ints:
    """int32 [E]: the matching of each edge src -> dst, numbered from 0 to `max_degree` - 1.

    src, dst: integers [E] in [0, ranks).
    """
    return _coloured(src, dst, ranks, max_degree(src, dst, ranks))


def solve(problem: ColouringProblem, budget: Budget) -> Colouring:
    """`matchings` behind the contract of its kind: always OPTIMAL. It ends by itself: no budget is looked at."""
    src, dst, ranks = problem.src, problem.dst, problem.ranks
    degree = max_degree(src, dst, ranks)
    end = Termination(Status.OPTIMAL, float(degree), float(degree))
    return Colouring(_coloured(src, dst, ranks, degree), end)


def _coloured(src: Ints, dst: Ints, ranks: int, colours: int) -> Ints:
    if not colours:
        return np.zeros(0, np.int32)
    return _colour(np.ascontiguousarray(src), np.ascontiguousarray(dst), ranks, colours)


@jit
def _colour(src: Ints, dst: Ints, ranks: int, colours: int) -> Ints:
    """Vertices: senders 0..ranks-1, receivers ranks..2*ranks-1. `at[v, c]`: the edge of colour c at v, where that is
    not free; free: bits [vertices, words], of the colours that are; lowest: no word of a vertex before it is free.

    Looking through all colours for one free at both ends costs less than the swaps that it saves."""
    words = (colours + BITS - 1) // BITS
    free = np.full((2 * ranks, words), ALL)
    free[:, words - 1] = ALL >> (words * BITS - colours)
    at = np.empty((2 * ranks, colours), np.int32)
    lowest = np.zeros(2 * ranks, np.int64)
    colour = np.empty(len(src), np.int32)
    for edge in range(len(src)):
        u, v = src[edge], ranks + dst[edge]
        _advance(free, lowest, u)
        _advance(free, lowest, v)
        word = max(lowest[u], lowest[v])
        while word < words and free[u, word] & free[v, word] == 0:
            word += 1
        if word < words:
            taken = word * BITS + _lowest_bit(free[u, word] & free[v, word])
        else:
            # one is free at u, another at v: swap them along the path from v, which cannot reach u
            taken = lowest[u] * BITS + _lowest_bit(free[u, lowest[u]])
            other = lowest[v] * BITS + _lowest_bit(free[v, lowest[v]])
            _swap_path(at, free, lowest, colour, src, dst, ranks, v, taken, other)
        colour[edge] = taken
        _take(at, free, u, taken, edge)
        _take(at, free, v, taken, edge)
    return colour


@jit
def _swap_path(
    at: NDArray[np.int32],
    free: Ints,
    lowest: Ints,
    colour: Ints,
    src: Ints,
    dst: Ints,
    ranks: int,
    start: int,
    a: int,
    b: int,
) -> None:
    """Swap colours `a` and `b` along the path that leaves `start` by `a`; `a` is free there afterwards."""
    vertex, edge, now, then = start, at[start, a], a, b
    _give(free, lowest, start, a)
    while edge >= 0:
        other = ranks + dst[edge] if vertex < ranks else src[edge]
        following = -1 if _is_free(free, other, then) else at[other, then]
        colour[edge] = then
        _take(at, free, vertex, then, edge)
        _take(at, free, other, then, edge)
        if at[other, now] == edge:
            _give(free, lowest, other, now)
        vertex, edge, now, then = other, following, then, now


@lean
def _advance(free: Ints, lowest: Ints, vertex: int) -> None:
    while free[vertex, lowest[vertex]] == 0:
        lowest[vertex] += 1


@lean
def _is_free(free: Ints, vertex: int, colour: int) -> bool:
    return bool(free[vertex, colour // BITS] >> (colour % BITS) & 1 == 1)


@lean
def _take(at: NDArray[np.int32], free: Ints, vertex: int, colour: int, edge: int) -> None:
    at[vertex, colour] = edge
    free[vertex, colour // BITS] &= ~(1 << (colour % BITS))


@lean
def _give(free: Ints, lowest: Ints, vertex: int, colour: int) -> None:
    free[vertex, colour // BITS] |= 1 << (colour % BITS)
    lowest[vertex] = min(lowest[vertex], colour // BITS)


@lean
def _lowest_bit(bits: int) -> int:
    """The place of the lowest bit that is set; bits: in (0, ALL]."""
    place = 0
    for half in (16, 8, 4, 2, 1):
        if bits & ((1 << half) - 1) == 0:
            bits >>= half
            place += half
    return place
