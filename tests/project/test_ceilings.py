"""Calls, rows and bytes of planning stay below the committed ceilings; their counter."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from apportion.bench import BenchJob, Source, cluster_of, count_calls
from apportion.ir.request.model import Model
from tests.checks import ceilings
from tests.support.programs import run_python

ROOT = Path(__file__).resolve().parents[2]


def test_planning_costs_no_more_than_its_ceilings() -> None:
    rows = json.loads(run_python("-m", "tests.checks.ceilings", "--json"))["rows"]
    expected = {(name, ranks) for name in ceilings.RECIPES for ranks in ceilings.RANKS}
    assert {(row["recipe"], row["ranks"]) for row in rows} == expected


def test_values_above_a_ceiling_are_named() -> None:
    ceiling = {"rows": 100, "bytes": 1000, "calls": {"lower": 1000}}
    row = {"rows": 101, "bytes": 1000, "calls": {"lower": 1031, "place": 11, "shard": 10}}
    assert list(ceilings.excesses_of(row, ceiling, same_versions=True)) == [
        "rows 101, at most 100",
        "lower calls 1,031 functions, at most 1,000",
        "place calls 11 functions, at most 0",
    ]
    assert list(ceilings.excesses_of(row, ceiling, same_versions=False)) == ["rows 101, at most 100"]


def test_calls_are_counted_by_step_and_reproducibly() -> None:
    job = BenchJob(Source().batch(4 * 4096, 0)[0], cluster_of(4), Model(4, 2, 64), "fcp")
    count_calls(job)
    first, before = count_calls(job), sys.getprofile()
    assert first == count_calls(job)
    assert sys.getprofile() is before
    assert {"shard", "place", "schedule", "lower", "encode", "report", "seal", "verify"} <= set(first)
    assert all(calls > 0 for calls in first.values())
