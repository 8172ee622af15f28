"""Hypergraphs as columns, for the compiled loops of the hypergraph solvers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.loops.jit import jit, lean


class Graph(NamedTuple):
    """ptr, pins: the vertices of each hyperedge as CSR; of_ptr, of: the hyperedges of each vertex; price: int64 [E]."""

    ptr: Ints
    pins: Ints
    of_ptr: Ints
    of: Ints
    price: Ints


def graph_of(ptr: Ints, pins: Ints, price: Ints, vertices: int) -> Graph:
    """A Graph of hyperedges as CSR."""
    return Graph(ptr, pins, *_incidence(ptr, pins, vertices), price)


@jit
def _incidence(ptr: Ints, pins: Ints, vertices: int) -> tuple[Ints, Ints]:
    start = np.zeros(vertices + 1, np.int64)
    for at in range(len(pins)):
        start[pins[at] + 1] += 1
    for v in range(vertices):
        start[v + 1] += start[v]
    place, edges = start[:-1].copy(), np.empty(len(pins), np.int64)
    for edge in range(len(ptr) - 1):
        for at in range(ptr[edge], ptr[edge + 1]):
            v = pins[at]
            edges[place[v]] = edge
            place[v] += 1
    return start, edges


@jit
def components(ptr: Ints, pins: Ints, vertices: int, base: Ints, free: Bools) -> Ints:
    """int64 [V]: the least vertex that hangs together with each; only free vertices of one base do."""
    root = np.arange(vertices)
    for edge in range(len(ptr) - 1):
        last = -1
        for at in range(ptr[edge], ptr[edge + 1]):
            if not free[pins[at]]:
                continue
            v = _top(root, pins[at])
            if last >= 0 and base[last] == base[v] and last != v:
                low, high = min(last, v), max(last, v)
                root[high] = low
                v = low
            last = v
    for v in range(vertices):
        root[v] = _top(root, v)
    return root


@lean
def _top(root: Ints, v: int) -> int:
    while root[v] != v:
        root[v] = root[root[v]]
        v = root[v]
    return v


@jit
def spans(ptr: Ints, pins: Ints, part: Ints, parts: int) -> Ints:
    """int64 [E]: the parts that each hyperedge has vertices in."""
    found, seen = np.zeros(len(ptr) - 1, np.int64), np.full(parts, -1, np.int64)
    for edge in range(len(ptr) - 1):
        for at in range(ptr[edge], ptr[edge + 1]):
            p = part[pins[at]]
            if p >= 0 and seen[p] != edge:
                seen[p] = edge
                found[edge] += 1
    return found
