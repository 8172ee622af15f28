"""Mt-KaHyPar (Gottesbüren et al., 2022): homes and compute together, then compute again with fixed homes.

It supports one weight per vertex and one bound. So first a vertex weighs its compute + token shares; parts are about
even in the sum; vertices whose tokens do not fit their part are placed by our greedy solver. Then all vertices with
tokens are fixed, with weight 1 (0 makes it hang or crash); others weigh their compute. It assigns nodes, then ranks
of all nodes, each time in a child process with one thread; results are checked and repaired, since they may be
unbalanced. If it fails or crashes, the greedy's moves are used, and the result's limit is `engine`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO

import numpy as np

from apportion.ir.arrays import Ints, group_of, offsets
from apportion.planner.solvers.contracts import HypergraphProblem, VertexRanks
from apportion.planner.solvers.hypergraph import mtkahypar_child
from apportion.planner.solvers.hypergraph.coarse import merge
from apportion.planner.solvers.hypergraph.graph import Graph, graph_of
from apportion.planner.solvers.hypergraph.mtkahypar_child import Job, read, write
from apportion.planner.solvers.hypergraph.solver import better_parts, level, partition
from apportion.planner.solvers.hypergraph.tokens import place_tokens
from apportion.planner.solvers.status import Budget, Limit

# Free vertices of a job are merged down to about this many. On 64 ranks (48,000 cells) 1,000 took 13 s and 10,000 took
# 51 s, without any gain.
MOST_VERTICES = 1_000
# the engine's weights and the sum of its prices are 32-bit
_LARGEST = 2**30
# units per rank's share in the combined weight
_UNITS = 1e6
# run by path, without its folder on the import path
_COMMAND = (sys.executable, "-P", mtkahypar_child.__file__)


def solve(problem: HypergraphProblem, budget: Budget) -> VertexRanks:
    """Solves with the engine."""
    return partition(problem, _spread, _homes)


def _homes(problem: HypergraphProblem) -> Ints:
    """int64 [V]: ranks of vertices with tokens, -1 for others and if no rank has room."""
    fixed, has_tokens = problem.required, problem.tokens > 0
    if not (has_tokens & (fixed < 0)).any():
        return place_tokens(problem)
    combined = _single_weight_problem(problem)
    part, limit = _parts(combined, fixed)
    if limit is not None:
        return place_tokens(problem)
    requested = np.where(has_tokens, part, -1)
    token_sums = np.zeros(problem.ranks, np.int64)
    np.add.at(token_sums, fixed[fixed >= 0], problem.tokens[fixed >= 0])
    for v in np.flatnonzero(has_tokens & (fixed < 0)).tolist():
        token_sums[requested[v]] += problem.tokens[v]
        if token_sums[requested[v]] > problem.tokens_caps[1][requested[v]]:
            token_sums[requested[v]] -= problem.tokens[v]
            requested[v] = -1
    return place_tokens(replace(problem, fixed=np.where(has_tokens, requested, fixed)))


def _single_weight_problem(problem: HypergraphProblem) -> HypergraphProblem:
    """The problem with one weight per vertex: the sum of its shares of compute and of tokens, in millionths of a
    rank's share."""
    weights = np.zeros(len(problem.flops))
    for column in (problem.flops, problem.tokens):
        weights += column * (_UNITS * problem.ranks / max(1, int(column.sum())))
    slack = (
        max(problem.flops_slack[0], problem.tokens_slack[0]),
        max(problem.flops_slack[1], problem.tokens_slack[1]),
    )
    no_tokens = np.zeros_like(problem.tokens)
    return replace(problem, flops=np.rint(weights).astype(np.int64), tokens=no_tokens, flops_slack=slack)


