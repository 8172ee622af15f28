"""Row statistics that attention computes, compared with a walk through the instructions."""

from __future__ import annotations

import numpy as np
import pytest

from apportion import Batch, Cluster, Model, Plan, masks
from apportion.ir.isa import Op
from apportion.ir.plan.fusion import find_statistics
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.tables import ProgramSet, Table
from apportion.planner import api
from tests.support.walks import computed_statistics, each_row

RECIPES = ("fcp", "blend", "ring", "usp", "dcp", "distca", "zeppelin", "upipe", "ulysses", "mixed", "magi")


def plan_of(recipe: str, mask: str) -> Plan:
    spec = {"causal": masks.causal(), "window": masks.sliding_window(64), "full": masks.full()}[mask]
    batch = Batch.from_lengths([700, 90, 310, 41, 5, 512, 260], mask=spec)
    return api.plan(batch, Cluster(2, 2), Model(8, 4, 32), recipe=recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("mask", ["causal", "window", "full"])
def test_statistics_are_computed_where_only_local_tasks_need_them(recipe: str, mask: str) -> None:
    plan = plan_of(recipe, mask)
    programs = plan.programs["default", "backward"]
    together = find_statistics(programs)
    forward = find_statistics(plan.programs["default", "forward"])
    assert sum((part.row1 - part.row0).sum() for part in forward) == 0
    count = 0
    for rank in range(4):
        program = programs.rank(rank)
        tasks, rowops = computed_statistics(program)
        statistics = find_statistics(program)
        assert sorted(each_row(statistics.tasks)) == sorted(tasks)
        assert sorted(each_row(statistics.rowops)) == sorted(rowops)
        count += len(rowops)
    assert (together.rowops.row1 - together.rowops.row0).sum() == count


def test_statistics_of_home_queries_are_computed_by_tasks() -> None:
    for recipe in ("fcp", "blend", "ring", "zeppelin"):
        rows = find_statistics(plan_of(recipe, "causal").programs["default", "backward"]).rowops
        assert (rows.row1 - rows.row0).sum() == 1918, recipe


def test_statistics_that_travel_are_not_computed_by_tasks() -> None:
    """`ulysses` sends all statistics; `distca` sends the statistics of rows that other ranks compute."""
    assert not find_statistics(plan_of("ulysses", "causal").programs["default", "backward"]).tasks
    distca = find_statistics(plan_of("distca", "full").programs["default", "backward"]).rowops
    assert 0 < (distca.row1 - distca.row0).sum() < 1918


def test_a_program_without_delta_computes_no_statistics() -> None:
    """Its tasks read statistics that are written elsewhere, as for a lone task."""
    programs = plan_of("fcp", "causal").programs["default", "backward"].rank(0)
    instructions = programs["instructions"]
    is_kept = instructions["op"] != Op.DELTA
    columns = {name: instructions[name][is_kept] for name in instructions.columns}
    tables = {**programs.tables, "instructions": Table.of(np.array([0, is_kept.sum()]), columns)}
    rows = instruction_of(instructions["op"], instructions.wide("count"), "rowops")
    kept_rows = is_kept[rows]
    rowops = programs["rowops"]
    kept = {name: rowops[name][kept_rows] for name in rowops.columns}
    tables["rowops"] = Table.of(np.array([0, kept_rows.sum()]), kept)
    assert not find_statistics(ProgramSet(tables)).tasks
