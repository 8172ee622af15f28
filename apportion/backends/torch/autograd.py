"""Programs as differentiable functions.

    forward   q, k, v ──forward program──► o, lse        saved: q, k, v, out, lse and the handle
    backward  dO      ──backward program─► dq, dk, dv (dsinks, or dX and the parameters' gradients)

In eager mode a call is an `autograd.Function` that keeps its handle. Under torch.compile it is one custom op
that takes the handle's number as a tensor: no graph breaks, and no new graph for a new plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from apportion.backends.torch.executor import Gradients, Layer, Projection, TorchMachine
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.kernels import Score
from apportion.backends.torch.memory import Memory, Parts
from apportion.ir.errors import ExecutionError
from apportion.ir.isa import Tensor as Name
from apportion.ir.messages import ALIGNMENT

Home = Mapping[Name, Parts]


def run(handle: PlanHandle, kind: str, phase: str, home: Home, layer: Layer) -> TorchMachine:
    """Executes a program. Forward is given q, k, v or hidden states; backward these, forward's result, and dO."""
    machine = prepare(handle, kind, phase, home, layer)
    machine.run()
    machine.close()
    return machine


def prepare(handle: PlanHandle, kind: str, phase: str, home: Home, layer: Layer) -> TorchMachine:
    """The machine of one call with its memory, ready to run. Compares plan ids the first time, a collective."""
    handle.agree()
    device = next(iter(home.values()))[0].device
    hidden = home[Name.X][0].shape[-1] if Name.X in home else 0
    loaded = handle.loaded(kind, phase, device, hidden)
    given = {name: tuple(_in_rows(part) for part in parts) for name, parts in home.items()}
    buffer = handle.communicator.pool.take(loaded.arenas.size, device)
    memory = Memory(loaded.arenas, handle.rows, given, buffer)
    return handle.engine_on(device).machine(loaded, memory, layer, handle.communicator)


def _in_rows(part: Tensor) -> Tensor:
    """Row after row, and where kernels may read 16 bytes at once."""
    part = part.detach().contiguous()
    return part if part.data_ptr() % ALIGNMENT == 0 else part.clone()


def check_qkv(handle: PlanHandle, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ExecutionError where q, k or v is not what the plan was made for."""
    header = handle.slice.header
    wants = {
        "q": (q, (handle.rows, header.q_heads, header.head_dim)),
        "k": (k, (handle.rows, header.kv_heads, header.head_dim)),
        "v": (v, (handle.rows, header.kv_heads, header.v_head_dim)),
    }
    for name, (tensor, shape) in wants.items():
        check_shape(name, tensor, shape)
        _check_dtype(name, tensor, handle)


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


def _attend(
    handle: PlanHandle, kind: str, q: Tensor, k: Tensor, v: Tensor, layer: Layer
) -> tuple[Tensor, Tensor]:
    """out [rows, Hq, Dv] in q's dtype, lse [rows, Hq] in float64."""
    check_qkv(handle, q, k, v)
    machine = run(handle, kind, "forward", {Name.Q: (q,), Name.KV: (k, v)}, layer)
    return machine.output(q.dtype)


def _attend_grad(
    handle: PlanHandle, kind: str, saved: tuple[Tensor, ...], do: Tensor, layer: Layer
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv in the dtypes of q, k, v, and dsinks where the layer has sinks."""
    q, k, v, out, lse = saved
    home = backward_home({Name.Q: (q,), Name.KV: (k, v)}, out, lse, do)
    machine = run(handle, kind, "backward", home, layer)
    return *machine.input_gradients(q.dtype), sink_gradient(layer, machine.gradients)


def backward_home(kept: Home, out: Tensor, lse: Tensor, do: Tensor) -> Home:
    """What a backward program is given: what forward `kept` (q, k, v or hidden states), its result, and dO."""
    return {**kept, Name.O: (out, lse), Name.DO: (do,)}


def sink_gradient(layer: Layer, gradients: Gradients) -> Tensor | None:
    """The gradient of the layer's sinks [Hq] in their dtype; None where it has none."""
    if layer.sinks is None:
        return None
    if gradients.sinks is None:  # a rank without rows
        return torch.zeros_like(layer.sinks)
    return gradients.sinks.to(layer.sinks.dtype)


class PlannedAttention(torch.autograd.Function):
    """q, k, v of this rank's rows -> out."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        handle: PlanHandle,
        kind: str,
        score: Score,
    ) -> Tensor:
        out, lse = _attend(handle, kind, q, k, v, Layer(score, sinks))
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.handle, ctx.kind, ctx.score = handle, kind, score
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        layer = Layer(ctx.score, sinks)
        grads = _attend_grad(ctx.handle, ctx.kind, (q, k, v, out, lse), do, layer)
        return *grads, None, None, None


class PlannedBlock(torch.autograd.Function):
    """Hidden states of this rank's rows -> out, where the plan projects heads itself."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        position_ids: Tensor,
        sinks: Tensor | None,
        handle: PlanHandle,
        kind: str,
        layer: Layer,
        *params: Tensor,
    ) -> Tensor:
        layer = replace(layer, sinks=sinks, params=())
        machine = run(handle, kind, "forward", {Name.X: (hidden, position_ids)}, layer)
        memory, (out, lse) = machine.memory, machine.output(hidden.dtype)
        # only a plan that keeps projected rows at home has them here
        ctx.kept = tuple((name, len(memory.home[name])) for name in (Name.Q, Name.KV) if name in memory.home)
        rows = [part for name, _ in ctx.kept for part in memory.home[name]]
        ctx.save_for_backward(hidden, position_ids, sinks, out, lse, *rows)
        ctx.handle, ctx.kind, ctx.layer, ctx.params = handle, kind, layer, params
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        hidden, position_ids, sinks, out, lse, *rows = ctx.saved_tensors
        wanted = tuple(param for param in ctx.params if param.requires_grad)
        layer = replace(ctx.layer, sinks=sinks, params=wanted)
        rest = iter(rows)
        kept: dict[Name, Parts] = {name: tuple(next(rest) for _ in range(n)) for name, n in ctx.kept}
        home = backward_home({**kept, Name.X: (hidden, position_ids)}, out, lse, do)
        machine = run(ctx.handle, ctx.kind, "backward", home, layer)
        (dx,), gradients = machine.memory.home_rows(Name.DX), machine.gradients
        found = iter(gradients.params)
        dparams = [next(found).to(p.dtype) if p.requires_grad else None for p in ctx.params]
        return dx.to(hidden.dtype), None, sink_gradient(layer, gradients), None, None, None, *dparams


# --- torch.compile


@torch.library.custom_op("apportion::attend", mutates_args=())
def attend_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    number: Tensor,
    kind: str,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """out, lse under the plan of that number."""
    out, lse = _attend(PlanHandle.of_number(number), kind, q, k, v, Layer(Score(scale, softcap), sinks))
    return out, lse


@attend_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    number: Tensor,
    kind: str,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[-1]), q.new_empty(q.shape[:2], dtype=torch.float64)


