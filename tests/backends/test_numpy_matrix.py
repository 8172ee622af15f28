"""Planned attention on the numpy executor against dense attention: masks × heads × widths × ranks × recipes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from apportion import Batch, Cluster, Model, Plan, Policy, Recipe, masks, plan as make_plan
from apportion.backends import numpy as executor
from tests.support import oracle
from tests.support.matrix import EXACT, LAYERS, SEQUENCES, batch_of, compare
from tests.support.sparse import marked

BLOCKS = [5, 16, "auto"]


def recipe(block: int | str, reshuffle: bool) -> Recipe:
    return Recipe(
        "fcp",
        {
            "shard": {"blocks": {"block": block, "zigzag": True}},
            "place": {"lpt": {}},
            "schedule": {"matchings": {"coalesce": 2, "buffers": 2}},
            "reshuffle": reshuffle,
        },
    )


def make_plan_of(batch: Batch, layer: tuple, ranks: int, block: int | str, reshuffle: bool) -> Plan:
    heads, kv_heads, width, v_width, _, _ = layer
    model = Model(heads, kv_heads, width, v_width, dtype="fp64", layers=1)
    # on 8 ranks these blocks cannot keep a cap of 1.02 x the mean
    policy = Policy(recipe(block, reshuffle), token_cap=batch.tokens)
    return make_plan(batch, Cluster(ranks_per_node=ranks), model, policy=policy)


@pytest.mark.parametrize("ranks", marked(range(1, 9), (2,)))
@pytest.mark.parametrize("name", SEQUENCES)
def test_every_mask_on_every_number_of_ranks(name: str, ranks: int) -> None:
    for turn, (layer, reshuffle) in enumerate(product(LAYERS, [False, True])):
        block = BLOCKS[(turn + ranks) % len(BLOCKS)]
        compare(make_plan_of(batch_of(name), layer, ranks, block, reshuffle), "default", layer, ranks)


@pytest.mark.parametrize("reshuffle", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_sequences_with_their_own_masks_share_a_batch(block: int | str, reshuffle: bool) -> None:
    plan = make_plan_of(
        batch_of("tree", "causal", "slices", "image_spans", "full"), LAYERS[1], 4, block, reshuffle
    )
    compare(plan, "default", LAYERS[1], 0)


@pytest.mark.parametrize("reshuffle", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [[1], [3], [1, 1, 1, 1, 1], [16, 1], [17, 33, 1], [65], [1] * 40, [40, 2, 1, 1, 3]],
    ids=lambda lengths: "-".join(map(str, lengths)),
)
def test_tails_of_one_token_and_ranks_without_tokens(lengths: list[int], reshuffle: bool) -> None:
    for block in BLOCKS:
        batch = Batch.from_lengths(lengths, masks.causal())
        compare(make_plan_of(batch, LAYERS[1], 8, block, reshuffle), "default", LAYERS[1], 1)


@pytest.mark.parametrize("reshuffle", [False, True])
def test_kinds_share_a_layout(reshuffle: bool) -> None:
    kinds = {"global": masks.causal(), "local": masks.sliding_window(5), "both": masks.full()}
    plan = make_plan_of(Batch.from_lengths([40, 9, 1], kinds), LAYERS[2], 3, 8, reshuffle)
    for seed, kind in enumerate(kinds):
        compare(plan, kind, LAYERS[2], seed)


def test_same_plan_gives_the_same_bits_and_other_plans_agree() -> None:
    p = oracle.Problem.random(4, 74, *LAYERS[1][:4])
    batch = batch_of("causal", "full")
    plans = [make_plan_of(batch, LAYERS[1], 4, 5, True)] * 2 + [make_plan_of(batch, LAYERS[1], 7, 16, False)]
    first, second, other = (executor.run(plan, "default", p.q, p.k, p.v, p.do) for plan in plans)
    for a, b, c in zip(first[:5], second[:5], other[:5], strict=True):
        assert a.tobytes() == b.tobytes()
        np.testing.assert_allclose(a, c, rtol=EXACT, atol=EXACT)
