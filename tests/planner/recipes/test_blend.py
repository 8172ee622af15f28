"""Blend: exact token counts, even work, few bytes, on any lengths, masks, speeds and attention kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

import apportion as ap
from apportion._core import blend as core
from apportion.ir.masks.profile import profile
from apportion.ir.request.workload import lognormal_lengths
from apportion.planner.place.blend.placement import UNEVEN, Blend, token_shares
from apportion.planner.place.lpt import Lpt, busiest_load
from apportion.planner.problem import Placement, Problem
from apportion.planner.shard.blocks import Blocks, row_areas, row_weights
from apportion.planner.solvers.contracts import PartitionProblem
from apportion.planner.solvers.use import PartitionSolver
from tests.support.placements import MASKS, MODEL, place, problem, tokens, work

GEMMA = {"full": ap.masks.causal(), "window": ap.masks.sliding_window(1024)}


def recipe(**steps: dict[str, dict[str, float]]) -> dict[str, dict[str, dict[Any, Any]] | str]:
    return {"name": "blend", "steps": {
        "shard": {"sequences": {}}, "place": {"blend": {}}, "schedule": {"matchings": {}}, **steps,
    }}  # fmt: skip


def time(made: Problem, placement: Placement) -> tuple[NDArray[Any], float]:
    """Each rank's pairs divided by its speed, and all pairs divided by the sum of speeds."""
    load = work(placement, made.ranks)
    return load / made.speeds, load.sum() / made.speeds.sum()


def most_pairs_of_a_row(made: Problem) -> int:
    rows = np.arange(made.batch.tokens + 1)
    return max(int(row_areas(bands, rows).max()) for bands in made.bands.values())


# ------------------------------------------------------------------------------------------------ any batch


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 120) | st.integers(200, 2000), min_size=1, max_size=20),
    mask=st.sampled_from(sorted(MASKS)),
    ranks=st.integers(1, 13),
    slow=st.lists(st.sampled_from([1.0, 0.9, 0.5]), min_size=13, max_size=13) | st.none(),
    head=st.sampled_from([0, 0.3, 0.5, 1]),
    grain=st.sampled_from([0, 1, 50]),
)
def test_tokens_are_exact_and_work_is_even_within_one_row(
    lengths: list[int], mask: str, ranks: int, slow: list[float] | None, head: float, grain: int
) -> None:
    speeds = None if slow is None else tuple(slow[:ranks])
    made = problem(lengths, ranks, MASKS[mask], speeds=speeds)
    placement = place(Blend(head=head, grain=grain), made)
    assert placement.lengths.max() <= (grain or sum(lengths))
    assert (abs(tokens(placement, ranks) - sum(lengths) * made.speeds / made.speeds.sum()) < 1 + 1e-9).all()
    busy, mean = time(made, placement)
    assert busy.max() <= (1 + UNEVEN) * mean + 2 * most_pairs_of_a_row(made) / made.speeds.min()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 400), min_size=1, max_size=60), ranks=st.integers(1, 9))
def test_ranks_share_few_documents(lengths: list[int], ranks: int) -> None:
    """Each rank shares few documents with other ranks."""
    blocks = len(place(Blend(), problem(lengths, ranks)).home)
    assert blocks <= len(lengths) + 6 * ranks


