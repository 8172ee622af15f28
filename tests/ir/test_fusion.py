"""Which home rows attention tasks leave complete, held against a walk through the instructions."""

from __future__ import annotations

import numpy as np
import pytest

from apportion.ir.bytes.codec import Plan
from apportion.ir.masks import specs as masks
from apportion.ir.plan.fusion import Complete, RowRanges, find_complete
from apportion.ir.plan.ops import instruction_of
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
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
def test_complete_rows_are_those_that_nothing_touches_later(recipe: str, mask: str) -> None:
    plan = plan_of(recipe, mask)
    for phase in PHASES:
        programs = plan.programs["default", phase]
        together = find_complete(programs, phase)
        for rank in range(4):
            alone = programs.rank(rank)
            for column, found in find_complete(alone, phase).items():
                tasks, rows, placed = complete_rows(alone, phase, column)
                assert sorted(each_row(found.tasks)) == sorted(tasks)
                by_operand = [
                    (int(alone[table][name][at]), row)
                    for table, name, one in (
                        ("transfers", "operand", found.sent),
                        ("rowops", "a", found.delivered),
                    )
                    for at, row in each_row(one)
                ]
                assert sorted(by_operand) == sorted(placed)
                ranges = [range(a, b) for a, b in zip(found.row0.tolist(), found.row1.tolist(), strict=True)]
                assert [row for one in ranges for row in one] == sorted(rows)
                mine = np.flatnonzero(together[column].rank == rank)
                assert together[column].row0[mine].tolist() == found.row0.tolist()
                assert together[column].row1[mine].tolist() == found.row1.tolist()


def test_a_document_on_one_rank_is_complete_at_once() -> None:
    plan = api.plan(Batch.from_lengths([64] * 4), Cluster(1, 4), Model(4, 4, 16), recipe="contiguous")
    for phase in PHASES:
        for found in find_complete(plan.programs["default", phase], phase).values():
            assert (found.tasks.row1 - found.tasks.row0).tolist() == [64] * 4
            assert (found.row1 - found.row0).tolist() == [64] * 4


def test_rows_within_ranges_and_between_them() -> None:
    rank, row0, row1 = np.array([0, 0, 2]), np.array([5, 20, 0]), np.array([10, 30, 4])
    nothing = RowRanges(*(np.zeros(0, np.int64),) * 3)
    found = Complete(nothing, rank, row0, row1, nothing, nothing)
    asked = np.array([0, 0, 0, 1, 2, 2]), np.array([0, 7, 10, 0, 0, 3]), np.array([100, 16, 10, 50, 4, 9])
    assert found.within(*asked).tolist() == [15, 6, 0, 0, 4, 1]
    alone = Complete(nothing, rank[:2], row0[:2], row1[:2], nothing, nothing)
    assert alone.gaps(0, 40) == [(0, 5), (10, 20), (30, 40)]
    assert alone.gaps(5, 10) == []
    assert alone.gaps(7, 22) == [(10, 20)]
    assert alone.gaps(12, 15) == [(12, 15)]
    none = Complete(nothing, *(np.zeros(0, np.int64),) * 3, nothing, nothing)
    assert none.gaps(3, 9) == [(3, 9)]
    assert none.within(*asked).tolist() == [0] * 6


def test_work_rows_that_leave_as_results_are_in_place() -> None:
    """All of them, where heads are split and one task computes each row."""
    plan = api.plan(Batch.from_lengths([512, 256]), Cluster(1, 4), Model(4, 4, 16), recipe="ulysses")
    for phase in PHASES:
        programs = plan.programs["default", phase]
        sent = programs["transfers"]["send"] == 1
        modes = programs["instructions"]["mode"][
            instruction_of(
                programs["instructions"]["op"], programs["instructions"].wide("count"), "transfers"
            )
        ]
        operands = (
            programs["operands"].ptr[programs["transfers"].rank_of_row()] + programs["transfers"]["operand"]
        )
        rows = programs["operands"].wide("rows")[operands]
        found = find_complete(programs, phase)
        placed = sum(one.sent.sums(len(sent)) for one in found.values())
        assert np.array_equal(placed, np.where(sent & (modes & 2 > 0), rows, 0))
