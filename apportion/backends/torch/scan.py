"""Recurrences and convolutions of a rank's rows under a plan, using kernels that handle only whole sequences.

runs          kernel computes                               before the states arrive
whole         the whole run                                 during the transfer
first         the whole run; the last state is U            yes
middle        V with K extra columns of zeros, the state     yes; these columns yield Q' and M, so that
              with the identity in these columns            o = o' + Q' in, and out = U + M in
last          the run from its incoming state; if it is a    no; yes if like middle
              large share of the rank's rows, like middle

Without the delta rule M and Q' are products of decays, and need no kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
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
        if group.has_all and len(self.v) == len(group.rows):
            return self
        return ScanRows(*(None if x is None else x[group.rows] for x in self))  # type: ignore[arg-type]


def scan(handle: PlanHandle, kind: str, kernel: Kernel, rows: ScanRows, scale: float) -> Tensor:
    """o [rows, heads, V], 0 for padding; differentiable. A collective. Autocast is off: states stay in a wide dtype."""
    with torch.autocast(rows.v.device.type, enabled=False):
        return _scan(handle, kind, kernel, rows, scale)


def _scan(handle: PlanHandle, kind: str, kernel: Kernel, rows: ScanRows, scale: float) -> Tensor:
    local, v = recurrence_of(handle, kind, rows.v.device), rows.v
    layer, sum_dtype = local.layer, accumulator_dtype(v.dtype)
    inputs = [x for x in rows if x is not None]
    u = v.new_zeros(0, layer.heads, layer.key_dim, layer.value_dim, dtype=sum_dtype)
    m = v.new_zeros(0, layer.heads, *(layer.key_dim,) * _transition_dims(local), dtype=sum_dtype)
    if not local.first.runs + local.middle.runs:
        u = _tie(u, *inputs)  # so that backward reaches the fold on every rank
    outs, us = list[Tensor](), [u]
    if local.first.runs:
        first, state = _run(kernel, rows.of(local.first), local.first, scale)
        us.append(state)
    if local.middle.runs:
        middle, q_in, state, m = _summary(local, kernel, rows.of(local.middle), local.middle, scale)
        us.append(state)
    u = torch.cat(us) if len(us) > 1 else u
    with _on_side_stream(u, m) as join:
        states, _ = fold_op(u.contiguous(), m.contiguous(), handle.number, kind)
    if states.grad_fn is not None:
        states.grad_fn.metadata["handle"] = handle  # keeps the handle alive until backward has run
    if local.whole.runs:
        outs.append(_run(kernel, rows.of(local.whole), local.whole, scale)[0])
    if local.early:
        last, q_in_last, *_ = _summary(local, kernel, rows.of(local.last), local.last, scale)
    join(states)
    to_middle, to_last = states.split([len(local.middle.runs), len(local.last.runs)])
    if local.first.runs:
        outs.append(first)
    if local.middle.runs:
        outs.append(middle + _read(q_in, to_middle, local.middle))
    if local.last.runs:
        if local.early:
            outs.append(last + _read(q_in_last, to_last, local.last))
        else:
            outs.append(_run(kernel, rows.of(local.last), local.last, scale, to_last)[0])
    if len(outs) > 1:
        outs = [torch.cat(outs)[local.place]]
    out = outs[0] if outs else v.new_zeros(0, *v.shape[1:])
    if len(out) < len(v):
        out = pad(out, (0, 0, 0, 0, 0, len(v) - len(out)))
    unused = [] if local.last.runs or local.middle.runs else [states]
    return _tie(out, *unused, *([] if outs else inputs))


def _transition_dims(local: RankRecurrence) -> int:
    return 2 if local.layer.delta else local.layer.gate == "diagonal"


def _run(
    kernel: Kernel, rows: ScanRows, group: RunGroup, scale: float, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """o [rows, heads, V] of a group's rows, and the last state of each run."""
    inputs = {name: x[None] for name, x in rows._asdict().items() if x is not None}
    options: dict[str, Any] = {"scale": scale, "initial_state": state, "output_final_state": True}
    out, last = kernel(**inputs, **options, cu_seqlens=group.ends)
    return out[0], last


