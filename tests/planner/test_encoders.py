"""An encoder's images and a decoder's text under two plans: both even, and the cost of moving rows between them."""

from __future__ import annotations

import numpy as np
import pytest

import apportion as ap
from apportion.ir.isa import SPAN_COLUMNS
from apportion.ir.plan.moves import Feed
from apportion.ir.plan.tables import Layout, Table
from apportion.ir.verify.feeds import verify_feed
from apportion.planner.remap import feed_us

#: of Qwen2.5-VL-7B
ENCODER = ap.Model(16, 16, 80, hidden=1280, ffn=3420, layers=32)
DECODER = ap.Model(28, 4, 128, hidden=3584, ffn=18944, layers=28)
MERGE = 4


def samples(tokens: int) -> tuple[ap.Batch, ap.Batch, np.ndarray]:
    """Batches of an encoder and a decoder, and the places of images: up to four per sample, of 64 to 5000 tokens,
    between text, as in production traces of Qwen-VL."""
    draw, lengths, found = np.random.default_rng(0), list[int](), []
    while True:
        text = int(draw.lognormal(5.5, 1.0)) + 2
        images = np.exp(draw.normal(6.5, 0.9, draw.integers(0, 5))).astype(int).clip(64, 5000)
        total = text + int(images.sum())
        if sum(lengths) + total > tokens:
            break
        first = sum(lengths) + text // 2 + np.cumsum(images) - images
        found += [*zip(first.tolist(), images.tolist(), strict=True)]
        lengths.append(total)
    token, count = np.array(found).T
    encoder = ap.Batch.from_lengths(MERGE * count, ap.masks.full())
    return encoder, ap.Batch.from_lengths(lengths), np.stack([token, encoder.starts[:-1], count], 1)


@pytest.mark.parametrize("recipe", ["blend", "fcp"])
@pytest.mark.parametrize("nodes", [1, 4])
def test_both_layouts_are_even_within_two_percent(nodes: int, recipe: str) -> None:
    cluster = ap.Cluster(nodes, 4)
    encoder, decoder, places = samples(cluster.ranks * 16384)
    plans = [ap.plan(encoder, cluster, ENCODER, recipe), ap.plan(decoder, cluster, DECODER, recipe)]
    for plan in plans:
        assert plan.report["imbalance"]["tokens"] <= 0.02
        assert plan.report["imbalance"]["compute"] <= 0.02
    layouts = [plan.layout("attention") for plan in plans]
    feed = Feed.of(*layouts, places, MERGE)
    verify_feed(feed, *layouts)
    row_bytes = ENCODER.hidden * ENCODER.element_bytes
    most = encoder.tokens / cluster.ranks * 1.02 * row_bytes / (cluster.inter_gbs_per_rank * 1e3)
    assert 0 < feed_us(feed, cluster, row_bytes) < most + cluster.inter_latency_us


def test_the_time_of_a_feed_by_hand() -> None:
    """Rank 0 has both rows; tokens of rank 1, on its node, and rank 2, on the other, need one each."""
    spans = ([0, 1, 1, 1, 1], [[0, 0, 2, 0, 0]]), ([0, 0, 1, 2, 2], [[0, 0, 1, 0, 0], [0, 1, 1, 0, 0]])
    tables = (Table(np.array(ptr), SPAN_COLUMNS, np.array(rows).T) for ptr, rows in spans)
    encoder, decoder = map(Layout, ("encoder", "decoder"), tables)
    cluster = ap.Cluster(2, 2)
    feed = Feed.of(encoder, decoder, np.array([[0, 0, 2]]), 1)
    near, far = (1000 / (gbs * 1e3) for gbs in (cluster.intra_gbs, cluster.inter_gbs_per_rank))
    assert feed_us(feed, cluster, 1000) == pytest.approx(cluster.inter_latency_us + near + far)
    unmoved = Feed.of(encoder, encoder, np.array([[0, 0, 2]]), 1)
    assert feed_us(unmoved, cluster, 1000) == 0.0
