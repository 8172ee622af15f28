"""Homes for the vertices with tokens, decided first (DCP, section 4.2, places tokens and compute together, but no
partitioner keeps both balances).

Every vertex without tokens joins the one to which its connection is most expensive (compute joins its queries): so
clusters have two weights. Clusters are placed by decreasing density, flops per token; small connected components are
placed as one. A cluster goes to the rank of its hyperedges, unless that rank would have too many flops after filling
its room with average remaining clusters: so dense clusters spread, and sparse ones fill up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion._core import hypergraph as core
from apportion.ir.arrays import Ints
from apportion.planner.solvers.contracts import HypergraphProblem
from apportion.planner.solvers.hypergraph.graph import graph_of

# Of values from 0.5 to 50, those from 1 to 8 hardly differ in bytes; with smaller ones a few ranks send and receive
# most of the bytes. Exchanging homes afterwards evens that out inside nodes (`place/dcp/links.py`).
SPREAD = 4.0


@dataclass(frozen=True)
class Clusters:
    """Clusters of vertices. vertex: int64 [C], the vertex with tokens; flops, tokens: int64 [C]; hyperedges over
    clusters as CSR, without those inside a single cluster."""

    vertex: Ints
    flops: Ints
    tokens: Ints
    ptr: Ints
    pins: Ints
    price: Ints
    fixed: Ints


def place_tokens(problem: HypergraphProblem, spread: float = SPREAD) -> Ints:
    """int64 [V]: the rank of each vertex with tokens, nodes first; -1 for others, and if no rank has room.

    spread: cost of flops above a cap relative to cut hyperedges, in mean prices per flop.
    """
    clusters = cluster(problem)
    per_node, count = problem.ranks_per_node, len(clusters.vertex)
    node_fixed = np.where(clusters.fixed < 0, -1, clusters.fixed // per_node)
    caps = [*zip(problem.flops_caps, problem.tokens_caps, strict=True)]
    zero: Ints = np.zeros(count, np.int64)
    node = zero
    if problem.nodes > 1:
        node = _level(clusters, node_fixed, zero, problem.nodes, caps[0], spread)
    base = np.where(node < 0, -1, node * per_node)
    home = _level(clusters, clusters.fixed, base, per_node, caps[1], spread)
    rank = np.full(len(problem.flops), -1, np.int64)
    rank[clusters.vertex] = home
    return rank


def cluster(problem: HypergraphProblem) -> Clusters:
    """Builds the clusters of a problem."""
    vertex = np.flatnonzero((problem.tokens > 0) | (problem.required >= 0))
    index = np.full(len(problem.flops), -1, np.int64)
    index[vertex] = np.arange(len(vertex))
    edges = problem.ptr, problem.pins, problem.price
    flops, ptr, pins, price = core.clusters(edges, problem.flops, index, len(vertex))
    return Clusters(vertex, flops, problem.tokens[vertex], ptr, pins, price, problem.required[vertex])


def _level(
    clusters: Clusters, fixed: Ints, base: Ints, span: int, caps: tuple[Ints, Ints], spread: float
) -> Ints:
    """int64 [C]: the part of each cluster, in [base, base + span); -1 if no part has room."""
    part, low = np.where(base < 0, -2, fixed), np.maximum(base, 0)
    graph = graph_of(clusters.ptr, clusters.pins, clusters.price, len(part))
    rate = spread * float(clusters.price.sum()) / max(1.0, float(clusters.flops.sum()))
    arguments = clusters.flops, clusters.tokens, low, *caps, span
    return np.maximum(core.place(graph, part, arguments, rate), -1)
