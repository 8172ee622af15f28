"""Pool jobs with halves of a loader: layers that take turns, or run batch after batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import apportion as ap
from apportion.backends.torch.transport import Communicator
from apportion.demo.decoder import Decoder
from apportion.ir.errors import ApportionError
from apportion.trainer.loading.loader import PlannedLoader
from tests.ranks.loading import Recorded


def trained(
    comm: Communicator, given: dict[str, Any], pairs: bool
) -> tuple[list[float], dict[str, Tensor], list[tuple[int, int]]]:
    """Summed over ranks, the loss of every two microbatches and the gradients of a pass; the states after each two."""
    torch.manual_seed(0)
    model = Decoder(given["model"], 800).double()
    loader = PlannedLoader(Recorded(), **given, communicator=comm, shuffle=False, drop_last=True)
    losses, states = [], []
    for two in loader.pairs() if pairs else by_two(loader):
        hidden = [model.embed(b.tokens) for b in two]
        if pairs:
            layers = [ap.PingPongLayer(one.pre, one.post, one.parameters()) for one in model.layers]
            hidden = list(ap.ping_pong(layers, *hidden, *(b.handle for b in two)))
        else:
            hidden = [alone(model, x, b) for x, b in zip(hidden, two, strict=True)]
        shares = [
            ap.normalised_loss(model.head(model.norm(x)), b.labels, b.valid_tokens)
            for x, b in zip(hidden, two, strict=True)
        ]
        loss = torch.stack(shares).sum()
        loss.backward()
        losses.append(loss.detach())
        states.append((loader.state_dict()["iteration"], loader.state_dict()["microbatch"]))
    ap.sum_gradients(model, comm._base)
    total = torch.stack(losses)
    torch.distributed.all_reduce(total, group=comm._base)
    return total.tolist(), {name: param.grad for name, param in model.named_parameters()}, states


def alone(model: Decoder, hidden: Tensor, batch: ap.PlannedBatch) -> Tensor:
    layers: Any = model.layers
    for layer in layers:
        q, k, v = layer.pre(hidden, batch.position_ids)
        hidden = layer.post(hidden, ap.planned_attention(q, k, v, batch.handle))
    return hidden


def by_two(loader: PlannedLoader) -> Iterator[list[ap.PlannedBatch]]:
    batches = iter(loader)
    for first in batches:
        yield [first, next(batches)]


def refused(comm: Communicator, given: dict[str, Any], options: dict[str, Any], begin: int = 0) -> str:
    """The error of a pass of halves that begins at a microbatch."""
    loader = PlannedLoader(Recorded(), **{**given, **options}, communicator=comm)
    loader.load_state_dict({**loader.state_dict(), "microbatch": begin})
    try:
        return str(len(list(loader.pairs())))
    except ApportionError as error:
        return str(error)
