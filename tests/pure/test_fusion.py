"""Which home rows attention tasks leave complete, held against a walk through the instructions."""

from __future__ import annotations

import numpy as np
import pytest

from apportion.ir import masks
from apportion.ir.batch import Batch
from apportion.ir.cluster import Cluster
from apportion.ir.codec import Plan
from apportion.ir.fusion import Complete, find_complete
from apportion.ir.isa import OPERAND_COLUMNS, PHASES, TASK_LIST, Op, Space, Tensor
from apportion.ir.model import Model
from apportion.ir.ops import LIST_OF_OP, LISTS, instruction_of
from apportion.ir.plan import ProgramSet
from apportion.planner import api

SUMS = {"o": (Tensor.O, ("q",)), "dq": (Tensor.DQ, ("q", "do", "delta")), "dkv": (Tensor.DKV, ("kv",))}


def walked(programs: ProgramSet, phase: str, column: str) -> tuple[set[int], set[int]]:
    """(complete tasks, complete home rows) of one rank's program, row by row."""
    tensor, beside = SUMS[column]
    name = TASK_LIST[phase]
    operands, op = programs["operands"], programs["instructions"]["op"].astype(int)
    rows = {
        number: set(
            range(int(operands["row"][number]), int(operands["row"][number] + operands["rows"][number]))
        )
        for number in range(len(operands))
        if operands["tensor"][number] == tensor and operands["space"][number] == Space.HOME
    }
    whole = [
        bool(space == Space.HOME and heads == 0)
        for space, heads in zip(operands["space"], operands["heads"], strict=True)
    ]
    modes = programs["instructions"]["mode"].astype(int)
    given: set[int] = set()  # rows that arrive as results
    used: list[tuple[int, int, bool]] = []  # instruction, operand, whether by a task that may complete it
    tasks: dict[int, tuple[int, int]] = {}
    for table, columns in OPERAND_COLUMNS.items():
        at = instruction_of(op, programs["instructions"].wide("count"), table)
        for i in range(len(programs[table])):
            for each in columns:
                operand = int(programs[table][each][i])
                if operand not in rows or op[at[i]] == Op.FINISH:
                    continue
                arrives = table == "transfers" and modes[at[i]] & 2 and not programs[table]["send"][i]
                if arrives or op[at[i]] == Op.DELIVER:
                    given |= rows[operand]
                own = table == name and each == column
                plain = own and all(whole[int(programs[table][other][i])] for other in (column, *beside))
                used.append((int(at[i]), operand, plain))
                if plain:
                    tasks[i] = int(at[i]), operand
    mixed = {at for at, _, plain in used if not plain and LISTS[LIST_OF_OP[op[at]]] == name}
    done = {
        i
        for i, (at, operand) in tasks.items()
        if at not in mixed and not any(rows[operand] & rows[other] and later > at for later, other, _ in used)
    }
    return done, given | {row for i in done for row in rows[tasks[i][1]]}


def plan_of(recipe: str, mask: str) -> Plan:
    lengths = [700, 300, 120, 60, 20, 1]
    spec = {"causal": masks.causal(), "window": masks.sliding_window(50), "full": masks.full()}[mask]
    model = Model(q_heads=4, kv_heads=4, head_dim=16)
    return api.plan(Batch.from_lengths(lengths, mask=spec), Cluster(2, 2), model, recipe=recipe)


@pytest.mark.parametrize(
    "recipe", ["fcp", "blend", "ring", "usp", "dcp", "distca", "zeppelin", "contiguous", "upipe"]
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
                tasks, rows = walked(alone, phase, column)
                assert set(np.flatnonzero(found.tasks).tolist()) == tasks
                ranges = [range(a, b) for a, b in zip(found.row0.tolist(), found.row1.tolist(), strict=True)]
                assert [row for one in ranges for row in one] == sorted(rows)
                mine = np.flatnonzero(together[column].rank == rank)
                assert together[column].row0[mine].tolist() == found.row0.tolist()
                assert together[column].row1[mine].tolist() == found.row1.tolist()


def test_a_document_on_one_rank_is_complete_at_once() -> None:
    plan = api.plan(Batch.from_lengths([64] * 4), Cluster(1, 4), Model(4, 4, 16), recipe="contiguous")
    for phase in PHASES:
        for found in find_complete(plan.programs["default", phase], phase).values():
            assert found.tasks.all()
            assert (found.row1 - found.row0).tolist() == [64] * 4


def test_rows_within_ranges_and_between_them() -> None:
    rank, row0, row1 = np.array([0, 0, 2]), np.array([5, 20, 0]), np.array([10, 30, 4])
    found = Complete(np.zeros(0, bool), rank, row0, row1)
    asked = np.array([0, 0, 0, 1, 2, 2]), np.array([0, 7, 10, 0, 0, 3]), np.array([100, 16, 10, 50, 4, 9])
    assert found.within(*asked).tolist() == [15, 6, 0, 0, 4, 1]
    alone = Complete(np.zeros(0, bool), rank[:2], row0[:2], row1[:2])
    assert alone.gaps(0, 40) == [(0, 5), (10, 20), (30, 40)]
    assert alone.gaps(5, 10) == []
    assert alone.gaps(7, 22) == [(10, 20)]
    assert alone.gaps(12, 15) == [(12, 15)]
    none = Complete(np.zeros(0, bool), *(np.zeros(0, np.int64),) * 3)
    assert none.gaps(3, 9) == [(3, 9)]
    assert none.within(*asked).tolist() == [0] * 6
