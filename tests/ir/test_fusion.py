"""Home rows that attention tasks complete, compared with a walk through the instructions."""

from __future__ import annotations

import numpy as np
import pytest

from apportion import Batch, Cluster, Model, Plan, masks
from apportion.ir.plan.fusion import CompleteRows, RowRanges, find_complete_rows
from apportion.ir.tensors import PHASES
from apportion.planner import api
from tests.support.walks import complete_rows, each_row


def plan_of(recipe: str, mask: str) -> Plan:
    lengths = [700, 300, 120, 60, 20, 1]
    spec = {"causal": masks.causal(), "window": masks.sliding_window(50), "full": masks.full()}[mask]
    model = Model(q_heads=4, kv_heads=4, head_dim=16)
    return api.plan(Batch.from_lengths(lengths, mask=spec), Cluster(2, 2), model, recipe=recipe)


@pytest.mark.parametrize(
    "recipe",
    ["fcp", "blend", "ring", "usp", "dcp", "distca", "zeppelin", "contiguous", "upipe", "ulysses", "mixed"],
)
@pytest.mark.parametrize("mask", ["causal", "window", "full"])
def test_complete_rows_are_not_touched_later(recipe: str, mask: str) -> None:
    plan = plan_of(recipe, mask)
    for phase in PHASES:
        programs = plan.programs["default", phase]
        together = find_complete_rows(programs, phase)
        for rank in range(4):
            program = programs.rank(rank)
            for column, complete in find_complete_rows(program, phase).items():
                tasks, rows, in_place = complete_rows(program, phase, column)
                assert sorted(each_row(complete.tasks)) == sorted(tasks)
                sent, delivered = program["transfers"]["operand"], program["rowops"]["a"]
                by_operand = [(int(sent[at]), row) for at, row in each_row(complete.sent)]
                by_operand += [(int(delivered[at]), row) for at, row in each_row(complete.delivered)]
                assert sorted(by_operand) == sorted(in_place)
                assert [row for _, row in each_row(complete.home)] == sorted(rows)
                home, all_home = complete.home, together[column].home
                is_own = np.flatnonzero(all_home.of == rank)
                assert all_home.row0[is_own].tolist() == home.row0.tolist()
                assert all_home.row1[is_own].tolist() == home.row1.tolist()


def test_rows_within_ranges_and_between_them() -> None:
    none = RowRanges.none()
    ranges = RowRanges(np.zeros(2, np.int64), np.array([5, 20]), np.array([10, 30]))
    assert [ranges.within(*rows) for rows in ((0, 100), (7, 21), (10, 20))] == [
        [(5, 10), (20, 30)],
        [(7, 10), (20, 21)],
        [],
    ]
    complete = CompleteRows(none, ranges, none, none, none)
    assert complete.gaps(0, 40) == [(0, 5), (10, 20), (30, 40)]
    assert complete.gaps(5, 10) == []
    assert complete.gaps(7, 22) == [(10, 20)]
    assert complete.gaps(12, 15) == [(12, 15)]
    assert CompleteRows(none, none, none, none, none).gaps(3, 9) == [(3, 9)]
