"""Autograd functions and ops that execute programs.

    forward   q, k, v   ──forward program──► o, lse        saved: q, k, v, out, lse and the handle
    backward  dO, dLSE  ──backward program─► dq, dk, dv (dsinks, or dX and the parameters' gradients)

A call is a single op, `torch.ops.apportion.attend`, in eager mode and under torch.compile, so features that work on
ops, like selective activation checkpointing, apply in both. It takes the handle's number as a tensor: no graph
breaks, and no new graph for a new plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel

from apportion.backends.interp import components
from apportion.backends.torch.executor import Gradients, Layer, TorchMachine
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.kernels.attention import Score
from apportion.backends.torch.memory.arenas import Memory, Parts
from apportion.backends.torch.ops import LIBRARY, op
from apportion.ir.errors import ExecutionError
from apportion.ir.plan.messages import ALIGNMENT
from apportion.ir.tensors import Tensor as Name

Home = Mapping[Name, Parts]
#: a layer's declared mask: window, causal, name of the layer (see `ir.masks.declared`)
LayerMask = tuple[int | None, bool | None, str | None]


def run(handle: PlanHandle, kind: str, phase: str, home: Home, layer: Layer) -> TorchMachine:
    """Executes a program. home: q, k, v or hidden states in forward; in backward, also forward's result and dO."""
    machine = prepare(handle, kind, phase, home, layer)
    machine.run()
    machine.close()
    return machine


def attention_scope(
    handle: PlanHandle, kind: str, phase: str, score: Score, sinks: Tensor | None, lse: bool = False
) -> AbstractContextManager[None]:
    """Opens the call of one program on all ranks. lse: whether LSE may have a gradient."""
    return handle.call(attention_call(handle.name, kind, phase, score, sinks is not None, lse))


def attention_call(plan: str, kind: str, phase: str, score: Score, sinks: bool, lse: bool = False) -> str:
    """Names an attention call by the facts that all ranks must agree on. plan: its id's prefix; lse: whether LSE may
    have a gradient."""
    softcap = "" if score.softcap is None else f", softcap {score.softcap:g}"
    suffix = ", sinks" * sinks + ", return_lse" * lse
    return f"{phase} of kind {kind}, plan {plan}, scale {score.scale!r}{softcap}{suffix}"


def prepare(handle: PlanHandle, kind: str, phase: str, home: Home, layer: Layer) -> TorchMachine:
    """Builds the machine of one call with its memory, ready to run. The first time, it compares the
    ranks' plan ids, a collective."""
    require_latent(handle, layer.expand is not None)
    handle.agree()
    if phase == "forward":
        handle.calls += 1
        handle.called[kind] += 1
        handle.wrapper = DistributedDataParallel._active_ddp_module
    device = next(iter(home.values()))[0].device
    hidden = home[Name.X][0].shape[-1] if Name.X in home else 0
    _require_current(device)
    executable = handle.executable(kind, phase, device, hidden)
    inputs = {name: tuple(_aligned(part) for part in parts) for name, parts in home.items()}
    layer = replace(layer, sinks=_checked_sinks(handle, layer.sinks, device))
    buffer = handle.communicator.pool.take(executable.arenas.size, device)
    memory = Memory(executable.arenas, handle.rows, inputs, buffer, handle.padding)
    return handle.engine_on(device).machine(executable, memory, layer, handle.communicator)


def _require_current(device: torch.device) -> None:
    """Raises ExecutionError if the rows are not on the current device, which kernels and messages use."""
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ExecutionError(
            f"the rows are on {device}, but cuda:{torch.cuda.current_device()} is current: call torch.cuda.set_device"
        )


def _aligned(part: Tensor) -> Tensor:
    """The tensor, contiguous and aligned to 16 bytes as kernels require; a copy if it is not."""
    part = part.detach().contiguous()
    return part if part.data_ptr() % ALIGNMENT == 0 else part.clone()


