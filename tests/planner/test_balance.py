"""Kinds whose queries choose keys at run time count the chosen keys: in placement, report, verifier and simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import apportion as ap
from apportion.ir.masks.profile import profile
from apportion.ir.masks.spec import Mask
from apportion.ir.plan.totals import chosen_keys

MODEL = ap.Model(q_heads=4, kv_heads=1, head_dim=16, layers=1)
#: one long document whose late queries see many keys, and many short documents
LENGTHS = [6000, *[300] * 20]
MASKS = (ap.masks.causal(), ap.masks.full(), ap.masks.sliding_window(7, 3))
MASKS += (ap.masks.sink_window(4, 9), ap.masks.chunked(8))


def weighed(keys: int = 64, **more: Any) -> ap.Model:
    return replace(MODEL, balance={"default": {"keys": keys}}, **more)


@given(st.sampled_from(MASKS), st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 40))
def test_a_capped_profile_counts_every_row(mask: Mask, lengths: list[int], keys: int) -> None:
    batch = ap.Batch.from_lengths(lengths, mask)
    bands = batch.bands("default")
    i, j = np.arange(batch.tokens)[:, None], np.arange(batch.tokens)
    pairs = np.zeros(batch.tokens, np.int64)
    for q0, q1, k0, k1, dmin, dmax in bands.tolist():
        inside = (q0 <= i) & (i < q1) & (k0 <= j) & (j < k1) & (dmin <= i - j) & (i - j <= dmax)
        pairs += inside.sum(1)
    whole, rows = profile({"": bands}, {"": 1}), np.arange(batch.tokens + 1)
    expected = np.append(0, np.minimum(pairs, keys).cumsum())
    np.testing.assert_array_equal(whole.capped(keys).pairs_before(rows), expected)
    both = profile({"": bands}, {"": 2}).plus(whole.capped(keys), 3)
    np.testing.assert_array_equal(both.pairs_before(rows), np.append(0, 2 * pairs.cumsum()) + 3 * expected)


@pytest.mark.parametrize("recipe", ["mixed", "blend", "fcp"])
def test_ranks_are_balanced_by_chosen_keys(recipe: str) -> None:
    batch, cluster = ap.Batch.from_lengths(LENGTHS), ap.Cluster(2, 2)
    plan, plain = (ap.plan(batch, cluster, model, recipe) for model in (weighed(), MODEL))
    layout = plan.layout("attention")
    chosen = np.array([np.minimum(layout.position_ids(rank) + 1, 64).sum() for rank in range(4)])
    found = chosen_keys(batch, weighed(), "default", layout)
    np.testing.assert_array_equal(found, chosen)
    assert plan.report["imbalance"]["compute"] == pytest.approx(chosen.max() / chosen.mean() - 1)
    assert plan.report["imbalance"]["compute"] < 0.02
    assert plan.id != plain.id
    assert plan.request.model.to_data()["balance"] == {"default": {"keys": 64}}
    assert "balance" not in plain.request.model.to_data()


def test_simulated_times_count_chosen_keys() -> None:
    """Choosing all keys changes nothing; a 16th of the pairs takes about a 16th of the kernels' time."""
    batch, cluster = ap.Batch.from_lengths([8192] * 2), ap.Cluster(1, 2)
    plain, all_, few = (
        ap.simulate(ap.plan(batch, cluster, model, "blend")) for model in (MODEL, weighed(8192), weighed(256))
    )
    for key, run in plain.runs.items():
        assert all_.runs[key].makespan_us == run.makespan_us
        assert all_.runs[key].ideal_us == pytest.approx(run.ideal_us)
        assert few.runs[key].ideal_us == pytest.approx(run.ideal_us / 16, rel=0.05)
        assert few.runs[key].work.kernels == pytest.approx(run.work.kernels / 16, rel=0.05)


def test_a_report_or_tolerance_that_counts_pairs_is_refused() -> None:
    plan = ap.plan(ap.Batch.from_lengths(LENGTHS), ap.Cluster(1, 4), weighed(), "blend")
    other = replace(plan.request, model=MODEL)
    with pytest.raises(ap.VerifyError, match=r"the report has imbalance\.compute"):
        ap.verify(replace(plan, request=other, sections=None))
    assert plan.report["imbalance"]["compute"] < 0.001
    policy = replace(plan.request.policy, tolerance=0.001)
    ap.verify(replace(plan, request=replace(plan.request, policy=policy), sections=None))


@pytest.mark.parametrize(
    ("balance", "field"),
    [
        ({"default": {"keys": 0}}, "model.balance.default.keys"),
        ({"default": {"key": 5}}, "model.balance.default"),
        ({"default": 5}, "model.balance.default"),
        ({"a b": {"keys": 5}}, "model.balance"),
        ([], "model.balance"),
    ],
)
def test_a_wrong_balance_is_named(balance: Any, field: str) -> None:
    with pytest.raises(ap.ConfigError, match=field):
        replace(MODEL, balance=balance)
    with pytest.raises(ap.UnknownNameError, match="sparse"):
        replace(MODEL, layers={"dense": 1}, balance={"sparse": {"keys": 5}})


def test_a_balance_for_an_unknown_kind_is_refused_by_name() -> None:
    model = replace(MODEL, balance={"sparse": {"keys": 5}})
    with pytest.raises(ap.UnknownNameError, match="sparse"):
        ap.plan(ap.Batch.from_lengths([20]), ap.Cluster(1, 2), model, "blend")
