"""Balanced k-way partitioning of hypergraphs under two constraints, nodes before ranks (DCP, section 4.2).

Vertices with tokens are placed together with those most connected to them (`tokens`), then the others separately, and
both balances are repaired (the compiled core's `hypergraph_moves.cpp`), first over nodes, then over the ranks of each.
Finally all vertices change ranks jointly (`hypergraph_joint.cpp`). An engine may replace the first two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion._core import hypergraph as core
from apportion.ir.arrays import Floats, Ints, group_of, offsets
from apportion.planner.solvers.contracts import HypergraphProblem, VertexRanks
from apportion.planner.solvers.hypergraph.coarse import contract, merge
from apportion.planner.solvers.hypergraph.graph import Graph, graph_of
from apportion.planner.solvers.hypergraph.tokens import place_tokens
from apportion.planner.solvers.status import Budget, Limit, Status, Termination

#: (problem, rank of the vertices with tokens) -> a rank for every vertex, and the limit that ended the search
Engine = Callable[[HypergraphProblem, Ints], tuple[Ints, Limit | None]]

# Free vertices are merged down to about this many per rank (4 to 128 were tried, for log-normal batches).
PIECES = 16
# Cost of spanning one more node relative to one more rank: links between nodes are about this much slower.
FAR = 10
# rounds of hashing that distinguish vertices by their neighbourhoods
_ROUNDS = 3
_ODD = np.uint64(0x9E3779B97F4A7C15)


def solve(problem: HypergraphProblem, budget: Budget) -> VertexRanks:
    """The greedy solver; it ignores the budget."""
    return partition(problem, lambda case, homes: (spread(case, homes), None))


def initial_ranks(problem: HypergraphProblem) -> Ints:
    """int64 [V]: the greedy's initial answer if all vertices with tokens are fixed; for comparing homes. Depends on
    the order of the vertices."""
    return spread(problem, problem.required, thorough=False)


def partition(
    problem: HypergraphProblem,
    engine: Engine,
    place_homes: Callable[[HypergraphProblem], Ints] = place_tokens,
) -> VertexRanks:
    """Places vertices with tokens by `place_homes` (-1: no room), the rest by `engine`; then refines all and checks.

    FEASIBLE if both constraints hold at both levels, OPTIMAL if the value equals the bound, else NO_SOLUTION, or
    INFEASIBLE if fixed vertices, or a single vertex, exceed a limit.
    """
    bound = lower_bound(problem)
    if _is_hopeless(problem):
        return _no_answer(problem, Termination(Status.INFEASIBLE, bound))
    order, case = canonical(problem)
    homes = place_homes(case)
    if (homes[case.tokens > 0] < 0).any():
        return _no_answer(problem, Termination(Status.NO_SOLUTION, bound))
    result, limit = engine(case, homes)
    if not is_valid(case, result):
        return _no_answer(problem, Termination(Status.NO_SOLUTION, bound, limit=limit))
    rank = np.empty(len(order), np.int64)
    rank[order] = refine_jointly(case, result)
    return answer(problem, rank, bound, limit)


def spread(problem: HypergraphProblem, homes: Ints, thorough: bool = True) -> Ints:
    """int64 [V]: ranks for all vertices, given the homes of those with tokens; nodes first. thorough: try all methods
    of `level`."""
    per_node, free = problem.ranks_per_node, homes < 0
    graph = graph_of(problem.ptr, problem.pins, problem.price, len(homes))
    node = np.where(free, -1, homes // per_node)
    zero = np.zeros(len(homes), np.int64)
    if problem.nodes > 1:
        node = level(graph, problem, node, zero, problem.nodes, problem.flops_caps[0], thorough)
    else:
        node = zero
    base = node * per_node
    return level(graph, problem, homes, base, per_node, problem.flops_caps[1], thorough)


def level(
    graph: Graph,
    problem: HypergraphProblem,
    part: Ints,
    base: Ints,
    span: int,
    cap: Ints,
    thorough: bool = True,
) -> Ints:
    """int64 [V]: the parts; each free vertex gets one in [base, base + span), and repair may move others without
    tokens. thorough: move groups of vertices too and, if the parts are ranks, start from merged vertices as well."""
    movable, flops = (problem.tokens == 0) & (problem.required < 0), problem.flops
    arguments = base, movable, flops, cap, span
    result = core.spread(graph, part, arguments, thorough)
    is_small = len(cap) < problem.ranks or (part < 0).sum() <= PIECES * len(cap)
    if is_small or not thorough:
        return result
    coarse = _spread_pieces(graph, flops, part, base, span, cap)
    return better_parts(problem, result, core.spread(graph, coarse, arguments, True), cap)


def better_parts(problem: HypergraphProblem, first: Ints, second: Ints, cap: Ints) -> Ints:
    """The parts, int64 [V], with the smaller excess over the caps, then the smaller value; `first` among equals."""

    def merit(part: Ints) -> tuple[float, float]:
        excess = np.bincount(part, problem.flops, len(cap)) - cap
        return max(0.0, float(excess.max())), connectivity(problem, part, len(cap))

    return min(first, second, key=merit)


def _spread_pieces(graph: Graph, flops: Ints, part: Ints, base: Ints, span: int, cap: Ints) -> Ints:
    """The parts after moving free vertices in pieces: better for long sequences over many ranks, worse for others."""
    free = part < 0
    cluster = merge(graph, part, base, flops, PIECES * len(cap))
    count = int(cluster.max()) + 1
    cluster_part, cluster_base, weight = (np.zeros(count, np.int64) for _ in range(3))
    movable = np.zeros(count, bool)
    cluster_part[cluster], cluster_base[cluster], movable[cluster] = part, base, free
    np.add.at(weight, cluster, flops)
    coarse = contract(graph, cluster, count)
    return core.spread(coarse, cluster_part, (cluster_base, movable, weight, cap, span), True)[cluster]


def refine_jointly(problem: HypergraphProblem, rank: Ints) -> Ints:
    """int64 [V]: the ranks of an answer after improving joint moves of homes and compute. If a hyperedge spans one more
    node, this costs as much as FAR more ranks."""
    graph, movable = graph_of(problem.ptr, problem.pins, problem.price, len(rank)), problem.required < 0
    caps = (problem.flops_caps[1], problem.tokens_caps[1], problem.flops_caps[0], problem.tokens_caps[0])
    arguments = movable, problem.flops, problem.tokens, *caps, problem.ranks_per_node, FAR
    return core.refine_together(graph, rank, arguments)


def polish(problem: HypergraphProblem, rank: Ints, limit: Limit | None) -> VertexRanks:
    """The answer after improving moves from `rank`, int64 [V], which must meet both constraints."""
    graph, span = graph_of(problem.ptr, problem.pins, problem.price, len(rank)), problem.ranks_per_node
    movable = (problem.tokens == 0) & (problem.required < 0)
    arguments = rank // span * span, movable, problem.flops, problem.flops_caps[1], span
    result = core.polish(graph, rank, arguments)
    return answer(problem, result, lower_bound(problem), limit)


def is_valid(problem: HypergraphProblem, rank: Ints) -> bool:
    """True if every vertex has a rank, the required one if fixed, and both constraints hold for nodes and ranks."""
    fixed = problem.required
    if (rank < 0).any() or (rank >= problem.ranks).any() or (rank != fixed)[fixed >= 0].any():
        return False
    for weights, caps in ((problem.flops, problem.flops_caps), (problem.tokens, problem.tokens_caps)):
        sums = np.zeros(problem.ranks, np.int64)
        np.add.at(sums, rank, weights)
        if (sums > caps[1]).any() or (sums.reshape(problem.nodes, -1).sum(1) > caps[0]).any():
            return False
    return True


def answer(problem: HypergraphProblem, rank: Ints, bound: float, limit: Limit | None) -> VertexRanks:
    """An answer with its values."""
    value = connectivity(problem, rank, problem.ranks)
    inter_bytes = connectivity(problem, rank // problem.ranks_per_node, problem.nodes)
    status = Status.OPTIMAL if value <= bound else Status.FEASIBLE
    end = Termination(status, min(bound, value), value, None if status is Status.OPTIMAL else limit)
    flops = imbalance(rank, problem.flops, problem.flops_shares)
    return VertexRanks(rank, inter_bytes, flops, imbalance(rank, problem.tokens, problem.tokens_shares), end)


def imbalance(rank: Ints, weights: Ints, shares: Floats) -> float:
    """The fullest rank over its share, less 1; 0 if there is no weight."""
    sums = np.bincount(rank, weights, len(shares))
    total = float(sums.sum())
    return float((sums / shares).max() * shares.sum() / total - 1) if total else 0.0


def connectivity(problem: HypergraphProblem, part: Ints, parts: int) -> float:
    """The sum of price times (parts spanned - 1)."""
    span = core.spans((problem.ptr, problem.pins, problem.price), part, parts)
    return float((problem.price * np.maximum(span - 1, 0)).sum())


def lower_bound(problem: HypergraphProblem) -> float:
    """Lower bound: a hyperedge spans at least the ranks of its fixed vertices, and a connected component that needs n
    ranks has n - 1 crossings of hyperedges, each at least as expensive as the component's cheapest hyperedge."""
    fixed = problem.required
    edge_bound = connectivity(problem, fixed, problem.ranks)
    count = len(fixed)
    root = core.components((problem.ptr, problem.pins, problem.price), np.zeros(count, np.int64))
    part_counts = np.ones(count, np.int64)
    for weights, caps in ((problem.flops, problem.flops_caps), (problem.tokens, problem.tokens_caps)):
        total = np.zeros(count, np.int64)
        np.add.at(total, root, weights)
        part_counts = np.maximum(part_counts, -(-total // max(1, int(caps[1].max()))))
    nonempty = np.diff(problem.ptr) > 0
    cheapest = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(cheapest, root[problem.pins[problem.ptr[:-1][nonempty]]], problem.price[nonempty])
    split = np.flatnonzero(part_counts > 1)
    split = split[cheapest[split] < np.iinfo(np.int64).max]
    return max(edge_bound, float(((part_counts[split] - 1) * cheapest[split]).sum()))


def canonical(problem: HypergraphProblem) -> tuple[Ints, HypergraphProblem]:
    """Sorts vertices and hyperedges by hashes of their weights and neighbourhoods, so that the value does not depend on
    their original order. Returns the order of the vertices and the problem in that order."""
    mark, edge_mark = _marks(problem)
    order, edges = np.argsort(mark, kind="stable"), np.argsort(edge_mark, kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    sizes = np.diff(problem.ptr)
    ptr = offsets(sizes[edges])
    pin_index = np.arange(len(problem.pins)) + np.repeat(problem.ptr[:-1][edges] - ptr[:-1], sizes[edges])
    pins = number[problem.pins[pin_index]]
    pins = pins[np.lexsort((pins, np.repeat(np.arange(len(sizes)), sizes[edges])))]
    return order, replace(
        problem,
        flops=problem.flops[order],
        tokens=problem.tokens[order],
        ptr=ptr,
        pins=pins,
        price=problem.price[edges],
        fixed=None if problem.fixed is None else problem.fixed[order],
    )


def _marks(problem: HypergraphProblem) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    edge_of = group_of(np.diff(problem.ptr))
    vertex_mark = _mix(problem.flops, problem.tokens, problem.required)
    price = _mix(problem.price)
    edge_mark = price
    for _ in range(_ROUNDS):
        sums = np.zeros(len(price), np.uint64)
        np.add.at(sums, edge_of, vertex_mark[problem.pins])
        edge_mark = _mix(price, sums)
        edge_sums = np.zeros(len(vertex_mark), np.uint64)
        np.add.at(edge_sums, problem.pins, edge_mark[edge_of])
        vertex_mark = _mix(vertex_mark, edge_sums)
    return vertex_mark, edge_mark


def _mix(*columns: NDArray[Any]) -> NDArray[np.uint64]:
    """uint64 [n]: a hash of each row (the finaliser of splitmix64)."""
    mark = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        mark = (mark ^ column.astype(np.uint64)) + _ODD
        mark = (mark ^ (mark >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mark = (mark ^ (mark >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mark ^= mark >> np.uint64(31)
    return mark


def _is_hopeless(problem: HypergraphProblem) -> bool:
    """True if a vertex exceeds every rank's limit, or the vertices fixed to a rank or node exceed its limit."""
    fixed = problem.required
    for weights, caps in ((problem.flops, problem.flops_caps), (problem.tokens, problem.tokens_caps)):
        sums = np.zeros(problem.ranks, np.int64)
        np.add.at(sums, fixed[fixed >= 0], weights[fixed >= 0])
        nodes = sums.reshape(problem.nodes, -1).sum(1)
        if weights.max(initial=0) > caps[1].max() or (sums > caps[1]).any() or (nodes > caps[0]).any():
            return True
    return False


def _no_answer(problem: HypergraphProblem, end: Termination) -> VertexRanks:
    unassigned = np.full(len(problem.flops), -1, np.int64)
    return VertexRanks(unassigned, float("inf"), float("inf"), float("inf"), end)
