"""Placement by predicted time, and the first candidates of a search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from apportion import Batch, Cluster, Model, Policy, Sequence, masks, simulate
from apportion.ir.masks.spec import Mask
from apportion.ir.request.workload import lognormal_lengths
from apportion.planner import api
from apportion.planner.place.blend.placement import pair_times
from apportion.planner.problem import Problem
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.search.candidates import SHORT, SPARSE, portfolio
from apportion.planner.shard.blocks import row_times, row_weights
from apportion.report.content import plan_data

MODEL = Model(q_heads=32, kv_heads=8, head_dim=128, layers=2)


def problem_of(batch: Batch, ranks: int = 8, recipe: str = "fcp") -> Problem:
    return Problem(batch, Cluster(nodes=1, ranks_per_node=ranks), MODEL, Policy(find_recipe(recipe), seed=0))


def short_documents(ranks: int = 8, tokens: int = 8192) -> Batch:
    return Batch.from_lengths(lognormal_lengths(0, ranks * tokens, median=300, sigma=1.0))


def test_short_documents_cost_more_per_pair() -> None:
    problem = problem_of(Batch.from_lengths([64, 512, 4096]))
    per_pair = row_times(problem, problem.batch.starts) / row_weights(problem, problem.batch.starts)
    assert (np.diff(per_pair) < 0).all()
    (times,) = pair_times(problem, problem.layers).values()
    assert (np.diff(times) < 0).all()
    assert times.min() >= 1


def test_block_times_add_up_to_at_least_the_time_of_the_whole() -> None:
    problem = problem_of(Batch.from_lengths([4096, 1000], mask=masks.sliding_window(500)))
    whole = row_times(problem, problem.batch.starts)
    cut = row_times(problem, np.array([0, 1024, 2048, 3072, 4096, 4600, 5096]))
    assert cut[:4].sum() >= whole[0]
    assert cut[4:].sum() >= whole[1]


@pytest.mark.parametrize("place", [{"lpt": {"weigh": "time"}}, {"blend": {"weigh": "time"}}])
@pytest.mark.parametrize("mask", [masks.causal(), masks.sliding_window(100), masks.full()])
def test_time_is_more_even_than_with_pairs(place: dict[str, dict[str, str]], mask: Mask) -> None:
    batch = Batch.from_lengths(short_documents().lengths, mask=mask)
    (name,) = place
    found = {}
    for weigh in ("pairs", "time"):
        steps = {"shard": {"sequences": {}}, "place": {name: {"weigh": weigh}}, "schedule": {"matchings": {}}}
        plan = api.plan(batch, Cluster(1, 8), MODEL, recipe={"name": "mine", "steps": steps})
        assert plan.report["imbalance"]["tokens"] <= 0.02
        found[weigh] = simulate(plan).time_imbalance
    assert found["time"] <= found["pairs"]


def test_auto_balances_time_instead_of_pairs_for_short_answers() -> None:
    """Answers to one question, as in chats: the simulated time is even, and shorter than if pairs were even."""
    sizes = lognormal_lengths(0, 8 * 16384, median=250, sigma=0.7)
    groups = [sizes[at : at + 16].tolist() for at in range(0, len(sizes) - 16, 16)]
    questions = [Sequence(200 + sum(group), masks.shared_question(200, group)) for group in groups]
    batch = Batch.from_sequences(questions)
    found = api.plan(batch, Cluster(1, 8), MODEL, recipe="auto")
    run, search = simulate(found), found.report["search"]
    pairs = api.plan(batch, Cluster(1, 8), MODEL, recipe=weighing_pairs(search["recipe"]))
    assert found.report["imbalance"]["compute"] > 0.1
    assert run.time_imbalance < 0.03 < simulate(pairs).time_imbalance
    assert search["ms"] <= min(trial["ms"] for trial in search["tried"] if trial["ms"]) * 1.001
    assert run.forward_ms + run.backward_ms < simulate(pairs).forward_ms + simulate(pairs).backward_ms
    name, value = plan_data(run, "chat", masks=False)["summary"][-1]
    assert (name, value.split()[0]) == ("time imbalance", f"{100 * run.time_imbalance:.2f}")


def weighing_pairs(recipe: dict[str, Any]) -> dict[str, Any]:
    """The recipe with pairs weighed instead of time."""
    ((name, options),) = recipe["steps"]["place"].items()
    return recipe | {"steps": recipe["steps"] | {"place": {name: {**options, "weigh": "pairs"}}}}


def test_two_kinds_are_weighed_by_their_layers() -> None:
    mask = {"global": masks.causal(), "local": masks.sliding_window(64)}
    model = Model(q_heads=8, kv_heads=8, head_dim=64, layers={"global": 1, "local": 5})
    batch = Batch.from_lengths([900, 800, 60, 50, 40], mask=mask)
    steps = {"shard": {"sequences": {}}, "place": {"blend": {"weigh": "time"}}, "schedule": {"matchings": {}}}
    plan = api.plan(batch, Cluster(1, 2), model, recipe={"name": "mine", "steps": steps})
    assert plan.report["imbalance"]["tokens"] < 0.01
    assert simulate(plan).time_imbalance < 0.1


def test_reach_is_that_of_the_kind_with_the_longest_reach() -> None:
    window = problem_of(Batch.from_lengths([65536], mask=masks.sliding_window(512)))
    both = problem_of(Batch.from_lengths([65536], mask={"a": masks.causal(), "b": masks.sliding_window(512)}))
    assert max(window.reach.values()) == pytest.approx(512 / 8192, rel=0.01)
    assert max(both.reach.values()) == pytest.approx(32768.5 / 8192)
    assert max(window.reach.values()) < SPARSE < SHORT < max(both.reach.values())


def test_a_search_starts_from_candidates_that_suit_the_mask() -> None:
    problems = map(problem_of, (Batch.from_lengths([65536]), short_documents()))
    long, short = ([one.recipe.name for one in portfolio(problem, "auto")[0]] for problem in problems)
    assert long == ["blend-u1", "mixed-u8", "mixed-u8", "blend-u8"]  # two shares of lone sequences
    assert short == ["blend-u1", "whole", "mixed-u8", "zones", "dcp"]


def test_a_search_reports_untried_candidates() -> None:
    batch = short_documents(4, 2048)
    policy = Policy(find_recipe("auto"), budget=2, seed=0)
    found = api.plan(batch, Cluster(1, 4), MODEL, policy=policy).report["search"]
    assert found["steps"] == 2
    assert found["untried"]
    assert 0 < found["ideal_ms"] < found["attainable_ms"] <= found["ms"]


def test_equal_plans_are_tried_once() -> None:
    """Splitting heads changes nothing if no document is cut."""
    found = api.plan(Batch.from_lengths([512] * 8), Cluster(1, 8), MODEL, recipe="auto").report["search"]
    steps = [str(one["recipe"]["steps"]["place"]) for one in found["tried"]]
    assert sum("head" in place for place in steps) == 0


@pytest.mark.parametrize("recipe", ["auto", "fcp", "blend", "dcp"])
def test_masks_without_pairs_are_planned_and_priced(recipe: str) -> None:
    nothing = Batch.from_sequences([Sequence(64, masks.bands([])), Sequence(32, masks.bands([]))])
    found = simulate(api.plan(nothing, Cluster(1, 2), MODEL, recipe=recipe))
    assert found.to_data()["attainable"] == 1
    mask = {"some": masks.causal(), "none": masks.bands([])}
    one = Batch.from_sequences([Sequence(64, mask)])
    model = Model(q_heads=4, kv_heads=4, head_dim=16, layers={"some": 1, "none": 1})
    assert 0 < simulate(api.plan(one, Cluster(1, 2), model, recipe=recipe)).of_attainable <= 1


def test_a_kind_without_pairs_takes_no_time() -> None:
    problem = problem_of(Batch.from_sequences([Sequence(64, masks.bands([]))]))
    assert [times.tolist() for times in pair_times(problem, problem.layers).values()] == [[]]
    assert row_times(problem, problem.batch.starts)[0] > 0
    assert max(problem.reach.values()) == 0
