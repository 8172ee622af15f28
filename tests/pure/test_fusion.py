"""Which home rows attention tasks leave complete, held against a walk through the instructions."""

from __future__ import annotations

import numpy as np
import pytest

from apportion.ir.bytes.codec import Plan
from apportion.ir.isa import OPERAND_COLUMNS, PHASES, TASK_LIST, Op, Space, Tensor
from apportion.ir.masks import specs as masks
from apportion.ir.plan.fusion import Complete, RowRanges, find_complete
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.planner import api

SUMS = {"o": (Tensor.O, ("q",)), "dq": (Tensor.DQ, ("q", "do", "delta")), "dkv": (Tensor.DKV, ("kv",))}
BESIDE = {"q": Tensor.Q, "do": Tensor.DO, "delta": Tensor.DELTA, "kv": Tensor.KV}


def each_row(found: RowRanges) -> list[tuple[int, int]]:
    return [
        (of, row)
        for of, row0, row1 in zip(*(part.tolist() for part in found), strict=True)
        for row in range(row0, row1)
    ]


def walked(
    programs: ProgramSet, phase: str, column: str
) -> tuple[set[tuple[int, int]], set[int], set[tuple[int, int]]]:
    """Of one rank's program, row by row: (task, row) that is complete when it has run, complete home rows, and
    (operand, row) of work rows that tasks put where they belong."""
    tensor, beside = SUMS[column]
    name = TASK_LIST[phase]
    operands, op = programs["operands"], programs["instructions"]["op"].astype(int)
    of = {
        key: operands[key].astype(int).tolist() for key in ("tensor", "space", "row", "rows", "heads", "col")
    }
    modes = programs["instructions"]["mode"].astype(int)

    def rows_of(operand: int) -> list[tuple[int, int]]:
        return [(of["space"][operand], of["row"][operand] + i) for i in range(of["rows"][operand])]

    alike = all(
        len(
            {
                (of["col"][i], of["heads"][i])
                for i in range(len(operands))
                if of["tensor"][i] == one and of["space"][i] == Space.WORK
            }
        )
        <= 1
        for one in (tensor, *(BESIDE[each] for each in beside))
    )
    given: set[int] = set()  # home rows that arrive as results
    last: dict[tuple[int, int], int] = {}
    taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
    tasks: list[tuple[int, int, int, bool]] = []
    for table, columns in OPERAND_COLUMNS.items():
        at = instruction_of(op, programs["instructions"].wide("count"), table)
        for i in range(len(programs[table])):
            for each in columns:
                operand = int(programs[table][each][i])
                if of["tensor"][operand] != tensor or op[at[i]] == Op.FINISH:
                    continue
                results = table == "transfers" and modes[at[i]] & 2
                sent = programs[table]["send"][i] if results else 0
                if of["space"][operand] == Space.HOME and (results or op[at[i]] == Op.DELIVER):
                    given |= {row for _, row in rows_of(operand)}
                leaves = (results and sent) or (op[at[i]] == Op.DELIVER and each == "a")
                for row in rows_of(operand):
                    if leaves:
                        taken.setdefault(row, []).append((int(at[i]), operand))
                    else:
                        last[row] = max(last.get(row, -1), int(at[i]))
                if table == name and each == column:
                    others = [int(programs[table][other][i]) for other in beside]
                    space = of["space"][operand]
                    plain = all(
                        of["space"][x] == space and of["row"][x] == of["row"][operand] for x in others
                    )
                    plain &= space == Space.WORK or not any(of["heads"][x] for x in (operand, *others))
                    tasks.append((i, int(at[i]), operand, plain))
    mixed = {(at, of["space"][operand]) for _, at, operand, plain in tasks if not plain}
    done: set[tuple[int, int]] = set()
    kept: set[int] = set()
    placed: set[tuple[int, int]] = set()
    for i, at, operand, _ in tasks:
        if (at, of["space"][operand]) in mixed:
            continue
        for space, row in rows_of(operand):
            leaving = taken.get((space, row), [])
            fit = space == Space.HOME or (alike and len(leaving) == 1 and leaving[0][0] > last[space, row])
            if fit and last[space, row] == at:
                done.add((i, row))
                if space == Space.HOME:
                    kept.add(row)
                else:
                    placed.add((leaving[0][1], row))
    return done, given | kept, placed


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
                tasks, rows, placed = walked(alone, phase, column)
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
