"""Attention that chooses keys at run time over gathered rows, on several ranks, compared with one process."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import apportion as ap
from apportion.ir.bytes.codec import Plan
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.plan.visible import Fetch, obstacle
from tests.ranks import cases, jobs_visible
from tests.ranks.rank_pool import Pool
from tests.support.programs import ROOT, run_python
from tests.support.sparse import sparse_product

MODEL = ap.Model(q_heads=4, kv_heads=1, head_dim=8, dtype="fp64", hidden=6, ffn=8, layers=1)
LENGTHS = [70, 33, 20, 9, 2, 1]
MASKS = {
    "causal": ap.Batch.from_lengths(LENGTHS),
    "window with sinks": ap.Batch.from_lengths(LENGTHS, ap.masks.sink_window(16, 4)),
    "trees": ap.Batch.from_sequences(
        [
            ap.Sequence(90, ap.masks.tree([(-1, 20), (0, 30), (0, 10), (1, 12), (1, 18)])),
            ap.Sequence(40, ap.masks.tree([(-1, 10), (0, 20), (0, 10)])),
        ]
    ),
}


def check(pool: Pool, plan: Plan, padding: int = 0) -> None:
    batch, home = plan.request.batch, plan.layout("attention")
    draw, mask = np.random.default_rng(1), cases.allowed(plan.request.batch)
    hidden, weight, grad = (draw.normal(size=n) for n in ((batch.tokens, 6), (6, 30), (batch.tokens, 8)))
    rows, matrix = (
        torch.from_numpy(hidden.copy()).requires_grad_(),
        torch.from_numpy(weight.copy()).requires_grad_(),
    )
    whole = jobs_visible.project(rows, matrix)
    out = jobs_visible.sparse(whole, whole.kv, whole.index, torch.from_numpy(mask))
    out.backward(torch.from_numpy(grad))
    tokens = [home.tokens(rank) for rank in range(plan.header.ranks)]
    each = [(plan.for_rank(i).encode(), hidden[one], weight, grad[one]) for i, one in enumerate(tokens)]
    results = pool.run(jobs_visible.layer, plan.header.ranks, padding, each=each)
    assert results is not None
    for rank_tokens, (result, hidden_grad, _, visible_facts) in zip(tokens, results, strict=True):
        np.testing.assert_allclose(result, out.detach().numpy()[rank_tokens], rtol=0, atol=1e-12)
        np.testing.assert_allclose(hidden_grad, rows.grad.numpy()[rank_tokens], rtol=0, atol=1e-12)
        visible, positions, sequences, first, end, spans = visible_facts
        np.testing.assert_array_equal(visible, np.flatnonzero(mask[rank_tokens].any(0)))
        np.testing.assert_array_equal(positions, batch.positions()[visible])
        np.testing.assert_array_equal(sequences, np.searchsorted(batch.starts, visible, "right") - 1)
        for query, row in zip(rank_tokens, spans, strict=False):
            keys = np.concatenate([np.arange(*one) for one in row])
            np.testing.assert_array_equal(visible[keys], np.flatnonzero(mask[query]))
        np.testing.assert_array_equal(first[: len(rank_tokens)], spans[: len(rank_tokens), 0, 0])
        np.testing.assert_array_equal(end, spans.max((1, 2)))
    summed = np.sum([weight_grad for _, _, weight_grad, _ in results], axis=0)
    np.testing.assert_allclose(summed, matrix.grad.numpy(), rtol=0, atol=1e-12)


def gathering_plan(mask: str, shape: tuple[int, int], recipe: str, **model: Any) -> Plan:
    balance = {"default": {"keys": jobs_visible.TOP}}
    return ap.plan(MASKS[mask], ap.Cluster(*shape), replace(MODEL, balance=balance, **model), recipe)


@pytest.mark.parametrize(
    ("mask", "recipe", "shape"), sparse_product(5, MASKS, ("mixed", "blend", "fcp"), ((1, 2), (2, 2)))
)
def test_run_time_attention_equals_a_process(pool: Pool, mask: str, recipe: str, shape: Any) -> None:
    check(pool, gathering_plan(mask, shape, recipe))


def test_other_routes_give_equal_results_and_padding_sees_nothing(pool: Pool) -> None:
    batch, steps = ap.Batch.from_lengths([90]), {"shard": {"blocks": {"block": 8}}, "place": {"lpt": {}}}
    ring = ap.Recipe("ring", {**steps, "schedule": {"ring": {}}})
    tree = ap.Recipe("tree", {**steps, "route": {"tree": {"fanout": 1}}, "schedule": {"matchings": {}}})
    for recipe in (ring, tree):
        check(pool, ap.plan(batch, ap.Cluster(2, 2), MODEL, recipe), padding=3)


def test_a_rank_without_rows_takes_part(pool: Pool) -> None:
    plan = ap.plan(ap.Batch.from_lengths([2]), ap.Cluster(1, 4), MODEL, "fcp")
    assert 0 in plan.layout("attention").rows_per_rank
    check(pool, plan)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("recipe", ["mixed", "blend", "fcp"])
def test_a_row_crosses_to_a_node_once(recipe: str, mask: str) -> None:
    plan = gathering_plan(mask, (2, 2), recipe)
    crossed, tokens_by_rank = crossings_and_visible(plan)
    token, node = np.array(crossed).reshape(-1, 2).T
    assert len(token)
    assert len(np.unique(token * 2 + node)) == len(token)
    allowed = cases.allowed(plan.request.batch)
    for rank, tokens in enumerate(tokens_by_rank):
        rank_tokens = plan.layout("attention").tokens(rank)
        np.testing.assert_array_equal(np.unique(tokens), np.flatnonzero(allowed[rank_tokens].any(0)))


def crossings_and_visible(plan: Plan) -> tuple[list[tuple[int, int]], list[NDArray[Any]]]:
    """(token, node) of all rows that come from another node, and the tokens that queries of each rank see."""
    ranks, program, home = plan.header.ranks, plan.programs["default", "forward"], plan.layout("attention")
    fetches = [Fetch.of(program.rank(rank), int(home.rows_per_rank[rank])) for rank in range(ranks)]
    tokens = [np.full(fetch.rows, -1) for fetch in fetches]
    for rank in range(ranks):
        tokens[rank][: fetches[rank].home] = home.tokens(rank)
    sent = {(i, j): deque[NDArray[Any]]() for i in range(ranks) for j in range(ranks)}
    crossed, hops_left = [], [deque(fetch.hops) for fetch in fetches]
    launched = [False] * ranks
    while any(hops_left):
        for rank in (rank for rank in range(ranks) if hops_left[rank]):
            hop = hops_left[rank][0]
            if not launched[rank]:
                for peer, rows in hop.sends.items():
                    sent[rank, peer].append(tokens[rank][rows])
                launched[rank] = True
            if all(sent[peer, rank] for peer in hop.receives):
                for peer, rows in hop.receives.items():
                    tokens[rank][rows] = received = sent[peer, rank].popleft()
                    if peer // 2 != rank // 2:
                        crossed += [(token, rank // 2) for token in received.tolist()]
                hops_left[rank].popleft()
                launched[rank] = False
    return crossed, [
        np.concatenate([rank_tokens[task.visible] for task in fetch.tasks])
        for rank_tokens, fetch in zip(tokens, fetches, strict=True)
    ]


def test_only_the_kind_whose_heads_are_split_is_refused(pool: Pool) -> None:
    batch = ap.Batch.from_lengths([300, 40], {"dense": ap.masks.causal(), "sparse": ap.masks.causal()})
    model = replace(MODEL, layers={"dense": 1, "sparse": 3}, balance={"sparse": {"keys": 5}})
    plan = ap.plan(batch, ap.Cluster(2, 2), model, "mixed")
    assert obstacle(plan.programs["dense", "forward"]) == "it splits heads among ranks"
    assert obstacle(plan.programs["sparse", "forward"]) is None
    pieces = [plan.for_rank(rank).encode() for rank in range(4)]
    messages = pool.errors(jobs_visible.gathered, 4, "dense", each=pieces)
    assert all("it splits heads among ranks; plan with balance={'dense'" in message for message in messages)
    assert pool.errors(jobs_visible.gathered, 4, "sparse", each=pieces) == [""] * 4


def test_a_plan_that_omits_visible_rows_is_refused() -> None:
    """Gathered rows are those that tasks read, so the verifier refuses a plan with a task or row too few."""
    plan = gathering_plan("causal", (2, 2), "fcp")
    program = plan.programs["default", "forward"]
    for table, column in (("tasks", "dmax"), ("transfers", "operand"), ("operands", "row")):
        values = program[table].values.copy()
        row = len(program[table]) - 1 if table != "operands" else 1
        values[program[table].names.index(column), row] -= 1
        changed = ProgramSet({**program.tables, table: replace(program[table], values=values)})
        mutant = replace(plan, programs={**plan.programs, ("default", "forward"): changed}, sections=None)
        with pytest.raises(ap.VerifyError):
            ap.verify(mutant)


def test_kinds_that_choose_keys_refuse_plans_that_move_queries() -> None:
    batch, cluster = MASKS["causal"], ap.Cluster(1, 4)
    balance = {"default": {"keys": 5}}
    for recipe in ("dcp", "distca"):
        plan = ap.plan(batch, cluster, MODEL, recipe)
        request = replace(plan.request, model=replace(MODEL, balance=balance))
        with pytest.raises(ap.VerifyError, match="does not gather all visible rows of its queries"):
            ap.verify(replace(plan, request=request, sections=None))
        with pytest.raises(ap.ConfigError, match=f"recipe.place = '{recipe}'"):
            ap.plan(batch, cluster, replace(MODEL, balance=balance), recipe)
    shuffled = ap.Recipe(
        "reshuffled",
        {
            "shard": {"sequences": {}},
            "place": {"blend": {}},
            "schedule": {"matchings": {}},
            "reshuffle": True,
        },
    )
    with pytest.raises(ap.ConfigError, match="moves the queries of default"):
        ap.plan(batch, cluster, replace(MODEL, balance=balance), shuffled)


def test_gradients_are_summed_in_float32(pool: Pool) -> None:
    """Also sums between ranks: bfloat16 would round 1 + 1/256 to 1, and so lose each rank's 1/256."""
    batch = ap.Batch.from_lengths([40])
    for sent, weights in (("wide", [1.0, 1 / 256, 1 / 256, 0.0]), ("model", [1.0] * 4)):
        model = replace(MODEL, dtype="bf16", sent_gradients=sent)
        plan = ap.plan(batch, ap.Cluster(2, 2), model, "fcp")
        rows = np.random.default_rng(0).normal(size=(40, 2, 3))
        home = [plan.layout("attention").tokens(rank) for rank in range(4)]
        each = [(plan.for_rank(rank).encode(), rows[one], weights[rank]) for rank, one in enumerate(home)]
        results = pool.run(jobs_visible.narrow, 4, each=each)
        assert results is not None
        allowed = cases.allowed(batch)
        visible = [allowed[one].any(0) for one in home]
        for rank, (received, grad) in enumerate(results):
            np.testing.assert_array_equal(
                received, torch.from_numpy(rows[visible[rank]]).bfloat16().float().numpy()
            )
            expected = torch.from_numpy(np.dot(weights, visible)[home[rank]]).bfloat16().float().numpy()
            np.testing.assert_array_equal(grad, np.broadcast_to(expected[:, None, None], grad.shape))


@pytest.mark.slow
def test_the_example_equals_one_process() -> None:
    """The example exits with an error if the ranks' losses differ from those of one process."""
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    printed = run_python("examples/sparse/train.py", env=env)
    losses = [float(line.split()[3].strip(",")) for line in printed.splitlines()]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
