"""The table of what executing costs the host: rows, promises, and how it is written down."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import execution

ROW = {"recipe": "fcp", "ranks": 8, "seed": 0}


@pytest.fixture(scope="module")
def row() -> dict[str, dict[str, int | str] | int | str]:
    return execution.measure("fcp", 2, repeats=1, tokens=512)


def phase(host_ms: float, launches: int = 12) -> dict[str, float]:
    return {"instructions": 8, "launches": launches, "messages": 5, "host_ms": host_ms, "prepare_ms": 2.0}


def test_a_row_has_both_phases_of_the_stage_engine(row: dict[str, Any]) -> None:
    assert (row["recipe"], row["ranks"]) == ("fcp", 2)
    for name in ("forward", "backward"):
        assert (row[name]["phase"], row[name]["engine"]) == (name, "stage")
        assert row[name]["launches"] > 0


def test_plans_that_cannot_be_measured_have_a_reason() -> None:
    row = execution.measure("upipe", 2, repeats=1, tokens=512)
    assert row["refused"].startswith("upipe: its plans project")
    assert execution.table([row]) == f"\nupipe, 2 ranks: {row['refused']}"


def test_misses_are_bold() -> None:
    kept = execution.figures(ROW | {"forward": phase(0.3), "backward": phase(0.3)})
    missed = execution.figures(ROW | {"forward": phase(0.301), "backward": phase(0.3, 13)})
    assert str(kept["launches / instructions"]) == "1.50"
    assert [
        str(missed[name]) for name in ("launches / instructions", "forward, host ms", "backward, host ms")
    ] == [
        "**1.56**",
        "**0.301**",
        "0.300",
    ]
    assert str(missed["prepare ms"]) == "4.0"


def test_promises_are_those_of_the_recipe() -> None:
    for recipe, ranks, wanted in (("fcp", 64, "0.6"), ("ring", 8, "-"), ("ring", 64, "4.0"), ("dcp", 8, "-")):
        held = {"recipe": recipe, "ranks": ranks, "forward": phase(9.0), "backward": phase(9.0)}
        assert str(execution.figures(held)["promised"]) == wanted


def test_the_table_has_a_line_for_each_plan(row: dict[str, Any]) -> None:
    lines = execution.table([row, row | {"ranks": 4}]).splitlines()
    assert [line.split(" | ")[:2] for line in lines[2:]] == [["| fcp", "2"], ["| fcp", "4"]]
    assert len({line.count("|") for line in lines}) == 1


def test_fresh_rows_replace_old_ones(row: dict[str, Any]) -> None:
    other, fresh = row | {"recipe": "ring"}, row | {"seed": 1}
    assert execution.merged([other, row], [fresh]) == [fresh, other]
