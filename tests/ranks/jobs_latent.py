"""Rank pool jobs with latent attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import apportion as ap
from apportion import Communicator, Latent
from apportion.backends.torch.memory import latent_rows

MODEL = ap.Model(q_heads=4, kv_heads=1, head_dim=6, v_head_dim=5, dtype="fp64", latent=Latent(rank=7, rope=2))
HIDDEN = 9
LENGTHS = [40, 1, 97, 23, 64, 9]


class LatentLayer(nn.Module):
    """Latent attention with uncompressed queries and output."""

    def __init__(self) -> None:
        super().__init__()
        m, latent = MODEL, MODEL.latent
        assert latent is not None
        self.q = nn.Linear(HIDDEN, m.q_heads * m.head_dim, bias=False)
        self.down = nn.Linear(HIDDEN, latent.rank + latent.rope)
        self.up = nn.Linear(latent.rank, m.q_heads * (m.head_dim - latent.rope + m.value_dim))
        self.out = nn.Linear(m.q_heads * m.value_dim, HIDDEN)
        self.sinks = nn.Parameter(torch.randn(m.q_heads))
        self.expand = ap.LatentExpansion(self.up, m.head_dim - latent.rope, m.value_dim)
        self.split = [latent.rank, latent.rope]

    def forward(self, hidden: Tensor, handle: Any = None, masks: Any = None) -> Tensor:
        q = self.q(hidden).view(len(hidden), MODEL.q_heads, -1)
        compressed, rotated = self.down(hidden).split(self.split, -1)
        if handle is None:
            k, v = self.expand(compressed, rotated, tuple(range(MODEL.q_heads)))
            out = _dense(q, k, v, self.sinks, masks)
        else:
            rows = q, compressed, rotated, handle, self.expand, self.expand.params
            out = ap.planned_latent_attention(*rows, sinks=self.sinks)
        return hidden + self.out(out.flatten(1))


def _dense(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, visible: Tensor) -> Tensor:
    logits = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    logits = logits.masked_fill(~visible, -torch.inf)
    weights = torch.cat((logits, sinks[:, None, None].expand(-1, len(q), 1)), -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v)


def difference(comm: Communicator, encoded: bytes, wrap: str, checkpointed: bool, most: Any) -> list[float]:
    """The largest differences of outputs and gradients of two layers from one process. most: numbers expanded at a
    time."""
    before = latent_rows.MAX_ELEMENTS
    latent_rows.MAX_ELEMENTS = before if most is None else most
    try:
        return _difference(comm, ap.Plan.decode(encoded), wrap, checkpointed)
    finally:
        latent_rows.MAX_ELEMENTS = before


def _difference(comm: Communicator, plan: ap.Plan, wrap: str, checkpointed: bool) -> list[float]:
    torch.manual_seed(0)
    layers, reference = (nn.ModuleList([LatentLayer(), LatentLayer()]).double() for _ in range(2))
    reference.load_state_dict(layers.state_dict())
    handle = ap.PlanHandle(plan.for_rank(comm.rank), comm)
    tokens = torch.from_numpy(plan.layout(plan.header.home_layout).tokens(comm.rank))
    whole = torch.randn(sum(LENGTHS), HIDDEN, dtype=torch.float64)
    document = torch.repeat_interleave(torch.tensor(LENGTHS))
    visible = (document[:, None] == document) & torch.ones(len(whole), len(whole)).tril().bool()

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, handle, use_reentrant=False) if checkpointed else layer(x, handle)
            return x

    stack: nn.Module = Stack()
    if wrap == "ddp":
        stack = ap.sum_gradients(DistributedDataParallel(stack, process_group=comm._base))
    out = stack(whole[tokens])
    out.square().sum().backward()
    if wrap == "plain":
        ap.sum_gradients(stack, comm._base)
    expected = whole
    for layer in reference:
        expected = layer(expected, masks=visible)
    expected.square().sum().backward()
    pairs = [(out, expected[tokens])]
    pairs += [(a.grad, b.grad) for a, b in zip(layers.parameters(), reference.parameters(), strict=True)]
    return [float((own - other).abs().max()) if own.numel() else 0.0 for own, other in pairs]
