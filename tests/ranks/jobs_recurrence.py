"""Rank pool jobs with recurrent layers."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import apportion as ap
from apportion.backends.torch.transport import Communicator


class Layer(NamedTuple):
    """Two layers, each a convolution and a recurrence; the second takes the results of the first."""

    heads: int
    key_heads: int
    key: int
    value: int
    gate: str
    delta: bool

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key + self.heads * self.value

    def split(self, x: Tensor) -> list[Tensor]:
        """Splits x [rows, channels] into q, k, v."""
        widths = [self.key_heads * self.key] * 2 + [self.heads * self.value]
        heads = self.key_heads, self.key_heads, self.heads
        return [part.unflatten(1, (n, -1)) for part, n in zip(x.split(widths, 1), heads, strict=True)]

    def __call__(self, conv: Any, scan: Any, x: Tensor, weight: Tensor, g: Tensor, beta: Any) -> Tensor:
        for _ in range(2):
            q, k, v = self.split(conv(x, weight))
            o = scan(q, torch.nn.functional.normalize(k, dim=-1), v, g, beta)
            x = x + torch.cat([o.flatten(1), x[:, self.heads * self.value :]], 1).sin()
        return x


def run(
    comm: Communicator,
    layer: Layer,
    options: dict[str, Any],
    checkpointing: str,
    rows: tuple[bytes, list[Any]],
) -> tuple[list[Any], int]:
    """This rank's rows of the result and gradients of x, weight, g and beta; the number of collective calls in
    backward. rows: a slice, and (x, weight, g, beta, gradient of the result)."""
    data, arrays = rows
    handle = ap.PlanHandle(ap.Slice.decode(data), comm, padding=options["padding"])
    dtype = getattr(torch, options["dtype"])
    x, weight, g, beta, grad = (None if one is None else torch.from_numpy(one).to(dtype) for one in arrays)
    pad = partial(torch.nn.functional.pad, mode="constant", value=1.0)
    behind = 0, handle.padding
    padded = (one if one is None else pad(one, (0, 0) * (one.dim() - 1) + behind) for one in (x, g, beta))
    x, g, beta = (one if one is None else one.requires_grad_() for one in padded)
    weight.requires_grad_()

    def conv(x: Tensor, weight: Tensor) -> Tensor:
        return ap.planned_conv(x, weight, handle, options["kind"])

    def scan(*rows: Any) -> Tensor:
        return ap.planned_scan(None, *rows, handle, options["kind"], scale=0.5)

    block = partial(layer, conv, scan)
    if checkpointing:
        contexts: Any = {"context_fn": partial(create_selective_checkpoint_contexts, _keep)}
        contexts = contexts if checkpointing == "selective" else {}
        out = checkpoint(block, x, weight, g, beta, use_reentrant=False, **contexts)
    else:
        out = block(x, weight, g, beta)
    before = comm._calls.number if comm._calls else 0
    padded_grad = pad(grad, (0, 0, 0, handle.padding))
    out.backward(padded_grad)
    assert not (out[handle.rows :] - x[handle.rows :]).isnan().any()
    calls = (comm._calls.number if comm._calls else 0) - before
    found = out[: handle.rows], x.grad[: handle.rows], weight.grad, g.grad[: handle.rows]
    grads = [*found, None if beta is None else beta.grad[: handle.rows]]
    return [one if one is None else one.detach().double().numpy() for one in grads], calls


def _keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = op in (torch.ops.apportion.fold.default, torch.ops.apportion.halo.default)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