@torch.library.custom_op("apportion::attend_grad", mutates_args=())
def attend_grad_op(
    do: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dsinks (empty without sinks)."""
    layer = Layer(Score(scale, softcap), sinks)
    handle = PlanHandle.of_number(number)
    dq, dk, dv, dsinks = _attend_grad(handle, kind, (q, k, v, out, lse), do, layer)
    return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks


@attend_grad_op.register_fake
def _(
    do: Tensor,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dsinks = q.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _save_op(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, number, *ctx.rule = inputs
    ctx.save_for_backward(q, k, v, sinks, *output, number)


def _grad_op(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, sinks, out, lse, number = ctx.saved_tensors
    dq, dk, dv, dsinks = attend_grad_op(do, q, k, v, sinks, out, lse, number, *ctx.rule)
    return dq, dk, dv, None if sinks is None else dsinks, None, None, None, None


attend_op.register_autograd(_grad_op, setup_context=_save_op)


def attend(
    handle: PlanHandle, kind: str, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, score: Score
) -> Tensor:
    """Planned attention, differentiable in q, k, v and sinks; eager or compiled."""
    if torch.compiler.is_compiling():
        out: Tensor = attend_op(q, k, v, sinks, handle.number, kind, score.scale, score.softcap)[0]
    else:
        out = PlannedAttention.apply(q, k, v, sinks, handle, kind, score)  # type: ignore[no-untyped-call]
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def attend_block(
    handle: PlanHandle,
    kind: str,
    hidden: Tensor,
    position_ids: Tensor,
    project: Projection,
    params: tuple[Tensor, ...],
    sinks: Tensor | None,
    score: Score,
) -> Tensor:
    """Planned attention of hidden states, differentiable in hidden, sinks and params."""
    check_shape("hidden", hidden, (handle.rows, hidden.shape[-1]))
    _check_dtype("hidden", hidden, handle)
    check_shape("position_ids", position_ids, (handle.rows,))
    layer = Layer(score, project=project)
    inputs = (hidden, position_ids, sinks, handle, kind, layer, *params)
    result: Tensor = PlannedBlock.apply(*inputs)  # type: ignore[no-untyped-call]
    return result
