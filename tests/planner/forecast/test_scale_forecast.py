"""What plans of very many ranks ask for, written out; and a plan that is extrapolated."""

from __future__ import annotations

import json

import pytest

from apportion.planner.forecast.parallelism import Degrees
from benchmarks import scale_forecast as scale

PLAN = {
    "ranks": 128,
    "plans": 4,
    "planning_s": 1.5,
    "verify_s": 0.5,
    "bytes": 128 * 26_000,
    "largest_part": 30_000,
    "measured": True,
}


def test_demands_are_their_closed_forms() -> None:
    found = scale.demands(PLAN, gpus=1024, step_s=10.0)
    assert found["of_step"] == 2.0 / 10
    assert found["processes"] == 4 * 2.0 / 10
    assert found["frames_s"] == 1024 * 4 / 10
    assert found["server_cores"] == pytest.approx(409.6 * 2 * 101e-6)  # frames of 26 KB count as two of 13 KB
    assert found["gb_s"] == pytest.approx(1024 * 4 * 26_000 / 10 / 1e9)
    assert found["rank_mb"] == pytest.approx(8 * 4 * 0.03)
    assert found["service_gb"] == pytest.approx(8 * 4 * 128 * 26_000 / 1e9)


def test_what_is_not_planned_is_extrapolated_and_says_so() -> None:
    whole, grown = (scale.plan_of("fcp", Degrees(8), 512, most) for most in (64, 16))
    assert (whole["measured"], whole["ranks"], whole["plans"]) == (True, 64, 1)
    assert (grown["measured"], grown["ranks"]) == (False, 64)
    assert grown["bytes"] % 4 == 0
    assert (
        0.3 < grown["bytes"] / whole["bytes"] < 1.2
    )  # without pods that are full, small plans have smaller parts


def test_the_page_has_the_tables_of_the_results() -> None:
    found, page = json.loads(scale.RESULTS.read_text())["rows"], scale.PAGE.read_text(encoding="utf-8")
    assert [row["gpus"] for row in found] == list(scale.GPUS)
    for lines in (scale.steps_table(found), scale.plans_table(found)):
        assert "\n".join(lines) in page