def require_latent(handle: PlanHandle, latent: bool) -> None:
    """Raises ExecutionError for a call on latent rows under a plan for keys and values, or vice versa."""
    if latent != (handle.slice.header.latent is not None):
        moves, call = ("keys and values", "attention") if latent else ("latent rows", "latent_attention")
        raise ExecutionError(f"the plan moves {moves} from rank to rank: call planned_{call}")


def qkv_home(
    handle: PlanHandle, q: Tensor, k: Tensor, v: Tensor, *, latent: bool = False
) -> dict[Name, Parts]:
    """The home rows of a forward program that does not project; latent: k, v are rotated and compressed latent rows.
    Raises ExecutionError if a tensor's shape, dtype or device does not match the plan."""
    require_latent(handle, latent)
    header = handle.slice.header
    keys, values = ("rotated", "compressed") if latent else ("k", "v")
    k_part, v_part = components(Name.KV, header)
    expected = {
        "q": (q, (handle.padded_rows, header.q_heads, header.head_dim)),
        keys: (k, (handle.padded_rows, header.kv_heads, k_part.width)),
        values: (v, (handle.padded_rows, header.kv_heads, v_part.width)),
    }
    for name, (tensor, shape) in expected.items():
        _check_rows_first(name, tensor, shape)
        if name != "q" and tensor.shape[0] != q.shape[0]:
            raise ExecutionError(
                f"q has {q.shape[0]} rows and {name} {tensor.shape[0]}: cross-attention is not supported"
            )
        check_shape(name, tensor, shape)
        _check_dtype(name, tensor, handle)
    return {Name.Q: (q,), Name.KV: (k, v)}


