"""Planned attention's errors about its arguments: other libraries' names, masks of layers, tensors with heads first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from apportion import Batch, Cluster, ConfigError, ExecutionError, PlanHandle, Slice, masks, planned_attention
from apportion.planner import api
from tests.ranks.cases import model, recipe


def slice_of(batch: Batch) -> Slice:
    return api.plan(batch, Cluster(1, 1), model(2), recipe(), verify=False).for_rank(0)


def inputs_of(handle: PlanHandle) -> list[torch.Tensor]:
    header = handle.slice.header
    heads = header.q_heads, header.kv_heads, header.kv_heads
    return [torch.zeros(handle.rows, count, header.head_dim, dtype=handle.dtype) for count in heads]


def test_arguments_named_as_in_other_libraries_are_refused_with_our_names() -> None:
    handle = PlanHandle(slice_of(Batch.from_lengths([6])))
    q, k, v = inputs_of(handle)
    for name, value, remedy in (
        ("window_size", (7, 0), r"window=left \+ 1"),
        ("window_size", (-1, -1), r"window=-1 for \(-1, -1\)"),
        ("sliding_window", 8, "window="),
        ("softmax_scale", 0.5, "scale="),
        ("scaling", 0.5, "scale="),
        ("logits_soft_cap", 30.0, "softcap="),
        ("s_aux", torch.zeros(2), "sinks="),
        ("attention_mask", torch.ones(6, 6), "part of the plan"),
    ):
        with pytest.raises(ConfigError, match=f"{name} = (?s:.*){remedy}"):
            planned_attention(q, k, v, handle, **{name: value})
        planned_attention(q, k, v, handle, **{name: None})
    with pytest.raises(TypeError, match=r"'dropout_prob'; options are kind, scale, .* window, causal"):
        planned_attention(q, k, v, handle, dropout_prob=0.1)


def test_a_missing_handle_is_an_error_that_names_its_source() -> None:
    q, k, v = inputs_of(PlanHandle(slice_of(Batch.from_lengths([6]))))
    for wrong in (None, "batch"):
        with pytest.raises(
            ConfigError, match=r"handle = .*: planned attention runs under a plan; pass batch\.h"
        ):
            planned_attention(q, k, v, wrong)


def test_heads_first_is_distinguished_from_cross_attention() -> None:
    handle = PlanHandle(slice_of(Batch.from_lengths([6])))
    tensors = inputs_of(handle)
    for rows in (tensors, [x[None] for x in tensors]):
        q, k, v = (x.transpose(-3, -2) for x in rows)
        message = r"q has its heads first.*\[rows, heads, D\], q\.transpose\(-3, -2\)"
        with pytest.raises(ExecutionError, match=message):
            planned_attention(q, k, v, handle)
        with pytest.raises(ExecutionError, match="k has its heads first"):
            planned_attention(rows[0], k, rows[2], handle)
        planned_attention(*(x.transpose(-3, -2) for x in (q, k, v)), handle)


def test_a_window_on_a_causal_plan_is_an_error_that_names_layer_kind_and_remedy() -> None:
    handle = PlanHandle(slice_of(Batch.from_lengths([6])))
    qkv = inputs_of(handle)
    for _ in range(2):
        planned_attention(*qkv, handle, window=-1, causal=True, layer=0)
        planned_attention(*qkv, handle, window=np.int64(-1))
        message = r"window = 512: .*kind 'default' in layer 3: causal; .*sliding_window\(512\)"
        with pytest.raises(ConfigError, match=message):
            planned_attention(*qkv, handle, window=512, layer=3)
    with pytest.raises(ConfigError, match=r"causal = False: .* 'default': causal"):
        planned_attention(*qkv, handle, causal=False)
    for wrong in (0, -2, True, 2.5):
        with pytest.raises(ConfigError, match="window = "):
            planned_attention(*qkv, handle, window=wrong)


def test_a_mask_declared_by_a_layer_is_checked_against_its_kind() -> None:
    kinds = {"global": masks.causal(), "local": masks.sliding_window(512)}
    handle = PlanHandle(slice_of(Batch.from_lengths([6], kinds)))  # shorter than the window
    qkv = [x.requires_grad_() for x in inputs_of(handle)]
    planned_attention(*qkv, handle, "local", window=512, causal=True, layer="layers.1").sum().backward()
    with pytest.raises(ConfigError, match="call it with kind='local', which is sliding window of 512"):
        planned_attention(*qkv, handle, "global", window=512)
    with pytest.raises(ConfigError, match="call it with kind='global', which is causal"):
        planned_attention(*qkv, handle, "local", window=-1)


def test_compiled_layers_check_their_declared_mask_against_every_plan() -> None:
    """One graph for plans of any mask, and the error of eager mode."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")

    def layer(q: Any, k: Any, v: Any, handle: PlanHandle, number: str) -> torch.Tensor:
        return planned_attention(q * 2, k, v, handle, window=8, causal=True, layer=number).sin()

    fast = torch.compile(layer, backend=counter, fullgraph=True)
    window = masks.sliding_window(8)
    fitting = [window, masks.documents([2, 4], window), masks.image_spans([], window)]
    for number, mask in enumerate([*fitting, masks.sliding_window(8, 1), masks.causal()]):
        handle = PlanHandle(slice_of(Batch.from_lengths([6], mask)))
        qkv = [x.requires_grad_() for x in inputs_of(handle)]
        if number < 3:
            fast(*qkv, handle, "1").sum().backward()
            assert all(x.grad is not None for x in qkv)
        else:
            with pytest.raises(ConfigError, match="differs from the plan's mask of attention kind 'default'"):
                fast(*qkv, handle, "1")
    assert counter.frame_count <= 2
