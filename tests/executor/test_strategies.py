"""Every strategy on real ranks over gloo, forward and backward, against dense float64 attention.

A pairwise cover: every strategy runs with every mask, 1 to 8 ranks, MHA and GQA, every dtype, sinks and softcap; and so
does each of these the others. Masks share batches, three of them or two in each. `make test` runs a cell of every
strategy, in which every value of every axis occurs; `make test-slow` the others.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import pytest

from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.figures import Figure
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.policy import Policy, Recipe
from apportion.ir.request.sequences import Sequence
from apportion.planner import api
from tests.ranks import cases
from tests.ranks.rank_pool import Pool
from tests.support.sparse import marked, sparse
from tests.support.strategies import STRATEGIES, WIDE, cluster, has_own_cap

MASKS = tuple(cases.BATCHES)
MATRIX = STRATEGIES | WIDE
RANKS = tuple(range(1, 9))


class Cell(NamedTuple):
    """One cell of the matrix. heads: query heads per KV head, and KV heads."""

    name: str
    masks: tuple[str, ...]
    ranks: int
    heads: tuple[int, int]
    dtype: str
    extra: str  # "", "sinks" or "softcap"


AXES = Cell(
    name=tuple(MATRIX),
    masks=tuple(MASKS[first::5] for first in range(5)),
    ranks=RANKS,
    heads=((1, 4), (2, 2), (8, 1)),
    dtype=("fp64", "fp32", "bf16"),
    extra=("", "sinks", "softcap"),
)


def serves(name: str, ranks: int) -> bool:
    """Groups of two ranks need an even number of them."""
    return ranks % 2 == 0 or "inner" not in name


def cell(turn: int, place: int) -> Cell:
    """The cell of a strategy and a number of ranks; the other axes cycle at different rates."""
    name, at = AXES.name[turn], turn + place
    return Cell(
        name,
        AXES.masks[at % 5],
        place + 1 if serves(name, place + 1) else place + 2,
        AXES.heads[at % 3],
        AXES.dtype[at // 3 % 3],
        AXES.extra[(at // 3 + place) % 3],
    )


CELLS = [cell(turn, place) for turn in range(len(MATRIX)) for place in range(len(RANKS))]
QUICK = [len(RANKS) * turn + turn % len(RANKS) for turn in range(0, len(MATRIX), 3)]


def test_the_cells_hold_every_pair_of_values_of_every_two_axes() -> None:
    held = {(i, each[i], j, each[j]) for each in CELLS for i, j in combinations(range(len(AXES)), 2)}
    wanted = {
        (i, a, j, b) for i, j in combinations(range(len(AXES)), 2) for a, b in product(AXES[i], AXES[j])
    }
    refused = {(0, name, 2, ranks) for name in AXES.name for ranks in RANKS if not serves(name, ranks)}
    assert held == wanted - refused
    for axis, values in list(enumerate(AXES))[1:]:
        assert {CELLS[at][axis] for at in QUICK} == set(values)


@pytest.mark.parametrize("at", marked(range(len(CELLS)), QUICK), ids=lambda at: f"{CELLS[at].name}-{at % 8}")
def test_every_strategy_on_real_ranks(pool: Pool, at: int) -> None:
    name, masks, ranks, heads, dtype, extra = CELLS[at]
    batch = Batch.from_sequences([Sequence(*each) for mask in masks for each in cases.BATCHES[mask]])
    model = cases.model(heads[0], dtype, (8, 12), kv_heads=heads[1])
    recipe = Recipe(name, MATRIX[name])
    cap = None if has_own_cap(recipe) else batch.tokens
    plan = api.plan(batch, cluster(ranks), model, policy=Policy(recipe, token_cap=cap))
    problem = cases.problem_of(plan, at, extra == "sinks", 2.0 if extra == "softcap" else None)
    cases.assert_good(cases.run(pool, plan, problem), problem, cases.allowed(batch), dtype)


def test_ranks_that_hold_no_tokens_serve_attention(pool: Pool) -> None:
    """Four ranks, two of them dedicated attention servers: their empty homes are no imbalance of tokens."""
    batch = Batch.from_lengths([300, 90, 40], home_ranks=[(0, 1)] * 3)
    recipe = Recipe("servers", {**MATRIX["distca"], "place": {"distca": {"granularity": 16}}})
    plan = api.plan(batch, cluster(4), cases.model(2, "fp64", (8, 12), kv_heads=2), policy=Policy(recipe))
    assert plan.layouts[plan.header.home_layout].rows_per_rank[2:].tolist() == [0, 0]
    assert max(plan.report["imbalance"].values()) < 0.1
    problem = cases.problem_of(plan, 1)
    cases.assert_good(cases.run(pool, plan, problem), problem, cases.allowed(batch), "fp64")


@pytest.mark.parametrize("turn", sparse(range(len(MATRIX)), 13), ids=tuple(MATRIX))
def test_every_strategy_with_gradients_rounded_in_transit(pool: Pool, turn: int) -> None:
    """Four ranks, bfloat16; equal to a run without rounding, except for those gradients."""
    name = AXES.name[turn]
    batch = cases.batch_of(MASKS[turn % len(MASKS)])
    model = cases.model(2, "bf16", (8, 12), kv_heads=2 if turn % 2 and name not in WIDE else 4)
    recipe = Recipe(name, MATRIX[name])
    cap = None if has_own_cap(recipe) else batch.tokens
    narrow = replace(model, sent_gradients="model")
    plans = [
        api.plan(batch, cluster(4), one, policy=Policy(recipe, token_cap=cap)) for one in (model, narrow)
    ]
    problem = cases.problem_of(plans[0], turn)
    before, after = (cases.run(pool, plan, problem) for plan in plans)
    cases.assert_good(after, problem, cases.allowed(batch), "bf16")
    if plans[0].programs == plans[1].programs:
        np.testing.assert_array_equal(before[0], after[0])


@pytest.mark.parametrize("recipe", ["fcp_paper", "distca", "ulysses"])
def test_rounds_of_few_senders_on_real_ranks(pool: Pool, recipe: str) -> None:
    """Four nodes of a rank, between which several senders at a time cost much and a round nothing."""
    batch, model = cases.batch_of(MASKS[0]), cases.model(2, "fp32", (8, 12), kv_heads=4)
    nodes = Cluster(4, 1, inter_latency_us=0.0)
    known = replace(Hardware.load("h100"), incast=Figure(10, "made up"), rowop_us=Figure(0, "made up"))
    whole, split = (api.plan(batch, nodes, model, recipe=recipe, hardware=each) for each in (None, known))
    assert split.report["rounds"] > whole.report["rounds"]
    problem = cases.problem_of(split, 0)
    before, after = (cases.run(pool, plan, problem) for plan in (whole, split))
    cases.assert_good(after, problem, cases.allowed(batch), "fp32")
    np.testing.assert_array_equal(before[0], after[0])
