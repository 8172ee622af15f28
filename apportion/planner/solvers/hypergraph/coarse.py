"""Coarser hypergraphs: vertices that have the same neighbours, as far as parts are known, become one.

Of a long document, all cells with their queries on one rank and their keys on another make a rectangle; it is cut into
pieces of a row or several. What moves then are pieces, which share the price of their hyperedges.
"""

from __future__ import annotations

import numpy as np

from apportion.ir.arrays import Ints, group_of, offsets
from apportion.planner.solvers.hypergraph.graph import Graph, graph_of


def merge(graph: Graph, part: Ints, base: Ints, flops: Ints, most: int) -> Ints:
    """int64 [V]: the vertex that each becomes, numbered from 0; those with a part (not -1) stay alone.

    Free ones of one base, whose dearest and cheapest hyperedges have their homes on the same parts, are merged, by
    hyperedge, up to 1/most of all flops."""
    free = part < 0
    edge_of = group_of(np.diff(graph.ptr))
    owner = np.full(len(graph.price) + 1, -1, np.int64)  # one more, of vertices without any
    held = ~free[graph.pins]
    owner[edge_of[held]] = part[graph.pins[held]]
    order = np.argsort(graph.price[edge_of], kind="stable")
    dear, cheap = (np.full(len(part), len(graph.price), np.int64) for _ in range(2))
    dear[graph.pins[order]] = edge_of[order]  # the last assignment wins
    cheap[graph.pins[order[::-1]]] = edge_of[order[::-1]]
    around = (base, owner[dear], owner[cheap])
    order = np.lexsort((cheap, dear, *around[::-1], free))
    chunk = np.cumsum(np.where(free, flops, 0)[order]) // max(1, int(flops[free].sum()) // most)
    fresh = ~free[order]
    fresh[:1] = True
    for column in (chunk, *(key[order] for key in around), free[order]):
        fresh[1:] |= column[1:] != column[:-1]
    merged = np.empty(len(part), np.int64)
    merged[order] = np.cumsum(fresh) - 1
    return merged


def contract(graph: Graph, merged: Ints, count: int) -> Graph:
    """The hypergraph of `count` merged vertices, int64 [V]; hyperedges stay, each vertex once in each."""
    edge_of = group_of(np.diff(graph.ptr))
    pairs = np.unique(edge_of * count + merged[graph.pins])
    ptr = offsets(np.bincount(pairs // count, minlength=len(graph.price)))
    return graph_of(ptr, pairs % count, graph.price, count)