@pytest.mark.parametrize(
    "lengths",
    [[1] * 20_000, [20_000], [10_000, 10_000], [10_000] + [1] * 10_000, [1000] * 20, [1500] * 13],
    ids=["ones", "one", "two", "one and ones", "equal", "one and a half ranks each"],
)
def test_extreme_lengths_are_balanced(lengths: list[int]) -> None:
    made = problem(lengths, 16)
    placement = place(Blend(), made)
    busy, mean = time(made, placement)
    assert busy.max() <= 1.01 * mean
    assert tokens(placement, 16).max() <= -(-sum(lengths) // 16)
    assert len(placement.home) <= len(lengths) + 6 * 16


def test_ranks_of_a_dense_document_are_filled_with_sparse_ones() -> None:
    """Six ranks share the long document, and each is filled with short ones."""
    made = problem([600] + [4] * 750, 6)
    placement = place(Blend(head=0), made)
    busy, mean = time(made, placement)
    assert busy.max() <= 1.02 * mean
    shares = placement.home[placement.starts[:-1] < 600]
    assert sorted(set(shares.tolist())) == list(range(6))
    assert len(shares) <= 9
    assert tokens(placement, 6).tolist() == [600] * 6


@pytest.mark.parametrize("head", [0, 0.5])
def test_spreading_heads_of_a_document_over_ranks_sends_less(head: float) -> None:
    """Keys that each rank sends for one long document: with only its tail spread, the rank with its head sends most."""
    ranks = 32
    made = problem([32_768, *[64] * 2048], ranks)
    placement = place(Blend(head=head), made)
    document = placement.starts[:-1] < 32_768
    starts, home = placement.starts[:-1][document], placement.home[document]
    readers = [len(set(home[starts > at].tolist()) - {rank}) for at, rank in zip(starts, home, strict=True)]
    sent = np.bincount(home, np.array(readers) * placement.lengths[document], ranks)
    assert (sent.max() > 3 * sent.mean()) == (head == 0)


# ------------------------------------------------------------------------------------------------ caps and speeds


def test_shares_of_tokens_follow_speeds_up_to_the_cap() -> None:
    assert token_shares(10, np.ones(4)).tolist() == [3, 2, 3, 2]
    assert token_shares(70, np.array([1.0, 1.0, 0.5, 1.0])).tolist() == [20, 20, 10, 20]
    assert token_shares(70, np.array([1.0, 1.0, 0.5, 1.0]), 18).tolist() == [18, 18, 16, 18]
    assert token_shares(72, np.array([1.0, 1.0, 0.5, 1.0]), 18).tolist() == [18, 18, 18, 18]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    total=st.integers(1, 10_000),
    speeds=st.lists(st.floats(0.1, 1.0), min_size=1, max_size=12),
    spare=st.integers(0, 50),
)
def test_shares_never_exceed_the_cap(total: int, speeds: list[float], spare: int) -> None:
    cap = -(-total // len(speeds)) + spare
    shares = token_shares(total, np.array(speeds), cap)
    assert shares.sum() == total
    assert shares.min() >= 0
    assert shares.max() <= cap


def test_a_slow_rank_gets_less_work_and_fewer_tokens() -> None:
    speeds = (1.0, 1.0, 1.0, 0.5)
    made = problem(lognormal_lengths(1, 4 * 8192).tolist(), 4, speeds=speeds)
    placement = place(Blend(), made)
    busy, mean = time(made, placement)
    assert busy.max() <= 1.003 * mean
    counts = tokens(placement, 4)
    assert counts[3] == pytest.approx(counts[0] / 2, abs=1)
    capped = problem(made.batch.lengths.tolist(), 4, speeds=speeds, token_cap=8400)
    placement = place(Blend(), capped)
    busy, mean = time(capped, placement)
    assert tokens(placement, 4).tolist() == [8400, 8400, 8400, 4 * 8192 - 3 * 8400]
    assert busy.max() <= 1.003 * mean


# ------------------------------------------------------------------------------------------------ several kinds


@pytest.mark.parametrize("seed", range(3))
def test_a_layout_shared_by_kinds_is_nearly_even_for_each(seed: int) -> None:
    model = ap.Model(q_heads=4, kv_heads=2, head_dim=8, hidden=32, ffn=64, layers={"full": 1, "window": 5})
    made = problem(lognormal_lengths(seed, 16 * 32_768).tolist(), 16, GEMMA, model=model)
    placement = place(Blend(), made)
    least = sum(made.layers[kind] * made.batch.area(kind) for kind in GEMMA) / 16
    assert busiest_load(made, placement) <= 1.05 * least
    shards = Blocks()(made)
    case = PartitionProblem(
        shards.per_piece(shards.weight), shards.per_piece(shards.lengths), made.token_caps
    )
    pieces = PartitionSolver("lpt")(case)
    by_sum = Placement(shards.starts, pieces.bin[shards.piece], shards.weight, 0.0)
    for some in (placement, Lpt()(made, shards)):
        assert busiest_load(made, some) < busiest_load(made, by_sum)
    assert (placement.weight == row_weights(made, placement.starts)).all()
    counts = tokens(placement, 16)
    assert counts.max() - counts.min() <= 1


# ------------------------------------------------------------------------------------------------ parts


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    masks=st.lists(st.sampled_from(sorted(MASKS)), min_size=1, max_size=2, unique=True),
)
def test_a_profile_counts_the_pairs_of_any_rows(lengths: list[int], masks: list[str]) -> None:
    factor = {mask: 3 + 4 * nth for nth, mask in enumerate(masks)}
    bands = {mask: ap.Batch.from_lengths(lengths, mask=MASKS[mask]).bands("default") for mask in masks}
    rows = np.arange(sum(lengths) + 1)
    expected = sum(factor[mask] * row_areas(bands[mask], rows) for mask in masks)
    assert (np.diff(profile(bands, factor).pairs_before(rows)) == expected).all()


