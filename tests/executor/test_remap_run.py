"""Hidden states move between the attention layout and an even split of tokens and back, on several ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import apportion as ap
from apportion.ir.bytes.codec import Plan
from tests.ranks import jobs_remap
from tests.ranks.rank_pool import Pool

MODEL = ap.Model(q_heads=2, kv_heads=1, head_dim=4, dtype="fp64", hidden=6, ffn=8, layers=1)
LENGTHS = [50, 21, 9, 4, 1]


#: whole sequences per rank, so that tokens are uneven; and rings over all nodes, with proxy hops
WHOLE = {"place": {"zeppelin": {"capacity": 100}}, "schedule": {"queues": {}}}
RINGS = {
    "place": {"zeppelin": {"cap": "paper", "inter_tokens": 30, "intra_tokens": 6, "parts": 2}},
    "schedule": {"queues": {"proxies": 2}},
}


def planned(nodes: int, per_node: int, lengths: Any = LENGTHS, steps: Any = WHOLE, **flow: str) -> Plan:
    remap = {"flow": {"when": "always", **flow}}
    recipe = ap.Recipe("test", {"shard": {"sequences": {}}, **steps, "remap": remap})
    return ap.plan(ap.Batch.from_lengths(lengths), ap.Cluster(nodes, per_node), MODEL, recipe)


def plain(
    lengths: list[int], hidden: NDArray[Any], weights: list[NDArray[Any]], grad: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any], list[NDArray[Any]]]:
    """Runs the layer in one process; returns its result and gradients."""
    hidden, *weights = (torch.from_numpy(x.copy()).requires_grad_() for x in (hidden, *weights))
    q, k, v = jobs_remap.project(hidden, weights)
    parts = []
    for sequence in zip(*(torch.split(x, lengths) for x in (q, k, v)), strict=True):
        heads = [x.transpose(0, 1) for x in sequence]
        kv = [x.expand(2, -1, -1) for x in heads[1:]]
        attended = torch.nn.functional.scaled_dot_product_attention(heads[0], *kv, is_causal=True)
        parts.append(attended.transpose(0, 1).flatten(1))
    out = jobs_remap.feed_forward(torch.cat(parts), weights)
    out.backward(torch.from_numpy(grad))
    return out.detach().numpy(), hidden.grad.numpy(), [weight.grad.numpy() for weight in weights]  # type: ignore[attr-defined]


@pytest.mark.parametrize("objective", ["paper", "two_sided", "sum"])
@pytest.mark.parametrize(("nodes", "ranks"), [(1, 2), (2, 2), (2, 4)])
def test_a_layer_in_two_layouts_equals_a_plain_one(
    pool: Pool, objective: str, nodes: int, ranks: int
) -> None:
    plan = planned(nodes, ranks, objective=objective)
    assert plan.report["remap"]["used"]
    check(pool, plan, nodes * ranks)


@pytest.mark.parametrize("lengths", [LENGTHS, [90], [40, 40, 5]])
def test_rings_through_proxies_and_even_tokens(pool: Pool, lengths: list[int]) -> None:
    check(pool, planned(2, 4, lengths, RINGS), 8)


def test_ranks_that_hold_no_sequence_get_rows(pool: Pool) -> None:
    plan = planned(1, 4, [12])
    assert sorted(plan.layout("attention").rows_per_rank.tolist()) == [0, 0, 0, 12]
    check(pool, plan, 4)


def test_a_plan_without_a_remap_gain_moves_no_rows(pool: Pool) -> None:
    plan = planned(1, 2, when="pays")
    assert plan.moves == ()
    assert not plan.report["remap"]["used"]
    check(pool, plan, 2)


def check(pool: Pool, plan: Plan, ranks: int) -> None:
    lengths, tokens = plan.request.batch.lengths.tolist(), plan.request.batch.tokens
    draw = np.random.default_rng(ranks)
    hidden, grad = draw.standard_normal((2, tokens, 6))
    weights = [draw.standard_normal(shape) / 2 for shape in ((6, 16), (8, 6), (6, 8), (8, 6))]
    home = plan.layout("attention")
    each = [
        (plan.for_rank(rank).encode(), hidden[home.tokens(rank)], weights, grad[home.tokens(rank)])
        for rank in range(ranks)
    ]
    expected, expected_hidden, expected_weights = plain(lengths, hidden, weights, grad)
    results = pool.run(jobs_remap.layer, ranks, each=each)
    even = [even for (_, even), *_ in results]
    assert even == plan.layout("linear" if plan.moves else "attention").rows_per_rank.tolist()
    for rank, (_, out, hidden_grad, _) in enumerate(results):
        np.testing.assert_allclose(out, expected[home.tokens(rank)], rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(hidden_grad, expected_hidden[home.tokens(rank)], rtol=1e-9, atol=1e-11)
    for number, one in enumerate(expected_weights):
        summed = sum(weights[number] for *_, weights in results)
        np.testing.assert_allclose(summed, one, rtol=1e-9, atol=1e-11)


def test_the_inverse_move_restores_every_bit(pool: Pool) -> None:
    plan = planned(2, 2)
    draw = np.random.default_rng(1)
    for dtype in (np.float32, np.float64):
        x = draw.standard_normal((plan.request.batch.tokens, 2, 3)).astype(dtype)
        home = plan.layout("attention")
        each = [(plan.for_rank(rank).encode(), x[home.tokens(rank)]) for rank in range(4)]
        for rank, (back, grad) in enumerate(pool.run(jobs_remap.there_and_back, 4, each=each)):
            np.testing.assert_array_equal(back, x[home.tokens(rank)])
            np.testing.assert_array_equal(grad, x[home.tokens(rank)])


def test_ranks_with_different_plans_are_refused(pool: Pool) -> None:
    """The check also starts the ranks' channels, if nothing has run under the plan yet."""
    plans = planned(1, 2), planned(1, 2, objective="sum")
    each = [
        (plan.for_rank(rank).encode(), np.zeros((int(plan.layout("attention").rows_per_rank[rank]), 3)))
        for rank, plan in enumerate(plans)
    ]
    for error in pool.errors(jobs_remap.there_and_back, 2, each=each):
        assert error.startswith("ExecutionError: ranks hold different plans")
