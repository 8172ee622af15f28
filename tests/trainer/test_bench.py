"""`apportion bench attention`: counts, times, comparisons and messages, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from apportion import Batch, CapacityError, Communicator, ConfigError, Model, Plan
from apportion.bench import BenchJob, Source, cluster_of, plan_unverified
from apportion.ir.isa import Op
from apportion.ir.masks import bands
from apportion.ir.masks.windows import SlidingWindow
from apportion.trainer.measure import bench
from apportion.trainer.measure.bench import AttentionRow, CallTimes
from apportion.trainer.step.plain import plain_attention
from benchmarks import bare_kernels
from tests.ranks import jobs_bench
from tests.ranks.rank_pool import Pool
from tests.support.commands import Command

SMALL = ("bench", "attention", "--tokens-per-rank", "512", "--ranks", "2,4", "--repeats", "1")
FIELDS = {
    *("recipe", "ranks", "rank", "phase", "engine", "instructions", "launches", "rounds", "messages"),
    *("host_ms", "prepare_ms", "simulated_ms", "ms", "tflops", "exposed_ms"),
}
MODEL = Model(4, 2, 16, dtype="fp32")


@pytest.fixture
def cpu_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU stand in for a GPU."""
    monkeypatch.setattr(bench, "device_obstacle", lambda *_: None)


def plan_of(ranks: int, recipe: str = "fcp", mask: SlidingWindow | None = None, model: Model = MODEL) -> Plan:
    batch, _ = Source(mask=mask).batch(ranks * 256, 0)
    return plan_unverified(BenchJob(batch, cluster_of(ranks), model, recipe))


def measure(plan: Plan, engines: tuple[str, ...] = ("flash",)) -> tuple[list[AttentionRow], list[str]] | None:
    """Measures in one process with a constant clock; returns rows and skipped recipes."""
    skipped = []
    return jobs_bench.bench_of(Communicator(), engines, skipped.append).measure(plan), skipped


# --- the command


def test_json_has_a_row_for_each_plan_phase_and_engine(run: Command) -> None:
    done = run(*SMALL, "--json")
    record = done.json
    assert done.code == 0
    assert all(set(row) == FIELDS for row in record["rows"])
    expected = [
        (ranks, recipe, engine, phase)
        for ranks in (2, 4)
        for recipe in ("fcp", "blend")
        for engine in ("stage", "flash", "plain")
        for phase in ("forward", "backward")
    ]
    assert [(row["ranks"], row["recipe"], row["engine"], row["phase"]) for row in record["rows"]] == expected
    assert record["machine"]["cores"] > 0
    assert {"torch", "triton"} <= set(record["versions"])
    assert "blend, 4 ranks, stage backward: " in done.err


def test_without_a_gpu_only_the_host_of_the_stage_engine_is_timed(run: Command) -> None:
    record = run(*SMALL, "--json").json
    for row in record["rows"]:
        stage = row["engine"] == "stage"
        assert all((row[name] is not None) == stage for name in ("launches", "host_ms", "prepare_ms"))
        assert all(row[name] is None for name in ("ms", "tflops", "exposed_ms"))
        assert row["simulated_ms"] > 0
    assert "flash: it computes on the CPU" in "\n".join(record["skipped"])
    assert "there is no GPU" in record["skipped"][0]


def test_the_table_has_all_measured_rows_and_columns(run: Command) -> None:
    done = run(*SMALL)
    lines = done.out.splitlines()
    assert done.code == 0
    assert {"launches", "host", "simulated"} <= set(lines[0].split())
    assert "TFLOP/s" not in lines[0]
    assert sum(line.startswith(("fcp ", "blend ")) for line in lines) == 8
    assert any(line.startswith("plain: it computes") for line in lines)


def test_recipes_that_are_refused_or_project_are_skipped(
    run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run(*SMALL, "--recipes", "upipe", "--json").json
    assert record["rows"] == []
    assert record["skipped"][0].startswith("upipe: its plans project hidden states")

    def refuse(job: BenchJob) -> None:
        raise CapacityError("too small\nby far")

    monkeypatch.setattr("apportion.bench.plan_unverified", refuse)
    record = run(*SMALL, "--json").json
    assert record["skipped"][0] == "fcp, 2 ranks: too small"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--engine", "fhash"), "did you mean flash?"),
        (("--recipes", "fcq"), "fcq"),
        (("--ranks", "8,x"), "--ranks = '8,x'"),
        (("--hardware", "h1000"), "h1000"),
        (("--repeats", "0"), "--repeats"),
    ],
)
def test_errors_name_the_wrong_argument(run: Command, args: tuple[str, str], message: str) -> None:
    done = run(*SMALL, *args)
    assert done.code == 2
    assert message in done.err


