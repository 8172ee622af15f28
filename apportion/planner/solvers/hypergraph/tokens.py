"""Homes for the vertices that have tokens, before anything else is decided (DCP, section 4.2, fixes tokens and compute
at once; no partitioner keeps both balances, so here tokens come first).

Every vertex without tokens is counted with the one it is dearest tied to (compute with its queries), which makes
clusters of two weights. Clusters are placed by falling density, flops a token; what hangs together and is small is
placed as one. A cluster goes where its hyperedges already are, unless that rank would end with too many flops if its
free room filled up with the average of what is left: so dense clusters spread, and sparse ones fill up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Ints, offsets
from apportion.ir.loops.jit import jit, lean
from apportion.planner.solvers.contracts import HypergraphProblem
from apportion.planner.solvers.hypergraph.graph import Graph, components, graph_of

# what hangs together is placed as one where it takes at most this share of a part's cap, in both weights
WHOLE_SHARE = 0.5
# Of 0.5 to 50: from 1 to 8 bytes hardly differ, but with less a few ranks send and receive most of them. Exchanging
# homes afterwards evens that, in nodes (`place/dcp/links.py`).
SPREAD = 4.0


@dataclass(frozen=True)
class Clusters:
    """vertex: int64 [C], the vertex with tokens; flops, tokens: int64 [C]; hyperedges over clusters as CSR, those with
    a single one left out."""

    vertex: Ints
    flops: Ints
    tokens: Ints
    ptr: Ints
    pins: Ints
    price: Ints
    fixed: Ints


class _PartLoads(NamedTuple):
    """part, base: int64 [C]; by part, int64: caps, load (flops), used (tokens), flops and tokens that are still to be
    placed from it (as a base) on; seen: int8 [E, parts], whether a hyperedge is there."""

    part: Ints
    base: Ints
    flops_cap: Ints
    tokens_cap: Ints
    load: Ints
    used: Ints
    rest_flops: Ints
    rest_tokens: Ints
    seen: Ints


def place_tokens(problem: HypergraphProblem, spread: float = SPREAD) -> Ints:
    """int64 [V]: the rank of each vertex with tokens, nodes first; -1: of others, and where no rank had room.

    spread: how much flops above a cap count, against hyperedges that are torn, in mean prices a flop."""
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
    """Clusters of a problem."""
    vertex = np.flatnonzero((problem.tokens > 0) | (problem.bound_to >= 0))
    index = np.full(len(problem.flops), -1, np.int64)
    index[vertex] = np.arange(len(vertex))
    anchor = _anchors(problem.ptr, problem.pins, problem.price, index)
    ptr, pins = _contract(problem.ptr, problem.pins, anchor, len(vertex))
    wide = np.diff(ptr) > 1
    tied = np.flatnonzero(anchor >= 0)
    flops = np.zeros(len(vertex), np.int64)
    np.add.at(flops, anchor[tied], problem.flops[tied])
    ends = offsets(np.diff(ptr)[wide])
    kept = pins[np.repeat(wide, np.diff(ptr))]
    return Clusters(
        vertex, flops, problem.tokens[vertex], ends, kept, problem.price[wide], problem.bound_to[vertex]
    )


def _level(
    clusters: Clusters, fixed: Ints, base: Ints, span: int, caps: tuple[Ints, Ints], spread: float
) -> Ints:
    """int64 [C]: the part of each cluster among [base, base + span), -1 where none had room."""
    part = np.where(base < 0, -2, fixed)
    item, order = _items(clusters, part, base, *caps)
    graph = graph_of(clusters.ptr, clusters.pins, clusters.price, len(part))
    rate = spread * float(clusters.price.sum()) / max(1.0, float(clusters.flops.sum()))
    load, used, rest_flops, rest_tokens = np.zeros((4, len(caps[0])), np.int64)
    seen = np.zeros((len(clusters.price), len(caps[0])), np.int8)
    parts = _PartLoads(part, np.maximum(base, 0), *caps, load, used, rest_flops, rest_tokens, seen)
    _place(order, item, clusters.flops, clusters.tokens, graph, span, rate, parts)
    return np.maximum(part, -1)


def _items(
    clusters: Clusters, part: Ints, base: Ints, flops_cap: Ints, tokens_cap: Ints
) -> tuple[Ints, Ints]:
    """item: int64 [C], the component that a cluster is placed with, or -1 - its number where it is placed alone;
    order: clusters by falling density of the item."""
    count = len(clusters.vertex)
    root = components(clusters.ptr, clusters.pins, count, base, part == -1)
    flops, tokens = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.add.at(flops, root, clusters.flops)
    np.add.at(tokens, root, clusters.tokens)
    small = (flops <= WHOLE_SHARE * flops_cap.min()) & (tokens <= WHOLE_SHARE * tokens_cap.min())
    whole = small[root]
    item = np.where(whole, root, -1 - np.arange(count))
    density = np.where(whole, flops[root], clusters.flops) / np.maximum(
        1, np.where(whole, tokens[root], clusters.tokens)
    )
    return item, np.lexsort((np.arange(count), root, -density))


@jit
def _anchors(ptr: Ints, pins: Ints, price: Ints, index: Ints) -> Ints:
    """int64 [V]: the cluster of each vertex, by the dearest hyperedge that has one; -1: none."""
    anchor, best = index.copy(), np.full(len(index), -1, np.int64)
    for edge in range(len(price)):
        first = -1
        for at in range(ptr[edge], ptr[edge + 1]):
            if index[pins[at]] >= 0:
                first = index[pins[at]]
                break
        if first < 0:
            continue
        for at in range(ptr[edge], ptr[edge + 1]):
            v = pins[at]
            if index[v] < 0 and price[edge] > best[v]:
                anchor[v], best[v] = first, price[edge]
    return anchor


@jit
def _contract(ptr: Ints, pins: Ints, anchor: Ints, clusters: int) -> tuple[Ints, Ints]:
    """Hyperedges over clusters, each once."""
    edges, count = len(ptr) - 1, 0
    starts, held, seen = np.zeros(edges + 1, np.int64), np.empty(len(pins), np.int64), np.full(clusters, -1)
    for edge in range(edges):
        for at in range(ptr[edge], ptr[edge + 1]):
            c = anchor[pins[at]]
            if c >= 0 and seen[c] != edge:
                seen[c] = edge
                held[count] = c
                count += 1
        starts[edge + 1] = count
    return starts, held[:count].copy()


@jit
def _place(
    order: Ints,
    item: Ints,
    flops: Ints,
    tokens: Ints,
    graph: Graph,
    span: int,
    rate: float,
    parts: _PartLoads,
) -> None:
    """Fills `parts.part` where it is -1, item after item."""
    for v in range(len(order)):
        if parts.part[v] >= 0:
            _enter(v, parts.part[v], flops, tokens, graph, parts)
        elif parts.part[v] == -1:
            parts.rest_flops[parts.base[v]] += flops[v]
            parts.rest_tokens[parts.base[v]] += tokens[v]
    at = 0
    while at < len(order):
        end = at + 1
        while end < len(order) and item[order[at]] >= 0 and item[order[end]] == item[order[at]]:
            end += 1
        if parts.part[order[at]] == -1:
            to = _cheapest(order[at:end], flops, tokens, graph, span, rate, parts)
            for index in range(at, end):
                alone = order[index : index + 1]
                p = to if to >= 0 else _cheapest(alone, flops, tokens, graph, span, rate, parts)
                if p >= 0:
                    _enter(order[index], p, flops, tokens, graph, parts)
                    parts.rest_flops[parts.base[order[index]]] -= flops[order[index]]
                    parts.rest_tokens[parts.base[order[index]]] -= tokens[order[index]]
        at = end


@lean
def _enter(v: int, p: int, flops: Ints, tokens: Ints, graph: Graph, parts: _PartLoads) -> None:
    parts.part[v] = p
    parts.load[p] += flops[v]
    parts.used[p] += tokens[v]
    for at in range(graph.of_ptr[v], graph.of_ptr[v + 1]):
        parts.seen[graph.of[at], p] = 1


@lean
def _cheapest(
    members: Ints, flops: Ints, tokens: Ints, graph: Graph, span: int, rate: float, parts: _PartLoads
) -> int:
    """The part where the members cost least, -1 where none has room for their tokens."""
    weight, size, low = 0, 0, parts.base[members[0]]
    for index in range(len(members)):
        weight += flops[members[index]]
        size += tokens[members[index]]
    density = parts.rest_flops[low] / max(1, parts.rest_tokens[low])
    best, least, least_end = -1, 0.0, 0.0
    for p in range(low, low + span):
        room = parts.tokens_cap[p] - parts.used[p] - size
        if room < 0:
            continue
        cap = max(1, parts.flops_cap[p])
        end = (parts.load[p] + weight + room * density) / cap
        cost = max(0.0, end - 1.0) * cap * rate
        if len(members) == 1:  # what hangs together has nothing elsewhere
            for at in range(graph.of_ptr[members[0]], graph.of_ptr[members[0] + 1]):
                if parts.seen[graph.of[at], p] == 0:
                    cost += graph.price[graph.of[at]]
        if best < 0 or cost < least or (cost == least and end < least_end):
            best, least, least_end = p, cost, end
    return best
