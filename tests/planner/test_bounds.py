"""Bounds against exhaustive search: never above the best of all placements of a small instance."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, strategies as st

import apportion as ap
from apportion.ir.masks.bands import dense
from apportion.ir.tensors import Tensor
from apportion.planner.bounds import Bound, foreign_kv_tokens, foreign_tokens, kv_bytes, makespan, slots
from apportion.planner.recipe.recipes import entries
from apportion.planner.solvers.colouring.matching import max_degree
from apportion.planner.solvers.partition.lpt import makespan_bound

MODEL = ap.Model(q_heads=4, kv_heads=2, head_dim=8, dtype="bf16", hidden=32, ffn=64, layers=1)
MASKS = {
    "causal": ap.masks.causal(),
    "full": ap.masks.full(),
    "window": ap.masks.sliding_window(4),
    "narrow": ap.masks.sliding_window(2),
    "two-sided": ap.masks.sliding_window(3, 2),
    "sink": ap.masks.sink_window(2, 3),
    "chunked": ap.masks.chunked(5),
    "video": ap.masks.block_causal(3),
    "video-window": ap.masks.block_causal(3, 2),
    "blockwise": ap.masks.causal_blockwise(2, 1),
    "prefix": ap.masks.prefix_lm(4),
    "image": ap.masks.image_spans([(2, 5)]),
    "shared": ap.masks.shared_question(4, [3, 2]),
}


def placements(tokens: int, ranks: int) -> np.ndarray:
    """[ranks**tokens, tokens]: every way to assign tokens to ranks."""
    return np.arange(ranks**tokens)[:, None] // ranks ** np.arange(tokens) % ranks


class ExhaustiveSearch:
    """All placements with queries at home: tokens, pairs and needed foreign keys of each rank."""

    def __init__(self, bands: np.ndarray, tokens: int, ranks: int) -> None:
        sees, homes = dense(bands, tokens, tokens), placements(tokens, ranks)
        on_rank = np.stack([homes == rank for rank in range(ranks)], axis=1)
        self.tokens, self.pairs = on_rank.sum(2), on_rank @ sees.sum(1)
        self.foreign = ((on_rank.astype(np.int64) @ sees > 0) & ~on_rank).sum((1, 2))

    def check(self, bands: np.ndarray, token_caps: set[int]) -> int:
        """The largest bound; asserts that each is at most the fewest foreign keys of any placement within its caps."""
        largest = 0
        for token_cap in token_caps:
            for load_cap in np.unique(self.pairs.max(1)).tolist():
                allowed = (self.tokens.max(1) <= token_cap) & (self.pairs.max(1) <= load_cap)
                if allowed.any():
                    bound = foreign_tokens(bands, token_cap, load_cap)
                    assert bound <= self.foreign[allowed].min(), (token_cap, load_cap)
                    largest = max(largest, bound)
        return largest


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_foreign_kv_bound_holds_for_every_mask(mask: str, ranks: int) -> None:
    bands = ap.Batch.from_lengths([9], MASKS[mask]).bands("default")
    assert ExhaustiveSearch(bands, 9, ranks).check(bands, {5, 6, 9} if ranks == 2 else {3, 4, 9}) > 0


@pytest.mark.parametrize("lengths", [(6, 3), (1, 8), (5, 2, 2)])
@pytest.mark.parametrize("mask", ["causal", "full", "window"])
def test_foreign_kv_bound_holds_for_several_sequences(lengths: tuple[int, ...], mask: str) -> None:
    bands = ap.Batch.from_lengths(lengths, MASKS[mask]).bands("default")
    ExhaustiveSearch(bands, sum(lengths), 3).check(bands, {3, 4, 6})


@st.composite
def band_sets(draw: st.DrawFn) -> np.ndarray:
    """Bands that share no query row, of 7 tokens."""
    edges = sorted(draw(st.sets(st.integers(1, 6), max_size=2)) | {0, 7})
    rows = []
    for q0, q1 in pairwise(edges):
        k0, k1 = sorted(draw(st.tuples(st.integers(0, 6), st.integers(0, 6))))
        dmin, dmax = draw(st.sampled_from([0, -2, 1, -(2**62)])), draw(st.sampled_from([0, 1, 2, 4, 2**62]))
        rows.append((q0, q1, k0, k1 + 1, dmin, dmax))
    return np.array(rows, np.int64)


@given(band_sets(), st.integers(2, 3))
def test_foreign_kv_bound_holds_for_random_bands(bands: np.ndarray, ranks: int) -> None:
    ExhaustiveSearch(bands, 7, ranks).check(bands, {3, 4, 7} if ranks == 3 else {4, 7})


def test_consecutive_shares_nearly_meet_the_foreign_kv_bound_of_a_window() -> None:
    batch = ap.Batch.from_lengths([8192], ap.masks.sliding_window(513))
    load = max(int(ap.Batch.from_lengths([2048], ap.masks.sliding_window(513)).area("default")), 2048 * 513)
    assert foreign_kv_tokens(batch, "default", 2048, load) == 3 * 512


def test_foreign_kv_bound_is_exact_for_equal_shares_in_order() -> None:
    batch = ap.Batch.from_lengths([4096])
    assert foreign_kv_tokens(batch, "default", 1024, batch.area("default")) == 1024 + 2048 + 3072
    full = ap.Batch.from_lengths([4096], ap.masks.full())
    assert foreign_kv_tokens(full, "default", 1024, full.area("default")) == 3 * 4096


def test_foreign_kv_bound_of_the_longest_sequences_is_exact() -> None:
    longest = 2**31 - 1
    windows = (ap.masks.sliding_window(width) for width in (2**23, 3))
    for mask in (ap.masks.causal(), ap.masks.full(), *windows):
        batch = ap.Batch.from_lengths([longest], mask)
        share = -(-longest // 64)
        assert 0 < foreign_kv_tokens(batch, "default", share, -(-batch.area("default") // 8)) <= 63 * longest


def test_the_kv_bytes_bound_counts_both_phases_or_gives_a_reason() -> None:
    batch = ap.Batch.from_lengths([4096, 10], {"a": ap.masks.causal(), "b": ap.masks.sliding_window(1)})
    caps = {kind: batch.area(kind) for kind in batch.kinds}
    per_token = 2 * MODEL.row_bytes(Tensor.KV) + MODEL.row_bytes(Tensor.DKV)
    found = kv_bytes(batch, MODEL, 1024, caps, 2.0 * 6144 * per_token)
    assert found.bound == 6144 * per_token
    assert found.gap == 2.0
    assert found.to_data() == {"bound": found.bound, "value": found.value, "gap": 2.0}
    moved = kv_bytes(batch, MODEL, 1024, caps, 5.0, queries_move=True)
    assert (moved.bound, moved.gap, moved.void) == (None, None, "queries move: nothing is proven")
    small = kv_bytes(batch, MODEL, 4106, caps, 0.0)
    assert (small.bound, small.gap, small.void) == (0, None, "the bound is below 1% of the tokens")


def test_bounds_of_kinds_that_share_a_layout_add_up() -> None:
    """Every placement of 8 tokens on 2 ranks: the keys that two calls fetch, against the sum of their bounds."""
    batch = ap.Batch.from_lengths([8], {"global": ap.masks.causal(), "local": ap.masks.sliding_window(3)})
    searched = [ExhaustiveSearch(batch.bands(kind), 8, 2) for kind in batch.kinds]
    for token_cap in (4, 5):
        fits = searched[0].tokens.max(1) <= token_cap
        for place in np.flatnonzero(fits).tolist():
            both = zip(batch.kinds, searched, strict=True)
            caps = {kind: int(one.pairs[place].max()) for kind, one in both}
            bound = sum(foreign_kv_tokens(batch, kind, token_cap, caps[kind]) for kind in batch.kinds)
            assert bound <= sum(one.foreign[place] for one in searched)


# ---------------------------------------------------------------------------------------------- makespan and slots


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=6),
    st.lists(st.sampled_from([0.25, 0.5, 1.0, 3.0]), min_size=1, max_size=3),
)
def test_the_makespan_bound_is_at_most_the_best_assignment(weights: list[int], speeds: list[float]) -> None:
    items, speed = np.array(weights), np.array(speeds)
    homes = placements(len(items), len(speed))
    loads = np.stack([((homes == rank) * items).sum(1) for rank in range(len(speed))], axis=1)
    best = loads[(loads / speed).max(1).argmin()]
    found = makespan(makespan_bound(items, speed), best, speed)
    assert found.bound <= found.value * (1 + 1e-12)
    assert found.gap is None or found.gap >= 1


def fewest_slots(edges: list[tuple[int, int]], ranks: int) -> int:
    """By search: the smallest k such that the edges can be coloured with k colours, none twice at a sender or
    receiver."""
    for count in range(len(edges) + 1):
        for colours in product(range(count), repeat=len(edges)):
            ends = [(c, side, edge[side]) for edge, c in zip(edges, colours, strict=True) for side in (0, 1)]
            if len(set(ends)) == len(ends):
                return count
    raise AssertionError("one colour per edge is enough")


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=5))
def test_the_slots_bound_is_at_most_the_best_colouring(edges: list[tuple[int, int]]) -> None:
    src, dst = (np.array([edge[side] for edge in edges], np.int64) for side in (0, 1))
    found = slots([max_degree(src, dst, 3)], [fewest_slots(edges, 3)])
    assert found.bound <= found.value
    assert (found.gap is None) == (not edges)


def test_slot_bounds_add_up_over_exchanges() -> None:
    assert slots([3, 0, 2], [4, 0, 2]) == Bound("slots", 5.0, 6.0)
    assert slots([3, 0, 2], [4, 0, 2]).gap == 1.2


def test_a_gap_within_rounding_is_one() -> None:
    assert Bound("makespan", 3.0000000001, 3.0).gap == 1.0
    assert Bound("makespan", 0.0, 3.0).to_data()["void"] == "the bound is 0"
    assert Bound("makespan", 2.0, None).gap is None


# ---------------------------------------------------------------------------------------------- in reports


@pytest.mark.parametrize("recipe", entries())
def test_no_reported_figure_is_below_its_bound(recipe: str) -> None:
    """All recipes and masks: each recipe either respects every bound or refuses the batch."""
    grouped = recipe in ("ulysses", "usp", "flexsp")
    cluster, planned = ap.Cluster(2, 2, speeds=None if grouped else (1.0, 0.5, 1.0, 2.0)), 0
    for mask in ("causal", "full", "window", "sink", "shared"):
        batch = ap.Batch.from_lengths([9, 9, 9, 9], MASKS[mask])
        try:
            report = ap.plan(batch, cluster, MODEL, recipe).report
        except (ap.ConfigError, ap.CapacityError):
            continue
        planned += 1
        for name, found in report["bounds"].items():
            if found["bound"] is not None and found["value"] is not None:
                assert found["value"] >= found["bound"] * (1 - 1e-12), (name, mask)
    assert planned
