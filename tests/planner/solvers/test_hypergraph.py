"""The hypergraph solvers: both balances, and the fallback if the engine has no answer (contract: test_solvers)."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest

from apportion._core import hypergraph as core
from apportion.ir.errors import ConfigError
from apportion.planner.solvers.contracts import HypergraphProblem
from apportion.planner.solvers.hypergraph import mtkahypar, solver as hypergraph
from apportion.planner.solvers.hypergraph.graph import graph_of
from apportion.planner.solvers.hypergraph.tokens import place_tokens
from apportion.planner.solvers.registry import SOLVERS
from apportion.planner.solvers.status import Budget, Limit, Status
from apportion.testing.problems import Hypergraphs

ENGINES = ["greedy", "mtkahypar"]


def long_sequence(
    blocks: int = 24, nodes: int = 1, per_node: int = 4, slack: float = 0.05
) -> HypergraphProblem:
    """One causal sequence: block b, and cell (q, k) for k <= q, with queries six times as expensive as keys."""
    cells = [(q, k) for q in range(blocks) for k in range(q + 1)]
    edges = [[b] for b in range(2 * blocks)]
    edges[blocks:] = [[b] for b in range(blocks)]
    for cell, (q, k) in enumerate(cells):
        edges[q].append(blocks + cell)
        edges[blocks + k].append(blocks + cell)
    flops = np.array([0] * blocks + [4 if k < q else 2 for q, k in cells])
    tokens = np.array([16] * blocks + [0] * len(cells))
    pins, price = (np.cumsum([0, *map(len, edges)]), np.concatenate(edges)), np.repeat([6, 1], blocks)
    return HypergraphProblem(flops, tokens, *pins, price, nodes, per_node, (slack, slack), (slack, slack))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 2), (4, 1)])
def test_both_weights_are_even_on_nodes_and_ranks(name: str, nodes: int, per_node: int) -> None:
    problem = long_sequence(nodes=nodes, per_node=per_node)
    found = SOLVERS["hypergraph", name].load()(problem, Budget())
    assert found.termination.status is Status.FEASIBLE
    assert found.tokens_imbalance == 0
    assert found.flops_imbalance <= 1.05**2 - 1
    of_node = np.bincount(found.rank // per_node, problem.flops)
    assert of_node.max() <= 1.05 * problem.flops.sum() / nodes
    assert found.node_value <= found.termination.value


@pytest.mark.parametrize("name", ENGINES)
def test_slow_ranks_get_less_compute_and_as_many_tokens(name: str) -> None:
    problem = replace(long_sequence(), speeds=np.array([1.0, 1.0, 0.5, 0.5]))
    found = SOLVERS["hypergraph", name].load()(problem, Budget())
    load = np.bincount(found.rank, problem.flops)
    assert (load <= problem.flops_caps[1]).all()
    assert load[2:].sum() < 0.36 * load.sum()
    assert np.bincount(found.rank, problem.tokens).tolist() == [96] * 4


def test_token_caps_follow_the_room_of_ranks() -> None:
    problem = replace(long_sequence(), room=np.array([1.0, 1.0, 0.5, 0.5]))
    found = hypergraph.solve(problem, Budget())
    assert (np.bincount(found.rank, problem.tokens) <= problem.tokens_caps[1]).all()
    assert problem.tokens_caps[1].tolist() == [141, 141, 70, 70]
    assert found.tokens_imbalance <= 0.2


@pytest.mark.parametrize("name", ENGINES)
def test_fixed_vertices_stay(name: str) -> None:
    problem = long_sequence()
    fixed = np.full(len(problem.flops), -1)
    fixed[:24], fixed[-5:] = np.arange(24) % 4, 2
    found = SOLVERS["hypergraph", name].load()(replace(problem, fixed=fixed), Budget())
    assert (found.rank[:24] == np.arange(24) % 4).all()
    assert (found.rank[-5:] == 2).all()


def test_vertices_fixed_to_a_rank_above_its_cap_are_infeasible() -> None:
    problem = long_sequence()
    fixed = np.where(problem.tokens > 0, 0, -1)
    assert hypergraph.solve(replace(problem, fixed=fixed), Budget()).termination.status is Status.INFEASIBLE


def test_small_sequences_stay_on_one_rank() -> None:
    """Eight sequences of two blocks on four ranks: nothing needs to move."""
    edges = np.concatenate([[s, s + 1, 16 + s // 2] for s in range(0, 16, 2)])
    weights = np.array([0] * 16 + [5] * 8), np.array([3] * 16 + [0] * 8)
    pins, slack = (np.arange(0, 25, 3), edges, np.full(8, 7)), (0.0, 0.0)
    problem = HypergraphProblem(*weights, *pins, 2, 2, slack, slack)
    found = hypergraph.solve(problem, Budget())
    assert (found.termination.status, found.termination.value) == (Status.OPTIMAL, 0.0)


def test_polishing_moves_no_fixed_vertex_and_adds_no_bytes() -> None:
    problem = long_sequence(nodes=2, per_node=4, slack=0.3)
    homes = np.where(problem.tokens > 0, np.arange(len(problem.flops)) % 8, -1)
    fixed = replace(problem, fixed=homes)
    rank = hypergraph.initial_ranks(fixed)
    found = hypergraph.polish(fixed, rank, None)
    assert hypergraph.is_valid(fixed, found.rank)
    assert (found.rank // 4 == rank // 4).all()
    assert found.termination.value <= hypergraph.connectivity(fixed, rank, 8)


def test_vertices_of_a_hyperedge_move_together() -> None:
    """Two rows on part 0 whose columns are on part 1: moving one vertex gains nothing, moving all does."""
    ptr, pins = np.array([0, 3, 5, 7]), np.array([0, 2, 3, 1, 2, 1, 3])
    price = np.array([5, 4, 4])
    graph = graph_of(ptr, pins, price, 4)
    part, movable = np.array([0, 1, 0, 0]), np.array([False, False, True, True])
    flops, caps = np.array([0, 0, 1, 1]), np.array([2, 2])
    for thorough, found in ((False, [0, 1, 0, 0]), (True, [0, 1, 1, 1])):
        moved = core.spread(graph, part, (np.zeros(4, np.int64), movable, flops, caps, 2), thorough)
        assert moved.tolist() == found


def test_tokens_without_room_have_no_rank() -> None:
    problem = long_sequence(blocks=5, slack=0.0)  # caps of 20 tokens, blocks of 16
    assert sorted(place_tokens(problem)[:5].tolist()) == [-1, 0, 1, 2, 3]
    assert hypergraph.solve(problem, Budget()).termination.status is Status.NO_SOLUTION


def test_wrong_columns_are_refused() -> None:
    problem = long_sequence()
    changes = {
        "speeds": np.ones(3),
        "room": np.ones(3),
        "flops_slack": (-1.0, 0.0),
        "price": np.ones(2),
        "nodes": 0,
    }
    for name, value in changes.items():
        with pytest.raises(ConfigError):
            replace(problem, **{name: value})


# ---------------------------------------------------------------------------------------------- the engine's process


def child(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.mark.parametrize(
    "code",
    [
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "print('no arrays')",
        "import sys, numpy; numpy.save(sys.stdout.buffer, numpy.array([99] * 9))",
    ],
)
def test_the_greedy_solver_replaces_a_failed_engine(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(mtkahypar, "_COMMAND", child(code))
    problem = long_sequence()
    found = mtkahypar.solve(problem, Budget())
    assert (found.termination.status, found.termination.limit) == (Status.FEASIBLE, Limit.ENGINE)
    assert found.termination.value == hypergraph.solve(problem, Budget()).termination.value


def test_an_answer_out_of_balance_is_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    everything_on_one = (
        "from apportion.planner.solvers.hypergraph.mtkahypar_child import *\n"
        "stream = BytesIO(sys.stdin.buffer.read())\n"
        "(jobs,) = read(stream, 1)\n"
        "for _ in range(int(jobs[0])):\n"
        "    fixed = read(stream, COLUMNS)[1]\n"
        "    write(sys.stdout.buffer, [np.where(fixed < 0, 0, fixed)])\n"
    )
    monkeypatch.setattr(mtkahypar, "_COMMAND", child(everything_on_one))
    found = mtkahypar.solve(long_sequence(nodes=2, per_node=2), Budget())
    assert (found.termination.status, found.termination.limit) == (Status.FEASIBLE, None)


def test_many_vertices_are_merged_for_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Hypergraphs().of(np.random.default_rng(0), [90, 60, 30, *[3] * 20], 2, 4, 0.1)
    sizes = []
    run = mtkahypar._run
    monkeypatch.setattr(mtkahypar, "_run", lambda jobs: sizes.extend(jobs) or run(jobs))
    monkeypatch.setattr(mtkahypar, "MOST_VERTICES", 300)
    found = mtkahypar.solve(problem, Budget())
    assert found.termination.solved
    assert max(len(job[0]) for job in sizes) < 1500 < len(problem.flops)
