"""Planned recurrences and convolutions of recurrent layers.

x = planned_conv(x, weight, handle)                         causal depthwise convolution of this rank's rows
o = planned_scan(None, q, k, v, g, beta, handle)            gated delta rule, Kimi Delta Attention
o = planned_scan(None, q, k, v, g, None, handle)            gated linear attention, Mamba-2, lightning attention
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apportion.backends.torch.autograd import check_shape
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.kernels.recurrent import Kernel, choose_kernel
from apportion.backends.torch.scan import ScanRows, conv, scan
from apportion.ir.errors import ConfigError, ExecutionError, UnknownNameError
from apportion.ir.fields import instance, suggestion
from apportion.ir.request.recurrent import Recurrent
from apportion.trainer.step.attention import refuse_gradients, run_recorded, without_batch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def planned_scan(
    kernel: Kernel | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None,
    handle: PlanHandle,
    kind: str | None = None,
    scale: float | None = None,
) -> Tensor:
    """A linear recurrence along every document and branch, for this rank's rows; a collective: ranks without tokens
    call it too.

        h = exp(g) h + k ⊗ β (v − kᵀ exp(g) h)    with the delta rule       o = scale · qᵀ h
        h = exp(g) h + k ⊗ v                       without

    q, k [rows, key heads, K], v [rows, heads, V]: the rank's rows in the plan's home layout (a leading batch dimension
    of 1 is kept); q and k may have fewer heads, each serving consecutive heads of v. g: the log of the decay, [rows,
    heads], or [rows, heads, K] for a diagonal gate. beta [rows, heads], None without the delta rule. kind: one of the
    model's recurrent kinds, optional if there is only one. scale: K^-1/2 by default. kernel: with the signature of
    flash-linear-attention's `chunk_gated_delta_rule` and similar, for concatenated runs of tokens; it must be jointly
    linear in v and its initial state. None: flash-linear-attention's if it is installed and the rows are on a GPU, else
    plain torch. Returns o [rows, heads, V]; 0 for padding. Differentiable once in all tensors. torch.compile breaks the
    graph here.

    Raises ConfigError without a handle and for a plan without recurrent layers, UnknownNameError for a kind that the
    plan does not have, ExecutionError for shapes that differ from the plan's and if ranks hold different plans.

    Data of other ranks comes from `torch.ops.apportion.fold`: selective activation checkpointing can save its results,
    so that recomputation does not communicate.
    """
    refuse_gradients("multiply q by a learnt scale", scale=scale)
    name, layer = _kind(handle, kind)
    batched = v.dim() == 4
    rows = ScanRows(q, k, v, g, beta)
    if batched:
        tensors = {field: x for field, x in rows._asdict().items() if x is not None}
        rows = rows._replace(**{field: without_batch(field, x, x.dim() - 1) for field, x in tensors.items()})
    _check_rows(handle, layer, rows)
    chosen = kernel or choose_kernel(layer.gate, layer.delta, v.device)
    inputs = [x for x in rows if x is not None]
    width = layer.key_dim**-0.5 if scale is None else scale
    out = _run_planned(handle, lambda: scan(handle, name, chosen, rows, width), *inputs)
    return out[None] if batched else out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def planned_conv(
    x: Tensor, weight: Tensor, handle: PlanHandle, kind: str | None = None, bias: Tensor | None = None
) -> Tensor:
    """Causal depthwise convolution along every document and branch, for this rank's rows: fetches the rows before each
    run from their ranks. A collective: ranks without tokens call it too.

    x [rows, channels] in the plan's home layout (a leading batch dimension of 1 is kept), weight [channels, width], the
    last entry of which is for the row itself, bias [channels]. kind: see `planned_scan`. Returns a tensor like x; 0 for
    padding. Differentiable once. torch.compile breaks the graph here. `torch.ops.apportion.halo` communicates.

    Raises the errors of `planned_scan`, and ExecutionError if the width differs from the plan's.
    """
    name, layer = _kind(handle, kind)
    batched = x.dim() == 3
    rows = without_batch("x", x, 2) if batched else x
    if layer.conv < 2 or weight.dim() != 2 or weight.shape[1] != layer.conv:
        expected = f"of width {layer.conv}" if layer.conv > 1 else "none"
        rule = f"the plan's convolutions of kind {name} are {expected}"
        raise ExecutionError(f"weight has shape {tuple(weight.shape)}, [channels, width]; {rule}")
    check_shape("x", rows, (handle.padded_rows, len(weight)))
    out = _run_planned(handle, lambda: conv(handle, name, rows, weight, bias), rows)
    return out[None] if batched else out


def _run_planned(handle: PlanHandle, run: Callable[[], Tensor], *inputs: Tensor) -> Tensor:
    def attempt() -> tuple[Tensor]:
        handle.agree()
        return (run(),)

    return run_recorded(handle, attempt, *inputs)[0]


def _kind(handle: Any, kind: str | None) -> tuple[str, Recurrent]:
    instance("handle", handle, PlanHandle, "pass batch.handle of this microbatch")
    kinds = handle.slice.header.recurrent
    if not kinds:
        remedy = "pass the planned model its recurrent kinds: Model(recurrent={...})"
        raise ConfigError("handle", f"plan {handle.name}", "its model has no recurrent layers", remedy)
    if kind is None and len(kinds) > 1:
        raise ConfigError("kind", None, "the plan has several recurrent kinds", f"name one of {(*kinds,)}")
    name = next(iter(kinds)) if kind is None else kind
    if name not in kinds:
        rule = f"the plan's recurrent kinds are {', '.join(kinds)}"
        raise UnknownNameError("kind", name, rule, suggestion(name, kinds))
    return name, kinds[name]


def _check_rows(handle: PlanHandle, layer: Recurrent, rows: ScanRows) -> None:
    count, channels = handle.padded_rows, (layer.key_dim,) if layer.gate == "diagonal" else ()
    expected = {
        "q": (count, layer.qk_heads, layer.key_dim),
        "k": (count, layer.qk_heads, layer.key_dim),
        "v": (count, layer.heads, layer.value_dim),
        "g": (count, layer.heads, *channels),
        "beta": (count, layer.heads),
    }
    if (rows.beta is not None) != layer.delta:
        rule = "has the delta rule" if layer.delta else "has no delta rule"
        actual = "None" if rows.beta is None else "a tensor"
        raise ExecutionError(f"beta is {actual}, and this kind of the plan's model {rule}")
    for name, shape in expected.items():
        x = getattr(rows, name)
        if x is not None:
            check_shape(name, x, shape)