def _summary(
    local: RankRecurrence, kernel: Kernel, rows: ScanRows, group: RunGroup, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For runs with a past: o' [rows, heads, V], Q' [rows, heads, K], U and M."""
    layer, v = local.layer, rows.v
    if not layer.delta:
        out, u = _run(kernel, rows, group, scale)
        decay = _decay(rows.g, group)
        ratio = layer.heads // rows.q.shape[1]
        factors = decay[..., None] if decay.dim() == 2 else decay
        q_in = scale * rows.q.repeat_interleave(ratio, 1) * factors.to(v.dtype)
        return out, q_in, u, decay[group.ends[1:] - 1].to(u.dtype)
    widths = [layer.value_dim, layer.key_dim]
    identity = torch.eye(layer.key_dim, dtype=accumulator_dtype(v.dtype), device=v.device)
    state = pad(identity, (layer.value_dim, 0)).expand(len(group.runs), layer.heads, -1, -1)
    padded = rows._replace(v=pad(v, (0, layer.key_dim)))
    out, last = _run(kernel, padded, group, scale, state.contiguous())
    (out, q_in), (u, m) = (torch.split(pair, widths, -1) for pair in (out, last))
    return out, q_in, u, m


def _decay(g: Tensor, group: RunGroup) -> Tensor:
    """The decay from the start of each row's run to the row, in float64, since it is a difference of long sums."""
    total = g.double().cumsum(0)
    start = pad(total, (0, 0) * (g.dim() - 1) + (1, 0))[group.ends[:-1]]
    lengths = group.ends.diff()
    return (total - start.repeat_interleave(lengths, 0, output_size=len(g))).exp()


def _read(q_in: Tensor, states: Tensor, group: RunGroup) -> Tensor:
    """Applies Q' [rows, heads, K] to the state [runs, heads, K, V] of each run -> [rows, heads, V]."""
    pairs = zip(torch.split(q_in, group.lengths), states.to(q_in.dtype), strict=True)
    return torch.cat([torch.einsum("thk,hkv->thv", *pair) for pair in pairs])


def _tie(out: Tensor, *others: Tensor) -> Tensor:
    """`out`, in whose graph the others get zero gradients, so that backward runs their producers."""
    return sum((other.flatten()[:0].sum().to(out.dtype) for other in others), out)


@contextmanager
def _on_side_stream(*tensors: Tensor) -> Iterator[Any]:
    """Runs a block on a side stream of a GPU, so that messages and the fold, and their backward, overlap kernels that
    are launched later. Yields a function that makes the current stream wait for a result."""
    if tensors[0].device.type != "cuda":
        yield lambda result: None
        return
    current, side = torch.cuda.current_stream(), _side_stream(tensors[0].device)
    side.wait_stream(current)

    def join(result: Tensor) -> None:
        current.wait_stream(side)
        result.record_stream(current)

    with torch.cuda.stream(side):
        yield join
    for tensor in tensors:
        tensor.record_stream(side)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def conv(handle: PlanHandle, kind: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Causal depthwise convolution along documents: x [rows, channels], weight [channels, width] -> like x, 0 for
    padding; differentiable. A collective."""
    local = recurrence_of(handle, kind, x.device)
    halo = halo_op(x, handle.number, kind)
    if halo.grad_fn is not None:
        halo.grad_fn.metadata["handle"] = handle  # keeps the handle alive until backward has run
    if not len(local.kept):
        return _tie(torch.zeros_like(x), halo, weight, *([] if bias is None else [bias]))
    padded = torch.cat([halo, x])[local.windows]
    out = conv1d(padded.T[None], weight[:, None], bias, groups=len(weight))[0].T[local.kept]
    return pad(out, (0, 0, 0, len(x) - len(out)))
