"""Tables of the stage kernels: tiles have one owner, entries hold every pair once, and panels move every byte."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apportion.backends.interp import compile_program
from apportion.backends.torch.stage.rowlists import COPY, Panel, Place, move, panels
from apportion.backends.torch.stage.tiles import cut_tiles, waves
from apportion.backends.torch.stage.worklists import ROLES, Columns, Targets, WorkList, work_list
from apportion.ir.bytes.codec import Plan
from apportion.ir.isa import Op
from apportion.ir.plan.fusion import CompleteRows, RowRanges, find_complete_rows, find_statistics
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.tensors import PHASES
from tests.ranks import cases
from tests.support.strategies import STRATEGIES, plan_of


def test_tiles_are_cut_where_fresh_rows_begin_and_hold_their_tasks_in_order() -> None:
    start, stop = np.array([0, 6]), np.array([8, 12])
    cut = cut_tiles(np.zeros(2, np.int64), start, stop, np.array([False, True]), 4)
    assert list(zip(cut.row0.tolist(), cut.row1.tolist(), cut.fresh.tolist(), strict=True)) == [
        (0, 4, False), (4, 6, False), (6, 10, True), (10, 12, True),
    ]  # fmt: skip
    tasks = [cut.task[lo:hi].tolist() for lo, hi in pairwise(cut.ptr.tolist())]
    assert tasks == [[0], [0], [0, 1], [1]]


def test_random_tiles_have_every_written_row_once_and_all_its_tasks() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        start = rng.integers(0, 40, 12)
        stop, key = start + rng.integers(1, 20, 12), rng.integers(0, 3, 12)
        cut = cut_tiles(key, start, stop, rng.random(12) < 0.3, int(rng.integers(1, 9)))
        actual = [
            (int(k), row, task)
            for k, lo, hi, a, b in zip(cut.key, cut.row0, cut.row1, cut.ptr[:-1], cut.ptr[1:], strict=True)
            for task in cut.task[a:b].tolist()
            for row in range(max(lo, start[task]), min(hi, stop[task]))
        ]
        expected = [(int(k), row, i) for i, k in enumerate(key) for row in range(start[i], stop[i])]
        assert sorted(actual) == sorted(expected)
        rows = [(k, row) for k, a, b in zip(cut.key, cut.row0, cut.row1, strict=True) for row in range(a, b)]
        assert len(rows) == len(set(rows))
        assert set(rows) == {(k, row) for k, row, _ in expected}


def test_tiles_of_two_owners_are_launched_in_program_order() -> None:
    one = np.zeros(4, np.int64)
    start, stop = np.array([0, 4, 2, 0]), np.array([4, 8, 6, 2])
    assert waves(one, one, start, stop, np.array([0, 0, 1, 0])).tolist() == [0, 0, 1, 1]
    assert waves(one, one, start, stop, np.array([0, 0, 0, 0])).tolist() == [0, 0, 0, 0]
    assert waves(one, np.array([0, 0, 1, 0]), start, stop, np.array([0, 0, 1, 0])).tolist() == [0, 0, 0, 0]
    assert waves(np.array([0, 0, 1, 1]), one, start, stop, np.array([0, 0, 1, 0])).tolist() == [0, 0, 0, 0]


def planned(name: str, mask: str, heads: tuple[int, int] = (2, 2)) -> Plan:
    return plan_of(cases.batch_of(mask), name, 4, cases.model(heads[0], "fp32", kv_heads=heads[1]))


def pairs_of_tasks(programs: ProgramSet, columns: Columns, kernel: str) -> list[tuple[int, ...]]:
    """(instruction, owner's array and row and column, walked array and row) of every pair of the program's tasks."""
    roles = ROLES[kernel]
    table, of = programs[roles.table], columns
    instruction = np.repeat(np.arange(len(programs["instructions"])), _task_counts(programs, kernel))
    pairs = []
    for i in range(len(table)):
        owner, walked = int(table[roles.owner][i]), int(table[roles.walked][i])
        q, kv = (owner, walked) if roles.walked == "kv" else (walked, owner)
        rows, keys = np.indices((of.rows[q], of.rows[kv]))
        visible = (rows - keys >= int(table["dmin"][i])) & (rows - keys <= int(table["dmax"][i]))
        for row, key in np.argwhere(visible).tolist():
            a, b = (row, key) if q == owner else (key, row)
            ends = of.space[owner], of.row[owner] + a, of.space[walked], of.row[walked] + b
            pairs.append((int(instruction[i]), *map(int, ends)))
    return sorted(pairs)


def _task_counts(programs: ProgramSet, kernel: str) -> NDArray[Any]:
    op = Op.ATTEND if kernel == "attend" else Op.ATTEND_GRAD
    return np.where(programs["instructions"]["op"] == op, programs["instructions"]["count"], 0)


def pairs_of_list(work: WorkList) -> list[tuple[int, ...]]:
    """The pairs of a work list, entry by entry; checks that all pairs of the unmasked middle are visible."""
    pairs = []
    for instruction, launches in work.launches.items():
        for launch in launches:
            for row0, row1, first, last, flags, *_ in work.tiles[
                launch.tile : launch.tile + launch.tiles
            ].tolist():
                for entry in work.entries[first:last].tolist():
                    start, stop, full0, full1, dmin, dmax, from_, to, spaces = entry[:9]
                    a, b = np.arange(row0, row1)[:, None], np.arange(start, stop)[None, :]
                    visible = (a - b >= dmin) & (a - b <= dmax) & (a >= from_) & (a < to)
                    assert visible[:, full0 - start : full1 - start].all()
                    for i, j in np.argwhere(visible).tolist():
                        pairs.append((instruction, flags >> 1 & 1, row0 + i, spaces & 1, start + j))
    return sorted(pairs)


def some_targets(complete: CompleteRows) -> Targets:
    """Arbitrary targets, one for each range of complete work rows."""
    both = (zip(*(x.tolist() for x in rows), strict=True) for rows in (complete.sent, complete.delivered))
    return Targets.of([(row0, row1, 1, 0, 1, 0, 0) for rows in both for _, row0, row1 in rows])


def list_of(plan: Plan, phase: str, rank: int, kernel: str, width: int) -> tuple[Any, ProgramSet, Columns]:
    """A rank's work list of a kernel, with tiles of 16 rows, and the program."""
    programs = plan.programs["default", phase].rank(rank)
    columns = Columns(compile_program(programs, plan.header))
    complete = find_complete_rows(programs, phase)[ROLES[kernel].owner]
    statistics = find_statistics(programs).tasks if kernel == "dq" else RowRanges.none()
    targets = some_targets(complete)
    work = work_list(programs, columns, kernel, 16, width, complete.tasks, targets, statistics)
    return work, programs, columns


@pytest.mark.parametrize("name", ["fcp", "distca", "dcp_heads", "ring", "inner"])
@pytest.mark.parametrize("mask", ["tree", "window", "bands"])
def test_work_lists_hold_every_pair_of_an_instruction_once(name: str, mask: str) -> None:
    plan = planned(name, mask)
    for phase in PHASES:
        for rank in range(4):
            for kernel in ("attend",) if phase == "forward" else ("dq", "dkdv"):
                work, *program = list_of(plan, phase, rank, kernel, 8)
                assert pairs_of_list(work) == pairs_of_tasks(*program, kernel)


def test_every_instruction_is_one_launch_and_long_tiles_come_first() -> None:
    for name in STRATEGIES:
        plan = planned(name, "causal", heads=(2, 4) if "upipe" in name else (2, 2))
        for phase in PHASES:
            work, *_ = list_of(plan, phase, 1, "attend" if phase == "forward" else "dkdv", 16)
            assert all(len(launches) == 1 for launches in work.launches.values()), name
            for (launch,) in work.launches.values():
                tiles = work.tiles[launch.tile : launch.tile + launch.tiles]
                sizes = [int((work.entries[a:b, 1] - work.entries[a:b, 0]).sum()) for a, b in tiles[:, 2:4]]
                assert sizes == sorted(sizes, reverse=True)


def execute_panels(moves: list[Panel], source: NDArray[Any], target: NDArray[Any]) -> None:
    """Executes panels on two byte arrays."""
    for panel in moves:
        for row in range(panel.rows):
            a, b = panel.source_at + row * panel.source_row, panel.target_at + row * panel.target_row
            target[b : b + panel.width] = source[a : a + panel.width]


@pytest.mark.parametrize("columns", [(0, 1, 2), (1,), (2, 0)])
def test_panels_move_the_bytes_of_their_columns(columns: tuple[int, ...]) -> None:
    source = np.arange(4 * 3 * 8, dtype=np.uint8)
    target = np.zeros(4 * len(columns) * 12, np.uint8)
    a = Place(None, 0, columns, 3, 8, 2)
    b = Place(None, 4, tuple(range(len(columns))), len(columns), 12, 2)
    moves = list(panels(a, b, 4, 8))
    execute_panels(moves, source, target)
    expected = source.reshape(4, 3, 8)[:, list(columns)]
    np.testing.assert_array_equal(target.reshape(4, len(columns), 12)[..., 4:], expected)
    assert all(panel.action == COPY for panel in moves)
    launch = move(moves)
    assert launch.panels[:, 6].sum() == sum(panel.rows for panel in moves)
    covered = [
        (p, r + i)
        for p, r in launch.chunks.tolist()
        for i in range(launch.rows)
        if r + i < launch.panels[p, 6]
    ]
    assert len(covered) == len(set(covered)) == launch.panels[:, 6].sum()


def test_rows_contiguous_on_both_sides_are_one_panel() -> None:
    a, b = Place(None, 0, (0, 1), 2, 8, 2), Place(None, 64, (0, 1), 2, 8, 2)
    (panel,) = panels(a, b, 5, 8)
    assert (panel.rows, panel.width) == (5, 16)
