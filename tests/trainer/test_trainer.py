"""The trainer seam: loader, loss, baselines, refused arguments, self-test and a short demo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apportion.backends.torch.engines import ENGINES
from apportion.backends.torch.executor import PlainMachine
from apportion.backends.torch.kernels import attention
from apportion.backends.torch.kernels.attention import Score
from apportion.backends.torch.kernels.cuts import Call
from apportion.ir.bytes.slices import Slice
from apportion.ir.errors import ConfigError, ExecutionError, UnknownNameError
from apportion.ir.masks import specs as masks
from apportion.ir.masks.windows import Causal, SlidingWindow
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.sequences import Sequence
from apportion.planner import api
from apportion.trainer.demo import run as demo, training, workload
from apportion.trainer.demo.baselines import contiguous, zigzag_ring
from apportion.trainer.loading.rows import local_rows
from apportion.trainer.measure import selftest
from apportion.trainer.step.attention import PlanHandle, planned_attention
from apportion.trainer.step.loss import IGNORED, normalised_loss
from tests.ranks.cases import model, recipe
from tests.ranks.loading import Recorded


def piece_of(
    batch: Batch, ranks: int = 1, rank: int = 0, **options: dict[str, Causal | SlidingWindow]
) -> Slice:
    return api.plan(batch, Cluster(1, ranks), model(2, **options), recipe(), verify=False).for_rank(rank)


# --- rows


def test_a_rank_reads_only_what_it_holds() -> None:
    batch = Batch.from_lengths([8, 8, 8, 8])
    for rank in range(4):
        piece, data = piece_of(batch, 4, rank), Recorded([8] * 4)
        local_rows(piece, batch, data.__getitem__)
        assert data.read == sorted(set(piece.layout("attention").spans["sequence"].tolist()))
        assert len(data.read) < 4


def test_labels_follow_the_mask_s_own_rule_and_small_dtypes_do_not_wrap() -> None:
    batch = Batch.from_sequences([Sequence(9, masks.shared_question(3, [4, 2]))])
    ids = np.arange(250, 259).astype(np.uint16)
    tokens, labels, *_ = local_rows(piece_of(batch), batch, lambda _: ids)
    want = batch.labels()[tokens.numpy() - 250]
    np.testing.assert_array_equal(labels.numpy(), np.where(want >= 0, want + 250, IGNORED))


def test_a_sample_of_another_length_and_a_plan_of_another_batch_are_refused() -> None:
    batch = Batch.from_lengths([4])
    with pytest.raises(ExecutionError, match="planned with length 4"):
        local_rows(piece_of(batch), batch, lambda _: [1, 2, 3])
    for other in ([2, 2], [3]):
        with pytest.raises(ExecutionError, match="not of this batch"):
            local_rows(piece_of(batch), Batch.from_lengths(other), lambda _: [1, 2, 3, 4])


# --- loss


def test_shares_of_ranks_and_microbatches_sum_to_the_mean() -> None:
    gen = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 7, generator=gen)
    labels = torch.tensor([1, 2, IGNORED, 3, 0, 6, IGNORED, 5, 4, 2])
    shares = [normalised_loss(logits[a:b], labels[a:b], 8) for a, b in ((0, 4), (4, 4), (4, 10))]
    whole = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED)
    torch.testing.assert_close(torch.stack(shares).sum(), whole)
    assert shares[1].item() == 0
    torch.testing.assert_close(normalised_loss(logits, labels, 8, averaged_over=4), whole * 4)


# --- attention arguments


def inputs_of(handle: PlanHandle) -> list[torch.Tensor]:
    header = handle.slice.header
    shapes = [
        (header.q_heads, header.head_dim),
        (header.kv_heads, header.head_dim),
        (header.kv_heads, header.v_head_dim),
    ]
    return [torch.zeros(handle.rows, *shape, dtype=handle.dtype) for shape in shapes]


def test_what_planned_attention_does_not_do_is_refused_by_name() -> None:
    handle = PlanHandle(piece_of(Batch.from_lengths([6])))
    q, k, v = inputs_of(handle)
    for name, value in {
        "dropout_p": 0.1,
        "alibi_slopes": torch.ones(2),
        "attn_bias": torch.ones(6, 6),
        "attn_mask": torch.ones(6, 6),
        "is_causal": True,
    }.items():
        with pytest.raises(ConfigError, match=name):
            planned_attention(q, k, v, handle, **{name: value})
    planned_attention(q, k, v, handle, dropout_p=0.0, attn_mask=None, is_causal=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_prob'"):
        planned_attention(q, k, v, handle, dropout_prob=0.1)
    with pytest.raises(ExecutionError, match="cross-attention"):
        planned_attention(q, k[:3], v[:3], handle)
    with pytest.raises(ConfigError, match="softcap"):
        planned_attention(q, k, v, handle, softcap=0.0)


def test_wrong_shapes_dtypes_kinds_and_ranks_are_errors() -> None:
    handle = PlanHandle(piece_of(Batch.from_lengths([6])))
    q, k, v = inputs_of(handle)
    with pytest.raises(
        ExecutionError, match=r"q has shape \(5, 2, 8\); this rank's part of the plan is \(6, 2, 8\)"
    ):
        planned_attention(q[:5], k[:5], v[:5], handle)
    with pytest.raises(ExecutionError, match=r"q has dtype torch\.float32, the plan torch\.float64"):
        planned_attention(q.float(), k.float(), v.float(), handle)
    with pytest.raises(UnknownNameError, match="kind"):
        planned_attention(q, k, v, handle, kind="local")
    with pytest.raises(ExecutionError, match="a slice of rank 1 of 2 on rank 0 of 1"):
        PlanHandle(piece_of(Batch.from_lengths([6]), 2, 1))


def test_a_kind_must_be_named_where_there_are_several() -> None:
    kinds = {"global": masks.causal(), "local": masks.sliding_window(3)}
    handle = PlanHandle(piece_of(Batch.from_lengths([6], kinds), kinds=kinds))
    with pytest.raises(ConfigError, match="several attention kinds"):
        planned_attention(*inputs_of(handle), handle)


def test_a_batch_dimension_of_one_is_kept() -> None:
    handle = PlanHandle(piece_of(Batch.from_lengths([6])))
    q, k, v = (torch.randn_like(x) for x in inputs_of(handle))
    out = planned_attention(q[None], k[None], v[None], handle)
    torch.testing.assert_close(out[0], planned_attention(q, k, v, handle))
    with pytest.raises(ExecutionError, match="batch dimension must be 1"):
        planned_attention(q.expand(2, *q.shape), k[None], v[None], handle)


# --- baselines


def test_baselines_count_loads_bytes_and_tokens_exactly() -> None:
    batch, m = Batch.from_lengths([8]), model(2, "fp32")
    filled = contiguous(batch, 2, m)
    # queries 0-3 have 10 pairs, 4-7 have 26; rank 1 fetches 4 keys
    row = 3 * 2 * 8 * 4  # k and v, fp32: out, out again, gradient home
    assert filled.compute_imbalance == pytest.approx(26 / 18 - 1)
    assert (filled.token_imbalance, filled.bytes_moved, filled.slots) == (0, 4 * row, 3)
    ring = zigzag_ring(batch, 2, m)
    # chunks of 2 tokens hold 3, 7, 11, 15 pairs: rank 0 has the first and last
    assert ring.compute_imbalance == ring.token_imbalance == 0
    assert (ring.bytes_moved, ring.slots) == (8 * (2 + 2) * 2 * 8 * 4, 4)


def test_baselines_of_a_window_fetch_only_what_it_sees() -> None:
    batch = Batch.from_lengths([100], masks.sliding_window(5))
    assert contiguous(batch, 4, model(2)).bytes_moved == 3 * 4 * 3 * 2 * 8 * 8


# --- self-test and demo


def test_selftest_in_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(selftest, "LENGTHS", (401, 140, 1))
    assert selftest.run(as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"]
    assert [(row["engine"], row["kind"], row["dtype"]) for row in record["rows"]] == [
        (engine, kind, dtype)
        for dtype in ("fp32", "fp16", "bf16")
        for kind in ("causal", "window")
        for engine in ("flash", "plain")
    ]
    assert all(row["error"] <= 2 * max(row["plain_error"], 1e-7) for row in record["rows"])
    assert [why.split(":")[0] for why in record["skipped"]] == ["stage"]


def test_selftest_fails_where_one_engine_errs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "LENGTHS", (40, 9))
    monkeypatch.setattr(selftest, "DTYPES", {"fp32": torch.float32})
    right = attention.PLAIN

    def wrong(*args: Call | Score | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = right.forward(*args)
        return o * 1.001, lse

    monkeypatch.setattr(PlainMachine, "kernel", replace(right, forward=wrong))
    assert selftest.run(as_json=True) == 1
    record = json.loads(capsys.readouterr().out)
    assert {(row["engine"], row["ok"]) for row in record["rows"]} == {("flash", True), ("plain", False)}
    assert selftest.run() == 1
    printed = capsys.readouterr().out
    assert "too large" in printed
    assert "stage: the stage kernels run on GPUs" in " ".join(printed.split())


def test_selftest_runs_the_stage_engine_where_it_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its place is taken here: the interpreter has tests of its own."""
    monkeypatch.setattr(selftest, "LENGTHS", (40, 9))
    monkeypatch.setattr(selftest, "ENGINES", {"stage": ENGINES["plain"]})
    monkeypatch.setattr(selftest, "PlanHandle", lambda piece, comm, engine: PlanHandle(piece, comm, "plain"))
    assert selftest.run(as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert {(row["engine"], row["dtype"]) for row in record["rows"]} == {("stage", "fp32"), ("stage", "fp16")}
    assert record["skipped"] == ["stage: Triton's interpreter multiplies bfloat16 wrongly"]


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The test leaves no process that was not there before."""
    before = processes_of(os.getpid(), PARENT)
    yield
    assert processes_of(os.getpid(), PARENT) <= before


@pytest.mark.usefixtures("nothing_left")
def test_demo_agrees_in_two_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.run(steps=2, as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["ok"]
    assert record["largest_difference"] <= record["tolerance"]
    assert len(record["losses"]["planned"]) == len(record["losses"]["plain"]) == 2
    assert set(record["layouts"]) == {"planned (fcp)", "contiguous", "zig-zag ring"}
    assert record["service"]["delivered"] == 2 * workload.RANKS
    assert record["service"]["planning_ms"] > 0


def test_demo_exits_non_zero_where_losses_differ_or_plans_are_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = [training.Ran(1.0, (bytes(32),) * workload.RANKS, (0.0,) * workload.RANKS)]
    monkeypatch.setattr(demo, "train_planned", lambda steps, progress: (ran, training.Service(4, 1.0, 0.0)))
    monkeypatch.setattr(demo, "train_plain", lambda steps: iter([1.001]))
    assert demo.run(steps=1) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "losses differ by 1.0e-03" in told
    assert "the processes ran ['000000000000'], not" in told


@pytest.mark.usefixtures("nothing_left")
def test_demo_ends_its_processes_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "documents", lambda steps: (_ for _ in ()).throw(ExecutionError("no disk")))
    with pytest.raises(ExecutionError, match="no disk"):
        demo.run(steps=1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_demo_that_is_killed_leaves_no_process(number: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "apportion", "demo", "--steps", "1000"]
    with open(tmp_path / "out", "wb") as out:
        run = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    with run:
        started = until(lambda: len(processes_of(run.pid)) >= 2 + workload.RANKS or run.poll() is not None)
        run.send_signal(number)
        run.wait(300)
    assert started, (tmp_path / "out").read_text()
    assert until(lambda: not processes_of(run.pid)), processes_of(run.pid)


def until(holds: Callable[..., Any], seconds: int = 300) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds()


PARENT, SESSION = 1, 3  # behind a process's name and its state


def processes_of(number: int, field: int = SESSION) -> set[str]:
    """Number and name of those of a session, or of a parent, by what the system tells of each."""
    told = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, rest = stat.read_text().rsplit(")", 1)
            state, *numbers = rest.split()
            if state != "Z" and int(numbers[field - 1]) == number:
                told.add(name)
    return told


def test_demo_without_a_repository_uses_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workload, "REPOSITORY", tmp_path)
    assert len(workload._corpus()) > 10_000
    assert len(workload._workload(None)) > 10
