"""Rank pool jobs with a small transformer, plain or tiled with offloaded checkpoints."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import apportion as ap
from apportion import Communicator, PlannedLoader
from tests.ranks.loading import Recorded

WIDTH = 24


class Block(nn.Module):
    """Attention with two query heads and one KV head, and a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 32), nn.Linear(16, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, WIDTH))

    def forward(self, hidden: Tensor, handle: ap.PlanHandle) -> Tensor:
        q, k, v = self.qkv(hidden).view(-1, 4, 8).split((2, 1, 1), 1)
        hidden = hidden + self.out(ap.planned_attention(q, k, v, handle).flatten(1))
        return hidden + self.mlp(self.norm(hidden))


def trained(
    comm: Communicator, arguments: dict[str, Any], tokens: Any, dtype: Any
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a pass and the gradients, summed over ranks. tokens: per tile; None: without tiles and offloading."""
    torch.manual_seed(0)
    table, head = nn.Embedding(800, WIDTH), nn.Linear(WIDTH, 800, bias=False)
    layers = [Block(), Block()]
    model = nn.ModuleList([table, *layers, head]).to(dtype)
    if tokens is not None:
        assert ap.memory.tile(model, "mlp", tokens) == 2
    total = torch.zeros(())
    for batch in PlannedLoader(Recorded(), **arguments, communicator=comm, shuffle=False):
        hidden, targets = table(batch.tokens), (batch.labels, batch.valid_tokens)
        for layer in layers:
            run = layer if tokens is None else partial(ap.memory.offloaded, layer)
            hidden = run(hidden, batch.handle)
        if tokens is None:
            loss = ap.normalised_loss(head(hidden), *targets)
        else:
            loss = ap.memory.tiled_loss(hidden, head.weight, *targets, tokens=tokens)
        loss.backward()
        total += loss.detach()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    for tensor in (total, *gradients.values()):
        dist.all_reduce(tensor, group=comm._groups[0])
    return total.item(), gradients


def biased(comm: Communicator, arguments: dict[str, Any]) -> None:
    """A step with a tiled loss of a head with a bias."""
    torch.manual_seed(0)
    table, block, head = nn.Embedding(800, WIDTH), Block(), nn.Linear(WIDTH, 800)
    model = nn.ModuleList([table, block, head])
    batch = next(iter(PlannedLoader(Recorded(), **arguments, communicator=comm)))
    hidden = block(table(batch.tokens), batch.handle)
    ap.memory.tiled_loss(hidden, head.weight, batch.labels, batch.valid_tokens).backward()
    ap.sum_gradients(model, comm._base)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
