"""Rank pool jobs with a pipeline of ticks, with each rank a replica of a stage, and without a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import apportion as ap
from apportion import Communicator, PlannedLoader
from apportion.demo.decoder import Decoder
from tests.ranks.loading import Recorded


def trained(
    comm: Communicator, arguments: dict[str, Any], pipeline: Sequence[Any] | None, kinds: Sequence[str] | None
) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each iteration and the gradients of a pass, summed over ranks; an optimizer steps at the end.
    pipeline: arguments of `tick_table`; kinds: its virtual stages' kinds."""
    torch.manual_seed(0)
    model = Decoder(arguments["model"], 800).double()
    for param in model.layers.parameters():
        param.register_hook(lambda grad: 2 * grad)  # once per backward, as DDP's sums
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = {**arguments, "communicator": comm, "shuffle": False}
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


def staged(model: Decoder, comm: Communicator, data: Any, pipeline: Any, kinds: Any) -> list[Tensor]:
    table = ap.tick_table(*pipeline)
    stage, virtual = comm.rank // (comm.ranks // table.stages), table.stages * table.virtual
    layers = [ap.PingPongLayer(one.pre, one.post, one.parameters()) for one in model.layers]
    each = len(layers) // virtual
    chunks = [layers[v * each : (v + 1) * each] for v in range(stage, virtual, table.stages)]

    def loss(hidden: Tensor, b: ap.PlannedBatch) -> Tensor:
        return ap.normalised_loss(model.head(model.norm(hidden)), b.labels, b.valid_tokens)

    ends = {"embed": lambda b: model.embed(b.tokens), "loss": loss}
    ticks_pipeline = ap.TickPipeline(table, chunks, model.embed.weight.shape[1:], **ends)
    loader, shares = PlannedLoader(Recorded(), **data, ticks=table, kinds=kinds), []
    for ticks in loader.iterations():
        evaluated = ticks_pipeline.step(ticks, train=False)
        shares.append(ticks_pipeline.step(ticks))
        torch.testing.assert_close(evaluated, shares[-1])
        assert loader.state_dict()["microbatch"] == 0
    return shares


def stepped(comm: Communicator, arguments: dict[str, Any], pipeline: Sequence[Any], chunks: int) -> None:
    table = ap.tick_table(*pipeline)
    loader = PlannedLoader(Recorded(), **arguments, communicator=comm, ticks=table, shuffle=False)
    ap.TickPipeline(table, [[]] * chunks, (16,)).step(next(loader.iterations()))


def mistaken(comm: Communicator, arguments: dict[str, Any], mistake: str) -> None:
    """A step of two stages that hold only their own layers: a sum of gradients over both, of different or of equal
    initial values, none over the ranks of a stage, or a mean of a rank's own rows as loss. A warning is an error."""
    torch.manual_seed(comm.rank if mistake == "sum" else 0)
    table, model = ap.tick_table(2, 2), Decoder(arguments["model"], 800).double()
    layers = [ap.PingPongLayer(one.pre, one.post, one.parameters()) for one in model.layers]

    def loss(hidden: Tensor, b: ap.PlannedBatch) -> Tensor:
        logits = model.head(model.norm(hidden))
        if mistake == "mean":
            return torch.nn.functional.cross_entropy(logits, b.labels)
        return ap.normalised_loss(logits, b.labels, b.valid_tokens)

    row = model.embed.weight.shape[1:]
    pipeline = ap.TickPipeline(table, [layers], row, embed=lambda b: model.embed(b.tokens), loss=loss)
    loader = PlannedLoader(Recorded(), **arguments, communicator=comm, ticks=table, shuffle=False)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pipeline.step(ticks := next(loader.iterations()))
    for warning in found[:1]:
        raise UserWarning(str(warning.message))
    if mistake in ("sum", "equal"):
        ap.sum_gradients(model, comm._base)
    if mistake == "none":
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        pipeline.step(ticks)
