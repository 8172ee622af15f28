"""The trainer seam: rows, loss, refused arguments and the self-test."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from apportion import Batch, Cluster, PlanHandle, Sequence, Slice, masks, planned_attention
from apportion.backends.torch.engines import ENGINES
from apportion.backends.torch.executor import PlainMachine
from apportion.backends.torch.kernels import attention
from apportion.backends.torch.kernels.attention import Score
from apportion.backends.torch.kernels.cuts import Call
from apportion.ir.errors import ConfigError, ExecutionError, UnknownNameError
from apportion.planner import api
from apportion.trainer.loading.rows import local_rows
from apportion.trainer.measure import selftest
from apportion.trainer.step.loss import IGNORED
from tests.ranks.cases import model, recipe


def piece_of(batch: Batch, ranks: int = 1, rank: int = 0, **options: Any) -> Slice:
    return api.plan(batch, Cluster(1, ranks), model(2, **options), recipe(), verify=False).for_rank(rank)


# --- rows


def test_labels_follow_the_mask_and_small_dtypes_do_not_overflow() -> None:
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
        with pytest.raises(ExecutionError, match="not for this batch"):
            local_rows(piece_of(batch), Batch.from_lengths(other), lambda _: [1, 2, 3, 4])


# --- loss


# --- attention arguments


def inputs_of(handle: PlanHandle) -> list[torch.Tensor]:
    head, kv_heads = handle.slice.header, handle.slice.header.kv_heads
    shapes = (head.q_heads, head.head_dim), (kv_heads, head.head_dim), (kv_heads, head.v_head_dim)
    return [torch.zeros(handle.rows, *shape, dtype=handle.dtype) for shape in shapes]


def test_unsupported_arguments_of_planned_attention_are_refused_by_name() -> None:
    handle = PlanHandle(piece_of(Batch.from_lengths([6])))
    q, k, v = inputs_of(handle)
    unsupported = {"dropout_p": 0.1, "alibi_slopes": torch.ones(2), "is_causal": True}
    for name, value in {**unsupported, **dict.fromkeys(("attn_bias", "attn_mask"), torch.ones(6, 6))}.items():
        with pytest.raises(ConfigError, match=name):
            planned_attention(q, k, v, handle, **{name: value})
    planned_attention(q, k, v, handle, dropout_p=0.0, attn_mask=None, is_causal=False)
    with pytest.raises(ExecutionError, match="cross-attention"):
        planned_attention(q, k[:3], v[:3], handle)
    with pytest.raises(ConfigError, match="softcap"):
        planned_attention(q, k, v, handle, softcap=0.0)
    learnt = torch.ones((), requires_grad=True)
    for name in ("scale", "softcap"):
        with pytest.raises(ConfigError, match=f"{name} = 'a learnt tensor': .*no gradient.*multiply q"):
            planned_attention(q, k, v, handle, **{name: learnt})
    planned_attention(q, k, v, handle, scale=learnt.detach())


def test_wrong_shapes_dtypes_kinds_and_ranks_are_errors() -> None:
    handle = PlanHandle(piece_of(Batch.from_lengths([6])))
    q, k, v = inputs_of(handle)
    message = r"q has shape \(5, 2, 8\); this rank's part of the plan is \(6, 2, 8\)"
    with pytest.raises(ExecutionError, match=message):
        planned_attention(q[:5], k[:5], v[:5], handle)
    with pytest.raises(ExecutionError, match=r"q has dtype torch\.float32, the plan torch\.float64"):
        planned_attention(q.float(), k.float(), v.float(), handle)
    with pytest.raises(UnknownNameError, match="kind"):
        planned_attention(q, k, v, handle, kind="local")
    with pytest.raises(ExecutionError, match="the slice of rank 1 of 2 is on rank 0 of 1"):
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


# --- self-test


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
    assert [reason.split(":")[0] for reason in record["skipped"]] == ["stage"]


def test_selftest_fails_if_one_engine_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
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


def test_selftest_runs_the_stage_engine_if_it_is_available(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Another engine stands in for stage; the interpreter has its own tests."""
    monkeypatch.setattr(selftest, "LENGTHS", (40, 9))
    monkeypatch.setattr(selftest, "ENGINES", {"stage": ENGINES["plain"]})
    monkeypatch.setattr(selftest, "PlanHandle", lambda piece, comm, engine: PlanHandle(piece, comm, "plain"))
    assert selftest.run(as_json=True) == 0
    record = json.loads(capsys.readouterr().out)
    assert {(row["engine"], row["dtype"]) for row in record["rows"]} == {("stage", "fp32"), ("stage", "fp16")}
    assert record["skipped"] == ["stage: Triton's interpreter multiplies bfloat16 incorrectly"]
