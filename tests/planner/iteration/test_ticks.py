"""Pipeline ticks: tables under a memory cap, batches of ticks, and a pipeline run by them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import apportion as ap
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.sequences import DEFAULT_KIND, Sequence
from apportion.planner.iteration.ticks import (
    BACKWARD,
    FORWARD,
    IDLE,
    TickBatch,
    TickPart,
    TickTable,
    plan_tick,
    stage_ranks,
    tick_batch,
    tick_table,
)
from apportion.planner.simulate import simulate
from apportion.planner.tasks.cells import cut_cells

MODEL = ap.Model(2, 1, 4, dtype="fp64", hidden=8, ffn=8, layers={"full": 2, "near": 2})
KINDS = {"full": masks.causal(), "near": masks.sliding_window(5)}
HOME_ONLY = {"distca": {"head_tail": "none", "threshold": 1e12}}


def ticks_of_1f1b(stages: int, microbatches: int, virtual: int = 1) -> int:
    """The fewest ticks of any order, interleaved or not, if forward and backward of a chunk take one tick each."""
    return 2 * (microbatches * virtual + stages - 1)


def finished(table: TickTable) -> dict[tuple[int, int, int], int]:
    """{(phase, microbatch, virtual stage): its tick}, each exactly once."""
    found = {}
    for tick in range(table.ticks):
        for stage in range(table.stages):
            microbatch, chunk = int(table.microbatch[tick, stage]), int(table.chunk[tick, stage])
            if microbatch != IDLE:
                key = (int(table.phase[tick]), microbatch, chunk * table.stages + stage)
                assert key not in found
                found[key] = tick
    return found


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    virtual=st.integers(1, 3),
    cap=st.one_of(st.none(), st.integers(3, 16)),
)
def test_everything_runs_once_in_order_and_under_the_cap(
    stages: int, microbatches: int, virtual: int, cap: Any
) -> None:
    table = tick_table(stages, microbatches, virtual, cap)
    ticks, last = finished(table), stages * virtual - 1
    assert len(ticks) == 2 * microbatches * (last + 1)
    for microbatch in range(microbatches):
        for v in range(last):
            assert ticks[FORWARD, microbatch, v] < ticks[FORWARD, microbatch, v + 1]
            assert ticks[BACKWARD, microbatch, v + 1] < ticks[BACKWARD, microbatch, v]
        assert ticks[FORWARD, microbatch, last] < ticks[BACKWARD, microbatch, last]
    assert table.peak.max() <= (cap or microbatches * virtual)
    assert table.ticks >= ticks_of_1f1b(stages, microbatches, virtual)
    assert (table.microbatch != IDLE).any(1).all()


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 17])
def test_nearly_twice_the_memory_of_1f1b_gives_as_few_ticks(stages: int, microbatches: int) -> None:
    cap = min(microbatches, 2 * stages - 1)
    table = tick_table(stages, microbatches, cap=cap)
    assert table.ticks == ticks_of_1f1b(stages, microbatches)
    assert table.peak.max() <= cap
    if microbatches >= 2 * stages - 1:
        assert table.peak.tolist() == [2 * stages - 1 - 2 * stage for stage in range(stages)]
    if cap > 1 and microbatches > 2 * stages:
        assert tick_table(stages, microbatches, cap=cap - 1).ticks > table.ticks


@pytest.mark.parametrize(("stages", "microbatches", "virtual"), [(2, 4, 2), (4, 8, 2), (4, 4, 3), (3, 9, 2)])
def test_interleaved_tables_match_interleaved_1f1b(stages: int, microbatches: int, virtual: int) -> None:
    table = tick_table(stages, microbatches, virtual, cap=microbatches * virtual)
    assert table.ticks == ticks_of_1f1b(stages, microbatches, virtual)
    assert table.peak.max() <= 2 * stages * virtual - 1
    assert tick_table(stages, microbatches, virtual, cap=virtual).ticks > table.ticks


def test_the_last_chunk_goes_back_first() -> None:
    """Under a low cap; in another order the first stage would wait once more."""
    assert str(tick_table(2, 2, 2, cap=3)).splitlines() == [
        "stage 0  F0a F1a F0b .   .   B0b F1b .   .   B1b B0a B1a",
        "stage 1  .   F0a F1a F0b B0b .   .   F1b B1b B0a B1a .",
    ]


def fewest_ticks(stages: int, microbatches: int, cap: int) -> int:
    """The minimum, by breadth-first search over all same-phase schedules."""
    none, full = (0,) * stages, (microbatches,) * stages
    seen, level, ticks = {(none, none)}, {(none, none)}, 0
    while (full, full) not in level:
        level = {after for state in level for after in next_states(*state, microbatches, cap)} - seen
        seen |= level
        ticks += 1
    return ticks


def next_states(f: Any, b: Any, microbatches: int, cap: int) -> Iterator[tuple[Any, Any]]:
    stages = range(len(f))
    able = [s for s in stages if f[s] < microbatches and (s == 0 or f[s] < f[s - 1]) and f[s] - b[s] < cap]
    back = [s for s in stages if b[s] < f[s] and (s == len(f) - 1 or b[s] < b[s + 1])]
    for phase, ready in ((FORWARD, able), (BACKWARD, back)):
        for size in range(1, len(ready) + 1):
            for chosen in combinations(ready, size):
                done = tuple(x + (s in chosen) for s, x in enumerate(b if phase else f))
                yield (f, done) if phase else (done, b)


@pytest.mark.parametrize("cap", [1, 2, 3, 4])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (2, 5), (3, 4)])
def test_tables_under_a_cap_are_within_a_tick_of_the_best(stages: int, microbatches: int, cap: int) -> None:
    assert tick_table(stages, microbatches, cap=cap).ticks <= fewest_ticks(stages, microbatches, cap) + 1


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_without_a_cap_no_stage_holds_more_than_in_1f1b(stages: int, microbatches: int) -> None:
    peak = tick_table(stages, microbatches).peak
    assert peak.tolist() == [min(stages - stage, microbatches) for stage in range(stages)]
    interleaved = tick_table(stages, microbatches, 2).peak  # Megatron-LM's warm-up, and one more
    assert (interleaved <= 2 * (stages - 1 - np.arange(stages)) + stages + 1).all()


def test_a_table_prints_as_text() -> None:
    assert str(tick_table(2, 3, cap=3)).splitlines() == [
        "stage 0  F0 F1 .  F2 B0 .  B1 B2",
        "stage 1  .  F0 B0 F1 B1 F2 B2 .",
    ]
    assert str(tick_table(1, 1, virtual=2)) == "stage 0  F0a F0b B0b B0a"


def test_the_idle_share_equals_the_pipeline_bubble() -> None:
    table = tick_table(4, 8)
    assert table.idle_fraction == pytest.approx(1 - 2 * 8 / table.ticks)
    assert tick_table(1, 8).idle_fraction == 0


def test_a_cap_below_the_chunks_of_one_microbatch_is_refused() -> None:
    with pytest.raises(CapacityError, match="raise it to 3"):
        tick_table(2, 4, virtual=3, cap=2)


# ------------------------------------------------------------------------------------------------ batches

LENGTHS = [[30, 9, 17], [5, 50], [24, 24, 8]]


def microbatches() -> list[Batch]:
    return [Batch.from_lengths(lengths, KINDS) for lengths in LENGTHS]


def test_a_tick_is_one_batch_homed_on_its_stages() -> None:
    table = tick_table(2, 3)
    tick = next(t for t in range(table.ticks) if (table.microbatch[t] != IDLE).all())
    made = tick_batch(table, tick, microbatches(), 2, ["full", "near"])
    first, second = (LENGTHS[index] for index in table.microbatch[tick])
    assert made.batch.lengths.tolist() == first + second
    assert made.batch.kinds == (DEFAULT_KIND,)
    assert [made.batch.home_ranks[i] for i in range(len(first))] == [(0, 1)] * len(first)
    assert made.batch.home_ranks[len(first)] == stage_ranks(1, 2) == (2, 3)
    specs = made.batch.masks[DEFAULT_KIND]
    expected = [KINDS["full"]] * len(first) + [KINDS["near"]] * len(second)
    assert [specs.specs[i] for i in specs.index] == expected
    parts = [(part.stage, part.first, part.start) for part in made.parts]
    assert parts == [(0, 0, 0), (1, len(first), sum(first))]


def test_batches_of_ticks_keep_positions_labels_and_home_ranks() -> None:
    table = tick_table(1, 1)
    second = Sequence(3, positions=[5, 6, 7], labels=[-1, -1, 0])
    batch = Batch.from_sequences([Sequence(4, home_ranks=(1,)), second])
    made = tick_batch(table, 0, [batch], 2).batch
    assert made.home_ranks == {0: (1,), 1: (0, 1)}
    assert made.positions().tolist() == batch.positions().tolist()
    assert made.labels().tolist() == batch.labels().tolist()


@pytest.mark.parametrize(
    ("kinds", "count", "message"),
    [
        (None, 3, "several"),
        (["full"], 3, "each of the 2 virtual stages"),
        (["full", "x"], 3, "use one of"),
        (None, 2, "3 micro"),
    ],
)
def test_what_does_not_fit_the_table_is_refused(kinds: Any, count: int, message: str) -> None:
    table = tick_table(2, 3)
    with pytest.raises(ConfigError, match=message):
        tick_batch(table, 1 if count == 2 else 3, microbatches()[:count], 2, kinds)


def test_stages_share_the_ranks_evenly() -> None:
    with pytest.raises(ConfigError, match="multiple of the 2 stages"):
        plan_tick(tick_table(2, 3), 0, microbatches(), ap.Cluster(1, 3), MODEL, ["full", "near"])


def layout_of(plan: Plan, made: TickBatch, part: TickPart, replicas: int) -> list[list[int]]:
    """The microbatch's tokens on each of its stage's ranks, in order of rows."""
    rows = [plan.layout("attention").tokens(rank) for rank in stage_ranks(part.stage, replicas)]
    return [(tokens - part.start).tolist() for tokens in rows]


@pytest.mark.parametrize("virtual", [1, 2])
def test_a_microbatch_has_one_layout_in_all_ticks_and_stages(virtual: int) -> None:
    table, seen, kinds = tick_table(2, 3, virtual), {}, ["full", "near"] * virtual
    for tick in range(table.ticks):
        plan, made = plan_tick(table, tick, microbatches(), ap.Cluster(1, 4), MODEL, kinds)
        specs = made.batch.masks[DEFAULT_KIND]
        for part in made.parts:
            assert specs.specs[specs.index[part.first]] == KINDS[kinds[part.chunk * 2 + part.stage]]
            seen.setdefault(part.microbatch, []).append(layout_of(plan, made, part, 2))
    assert len(seen) == 3
    assert all(layout == layouts[0] for layouts in seen.values() for layout in layouts)


def test_idle_ranks_serve_and_time_falls() -> None:
    model = ap.Model(layers=4)
    batches = [Batch.from_lengths([16_384, 2048, 6000, 8336]) for _ in range(4)]
    table, cluster = tick_table(4, 4), ap.Cluster(1, 8)
    tick = 1  # stages 0 and 1 are busy
    assert (table.microbatch[tick] != IDLE).sum() == 2
    served, _ = plan_tick(table, tick, batches, cluster, model)
    steps = {"shard": {"sequences": {}}, "place": HOME_ONLY, "schedule": {"gather": {}}}
    alone, _ = plan_tick(table, tick, batches, cluster, model, recipe={"name": "home_only", "steps": steps})
    rows = served.layout("attention").rows_per_rank
    assert (rows[4:] == 0).all()
    with_help, without = simulate(served), simulate(alone)
    for phase in ("forward", "backward"):
        assert (with_help.runs[DEFAULT_KIND, phase].compute_us[4:] > 0).all()
        assert (without.runs[DEFAULT_KIND, phase].compute_us[4:] == 0).all()
    forward = (DEFAULT_KIND, "forward")
    assert with_help.runs[forward].makespan_us < 0.7 * without.runs[forward].makespan_us
    assert served.report["imbalance"]["compute"] <= 0.05


# ------------------------------------------------------------------------------------------------ a pipeline


def test_the_work_of_a_tick_is_balanced_over_all_ranks() -> None:
    table = tick_table(2, 3)
    batches = [Batch.from_lengths([2000, 500, 100], KINDS) for _ in range(3)]
    plan, made = plan_tick(table, 0, batches, ap.Cluster(1, 8), MODEL, ["full", "near"])
    assert plan.report["imbalance"]["compute"] <= 0.05
    assert len(cut_cells(made.batch.bands(DEFAULT_KIND), made.batch.starts)) == 3
