"""The portfolio returns the best plan that it tries, within its budget; equal requests give equal bytes."""

from __future__ import annotations

from typing import Any

import pytest

import apportion as ap
from apportion import CapacityError, ConfigError, Policy, Recipe, masks, simulate
from apportion.ir.request.workload import lognormal_lengths
from apportion.planner.problem import Problem
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.search.candidates import Candidate
from apportion.planner.search.loop import SAME_TIME, Portfolio, Trial, _Search
from apportion.planner.search.price import Price

CLUSTER = ap.Cluster(nodes=2, ranks_per_node=4)
MODEL = ap.Model(q_heads=8, kv_heads=2, head_dim=64, layers=2)
LENGTHS = [9000, 5000, 2500, 1200, 900, 700, 500, 300, 200, 180]


def auto(**parameters: Any) -> Recipe:
    return Recipe("auto", {"search": {"portfolio": parameters}})


def plan(batch: ap.Batch | None = None, cluster: ap.Cluster = CLUSTER, **parameters: Any) -> ap.Plan:
    return ap.plan(batch or ap.Batch.from_lengths(LENGTHS), cluster, MODEL, auto(**parameters))


def milliseconds(found: ap.Plan) -> float:
    run = simulate(found)
    return run.forward_ms + run.backward_ms


def test_the_plan_keeps_the_requested_recipe_and_reports_the_one_found() -> None:
    found = plan()
    assert found.header.recipe == "auto"
    assert found.request.policy.recipe.step("search") is not None
    chosen = Recipe.from_data(found.report["search"]["recipe"])
    single = ap.plan(ap.Batch.from_lengths(LENGTHS), CLUSTER, MODEL, chosen)
    assert milliseconds(single) == milliseconds(found)


def test_the_reported_time_is_the_simulators() -> None:
    found, run = plan(), simulate(plan())
    search = found.report["search"]
    assert (search["forward_ms"], search["backward_ms"]) == (run.forward_ms, run.backward_ms)
    assert search["ms"] == pytest.approx(run.forward_ms + run.backward_ms)
    assert 1 / (1 + search["gap"]) == pytest.approx(run.efficiency)


@pytest.mark.parametrize("name", ["fcp", "ring", "usp", "hybrid_dp", "contiguous", "zeppelin"])
def test_auto_is_never_worse_than_its_candidates(name: str) -> None:
    names = ["ring", name, "fcp"]
    found = plan(candidates=names, improve=False, steps=8)
    tried = {trial["recipe"]["name"]: trial for trial in found.report["search"]["tried"]}
    single = milliseconds(ap.plan(ap.Batch.from_lengths(LENGTHS), CLUSTER, MODEL, name))
    assert tried[name]["refused"] or milliseconds(found) <= (1 + SAME_TIME) * single


