"""Attention that chooses keys at run time over gathered rows, on several ranks, beside one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import apportion as ap
from apportion.ir.bytes.codec import Plan
from tests.ranks import jobs_visible
from tests.ranks.rank_pool import Pool

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


def dense(batch: ap.Batch) -> NDArray[Any]:
    """bool [tokens, tokens]"""
    i, j = np.arange(batch.tokens)[:, None], np.arange(batch.tokens)
    mask = np.zeros((batch.tokens, batch.tokens), np.bool_)
    for q0, q1, k0, k1, dmin, dmax in batch.bands(batch.kinds[0]).tolist():
        mask |= (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (dmin <= i - j) & (i - j <= dmax)
    return mask


def check(pool: Pool, plan: Plan, padding: int = 0) -> None:
    batch, home = plan.request.batch, plan.layout("attention")
    draw, mask = np.random.default_rng(1), dense(plan.request.batch)
    hidden, weight, grad = (
        draw.normal(size=size) for size in ((batch.tokens, 6), (6, 30), (batch.tokens, 8))
    )
    rows, matrix = (
        torch.from_numpy(hidden.copy()).requires_grad_(),
        torch.from_numpy(weight.copy()).requires_grad_(),
    )
    alone = jobs_visible.project(rows, matrix)
    out = jobs_visible.sparse(alone, alone.kv, alone.index, torch.from_numpy(mask))
    out.backward(torch.from_numpy(grad))
    tokens = [home.tokens(rank) for rank in range(plan.header.ranks)]
    each = [(plan.for_rank(i).encode(), hidden[one], weight, grad[one]) for i, one in enumerate(tokens)]
    found = pool.run(jobs_visible.layer, plan.header.ranks, padding, each=each)
    assert found is not None
    for own, (result, of_hidden, _, told) in zip(tokens, found, strict=True):
        np.testing.assert_allclose(result, out.detach().numpy()[own], rtol=0, atol=1e-12)
        np.testing.assert_allclose(of_hidden, rows.grad.numpy()[own], rtol=0, atol=1e-12)
        visible, positions, sequences, first, end, spans = told
        np.testing.assert_array_equal(visible, np.flatnonzero(mask[own].any(0)))
        np.testing.assert_array_equal(positions, batch.positions()[visible])
        np.testing.assert_array_equal(sequences, np.searchsorted(batch.starts, visible, "right") - 1)
        for query, row in zip(own, spans, strict=False):
            seen = np.concatenate([np.arange(*one) for one in row])
            np.testing.assert_array_equal(visible[seen], np.flatnonzero(mask[query]))
        np.testing.assert_array_equal(first[: len(own)], spans[: len(own), 0, 0])
        np.testing.assert_array_equal(end, spans.max((1, 2)))
    summed = np.sum([of_weight for _, _, of_weight, _ in found], axis=0)
    np.testing.assert_allclose(summed, matrix.grad.numpy(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("recipe", ["mixed", "blend", "fcp"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_run_time_attention_equals_one_process(
    pool: Pool, shape: tuple[int, int], recipe: str, mask: str
) -> None:
    check(pool, ap.plan(MASKS[mask], ap.Cluster(*shape), MODEL, recipe))