def test_exchanging_rows_evens_out_what_the_walk_leaves_uneven() -> None:
    batch, speeds = ap.Batch.from_lengths(lognormal_lengths(4, 12_000)), np.linspace(0.5, 1.0, 6)
    rows = profile({"default": batch.bands("default")}, {"default": 1})
    targets, tokens = rows.below[-1] * speeds / speeds.sum(), np.full(6, 2000)

    def fullest(tolerance: float) -> float:
        mixed = batch.starts, rows.columns, tokens, speeds, targets, float(targets.max()), 0.5, tolerance
        low, high, rank = core.mix(*mixed)
        assert np.bincount(rank, high - low).tolist() == tokens.tolist()
        load = np.bincount(rank, rows.pairs_before(high) - rows.pairs_before(low))
        return float((load / targets).max())

    assert fullest(1.0) > 1.03
    assert fullest(UNEVEN) <= 1 + UNEVEN


# ------------------------------------------------------------------------------------------------ whole plans


@pytest.mark.parametrize(("ranks", "gap"), [(8, 3.0), (64, 2.0), (256, 1.6)])
@pytest.mark.parametrize("seed", range(3))
def test_plans_of_a_realistic_workload_keep_their_targets(ranks: int, gap: float, seed: int) -> None:
    """Checks imbalance, tokens, slots and bytes on log-normal documents, 32K tokens per rank."""
    batch = ap.Batch.from_lengths(lognormal_lengths(seed, ranks * 32_768))
    plan = ap.plan(batch, ap.Cluster(ranks // 8, 8), ap.Model(), recipe(), verify=ranks <= 64)
    report = plan.report
    assert report["imbalance"]["compute"] <= 0.005
    assert report["imbalance"]["tokens"] * 32_768 <= 1
    assert report["slots"] == report["max_degree"]
    assert report["bounds"]["kv_bytes"]["gap"] <= gap


def test_inter_node_bytes_shared_by_a_node() -> None:
    batch = ap.Batch.from_lengths(lognormal_lengths(0, 256 * 32_768))
    star, node = (
        ap.plan(batch, ap.Cluster(32, 8), ap.Model(), recipe(route={route: {}}), verify=False).report["bytes"]
        for route in ("star", "node")
    )
    assert node["inter_node"] * 4 <= star["inter_node"]


# ---- cuts at multiples of a tile


@pytest.mark.parametrize("seed", range(4))
def test_aligned_documents_are_cut_between_tiles(seed: int) -> None:
    made = problem(lognormal_lengths(seed, 16 * 32768), 16)
    placement = place(Blend(align=128), made)
    exact = place(Blend(), made)
    of = np.searchsorted(made.batch.starts, placement.starts[:-1], "right") - 1
    assert ((placement.starts[:-1] - made.batch.starts[of]) % 128 == 0).all()
    assert set(made.batch.starts) <= set(placement.starts.tolist())
    assert len(placement.home) <= len(exact.home)
    assert (tokens(placement, 16) <= made.token_caps).all()
    assert abs(tokens(placement, 16) - tokens(exact, 16)).max() <= 0.01 * 32768


def test_caps_have_priority_over_alignment() -> None:
    for tokens_of_rank in (32768, 1024):
        batch = lognormal_lengths(0, 16 * tokens_of_rank)
        tight = place(Blend(align=128), problem(batch, 16, token_cap=tokens_of_rank))
        assert tokens(tight, 16).tolist() == [tokens_of_rank] * 16
        loose = place(Blend(align=128), problem(batch, 16))
        assert tokens(loose, 16).max() <= 1.02 * tokens_of_rank
        assert (np.diff(loose.starts)[:-1] > 0).all()
        assert loose.starts[-1] == sum(batch)


def test_aligned_plans_verify_and_record_their_cap() -> None:
    batch = ap.Batch.from_lengths(lognormal_lengths(0, 8 * 4096))
    plan = ap.plan(batch, ap.Cluster(1, 8), MODEL, recipe=recipe(place={"blend": {"align": 128}}))
    assert plan.report["imbalance"]["tokens"] <= 0.02
