"""Comparisons: the same batches, one row per recipe, and a reason for missing figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from apportion import Batch, Hardware, Model, comparison as engine, masks, plan, simulate
from apportion.bench import Source, cluster_of
from apportion.comparison import Comparison, Refusal, Row, Setting, Trial, compare_all
from apportion.ir.errors import ConfigError, VerifyError
from apportion.ir.request.workload import workload_from_data
from apportion.planner.recipe.recipes import find_recipe, with_block
from apportion.planner.simulate.scenarios import SCENARIOS
from benchmarks import comparison, published, sensitivity

MODEL = Model(q_heads=8, kv_heads=2, head_dim=64, layers=2)
SETTING = Setting(cluster_of(4), MODEL)
RING, FCP = find_recipe("ring"), with_block(find_recipe("fcp"), 256)
TIMED = ("planning_ms", "verify_ms")


def draw_batches(count: int = 3) -> list[Batch]:
    return [Source().batch(4096, seed)[0] for seed in range(count)]


def records(comparison: Comparison) -> list[dict[str, Any]]:
    """Rows without measured times."""
    return [{k: v for k, v in row.record().items() if k not in TIMED} for row in comparison.rows]


def trial(total_ms: float) -> Trial:
    times = {"forward_ms": total_ms / 4, "backward_ms": 3 * total_ms / 4, "recurrent_ms": 0.0}
    return Trial({}, times, 1.0, None)


def test_a_row_equals_the_plans_report_and_its_simulation() -> None:
    (batch,) = draw_batches(1)
    row = compare_all([batch], [FCP], FCP, SETTING).rows[0].record()
    the_plan = plan(batch, SETTING.cluster, MODEL, recipe=FCP)
    simulation = simulate(the_plan)
    for name in engine.REPORTED:
        assert row[name] == the_plan.report[name], name
    assert (row["forward_ms"], row["backward_ms"]) == (simulation.forward_ms, simulation.backward_ms)
    assert (row["efficiency"], row["exposed_ms"]) == (simulation.efficiency, simulation.exposed_ms)
    assert row["peak_rows"] == simulation.peak_work_rows > 0
    assert row["of_attainable"] == pytest.approx(row["efficiency"] / row["attainable"])
    assert sum(row["lost_ms"].values()) == pytest.approx(row["forward_ms"] + row["backward_ms"])
    gaps = {name: bound["gap"] for name, bound in the_plan.report["bounds"].items()}
    assert {name: bound["gap"] for name, bound in row["bounds"].items()} == gaps
    assert row["verified"]


def test_repeated_comparisons_differ_only_in_measured_times() -> None:
    first, second = (records(compare_all(draw_batches(), [RING, FCP], RING, SETTING)) for _ in range(2))
    assert first == second
    assert [row["recipe"] for row in first] == ["ring", "fcp"]


def test_the_baseline_gets_a_row_and_a_speed_up_of_one() -> None:
    rows = compare_all(draw_batches(), [FCP], RING, SETTING).rows
    assert [row.recipe for row in rows] == ["ring", "fcp"]
    assert rows[0].record()["speedup"] == {"min": 1.0, "median": 1.0, "max": 1.0}


def test_speed_ups_compare_forward_plus_backward_batch_by_batch() -> None:
    base = (trial(8.0), trial(6.0), Refusal("no"))
    row = Row("mine", (trial(4.0), trial(6.0), trial(1.0)), base)
    assert row.speedups == [2.0, 1.0]
    assert Row("mine", (Refusal("no"),) * 3, base).speedups == []


def test_a_recipe_refused_for_every_batch_keeps_its_row_and_reason() -> None:
    homes = Batch.from_lengths([1000] * 4, home_ranks=[[1], None, None, None])
    rows = {row.recipe: row.record() for row in compare_all([homes], [RING, FCP], FCP, SETTING).rows}
    assert (rows["fcp"]["status"], rows["fcp"]["reason"]) == ("ok", None)
    refused = rows["ring"]
    assert (refused["status"], refused["batches"], refused["refused"]) == ("refused", 0, 1)
    assert "home_ranks" in refused["reason"]
    assert refused["speedup"] is refused["forward_ms"] is refused["bytes"] is None
    assert set(refused) == set(rows["fcp"])


def test_a_row_counts_the_batches_that_its_recipe_refuses() -> None:
    batches = [*draw_batches(2), Batch.from_lengths([1000] * 4, home_ranks=[[1], None, None, None])]
    row = compare_all(batches, [RING], RING, SETTING).rows[0].record()
    assert (row["status"], row["batches"], row["refused"]) == ("ok", 2, 1)
    assert row["reason"].startswith("1 of 3 batches: ")


def test_a_row_shows_the_batch_of_median_time() -> None:
    rows = [compare_all([batch], [FCP], FCP, SETTING).rows[0].record() for batch in draw_batches()]
    middle = sorted(rows, key=lambda row: row["forward_ms"] + row["backward_ms"])[1]
    row = compare_all(draw_batches(), [FCP], FCP, SETTING).rows[0].record()
    figures = "forward_ms", "efficiency", "exposed_ms", "slots", "bytes", "imbalance", "bounds", "plan_bytes"
    for name in figures:
        assert row[name] == middle[name], name
    for bound in row["bounds"].values():
        assert bound["gap"] is None or bound["gap"] == pytest.approx(bound["value"] / bound["bound"])


def test_other_hardware_changes_only_times() -> None:
    settings = SETTING, replace(SETTING, hardware=Hardware.load("h20"))
    fast, slowed = (compare_all(draw_batches(1), [RING], RING, each).rows[0].record() for each in settings)
    assert slowed["forward_ms"] > fast["forward_ms"]
    assert slowed["bytes"] == fast["bytes"]


def test_a_comparison_needs_at_least_one_batch() -> None:
    with pytest.raises(ConfigError, match="at least one batch"):
        compare_all([], [RING], RING, SETTING)


def test_progress_is_reported_for_every_plan() -> None:
    done: list[str] = []
    compare_all(draw_batches(2), [FCP], RING, SETTING, done.append)
    assert done == ["ring", "fcp", "ring", "fcp"]


def raising(message: str) -> Callable[[object], float]:
    class Violation:
        def __init__(self) -> None:
            self.message = message

    def fail(plan: object) -> float:
        raise VerifyError(f"the plan breaks 1 promise: {message}", (Violation(),))

    return fail


def test_a_plan_that_violates_a_rule_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "timed_verify", raising("rows are read before they arrive"))
    result = compare_all(draw_batches(1), [RING], RING, SETTING)
    assert result.broken == ["ring"]
    assert "breaks a rule" in str(result.rows[0].record()["reason"])
    assert compare_all(draw_batches(1), [RING], RING, replace(SETTING, verify=False)).broken == []


def test_a_plan_too_large_to_verify_keeps_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "timed_verify", raising("cannot be verified: too many pieces"))
    result = compare_all(draw_batches(1), [RING], RING, SETTING)
    row = result.rows[0].record()
    assert (result.broken, row["status"], row["verified"], row["verify_ms"]) == ([], "ok", False, None)
    assert "too many pieces" in row["unverified"]


def test_a_mask_applies_only_to_plain_documents() -> None:
    batch, _ = Source(mask=masks.sliding_window(64)).batch(4096, 0)
    assert batch.area("default") < Source().batch(4096, 0)[0].area("default")
    groups = workload_from_data({"groups": [[100, [50, 60]]]})
    with pytest.raises(ConfigError, match="their own masks"):
        Source(groups, masks.causal())


# --- the benchmark and its page


@pytest.mark.parametrize("case", comparison.CASES, ids=lambda case: case.name)
def test_batches_of_the_benchmark_fill_the_ranks(case: comparison.Case) -> None:
    tokens = 2**18
    first, again = (case.draw(tokens, 3) for _ in range(2))
    assert first.lengths.tolist() == again.lengths.tolist()
    assert first.tokens == tokens


def test_documents_of_magi_match_its_published_histogram() -> None:
    """Counts of documents match, and none exceeds a quarter of a pack; pieces of long ones count as documents."""
    tokens = 2**22
    lengths = published.magi_documents(tokens, 1).lengths[:-1]
    assert lengths.max() == 163840
    count = sum(published.MAGI_DOCUMENTS.values())
    mean = sum(length * number for length, number in published.MAGI_DOCUMENTS.items()) / count
    assert lengths.mean() == pytest.approx(mean, rel=0.2)
    assert (lengths == 350).mean() == pytest.approx(published.MAGI_DOCUMENTS[350] / count, rel=0.1)
    assert published.magi_documents(65536, 1).lengths.max() == 16384


def test_a_published_setting_is_compared_with_its_figures() -> None:
    systems = (published.System("theirs", RING, {4: (100.0, 50.0)}), published.System("", FCP, {}))
    case = published.PublishedSetting("tiny", "tiny", "h100", 1024, systems, Model(), batches=2, ranks=(4, 8))
    measured = comparison.measure(case)
    assert [(row["system"], row["ranks"]) for row in measured["rows"]] == [("theirs", 4), ("", 4), ("", 8)]
    row = measured["rows"][0]
    batches = [case.draw(4096, seed) for seed in (0, 1)]
    plans = [plan(each, cluster_of(4), Model(), recipe=RING, seed=seed) for seed, each in enumerate(batches)]
    runs = [simulate(each) for each in plans]
    pairs = [sum(n * (n + 1) // 2 for n in batch.lengths.tolist()) for batch in batches]
    mean = sum(4 * n * 32 * 128 / 4 / one.forward_ms / 1e9 for n, one in zip(pairs, runs, strict=True)) / 2
    assert row["tflops"]["nominal"]["forward"] == pytest.approx(mean, abs=0.06)
    assert row["tflops"]["slow-kernels"]["forward"] < row["tflops"]["nominal"]["forward"]
    ratio = row["tflops"]["nominal"]["forward"] / 100
    text = comparison.table(measured)
    assert f"| theirs | ring | 4 | 100 | {row['tflops']['nominal']['forward']:.0f} ±" in text
    assert f"| {ratio:.2f} | 50 |" in text
    assert "| - | fcp | 8 | - |" in text


def test_sensitivity_ranks_recipes_under_every_scenario() -> None:
    size, recipes = (comparison.lognormal, Model(), 4, 1024, 1), ("auto", "ring")
    measured = comparison.measure(sensitivity.Sensitivity("tiny", "tiny", *size, recipes=recipes))
    assert [row["recipe"] for row in measured["rows"]] == ["auto", "ring", "auto, told"]
    for row in measured["rows"]:
        assert list(row["ms"]) == [*(scenario.name for scenario in SCENARIOS), "incast, told"]
    planned_for_it = measured["rows"][2]["ms"]
    assert planned_for_it["nominal"] == measured["rows"][0]["ms"]["nominal"]
    text = comparison.table(measured)
    assert "| auto | 1.00 (1) |" in text
    assert "| pairs of 1 in another order | 0 |" in text
