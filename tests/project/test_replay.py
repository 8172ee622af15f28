"""Plans match the committed ids and step digests; the comparison names the first step that differs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import apportion as ap
from apportion.ir.bytes.codec import Plan
from apportion.ir.plan.tables import Table
from tests.checks import replay


@pytest.mark.slow
def test_no_plan_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([]) == 0, capsys.readouterr().out
    assert len(replay.committed_steps()) > 300


@pytest.fixture(scope="module")
def plan() -> Plan:
    return ap.plan(ap.Batch.from_lengths([4000, 900, 100]), ap.Cluster(1, 4), ap.Model(4, 2, 8), verify=False)


def with_change(plan: Plan, table: str, column: str, change: int, row: int = -1) -> Plan:
    """The plan with one number of a table changed."""
    key = "default", "forward"
    old = plan.programs[key][table]
    columns = {name: np.array(values) for name, values in old.columns.items()}
    columns[column][row] += change
    programs = replace(
        plan.programs[key], tables={**plan.programs[key].tables, table: Table.of(old.ptr, columns)}
    )
    return replace(plan, programs={**plan.programs, key: programs})


def test_the_first_step_that_differs_is_named(plan: Plan) -> None:
    reference = {"case": replay.digests(plan)}
    for table, column, step in (
        ("tasks", "dmax", "tasks"),
        ("transfers", "peer", "transfers"),
        ("instructions", "round", "order"),
        ("arenas", "rows", "memory"),
    ):
        assert replay.differing({"case": replay.digests(with_change(plan, table, column, 1))}, reference) == {
            "case": step
        }
    span = replace(
        plan.layouts["attention"], spans=Table.of(*_shifted_tokens(plan.layouts["attention"].spans))
    )
    other = replay.digests(replace(plan, layouts={"attention": span}))
    assert replay.differing({"case": other}, reference) == {"case": "layouts"}
    with_report = replay.digests(replace(plan, report={**plan.report, "slots": -1}))
    assert replay.differing({"case": with_report}, reference) == {"case": "report"}
    assert (
        replay.digests(replace(plan, report={**plan.report, "plan_bytes": {}}))[:-1] == reference["case"][:-1]
    )
    assert replay.differing({"case": [*reference["case"][:-1], "0"]}, reference) == {"case": "bytes"}
    assert replay.differing({"case": ["refused: ConfigError"]}, reference) == {"case": "refused"}
    assert replay.differing({"other": reference["case"]}, reference) == {
        "other": "missing",
        "case": "missing",
    }


def _shifted_tokens(spans: Table) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return spans.ptr, {**spans.columns, "token": spans["token"] + 1}


def test_differing_rows_are_printed(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(case.name for case in replay.cases())
    rows = replay.lines(name, "tasks")
    assert all("q.tensor=2" in row for row in rows if "dq.tensor" not in row)
    replay._print_rows("HEAD", name, "tasks", [*rows[:-1], "rank=0"])
    output = capsys.readouterr().out
    assert f"row {len(rows) - 1} of {len(rows)}" in output
    assert "- rank=0" in output
