"""Every strategy on real ranks over gloo, forward and backward, against dense float64 attention.

A pairwise cover of strategies, masks, numbers of ranks (1 to 8), heads (MHA and GQA), dtypes, and sinks or softcap: any
two values of different axes occur together. Each batch has the sequences of two or three masks. `make test` runs some
of the cells, in which every value of every axis occurs; `make test-slow` the others.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
import pytest

from apportion import Batch, Cluster, Hardware, Policy, Recipe, Sequence
from apportion.ir.request.figures import Figure
from apportion.planner import api
from tests.ranks import cases
from tests.ranks.rank_pool import Pool
from tests.support.sparse import marked, sparse
from tests.support.strategies import STRATEGIES, WIDE, cluster, plan_of

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


def supports(name: str, ranks: int) -> bool:
    """True if the strategy runs on this many ranks: groups of two need an even number."""
    return ranks % 2 == 0 or "inner" not in name


def cell(turn: int, rank_index: int) -> Cell:
    """The cell of a strategy and a number of ranks; the other axes cycle at different rates."""
    name, index = AXES.name[turn], turn + rank_index
    return Cell(
        name,
        AXES.masks[index % 5],
        rank_index + 1 if supports(name, rank_index + 1) else rank_index + 2,
        AXES.heads[index % 3],
        AXES.dtype[index // 3 % 3],
        AXES.extra[(index // 3 + rank_index) % 3],
    )


CELLS = [cell(turn, rank_index) for turn in range(len(MATRIX)) for rank_index in range(len(RANKS))]
QUICK = [len(RANKS) * turn + turn % len(RANKS) for turn in range(0, len(MATRIX), 3)]


def test_the_cells_hold_every_pair_of_values_of_every_two_axes() -> None:
    covered = {(i, each[i], j, each[j]) for each in CELLS for i, j in combinations(range(len(AXES)), 2)}
    both = {(i, a, j, b) for i, j in combinations(range(len(AXES)), 2) for a, b in product(AXES[i], AXES[j])}
    refused = {(0, name, 2, ranks) for name in AXES.name for ranks in RANKS if not supports(name, ranks)}
    assert covered == both - refused
    for axis, values in list(enumerate(AXES))[1:]:
        assert {CELLS[index][axis] for index in QUICK} == set(values)


@pytest.mark.parametrize(
    "index", marked(range(len(CELLS)), QUICK), ids=lambda index: f"{CELLS[index].name}-{index % 8}"
)
def test_every_strategy_on_real_ranks(pool: Pool, index: int) -> None:
    name, masks, ranks, heads, dtype, extra = CELLS[index]
    batch = Batch.from_sequences([Sequence(*each) for mask in masks for each in cases.BATCHES[mask]])
    model = cases.model(heads[0], dtype, ((8, 8), (16, 8), (8, 12))[index % 3], kv_heads=heads[1])
    plan = plan_of(batch, name, ranks, model)
    problem = cases.problem_of(plan, index, extra == "sinks", 2.0 if extra == "softcap" else None)
    cases.assert_good(cases.run(pool, plan, problem), problem, cases.allowed(batch), dtype)


def test_ranks_that_hold_no_tokens_serve_attention(pool: Pool) -> None:
    """Four ranks, two of which are attention servers without tokens: this does not count as imbalance."""
    batch = Batch.from_lengths([300, 90, 40], home_ranks=[(0, 1)] * 3)
    recipe = Recipe("servers", {**MATRIX["distca"], "place": {"distca": {"granularity": 16}}})
    plan = api.plan(batch, cluster(4), cases.model(2, "fp64", (8, 12), kv_heads=2), policy=Policy(recipe))
    assert plan.layouts[plan.header.home_layout].rows_per_rank[2:].tolist() == [0, 0]
    assert max(plan.report["imbalance"].values()) < 0.1
    problem = cases.problem_of(plan, 1)
    cases.assert_good(cases.run(pool, plan, problem), problem, cases.allowed(batch), "fp64")


@pytest.mark.parametrize("turn", sparse(range(len(MATRIX)), 13), ids=tuple(MATRIX))
def test_every_strategy_with_gradients_rounded_in_transit(pool: Pool, turn: int) -> None:
    """On four ranks in bfloat16, results equal those without rounding, except for these gradients."""
    name = AXES.name[turn]
    batch = cases.batch_of(MASKS[turn % len(MASKS)])
    model = cases.model(2, "bf16", (8, 12), kv_heads=2 if turn % 2 and name not in WIDE else 4)
    plans = [plan_of(batch, name, 4, one) for one in (model, replace(model, sent_gradients="model"))]
    problem = cases.problem_of(plans[0], turn)
    before, after = (cases.run(pool, plan, problem) for plan in plans)
    cases.assert_good(after, problem, cases.allowed(batch), "bf16")
    if plans[0].programs == plans[1].programs:
        np.testing.assert_array_equal(before[0], after[0])


@pytest.mark.parametrize("recipe", ["fcp_paper", "distca", "ulysses"])
def test_rounds_of_few_senders_on_real_ranks(pool: Pool, recipe: str) -> None:
    """Four nodes of one rank, where several senders at a time cost much and a round costs nothing."""
    batch, model = cases.batch_of(MASKS[0]), cases.model(2, "fp32", (8, 12), kv_heads=4)
    nodes = Cluster(4, 1, inter_latency_us=0.0)
    known = replace(Hardware.load("h100"), incast=Figure(10, "made up"), rowop_us=Figure(0, "made up"))
    whole, split = (api.plan(batch, nodes, model, recipe=recipe, hardware=each) for each in (None, known))
    assert split.report["rounds"] > whole.report["rounds"]
    problem = cases.problem_of(split, 0)
    before, after = (cases.run(pool, plan, problem) for plan in (whole, split))
    cases.assert_good(after, problem, cases.allowed(batch), "fp32")
    np.testing.assert_array_equal(before[0], after[0])
