"""Recurrences and convolutions of a rank's rows under a plan, using kernels that handle only whole sequences.

runs of       kernel                                        before the states arrive
documents     all of it                                     during the transfer
first         all of it; the last state is U                yes
middle        V with K more columns of zeros, the state     yes; these columns yield Q' and M, so that
              with the identity in these columns            o = o' + Q' in, and out = U + M in
last          from the state that comes in; as middle       no; yes
              ones where they are much of a rank's rows

Without the delta rule M and Q' are products of decays, and need no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad

from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.kernels.recurrent import Kernel
from apportion.backends.torch.memory.arrays import accumulator_dtype
from apportion.backends.torch.recurrence import RankRecurrence, RunGroup, fold_op, halo_op, recurrence_of


class ScanRows(NamedTuple):
    """q, k [rows, key heads, K], v [rows, heads, V], g [rows, heads] or [rows, heads, K], beta [rows, heads] or
    None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None

    def of(self, group: RunGroup) -> ScanRows:
        if group.alone and len(self.v) == len(group.rows):
            return self
        return ScanRows(*(None if x is None else x[group.rows] for x in self))  # type: ignore[arg-type]


def scan(handle: PlanHandle, kind: str, kernel: Kernel, rows: ScanRows, scale: float) -> Tensor:
    """o [rows, heads, V], 0 for padding; differentiable. A collective. Autocast is off inside: states stay wide."""
    with torch.autocast(rows.v.device.type, enabled=False):
        return _scan(handle, kind, kernel, rows, scale)


def _scan(handle: PlanHandle, kind: str, kernel: Kernel, rows: ScanRows, scale: float) -> Tensor:
    own, v = recurrence_of(handle, kind, rows.v.device), rows.v
    layer, wide = own.layer, accumulator_dtype(v.dtype)
    inputs = [x for x in rows if x is not None]
    u = v.new_zeros(0, layer.heads, layer.key_dim, layer.value_dim, dtype=wide)
    m = v.new_zeros(0, layer.heads, *(layer.key_dim,) * _transition_dims(own), dtype=wide)
    if not own.first.runs + own.middle.runs:
        u = _tied(u, *inputs)  # so that backward passes here on every rank
    outs, us = list[Tensor](), [u]
    if own.first.runs:
        first, state = _run(kernel, rows.of(own.first), own.first, scale)
        us.append(state)
    if own.middle.runs:
        middle, more, state, m = _summary(own, kernel, rows.of(own.middle), own.middle, scale)
        us.append(state)
    u = torch.cat(us) if len(us) > 1 else u
    with _on_side_stream(u, m) as joined:
        states, _ = fold_op(u.contiguous(), m.contiguous(), handle.number, kind)
    if states.grad_fn is not None:
        states.grad_fn.metadata["handle"] = handle  # keeps the handle alive until backward has run
    if own.whole.runs:
        outs.append(_run(kernel, rows.of(own.whole), own.whole, scale)[0])
    if own.early:
        last, more_last, *_ = _summary(own, kernel, rows.of(own.last), own.last, scale)
    joined(states)
    to_middle, to_last = states.split([len(own.middle.runs), len(own.last.runs)])
    if own.first.runs:
        outs.append(first)
    if own.middle.runs:
        outs.append(middle + _read(more, to_middle, own.middle))
    if own.last.runs:
        if own.early:
            outs.append(last + _read(more_last, to_last, own.last))
        else:
            outs.append(_run(kernel, rows.of(own.last), own.last, scale, to_last)[0])
    if len(outs) > 1:
        outs = [torch.cat(outs)[own.place]]
    out = outs[0] if outs else v.new_zeros(0, *v.shape[1:])
    if len(out) < len(v):
        out = pad(out, (0, 0, 0, 0, 0, len(v) - len(out)))
    missed = [] if own.last.runs or own.middle.runs else [states]
    return _tied(out, *missed, *([] if outs else inputs))


def _transition_dims(own: RankRecurrence) -> int:
    return 2 if own.layer.delta else own.layer.gate == "diagonal"