def _check_rows_first(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    rows, heads, width = shape
    if tensor.shape == (heads, rows, width) and rows != heads:
        raise ExecutionError(
            f"{name} has its heads first, {tuple(tensor.shape)}: pass [rows, heads, D], {name}.transpose(-3, -2)"
        )


def _checked_sinks(handle: PlanHandle, sinks: Tensor | None, device: torch.device) -> Tensor | None:
    """The learned logits [Hq], contiguous. Raises ExecutionError for a wrong shape, dtype or device."""
    if sinks is None:
        return None
    check_shape("sinks", sinks, (handle.slice.header.q_heads,))
    if not sinks.is_floating_point() or sinks.device != device:
        raise ExecutionError(
            f"sinks are {sinks.dtype} on {sinks.device}; they must be floating-point numbers on {device}"
        )
    return sinks.detach().contiguous()


def _check_hidden(handle: PlanHandle, hidden: Tensor, position_ids: Tensor) -> None:
    check_shape("hidden", hidden, (handle.padded_rows, hidden.shape[-1]))
    _check_dtype("hidden", hidden, handle)
    check_shape("position_ids", position_ids, (handle.padded_rows,))


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ExecutionError(
            f"{name} has shape {tuple(tensor.shape)}; this rank's part of the plan is {shape}"
        )


def _check_dtype(name: str, tensor: Tensor, handle: PlanHandle) -> None:
    if tensor.dtype != handle.dtype:
        raise ExecutionError(
            f"{name} has dtype {tensor.dtype}, the plan {handle.dtype}: cast it, or plan with that dtype"
        )


def backward_home(kept: Home, out: Tensor, lse: Tensor, do: Tensor) -> dict[Name, Parts]:
    """The home rows of a backward program: `kept`, forward's inputs (q, k, v or hidden states), its result and dO."""
    return {**kept, Name.O: (out, lse), Name.DO: (do,)}


def or_zeros(grad: Tensor | None, like: Tensor) -> Tensor:
    """The gradient, or zeros if autograd passed None: a rank without a gradient still takes part in every round."""
    return torch.zeros_like(like) if grad is None else grad


def sink_gradient(layer: Layer, gradients: Gradients) -> Tensor | None:
    """The gradient of the layer's sinks [Hq] in their dtype; None if there are no sinks."""
    if layer.sinks is None:
        return None
    if gradients.sinks is None:  # a rank without rows
        return torch.zeros_like(layer.sinks)
    return gradients.sinks.to(layer.sinks.dtype)


def param_gradients(params: Sequence[Tensor], gradients: Gradients) -> list[Tensor | None]:
    """The summed gradients of the parameters that need them, in the parameters' dtypes; None for the others."""
    values = iter(gradients.params)
    return [next(values).to(param.dtype) if param.requires_grad else None for param in params]


def _versions(params: Sequence[Tensor]) -> list[int]:
    return [param._version for param in params if param.requires_grad]


def _require_unchanged(ctx: Any) -> None:
    """Raises ExecutionError if a parameter was modified since forward: backward calls the layer's function again."""
    if _versions(ctx.params) != ctx.versions:
        raise ExecutionError("a parameter of a layer was changed in place between its forward and backward")


class PlannedLayer(torch.autograd.Function):
    """Autograd function from this rank's home rows to out, for layers whose function backward calls again: a projection
    of hidden states, or an expansion of latent rows. names: the home tensor of each input. Inputs come before the
    layer's params."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: PlanHandle,
        kind: str,
        layer: Layer,
        names: Sequence[Name],
        sinks: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        inputs, params = tensors[: len(names)], tensors[len(names) :]
        home = _group_parts(names, inputs)
        with attention_scope(handle, kind, "forward", layer.score, sinks):
            if Name.X in home:
                _check_hidden(handle, *home[Name.X])
            else:
                qkv_home(handle, *inputs, latent=True)
            machine = run(handle, kind, "forward", home, replace(layer, sinks=sinks))
        out, lse = machine.output(inputs[0].dtype)
        ctx.names, rows = _flatten(inputs_of(machine, home))
        ctx.save_for_backward(sinks, out, lse, *rows)
        ctx.handle, ctx.kind, ctx.layer = handle, kind, layer
        ctx.params, ctx.versions = params, _versions(params)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        _require_unchanged(ctx)
        sinks, out, lse, *rows = ctx.saved_tensors
        projects, dtype = ctx.names[0] == Name.X, rows[0].dtype
        trainable = tuple(param for param in ctx.params if param.requires_grad)
        layer = replace(ctx.layer, sinks=sinks, params=trainable)
        home = backward_home(_group_parts(ctx.names, rows), out, lse, do)
        del out, lse, rows
        with attention_scope(ctx.handle, ctx.kind, "backward", layer.score, sinks):
            machine = prepare(ctx.handle, ctx.kind, "backward", home, layer)
            home.clear()  # so that the machine can free tensors early
            machine.run()
            machine.close()
        grads = (machine.hidden_gradient(dtype), None) if projects else machine.input_gradients(dtype)
        dparams = param_gradients(ctx.params, machine.gradients)
        return None, None, None, None, sink_gradient(layer, machine.gradients), *grads, *dparams


def inputs_of(machine: TorchMachine, home: Home) -> dict[Name, Parts]:
    """The inputs of a forward program that backward reads: home rows, and projected rows if the plan keeps them."""
    rows = dict(machine.memory.home) | dict(home)
    del rows[Name.O]
    return rows


def _flatten(home: Home) -> tuple[tuple[Name, ...], tuple[Tensor, ...]]:
    """The home tensor of each part, and the parts: the inverse of `_group_parts`."""
    names, parts = zip(*((name, part) for name, parts in home.items() for part in parts), strict=True)
    return names, parts


def _group_parts(names: Sequence[Name], parts: Sequence[Tensor]) -> dict[Name, Parts]:
    """Groups parts by home tensor. names: the home tensor of each part."""
    result: dict[Name, Parts] = {}
    for name, part in zip(names, parts, strict=True):
        result[name] = (*result.get(name, ()), part)
    return result


# --- the op

_SETTINGS = 5  # arguments from `number` to `return_lse`


@op
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    number: Tensor,
    kind: str,
    scale: float,
    softcap: float | None,
    return_lse: bool,
    window: int | None = None,
    causal: bool | None = None,
    layer: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes out [rows, Hq, Dv] in q's dtype and lse [rows, Hq] in float64 under the plan of handle `number`.

    return_lse: whether LSE may get a gradient; equal on all ranks, since each also computes tasks on others' rows.
    window, causal: compared with the plan inside the op, so that torch.compile does not recompile for a new mask.
    """
    handle = PlanHandle.of_number(number)
    score = Score(scale, softcap)
    with attention_scope(handle, kind, "forward", score, sinks, return_lse):
        handle.check(kind, window, causal, layer)
        home = qkv_home(handle, q, k, v)
        results = run(handle, kind, "forward", home, Layer(score, sinks)).output(q.dtype)
    if handle.observer is not None:
        handle.observer(handle, results)
    return results


@torch.library.register_fake("apportion::attend", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_attend(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float64)


@op
def _attend_grad(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    number: Tensor,
    kind: str,
    scale: float,
    softcap: float | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes dq, dk, dv and dsinks (empty if there are no sinks)."""
    layer = Layer(Score(scale, softcap, any_delta=return_lse), sinks, dlse=dlse)
    home = backward_home({Name.Q: (q,), Name.KV: (k, v)}, out, lse, do)
    handle = PlanHandle.of_number(number)
    with attention_scope(handle, kind, "backward", layer.score, sinks, return_lse):
        machine = run(handle, kind, "backward", home, layer)
    dsinks = sink_gradient(layer, machine.gradients)
    return *machine.input_gradients(q.dtype), q.new_empty(0) if dsinks is None else dsinks


@torch.library.register_fake("apportion::attend_grad", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _fake_attend_grad(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


class _Attend(torch.autograd.Function):
    """The op's autograd function: its forward calls the op again, below autograd."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = attend_op(*inputs)
        q, k, v, sinks, number, *settings = inputs
        ctx.settings, ctx.others = settings[: _SETTINGS - 1], len(settings) + 1
        ctx.save_for_backward(q, k, v, sinks, out, lse, number)
        if not ctx.settings[-1]:
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse, number = ctx.saved_tensors
        inputs = (or_zeros(do, out), dlse, q, k, v, sinks, out, lse, number)
        dq, dk, dv, dsinks = attend_grad_op(*inputs, *ctx.settings)
        return dq, dk, dv, None if sinks is None else dsinks, *(None,) * ctx.others


LIBRARY.impl("attend", _Attend.apply, "Autograd")
attend_op = torch.ops.apportion.attend.default
attend_grad_op = torch.ops.apportion.attend_grad.default


def attend(
    handle: PlanHandle, kind: str, qkv: Sequence[Tensor], layer: Layer, return_lse: bool, declared: LayerMask
) -> tuple[Tensor, Tensor]:
    """Planned attention and its LSE [rows, Hq] in float64, differentiable in q, k, v and sinks; eager or compiled.

    LSE is differentiable if return_lse is True, on all ranks."""
    settings = handle.number, kind, layer.score.scale, layer.score.softcap, return_lse
    out, lse = attend_op(*qkv, layer.sinks, *settings, *declared)
    if not torch.compiler.is_compiling() and out.grad_fn is not None:
        out.grad_fn.metadata["handle"] = handle  # keeps the handle alive until backward has run
    return out, lse


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_layer(
    handle: PlanHandle, kind: str, home: Home, layer: Layer, declared: LayerMask = (None, None, None)
) -> Tensor:
    """Planned attention of hidden states, or of q [rows, Hq, D] to latent rows [rows, 1, rope] and [rows, 1, rank],
    differentiable in all of these and in the layer's sinks and params."""
    handle.check(kind, *declared)
    names, tensors = _flatten(home)
    bare = replace(layer, sinks=None, params=())
    inputs = (handle, kind, bare, names, layer.sinks, *tensors, *layer.params)
    return PlannedLayer.apply(*inputs)  # type: ignore[no-untyped-call,no-any-return]