def test_a_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.dtype = 'fp64'.*write bf16"):
        measure(plan_of(2, model=Model(4, 2, 16, dtype="fp64")))


# --- what is measured


def test_the_busiest_rank_is_recorded() -> None:
    plan = plan_of(4)
    (forward, backward), _ = measure(plan, ("stage",))
    programs = {phase: plan.programs["default", phase] for phase in ("forward", "backward")}
    count = {phase: np.diff(program["instructions"].ptr) for phase, program in programs.items()}
    both = count["forward"] + count["backward"]
    assert both[forward.rank] == both.max()
    for row in (forward, backward):
        program = programs[row.phase].rank(row.rank)
        op, tiles = (program["instructions"][name] for name in ("op", "count"))
        launch = np.repeat(np.arange(len(op)), np.where(op == Op.LAUNCH, tiles, 0))
        ends = np.stack([launch, *(program["transfers"][name] for name in ("send", "peer"))])
        assert (row.instructions, row.rounds) == (len(op), np.count_nonzero(op == Op.LAUNCH))
        assert row.messages == np.unique(ends, axis=1).shape[1]
        assert 0 < row.launches <= 1.5 * row.instructions
        assert (row.host_ms, row.ms) == (1.0, None)


@pytest.mark.usefixtures("cpu_as_gpu")
def test_plans_of_one_rank_are_run_and_others_recorded() -> None:
    plan = plan_of(1)
    (forward, backward), skipped = measure(plan)
    pairs = int(bands.dense(plan.request.batch.bands("default"), 256, 256).sum()) * 4
    assert forward.tflops == pytest.approx(pairs * 4 * 16 / 2e-3 / 1e12)
    assert backward.tflops == pytest.approx(pairs * 10 * 16 / 2e-3 / 1e12)
    for row in (forward, backward):
        assert (row.ms, row.launches, row.exposed_ms) == (2.0, None, None)
    assert skipped == []
    (forward, _), skipped = measure(plan_of(2))
    assert (forward.host_ms, forward.ms) == (1.0, None)
    assert skipped[0].startswith("2 ranks: the job has 1, so kernels are launched and messages are not")


def test_ranks_of_a_job_run_their_plan_and_agree_on_its_rows(pool: Pool) -> None:
    plan = plan_of(2)
    first, second = pool.run(jobs_bench.rows, 2, plan, ("flash", "plain"))
    assert [(row["engine"], row["phase"], row["ms"], row["exposed_ms"]) for row in first] == [
        (engine, phase, 2.0, 0.0) for engine in ("flash", "plain") for phase in ("forward", "backward")
    ]
    for rows in (first, second):
        assert all(row.pop("prepare_ms") > 0 for row in rows)  # measured
    assert first == second


# --- meters and bare kernels


def test_gpu_times_come_from_events(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("record")

        def elapsed_time(self, end: Any) -> float:
            return 7.0

    fake = SimpleNamespace(Event=Event, synchronize=lambda: events.append("synchronize"))
    monkeypatch.setattr(torch, "cuda", fake)
    result, elapsed = bench.on_gpu(lambda: events.append("work") or 3)
    assert (result, elapsed.device) == (3, 7.0)
    assert elapsed.host < 7.0
    assert events == ["synchronize", "record", "work", "record", "synchronize"]


def test_the_best_call_after_the_warm_up_counts() -> None:
    times = iter([9.0, 9.0, 5.0, 6.0, 4.0, 8.0])
    rows = bench.RankTensors.of(plan_of(1).header, 3, torch.device("cpu"), is_random=True)
    clock = lambda work: (work(), CallTimes(1.0, next(times)))  # noqa: E731
    best = bench.best(lambda q, k, v: q + k.sum() + v.sum(), rows, clock, 2)
    assert {phase: elapsed.device for phase, elapsed in best.items()} == {"forward": 4.0, "backward": 6.0}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["sdpa", "flex"])
def test_bare_kernels_compute_causal_documents(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    batch, generator = Batch.from_lengths([100, 27, 1]), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(128, heads, 16, generator=generator) for heads in (4, 2, 2))
    kernel = bare_kernels.KERNELS[name]([100, 27, 1], torch.device("cpu"))
    torch.testing.assert_close(kernel(q, k, v), plain_attention(q, k, v, batch, "default"))