@pytest.mark.parametrize(("ranks", "median", "sigma"), [(64, 150, 1.0), (128, 60, 1.3)])
def test_auto_cuts_little_if_communication_dominates(ranks: int, median: int, sigma: float) -> None:
    """Some 2,000 tokens per rank: mostly short samples, a few longer than a rank holds, as in tool-calling data."""
    lengths = lognormal_lengths(0, ranks * 2048, median=median, sigma=sigma)
    batch, cluster = ap.Batch.from_lengths(lengths), ap.Cluster(ranks // 8, 8)
    model = ap.Model(q_heads=32, kv_heads=8, head_dim=128, layers=2)
    found = ap.plan(batch, cluster, model, "auto")
    assert found.report["imbalance"]["tokens"] <= 0.02
    for name in ("hybrid_dp", "zeppelin", "mixed", "blend"):
        single = ap.plan(batch, cluster, model, name)
        if single.report["imbalance"]["tokens"] <= 0.02:
            assert milliseconds(found) <= 1.01 * milliseconds(single), name


def trial(us: float, imbalance: float) -> Trial:
    return Trial(Candidate(find_recipe("fcp")), price=Price(0.0, 0.0, us, 0.0, 0.0), imbalance=imbalance)


@pytest.mark.parametrize(
    ("best", "other", "better"),
    [
        ((1000.0, 0.026), (1000.1, 0.002), True),  # slower by 1/10,000, and much more even
        ((1000.0, 0.002), (999.9, 0.026), False),
        ((1000.0, 0.002), (998.0, 0.026), True),  # a real gain
        ((1000.0, 0.002), (999.9, 0.004), True),  # about as even
        ((1000.0, 0.004), (1000.1, 0.002), False),
        ((1000.9, 0.01), (999.0, 0.05), True),  # the best stays near the fastest
    ],
)
def test_balance_decides_between_equal_times(best: Any, other: Any, better: bool) -> None:
    problem = Problem(ap.Batch.from_lengths(LENGTHS), CLUSTER, MODEL, ap.Policy(auto()))
    search = _Search(problem, Portfolio(), 8)
    search.best, search.fastest_us = trial(*best), min(best[0], other[0])
    assert search._is_better(trial(*other)) is better


def test_candidates_are_dropped_only_by_a_valid_bound() -> None:
    tried = plan(steps=40).report["search"]["tried"]
    dropped = [trial for trial in tried if trial["ms"] is None and trial["refused"] is None]
    assert dropped
    for trial in dropped:
        recipe = Recipe.from_data(trial["recipe"])
        single = ap.plan(ap.Batch.from_lengths(LENGTHS), CLUSTER, MODEL, recipe)
        assert trial["least_ms"] <= milliseconds(single) * (1 + 1e-12)


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_the_budget_is_obeyed(steps: int) -> None:
    search = plan(steps=steps).report["search"]
    assert search["steps"] == len(search["tried"]) == steps
    assert search["stopped"] == "steps"


def test_exact_solvers_are_tried_last_on_request() -> None:
    batch, cluster = ap.Batch.from_lengths(lognormal_lengths(1, 16 * 2048, longest=16_384)), ap.Cluster(2, 8)
    usual, exact = (ap.plan(batch, cluster, ap.Model(), auto(solvers=flag)) for flag in (False, True))
    tried = exact.report["search"]["tried"]
    assert tried[: usual.report["search"]["steps"]] == usual.report["search"]["tried"]
    assert tried[-1]["recipe"]["steps"]["schedule"]["matchings"]["solver"] == "flow"
    assert exact.report["search"]["ms"] <= usual.report["search"]["ms"]


def test_the_budget_of_the_policy_has_priority() -> None:
    policy = Policy(auto(steps=9), budget=2)
    found = ap.plan(ap.Batch.from_lengths(LENGTHS), CLUSTER, MODEL, policy=policy)
    assert found.report["search"]["most_steps"] == 2


def test_the_search_ends_when_no_candidate_is_left() -> None:
    search = plan(candidates=["fcp", "ring"], improve=False, steps=9).report["search"]
    assert search["stopped"] is None
    assert search["steps"] == 2


def test_refusals_are_reported_with_their_reasons() -> None:
    odd = Recipe("odd", {**find_recipe("fcp").to_data()["steps"], "inner": {"ulysses": {"degree": 3}}})
    tried = plan(candidates=[odd.to_data(), "fcp"], improve=False).report["search"]["tried"]
    assert "must divide" in tried[0]["refused"]
    assert tried[1]["refused"] is None


def test_every_candidate_obeys_the_token_cap() -> None:
    found = plan(candidates=["hybrid_dp", "fcp"], improve=False)
    reason = found.report["search"]["tried"][0]["refused"]
    assert reason is None or "the cap is" in reason
    assert found.report["imbalance"]["tokens"] <= 0.02 + 1e-9


def test_inner_none_excludes_candidates_that_split_heads() -> None:
    tried = plan(inner="none", steps=30).report["search"]["tried"]
    assert not any("inner" in trial["recipe"]["steps"] for trial in tried)


def test_the_next_candidate_is_taken_if_the_best_exceeds_the_tolerance() -> None:
    recipes = ["contiguous", "fcp"]
    batch = ap.Batch.from_lengths([4096] * 8)
    first = plan(batch, candidates=recipes, improve=False)
    policy = Policy(auto(candidates=recipes, improve=False), tolerance=first.report["imbalance"]["compute"])
    assert ap.plan(batch, CLUSTER, MODEL, policy=policy).report["imbalance"]["compute"] <= policy.tolerance


def test_a_tolerance_that_no_candidate_keeps_is_an_error_with_numbers() -> None:
    policy = Policy(auto(), tolerance=0.0)
    with pytest.raises(CapacityError, match="tolerance"):
        ap.plan(ap.Batch.from_lengths([4001, 7]), CLUSTER, MODEL, policy=policy)


MASKS = {"causal": masks.causal(), "full": masks.full(), "window": masks.sliding_window(64)}
MASKS["question"] = masks.shared_question(100, [300, 200, 100])


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", MASKS)
def test_auto_plans_every_mask_and_rank_count(name: str, ranks: int) -> None:
    batch = ap.Batch.from_sequences([ap.Sequence(700, MASKS[name]), ap.Sequence(401), ap.Sequence(60)])
    found = plan(batch, ap.Cluster(nodes=1, ranks_per_node=ranks))
    assert found.header.ranks == ranks


def test_auto_plans_given_home_ranks() -> None:
    sequences = [ap.Sequence(400, home_ranks=(0, 1)), ap.Sequence(400, home_ranks=(2, 3))]
    found = plan(ap.Batch.from_sequences(sequences), ap.Cluster(nodes=1, ranks_per_node=4))
    assert found.report["search"]["recipe"]["name"].startswith("fcp")


def test_auto_weighs_kinds_by_their_layers() -> None:
    model = ap.Model(q_heads=4, kv_heads=2, head_dim=64, layers={"window": 5, "full": 1})
    kinds = {"window": masks.sliding_window(256), "full": masks.causal()}
    batch = ap.Batch.from_sequences([ap.Sequence(4000, kinds), ap.Sequence(1500, kinds)])
    found = ap.plan(batch, CLUSTER, model, auto())
    runs = simulate(found).runs
    value = sum(model.layers_of(kind) * run.makespan_us for (kind, _), run in runs.items()) / 6e3
    assert found.report["search"]["ms"] == pytest.approx(value)


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"steps": 0}, "steps"),
        ({"inner": "some"}, "inner"),
        ({"improve": 1}, "improve"),
        ({"candidates": []}, "candidates"),
        ({"candidates": "fcp"}, "candidates"),
        ({"candidates": ["auto"]}, "candidates"),
        ({"candidates": ["nobody"]}, "recipe"),
    ],
)
def test_wrong_parameters_are_refused(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        plan(**parameters)


def test_a_search_step_excludes_other_steps() -> None:
    steps = {"search": {"portfolio": {}}, "shard": {"sequences": {}}}
    with pytest.raises(ConfigError, match="combined with a search"):
        ap.plan(ap.Batch.from_lengths(LENGTHS), CLUSTER, MODEL, Recipe("both", steps))
