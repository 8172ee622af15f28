"""Coarsens hypergraphs: merges vertices whose neighbours are on the same parts, as far as their parts are known.

All cells of a long document with queries on one rank and keys on another form a rectangle; it is cut into pieces of one
or several rows. Pieces then move as a whole and share the price of their hyperedges.
"""

from __future__ import annotations

import numpy as np

from apportion.ir.arrays import Ints, group_of, offsets
from apportion.planner.solvers.hypergraph.graph import Graph, graph_of


def merge(graph: Graph, part: Ints, base: Ints, flops: Ints, limit: int) -> Ints:
    """int64 [V]: the merged vertex of each vertex, numbered from 0; those with a part (not -1) stay unmerged.

    Free vertices of one `base` are merged, by hyperedge, if their costliest hyperedges lead to the same part, and their
    cheapest ones too; a merged vertex has up to 1/`limit` of the free vertices' flops.
    """
    free = part < 0
    edge_of = group_of(np.diff(graph.ptr))
    owner = np.full(len(graph.price) + 1, -1, np.int64)  # plus one for vertices without hyperedges
    is_fixed = ~free[graph.pins]
    owner[edge_of[is_fixed]] = part[graph.pins[is_fixed]]
    order = np.argsort(graph.price[edge_of], kind="stable")
    costliest, cheapest = (np.full(len(part), len(graph.price), np.int64) for _ in range(2))
    costliest[graph.pins[order]] = edge_of[order]  # the last assignment wins
    cheapest[graph.pins[order[::-1]]] = edge_of[order[::-1]]
    group_keys = (base, owner[costliest], owner[cheapest])
    order = np.lexsort((cheapest, costliest, *group_keys[::-1], free))
    chunk = np.cumsum(np.where(free, flops, 0)[order]) // max(1, int(flops[free].sum()) // limit)
    is_first = ~free[order]
    is_first[:1] = True
    for column in (chunk, *(key[order] for key in group_keys), free[order]):
        is_first[1:] |= column[1:] != column[:-1]
    cluster = np.empty(len(part), np.int64)
    cluster[order] = np.cumsum(is_first) - 1
    return cluster


def contract(graph: Graph, cluster: Ints, count: int) -> Graph:
    """The hypergraph of `count` merged vertices; all hyperedges are kept, with each vertex once. cluster: int64 [V]."""
    edge_of = group_of(np.diff(graph.ptr))
    pairs = np.unique(edge_of * count + cluster[graph.pins])
    ptr = offsets(np.bincount(pairs // count, minlength=len(graph.price)))
    return graph_of(ptr, pairs % count, graph.price, count)
