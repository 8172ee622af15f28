"""Which tasks overwrite the rows that they add to, and what is cleared for the others."""

import numpy as np
import pytest

import apportion as ap
from apportion.ir.isa import Op
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.sequences import Sequence
from apportion.planner.lower.first_writes import Written, find_openers

MODEL = Model(q_heads=4, kv_heads=2, head_dim=64, layers=1)


def walked(written: Written, held: np.ndarray, tasks: int) -> tuple[list[int], list[np.ndarray]]:
    """Row by row: the flags of tasks, and of each lane bool [rows], whether a row must be cleared."""
    seen = [np.zeros(rows, bool) for rows in held]
    opened = [np.zeros(rows, bool) for rows in held]
    flags = [0] * tasks
    for task in range(tasks):
        parts = [
            (seen[lane], opened[lane], slice(row, row + rows), may)
            for of, lane, row, rows, may in zip(
                *(column.tolist() for column in vars(written).values()), strict=True
            )
            if of == task
        ]
        if not parts:
            continue
        flags[task] = int(all(may and not before[at].any() for before, _, at, may in parts))
        for before, fresh, at, _ in parts:
            fresh[at] |= bool(flags[task])
            before[at] = True
    return flags, [~fresh for fresh in opened]


@pytest.mark.parametrize("seed", range(40))
def test_as_row_by_row(seed: int) -> None:
    rng = np.random.default_rng(seed)
    held = rng.integers(0, 12, 5)
    lanes = np.flatnonzero(held)
    count, tasks = int(rng.integers(0, 14)) if len(lanes) else 0, 8
    lane = rng.choice(lanes, count) if len(lanes) else np.zeros(0, np.int64)
    row = np.array([rng.integers(0, held[one]) for one in lane], np.int64)
    rows = np.array(
        [rng.integers(1, held[one] - at + 1) for one, at in zip(lane, row, strict=True)], np.int64
    )
    task = np.sort(rng.integers(0, tasks, count))
    # parts of one task have no row in common
    keep = np.ones(count, bool)
    for i in range(count):
        for j in range(i):
            if keep[j] and task[i] == task[j] and lane[i] == lane[j]:
                keep[i] &= row[i] >= row[j] + rows[j] or row[j] >= row[i] + rows[i]
    written = Written(task[keep], lane[keep], row[keep], rows[keep], rng.random(int(keep.sum())) < 0.8)
    found = find_openers(written, held, tasks)
    flags, cleared = walked(written, held, tasks)
    assert found.flags.tolist() == flags
    said = [np.zeros(size, bool) for size in held]
    for one, at, size in zip(found.lane, found.row, found.rows, strict=True):
        assert size > 0
        assert not said[one][at : at + size].any()
        assert at == 0 or not said[one][at - 1]  # longest ranges
        said[one][at : at + size] = True
    for one, other in zip(said, cleared, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    "mask",
    [masks.causal(), masks.shared_question(40, [30, 50, 20]), masks.full(), masks.prefix_lm(20)],
    ids=["causal", "shared question", "full", "prefix"],
)
def test_nothing_is_cleared_where_whole_sequences_stay_at_home(mask: masks.Mask) -> None:
    batch = Batch.from_sequences([Sequence(140, mask)] * 4)
    steps = {"shard": {"sequences": {}}, "place": {"lpt": {}}, "schedule": {"matchings": {}}}
    made = ap.plan(batch, Cluster(1, 2), MODEL, recipe={"name": "whole", "steps": steps})
    for program in made.programs.values():
        count = program["instructions"]["count"]
        assert not count[program["instructions"]["op"] == Op.CLEAR].any()


def test_answers_to_one_question_are_one_task_beside_their_own() -> None:
    batch = Batch.from_sequences([Sequence(140, masks.shared_question(40, [30, 50, 20]))])
    made = ap.plan(batch, Cluster(1, 1), MODEL, recipe="contiguous")
    program = made.programs["default", "forward"]
    rows = program["operands"]["rows"][program["tasks"]["q"]]
    assert sorted(rows.tolist()) == [
        20,
        50,
        70,
        70,
    ]  # the question with its first answer; two; what these see of it