def _parts(problem: HypergraphProblem, homes: Ints) -> tuple[Ints, Limit | None]:
    """Ranks from the engine, without repair: nodes first, then their ranks; and the limit if the engine fails."""
    graph = graph_of(problem.ptr, problem.pins, problem.price, len(homes))
    per_node, first = problem.ranks_per_node, np.zeros(len(homes), np.int64)
    node, limit = np.where(homes < 0, -1, homes // per_node), None
    if problem.nodes > 1:
        groups = [(np.arange(len(homes)), 0)]
        limit = _assign(graph, problem, groups, node, first, problem.flops_caps[0], problem.nodes)
        if limit is not None:
            return homes, limit
    else:
        node = first
    rank = homes.copy()
    members = [(np.flatnonzero(node == n), n * per_node) for n in range(problem.nodes)]
    limit = _assign(graph, problem, members, rank, node * per_node, problem.flops_caps[1], per_node)
    return np.where(rank < 0, node * per_node, rank), limit


def _spread(problem: HypergraphProblem, homes: Ints) -> tuple[Ints, Limit | None]:
    """Like the greedy's `spread`: nodes, then ranks."""
    per_node, count = problem.ranks_per_node, len(homes)
    node: Ints = np.zeros(count, np.int64)
    limit = None
    if problem.nodes > 1:
        part = np.where(homes < 0, -1, homes // per_node)
        groups = [(np.arange(count), 0)]
        node, limit = _level(problem, groups, part, node, problem.flops_caps[0], problem.nodes)
    members = [(np.flatnonzero(node == n), n * per_node) for n in range(problem.nodes)]
    rank, rank_limit = _level(problem, members, homes, node * per_node, problem.flops_caps[1], per_node)
    return rank, limit or rank_limit


def _level(
    problem: HypergraphProblem,
    members: Sequence[tuple[Ints, int]],
    part: Ints,
    base: Ints,
    caps: Ints,
    span: int,
) -> tuple[Ints, Limit | None]:
    """Parts of one level: the engine's answer, repaired, or the greedy's if that is better or the engine fails."""
    graph = graph_of(problem.ptr, problem.pins, problem.price, len(part))
    requested = part.copy()
    limit = _assign(graph, problem, members, requested, base, caps, span)
    result = level(graph, problem, part, base, span, caps)
    if limit is not None:
        return result, limit
    return better_parts(problem, level(graph, problem, requested, base, span, caps), result, caps), None


def _assign(
    graph: Graph,
    problem: HypergraphProblem,
    members: Sequence[tuple[Ints, int]],
    part: Ints,
    base: Ints,
    caps: Ints,
    span: int,
) -> Limit | None:
    """Assigns those members of each job that have no part (-1) to parts in [base, base + span), in place.

    members: (vertices, base) of each job. Returns the limit if the engine fails; `part` is then unchanged.
    """
    free = part < 0
    targets = [(vertices, low) for vertices, low in members if free[vertices].any() and span > 1]
    cluster: Ints = np.arange(len(part))
    if targets and free.sum() > MOST_VERTICES * len(targets):
        cluster = merge(graph, part, base, problem.flops, MOST_VERTICES * len(targets))
    coarse = [np.unique(cluster[vertices], return_inverse=True)[1] for vertices, _ in targets]
    jobs = [
        _job(problem, vertices, pieces, part, low, caps[low : low + span])
        for (vertices, low), pieces in zip(targets, coarse, strict=True)
    ]
    answers = _run(jobs)
    if isinstance(answers, Limit):
        return answers
    for (vertices, low), pieces, answer in zip(targets, coarse, answers, strict=True):
        is_free = free[vertices]
        part[vertices[is_free]] = low + answer[pieces][is_free]
    return None


def _job(problem: HypergraphProblem, vertices: Ints, cluster: Ints, part: Ints, base: int, caps: Ints) -> Job:
    """The subhypergraph of these vertices, in the engine's units."""
    count = int(cluster.max()) + 1
    cluster_of = np.full(len(problem.flops), -1, np.int64)
    cluster_of[vertices] = cluster
    edge_of = group_of(np.diff(problem.ptr))
    in_job = cluster_of[problem.pins] >= 0
    pairs = np.unique(edge_of[in_job] * count + cluster_of[problem.pins[in_job]])
    sizes = np.bincount(pairs // count, minlength=len(problem.price))
    wide = sizes > 1
    pins = (pairs % count)[wide[pairs // count]]
    flops, fixed = np.zeros(count, np.int64), np.full(count, -1, np.int64)
    np.add.at(flops, cluster, problem.flops[vertices])
    is_fixed = part[vertices] >= 0
    fixed[cluster[is_fixed]] = part[vertices[is_fixed]] - base
    scale = min(1.0, _LARGEST / max(1, int(caps.sum())))
    weights = np.maximum(1, np.rint(flops * scale)).astype(np.int64)
    fixed_counts = np.bincount(fixed[fixed >= 0], minlength=len(caps))
    limits = np.floor(caps * scale).astype(np.int64) + fixed_counts
    price = problem.price[wide]
    factor = _LARGEST / max(1.0, float(price.sum()) * len(caps))
    prices = np.maximum(1, np.rint(price * min(1.0, factor))).astype(np.int64)
    return weights, fixed, offsets(sizes[wide]), pins, prices, limits


def _run(jobs: list[Job]) -> list[Ints] | Limit:
    """A partition for each job, or the limit if there is none."""
    if not jobs:
        return []
    stream = BytesIO()
    write(stream, [np.array([len(jobs)]), *(column for job in jobs for column in job)])
    try:
        process = subprocess.run(_COMMAND, input=stream.getvalue(), capture_output=True)
        answers = read(BytesIO(process.stdout), len(jobs))
    except (OSError, ValueError, EOFError):
        return Limit.ENGINE
    is_valid = all(_is_answer(job, answer) for job, answer in zip(jobs, answers, strict=True))
    return answers if is_valid else Limit.ENGINE


def _is_answer(job: Job, answer: Ints) -> bool:
    _, fixed, _, _, _, caps = job
    if answer.shape != fixed.shape or (answer < 0).any() or (answer >= len(caps)).any():
        return False
    return bool((answer == fixed)[fixed >= 0].all())
