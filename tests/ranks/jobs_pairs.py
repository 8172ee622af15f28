"""Rank pool jobs with pairs of microbatches whose layers take turns, or which run one after another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import apportion as ap
from apportion import Communicator, PlannedLoader
from apportion.demo.decoder import Decoder
from tests.ranks.loading import Recorded


def trained(
    comm: Communicator, arguments: dict[str, Any], pairs: bool
) -> tuple[list[float], dict[str, Tensor], list[tuple[int, int]]]:
    """The loss of each pair of microbatches and the gradients of a pass, summed over ranks; the loader's state after
    each pair."""
    torch.manual_seed(0)
    model = Decoder(arguments["model"], 800).double()
    for param in model.layers.parameters():
        param.register_hook(lambda grad: 2 * grad)  # once per backward, as DDP's sums
    loader = PlannedLoader(Recorded(), **arguments, communicator=comm, shuffle=False, drop_last=True)
    losses, states = [], []
    for pair in loader.pairs() if pairs else by_two(loader):
        hidden = [model.embed(b.tokens) for b in pair]
        if pairs:
            layers = [ap.PingPongLayer(one.pre, one.post, one.parameters()) for one in model.layers]
            hidden = list(ap.ping_pong(layers, *hidden, *(b.handle for b in pair)))
        else:
            hidden = [one_batch(model, x, b) for x, b in zip(hidden, pair, strict=True)]
        shares = [
            ap.normalised_loss(model.head(model.norm(x)), b.labels, b.valid_tokens)
            for x, b in zip(hidden, pair, strict=True)
        ]
        loss = torch.stack(shares).sum()
        loss.backward()
        losses.append(loss.detach())
        states.append((loader.state_dict()["iteration"], loader.state_dict()["microbatch"]))
    ap.sum_gradients(model, comm._base)
    total = torch.stack(losses)
    torch.distributed.all_reduce(total, group=comm._base)
    return total.tolist(), {name: param.grad for name, param in model.named_parameters()}, states


def one_batch(model: Decoder, hidden: Tensor, batch: ap.PlannedBatch) -> Tensor:
    layers: Any = model.layers
    for layer in layers:
        q, k, v = layer.pre(hidden, batch.position_ids)
        hidden = layer.post(hidden, ap.planned_attention(q, k, v, batch.handle))
    return hidden


def by_two(loader: PlannedLoader) -> Iterator[list[ap.PlannedBatch]]:
    batches = iter(loader)
    for first in batches:
        yield [first, next(batches)]


def passed(comm: Communicator, arguments: dict[str, Any], options: dict[str, Any], begin: int = 0) -> None:
    """A pass of pairs that starts at microbatch `begin`."""
    loader = PlannedLoader(Recorded(), **{**arguments, **options}, communicator=comm)
    loader.load_state_dict({**loader.state_dict(), "microbatch": begin})
    list(loader.pairs())
