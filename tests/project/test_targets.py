"""The benchmark of targets: its measurements, missed targets, and tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from apportion.ir.errors import CapacityError
from apportion.planner.recipe.recipes import find_recipe
from benchmarks import targets
from benchmarks.targets import PROMISES, Effort, Figure, merge, promise_for

EFFORT = Effort(ranks=(2, 4), seeds=(0,), repeats=1, patience=60.0)
SMALL = replace(PROMISES["fcp_paper 2K"], tokens_per_rank=1024)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return list(targets.measure(SMALL, SMALL.recipe(), EFFORT))


def test_a_target_applies_from_its_number_of_ranks() -> None:
    by_ranks = {8: 0.02, 64: 0.01}
    assert [promise_for(by_ranks, ranks) for ranks in (4, 8, 63, 64, 1024)] == [None, 0.02, 0.02, 0.01, 0.01]


def test_figures_that_miss_their_target_are_bold() -> None:
    assert str(Figure(1.5, 1.5)) == "1.50"
    assert str(Figure(1.51, 1.5, 1)) == "**1.5**"
    assert str(Figure(4.9, 5.0, 1, least=True)) == "**4.9**"
    assert str(Figure(7.0, None)) == "7.00"
    assert str(Figure(None, 1.0)) == "-"


def test_there_is_one_row_per_rank_count_and_seed(rows: list[dict[str, Any]]) -> None:
    results = [(row["name"], row["ranks"], row["seed"]) for row in rows]
    assert results == [("fcp_paper 2K", 2, 0), ("fcp_paper 2K", 4, 0)]
    for row in rows:
        assert row["slots"] == row["max_degree"]
        assert row["tasks"] > 0
        assert row["planning_ms"]["p50"] > 0


def test_sizes_that_would_take_too_long_are_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    hasty = replace(EFFORT, patience=0.0)
    assert [row["ranks"] for row in targets.measure(SMALL, SMALL.recipe(), hasty)] == [2]
    assert "no more than 2 ranks" in capsys.readouterr().err


def test_unavailable_recipes_are_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown_recipe = targets.Promise("absent", lambda: find_recipe("absent"), {})
    monkeypatch.setitem(PROMISES, "absent", unknown_recipe)
    assert list(targets.measure_all(["absent"], EFFORT)) == []
    assert capsys.readouterr().err == "absent: unknown recipe\n"


def test_refusals_are_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CapacityError("too small\nby far")

    monkeypatch.setattr(targets, "timed_plan", refuse)
    results = list(targets.measure(SMALL, SMALL.recipe(), replace(EFFORT, ranks=(2,))))
    assert results == [{"name": "fcp_paper 2K", "ranks": 2, "seed": 0, "refused": "too small"}]
    assert targets.tables(results)["targets-quality"] == "\nfcp_paper 2K, 2 ranks: too small"


def test_rows_are_written_as_tables(rows: list[dict[str, Any]]) -> None:
    tables = targets.tables(rows)
    times = tables["targets-times"].splitlines()
    assert times[0] == "| ms | 2 | 4 |"
    assert times[2].startswith("| fcp_paper 2K | ")
    quality = tables["targets-quality"].splitlines()
    assert [line.split(" | ")[1] for line in quality[2:]] == ["2", "4"]
    assert len({line.count("|") for line in quality}) == 1


def test_fresh_rows_replace_old_ones(rows: list[dict[str, Any]]) -> None:
    newer = [dict(rows[1], tokens=-1)]
    assert [row["tokens"] for row in merge(rows[::-1], newer)] == [rows[0]["tokens"], -1]
