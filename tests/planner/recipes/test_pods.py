"""Documents go to pods first, and each pod is planned separately: every strategy, and the properties of pods."""

from __future__ import annotations

import numpy as np
import pytest

import apportion as ap
from apportion.cli.inputs import recipe_of
from apportion.ir.errors import ConfigError
from apportion.ir.request.workload import lognormal_lengths
from apportion.planner.pipeline.checks import checked_steps
from apportion.planner.pods import Documents
from apportion.planner.problem import Problem
from apportion.planner.recipe.recipes import find_recipe, with_pods
from tests.support.matrix import compare
from tests.support.strategies import STRATEGIES

MODEL = ap.Model(q_heads=4, kv_heads=2, head_dim=4, dtype="fp64")
# each twice, so that pods can be even; shuffled, so that sequences of one pod are not adjacent
LENGTHS = [23, 64, 5, 17, 31, 8, 64, 40, 17, 31, 23, 8, 40, 5]
MASKS = {"global": ap.masks.causal(), "local": ap.masks.sliding_window(7)}


def _recipe(name: str, pods: int | str) -> ap.Recipe:
    return with_pods(ap.Recipe(name, STRATEGIES[name]), pods)


def _homes(plan: ap.Plan) -> list[set[int]]:
    """The ranks of each sequence."""
    spans = next(iter(plan.layouts.values())).spans
    rank, sequence = spans.rank_of_row(), spans["sequence"]
    return [set(rank[sequence == one].tolist()) for one in range(len(plan.request.batch.lengths))]


@pytest.mark.parametrize("name", [name for name, steps in STRATEGIES.items() if "search" not in steps])
def test_every_strategy_plans_pods(name: str) -> None:
    batch = ap.Batch.from_lengths(LENGTHS, mask=MASKS)
    model = ap.Model(q_heads=4, kv_heads=2, head_dim=4, dtype="fp64", layers={"global": 1, "local": 2})
    with checked_steps():
        plan = ap.plan(batch, ap.Cluster(4, 2), model, _recipe(name, 4))
    assert ap.plan(batch, ap.Cluster(4, 2), model, _recipe(name, 4)).id == plan.id
    if "reshuffle" not in STRATEGIES[name]:
        assert all(len({rank // 4 for rank in ranks}) == 1 for ranks in _homes(plan))


@pytest.mark.parametrize("name", ["fcp", "distca", "dcp_heads", "inner"])
def test_plans_of_pods_equal_dense_attention(name: str) -> None:
    plan = ap.plan(ap.Batch.from_lengths(LENGTHS), ap.Cluster(4, 2), MODEL, _recipe(name, 4))
    compare(plan, "default", (4, 2, 4, 4, False, None), 0)


def test_pods_are_joined_for_a_sequence_larger_than_one() -> None:
    batch = ap.Batch.from_lengths([40] * 16 + [400] + [40] * 16)
    plan = ap.plan(batch, ap.Cluster(8, 2), MODEL, with_pods(find_recipe("blend"), 2))
    ranks = _homes(plan)[16]
    assert ranks == set(range(len(ranks)))
    assert len(ranks) > 2  # of two or more pods
    assert all(
        len({rank // 2 for rank in found}) == 1
        for place, found in enumerate(_homes(plan))
        if place != 16 and min(found) >= len(ranks)
    )


def test_too_few_sequences_are_planned_without_pods() -> None:
    batch, cluster = ap.Batch.from_lengths([500]), ap.Cluster(8, 2)
    in_pods, whole = (
        ap.plan(batch, cluster, MODEL, recipe) for recipe in (with_pods(find_recipe("blend"), 2), "blend")
    )
    assert _homes(in_pods) == _homes(whole)


def test_pods_cost_little_time() -> None:
    batch = ap.Batch.from_lengths(lognormal_lengths(0, 128 * 8192))
    cluster, model = ap.Cluster(16, 8), ap.Model()
    for name in ("fcp", "blend"):
        report = ap.plan(batch, cluster, model, with_pods(find_recipe(name), 32)).report
        assert report["imbalance"]["compute"] < 0.02
        assert report["imbalance"]["tokens"] <= 0.02


@pytest.mark.parametrize("name", ["fcp", "blend", "dcp", "magi"])
def test_caps_hold_on_pods_of_unequal_speed(name: str) -> None:
    batch = ap.Batch.from_lengths([58, 75, 42, 2, 1, 42, 36, 16, 2, 60, 3, 2, 27, 13])
    cluster = ap.Cluster(2, 3, speeds=(1.0, 0.5, 0.5, 1.0, 1.0, 2.0))
    plan = ap.plan(batch, cluster, MODEL, policy=ap.Policy(_recipe(name, 2), token_cap=71))
    assert plan.layout("attention").rows_per_rank.max() <= 71


def test_each_pod_is_planned_by_the_speeds_of_its_own_ranks() -> None:
    cluster = ap.Cluster(2, 2, speeds=(1.0, 0.5, 0.5, 1.0))
    plan = ap.plan(ap.Batch.from_lengths([64] * 8), cluster, MODEL, _recipe("blend", 2))
    rows = plan.layout("attention").rows_per_rank
    assert rows[[0, 3]].min() > 1.8 * rows[[1, 2]].max()


@pytest.mark.parametrize(
    ("nodes", "ranks", "sizes"), [(5, 5, {2, 4}), (3, 4, {2, 4}), (255, 1024, {1016, 1024})]
)
def test_no_pod_is_larger_than_requested(nodes: int, ranks: int, sizes: set[int]) -> None:
    cluster = ap.Cluster(nodes, 2 if nodes < 9 else 8)
    problem = Problem(
        ap.Batch.from_lengths([8] * cluster.ranks), cluster, MODEL, ap.Policy(_recipe("fcp", ranks))
    )
    assert set(np.diff(next(Documents(ranks)._pods(problem, 1))).tolist()) <= sizes


def test_options_that_conflict_with_pods_are_refused() -> None:
    batch = ap.Batch.from_data({"sequences": [{"length": 64, "home_ranks": [1]}, {"length": 64}]})
    with pytest.raises(ConfigError, match="drop `pods` or the home_ranks"):
        ap.plan(batch, ap.Cluster(4, 2), MODEL, with_pods(find_recipe("fcp"), 2))
    with pytest.raises(ConfigError, match="leave --pods out"):
        with_pods(find_recipe("auto"), 8)
    with pytest.raises(ConfigError, match="--pods"):
        recipe_of("fcp", pods="none")