def _run(
    kernel: Kernel, rows: ScanRows, group: RunGroup, scale: float, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o [rows, heads, V] of a group's rows, and the last state of each run."""
    given = {name: x[None] for name, x in rows._asdict().items() if x is not None}
    options: dict[str, Any] = {"scale": scale, "initial_state": state, "output_final_state": True}
    out, last = kernel(**given, **options, cu_seqlens=group.ends)
    return out[0], last


def _summary(
    own: RankRecurrence, kernel: Kernel, rows: ScanRows, group: RunGroup, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For runs with a past: o' [rows, heads, V], Q' [rows, heads, K], U and M."""
    layer, v = own.layer, rows.v
    if not layer.delta:
        out, u = _run(kernel, rows, group, scale)
        decay = _decay(rows.g, group)
        shared = layer.heads // rows.q.shape[1]
        kept = decay[..., None] if decay.dim() == 2 else decay
        more = scale * rows.q.repeat_interleave(shared, 1) * kept.to(v.dtype)
        return out, more, u, decay[group.ends[1:] - 1].to(u.dtype)
    widths = [layer.value_dim, layer.key_dim]
    identity = torch.eye(layer.key_dim, dtype=accumulator_dtype(v.dtype), device=v.device)
    state = pad(identity, (layer.value_dim, 0)).expand(len(group.runs), layer.heads, -1, -1)
    wider = rows._replace(v=pad(v, (0, layer.key_dim)))
    out, last = _run(kernel, wider, group, scale, state.contiguous())
    (out, more), (u, m) = (torch.split(both, widths, -1) for both in (out, last))
    return out, more, u, m


def _decay(g: Tensor, group: RunGroup) -> Tensor:
    """The decay from the start of its run to each row, in float64, since it is a difference of long sums."""
    total = g.double().cumsum(0)
    before = pad(total, (0, 0) * (g.dim() - 1) + (1, 0))[group.ends[:-1]]
    lengths = group.ends.diff()
    return (total - before.repeat_interleave(lengths, 0, output_size=len(g))).exp()


def _read(more: Tensor, states: Tensor, group: RunGroup) -> Tensor:
    """Applies Q' [rows, heads, K] to the state [runs, heads, K, V] of each run -> [rows, heads, V]."""
    pairs = zip(torch.split(more, group.lengths), states.to(more.dtype), strict=True)
    return torch.cat([torch.einsum("thk,hkv->thv", *pair) for pair in pairs])


class _GraphTie(torch.autograd.Function):
    """Returns its first argument; the others get zero gradients, so that backward runs their producers."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(one.shape, one.dtype, one.device) for one in others]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.others)
        return grad, *zeros


def _tied(out: Tensor, *others: Tensor) -> Tensor:
    found: Tensor = _GraphTie.apply(out, *others) if others else out  # type: ignore[no-untyped-call]
    return found


@contextmanager
def _on_side_stream(*given: Tensor) -> Iterator[Any]:
    """Runs a block on a side stream of a GPU, so that messages and the fold, and their backward, overlap kernels that
    are launched later. Yields a function that makes the current stream wait for a result."""
    if given[0].device.type != "cuda":
        yield lambda result: None
        return
    current, side = torch.cuda.current_stream(), _side_stream(given[0].device)
    side.wait_stream(current)

    def joined(result: Tensor) -> None:
        current.wait_stream(side)
        result.record_stream(current)

    with torch.cuda.stream(side):
        yield joined
    for tensor in given:
        tensor.record_stream(side)


_SIDES: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _SIDES:
        _SIDES[device] = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    return _SIDES[device]


def conv(handle: PlanHandle, kind: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Causal depthwise convolution along documents: x [rows, channels], weight [channels, width] -> like x, 0 for
    padding; differentiable. A collective."""
    own = recurrence_of(handle, kind, x.device)
    before = halo_op(x, handle.number, kind)
    if before.grad_fn is not None:
        before.grad_fn.metadata["handle"] = handle  # keeps the handle alive until backward has run
    if not len(own.kept):
        return _tied(torch.zeros_like(x), before, weight, *([] if bias is None else [bias]))
    held = torch.cat([before, x])[own.windows]
    out = conv1d(held.T[None], weight[:, None], bias, groups=len(weight))[0].T[own.kept]
    return pad(out, (0, 0, 0, len(x) - len(out)))
