"""An encoder that feeds its rows to a decoder, each under its own plan, on several ranks, against one process."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import apportion as ap
from apportion.ir.bytes.codec import Plan
from tests.ranks import jobs_feed
from tests.ranks.jobs_feed import HEADS, MERGE, PATCH, WIDTH
from tests.ranks.rank_pool import Pool
from tests.support.sparse import sparse_product

MODEL = ap.Model(HEADS, HEADS, WIDTH // HEADS, dtype="fp64", hidden=WIDTH, ffn=WIDTH, layers=1)
#: for each sample its tokens, and (first token, tokens) of each image
SAMPLES = {
    "several images, and a sample without": ([60, 21, 33], [[(3, 12), (20, 30)], [], [(0, 1), (30, 3)]]),
    "one image": ([30, 40], [[], [(7, 5)]]),
    "images side by side": ([50], [[(0, 20), (20, 8), (28, 22)]]),
    "an image of one token": ([70], [[(33, 1)]]),
}


WHOLE = ap.Recipe("whole", {"shard": {"sequences": {}}, "place": {"whole": {}}, "schedule": {"gather": {}}})


def plans_and_places(
    samples: str, ranks: int, recipe: str, encoder_recipe: str | ap.Recipe
) -> tuple[Plan, Plan, NDArray[Any]]:
    """Plans of the encoder and the decoder, and the places of the images."""
    tokens, images = SAMPLES[samples]
    decoder = ap.Batch.from_lengths(tokens)
    spans = [
        (int(decoder.starts[i]) + first, count) for i, each in enumerate(images) for first, count in each
    ]
    counts = np.array([count for _, count in spans])
    encoder = ap.Batch.from_lengths(MERGE * counts, ap.masks.full())
    places = np.column_stack([[first for first, _ in spans], encoder.starts[:-1], counts])
    cluster = ap.Cluster(1, ranks)
    first, second = (
        ap.plan(batch, cluster, MODEL, own) for batch, own in ((encoder, encoder_recipe), (decoder, recipe))
    )
    return first, second, places


def dense_mask(batch: ap.Batch) -> NDArray[Any]:
    """bool [tokens, tokens]: the pairs that the batch's mask allows."""
    mask = np.zeros((batch.tokens, batch.tokens), np.bool_)
    i, j = np.arange(batch.tokens)[:, None], np.arange(batch.tokens)
    for q0, q1, k0, k1, dmin, dmax in batch.bands(batch.kinds[0]).tolist():
        mask |= (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (dmin <= i - j) & (i - j <= dmax)
    return mask


def check(pool: Pool, encoder: Plan, decoder: Plan, places: NDArray[Any]) -> None:
    """Compares results and gradients of all ranks with one process."""
    ranks = encoder.header.ranks
    draw, weights_by_name = np.random.default_rng(0), jobs_feed.weights()
    sizes = encoder.request.batch.tokens, decoder.request.batch.tokens
    patches, tokens, grad = (
        draw.normal(size=shape) for shape in ((sizes[0], PATCH), (sizes[1], WIDTH), (sizes[1], WIDTH))
    )
    leaves = [torch.from_numpy(one.copy()).requires_grad_() for one in (patches, tokens)]
    rows = np.concatenate([np.arange(first, first + count) for first, _, count in places])
    encoded = jobs_feed.encode(
        leaves[0], weights_by_name, jobs_feed.dense_attention(dense_mask(encoder.request.batch))
    )
    attend = jobs_feed.dense_attention(dense_mask(decoder.request.batch))
    out = jobs_feed.decode(leaves[1], torch.from_numpy(rows), encoded, weights_by_name, attend)
    out.backward(torch.from_numpy(grad))
    home_tokens = [
        [plan.layout("attention").tokens(rank) for rank in range(ranks)] for plan in (encoder, decoder)
    ]
    each = [
        (encoder.for_rank(i).encode(), decoder.for_rank(i).encode(), patches[see], tokens[read], grad[read])
        for i, (see, read) in enumerate(zip(*home_tokens, strict=True))
    ]
    results = pool.run(jobs_feed.planned, ranks, 3, places, each=each)
    assert results is not None
    expected = out.detach(), leaves[0].grad, leaves[1].grad
    for place, (side, whole) in enumerate(
        zip((home_tokens[1], home_tokens[0], home_tokens[1]), expected, strict=True)
    ):
        for rows_of_rank, one in zip(side, results, strict=True):
            np.testing.assert_allclose(one[place], whole.numpy()[rows_of_rank], rtol=0, atol=1e-12)
    for name, weight in weights_by_name.items():
        summed = np.sum([one[3][name] for one in results], axis=0)
        np.testing.assert_allclose(summed, weight.grad.numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("samples", "recipes", "ranks"),
    sparse_product(7, SAMPLES, (("blend", "blend"), ("mixed", "fcp"), ("fcp", "mixed")), (2, 4)),
)
def test_two_plans_equal_one_process(pool: Pool, samples: str, recipes: tuple[str, str], ranks: int) -> None:
    check(pool, *plans_and_places(samples, ranks, *recipes))


def test_ranks_without_images_and_without_patches_take_part(pool: Pool) -> None:
    encoder, decoder, places = plans_and_places("an image of one token", 4, "fcp", WHOLE)
    assert sorted(encoder.layout("attention").rows_per_rank) == [0, 0, 0, 4]
    check(pool, encoder, decoder, places)


@pytest.mark.parametrize(
    ("places", "merge", "error"),
    [
        ([[[31, 0, 5]], [[32, 0, 5]]], MERGE, "ExecutionError: ranks feed plan .* at different places"),
        ([[[31, 0, 4]]], MERGE, "ConfigError: .*must name each of the encoder's 20 rows once, 4 per token"),
        ([[[31, 0, 5]]], 5, "ConfigError: .*must name each of the encoder's 20 rows once, 5 per token"),
        (
            [[[31, 0, 3], [33, 12, 2]]],
            MERGE,
            "ConfigError: .*runs of the decoder's 70 tokens, without overlap",
        ),
        ([[[66, 0, 5]]], MERGE, "ConfigError: .*runs of the decoder's 70 tokens"),
        ([[[31, 0]]], MERGE, r"ConfigError: places.shape = \(1, 2\): must be \[n, 3\]"),
        ([[[31, 0, 5]]], 0, "ConfigError: merge = 0"),
    ],
)
def test_invalid_places_are_refused_on_every_rank(pool: Pool, places: Any, merge: int, error: str) -> None:
    encoder, decoder, _ = plans_and_places("one image", 2, "blend", "blend")
    pieces = [(encoder.for_rank(i).encode(), decoder.for_rank(i).encode()) for i in range(2)]
    results = pool.run(jobs_feed.refused, 2, places, merge, each=pieces)
    assert results is not None
    for one in results:
        assert re.match(error, one, re.DOTALL)


def test_a_wrong_number_of_rows_is_refused(pool: Pool) -> None:
    encoder, decoder, places = plans_and_places("one image", 2, "blend", "blend")
    pieces = [(encoder.for_rank(i).encode(), decoder.for_rank(i).encode()) for i in range(2)]
    results = pool.run(jobs_feed.other_rows, 2, places, each=pieces)
    assert results == ["this rank holds 10 rows of the encoder, got 11"] * 2
