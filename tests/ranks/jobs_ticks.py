"""Pool jobs with a pipeline of ticks, each rank a replica of a stage, and without a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
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
    comm: Communicator, given: dict[str, Any], pipeline: Sequence[Any] | None, kinds: Sequence[str] | None
) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each iteration and the gradients of a pass, summed over ranks. pipeline: arguments of `tick_table`;
    kinds: of its virtual stages. An optimizer steps at the end."""
    torch.manual_seed(0)
    model = Decoder(given["model"], 800).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = {**given, "communicator": comm, "shuffle": False}
    losses = plain(model, data) if pipeline is None else staged(model, comm, data, pipeline, kinds)
    ap.sum_gradients(model, comm._base)
    optimizer.step()
    total = torch.stack(losses)
    torch.distributed.all_reduce(total, group=comm._base)
    return total.tolist(), {name: param.grad for name, param in model.named_parameters()}


def plain(model: Decoder, data: dict[str, Any]) -> list[Tensor]:
    losses, share = [], torch.zeros(())
    for b in PlannedLoader(Recorded(), **data):

        def attention(q: Tensor, k: Tensor, v: Tensor, kind: str, b: ap.PlannedBatch = b) -> Any:
            return ap.planned_attention(q, k, v, b.handle, kind if len(b.handle.kinds) > 1 else None)

        loss = ap.normalised_loss(model(b.tokens, b.position_ids, attention), b.labels, b.valid_tokens)
        loss.backward()
        share = share + loss.detach()
        if b.is_last:
            losses.append(share)
            share = torch.zeros(())
    return losses


def staged(
    model: Decoder,
    comm: Communicator,
    data: dict[str, Any],
    pipeline: Sequence[Any],
    kinds: Sequence[str] | None,
) -> list[Tensor]:
    table = ap.tick_table(*pipeline)
    stage, virtual = comm.rank // (comm.ranks // table.stages), table.stages * table.virtual
    layers = [ap.PingPongLayer(one.pre, one.post, one.parameters()) for one in model.layers]
    each = len(layers) // virtual
    chunks = [layers[v * each : (v + 1) * each] for v in range(stage, virtual, table.stages)]

    def loss(hidden: Tensor, b: ap.PlannedBatch) -> Tensor:
        return ap.normalised_loss(model.head(model.norm(hidden)), b.labels, b.valid_tokens)

    ends = {"embed": lambda b: model.embed(b.tokens), "loss": loss}
    held = ap.TickPipeline(table, chunks, model.embed.weight.shape[1:], **ends)
    loader, found = PlannedLoader(Recorded(), **data, ticks=table, kinds=kinds), []
    for ticks in loader.iterations():
        alone = held.step(ticks, train=False)
        found.append(held.step(ticks))
        torch.testing.assert_close(alone, found[-1])
        assert loader.state_dict()["microbatch"] == 0
    return found


def refused(comm: Communicator, given: dict[str, Any], pipeline: Sequence[Any], chunks: int) -> str:
    """The error of a pipeline of ticks that cannot run."""
    table = ap.tick_table(*pipeline)
    try:
        loader = PlannedLoader(Recorded(), **given, communicator=comm, ticks=table, shuffle=False)
        held = ap.TickPipeline(table, [[]] * chunks, (16,))
        held.step(next(loader.iterations()))
    except ApportionError as error:
        return str(error)
    return ""
