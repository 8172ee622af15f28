"""Rank pool jobs with training loops that omit a required call."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import apportion as ap
from apportion import Communicator, PlannedLoader
from apportion.trainer.step.loss import IGNORED
from tests.ranks.loading import LENGTHS, Recorded, job, planning


class Layer(nn.Module):
    """Two query heads, one KV head, learned sinks. variant: attention by the plan, by the first plan ("kept"), or of
    only this rank's rows by SDPA or by hand."""

    def __init__(self, variant: str = "plan") -> None:
        super().__init__()
        self.variant, self.qkv, self.sinks = variant, nn.Linear(16, 32), nn.Parameter(torch.zeros(2))

    def forward(self, hidden: Tensor, handle: Any) -> Tensor:
        q, k, v = self.qkv(hidden).view(-1, 4, 8).split((2, 1, 1), 1)
        if self.variant.startswith("kept"):
            self.handle = handle = getattr(self, "handle", handle)
        if self.variant == "kept rows":
            return hidden + ap.gather_visible(hidden, handle).rows.mean()
        if self.variant in ("plan", "kept"):
            out = ap.planned_attention(q, k, v, handle, handle.kinds[0], sinks=self.sinks)
            return hidden + out.flatten(1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if self.variant == "sdpa":
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = (q @ k.mT).softmax(-1) @ v
        return hidden + out[0].transpose(0, 1).flatten(1)


class Net(nn.Module):
    def __init__(self, *layer_kinds: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.head = nn.Embedding(800, 16), nn.Linear(16, 800)
        self.layers = nn.ModuleList(map(Layer, layer_kinds or ("plan", "plan")))

    def forward(self, batch: Any) -> Tensor:
        hidden = self.table(batch.tokens)
        for layer in self.layers:
            hidden = layer(hidden, batch.handle)
        logits: Tensor = self.head(hidden)
        return logits


class Weighted(Recorded):
    def __getitem__(self, index: int) -> Any:
        ids = super().__getitem__(index)
        return {"input_ids": ids, "loss_weights": ids.astype("float32")}


_SUMMED = (
    *("", "seeds", "sinks", "frozen", "here", "experts", "early", "both averaged over", "chunks", "halves"),
    *("next tokens", "next labels", "clipped", "skipped", "evaluated", "every second"),
)


def _clip_shards(params: Any) -> None:
    """Clips gradients by the norm of this rank's shards."""
    shards = [param.grad.to_local() for param in params]
    factor = 0.01 / torch.cat([shard.flatten() for shard in shards]).norm()
    for shard in shards:
        shard.mul_(factor)


CLIPS = {
    "shards": _clip_shards,
    "norm": lambda params: nn.utils.clip_grad_norm_(params, 0.01),
    "value": lambda params: nn.utils.clip_grad_value_(params, 1e-4),
}


class StepInBackward:
    """Steps on a parameter as soon as its gradient is complete, to free it."""

    def __init__(self, param: Any) -> None:
        self.optimizer = torch.optim.SGD([param], lr=0.1)

    def __call__(self, _: Any) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def trained(comm: Communicator, mistake: str) -> None:
    """A loop with this mistake; warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _run_loop(comm, mistake)


def trained_before(comm: Communicator, is_kept: bool) -> None:
    """Trains a model without plans after a planned one; warnings are errors. is_kept: the planned one still exists, and
    never made a step."""
    kept = _run_loop(comm, "no steps" if is_kept else "")
    if not is_kept:
        del kept
        gc.collect()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(3):
            model(torch.ones(1)).sum().backward()
            optimizer.step()


def wrapped_again(comm: Communicator) -> list[float]:
    """The gradients of a module in a DDP wrapper, in another one, and in none, where each rank contributes 1."""
    model, found = nn.Linear(1, 1, bias=False), list[float]()
    for is_wrapped in (True, True, False):
        net: Any = DistributedDataParallel(model, process_group=comm._base) if is_wrapped else model
        if is_wrapped:
            ap.sum_gradients(net)
        net(torch.ones(1)).sum().backward()
        if not is_wrapped:
            ap.sum_gradients(model, comm._base)
        found.append(float(net.get_parameter("module.weight" if is_wrapped else "weight").grad))
        model.zero_grad()
    return found


def _run_loop(comm: Communicator, mistake: str) -> Net:
    layer_kinds = {
        "sdpa": ("plan", "sdpa"),
        "softmax": ("by hand", "plan"),
        "deaf": ("sdpa", "sdpa"),
        "kept": ("plan", "kept"),
        "kept rows": ("plan", "kept rows"),
    }.get(mistake, ())
    model = Net(*layer_kinds, seed=comm.rank * (mistake == "seeds"))
    if mistake == "sinks":
        model.get_parameter("layers.1.sinks").data += comm.rank
    if mistake == "frozen":
        model.table.weight.requires_grad_(False).add_(comm.rank)
    wrapped = _wrapped(model, comm, mistake)
    averaged_over = comm.ranks if mistake.endswith("averaged over") else 1
    data = (
        Weighted() if mistake == "weights" else Recorded([40, 26, 33, 33] if "kept" in mistake else LENGTHS)
    )
    plans = planning(job(comm.ranks, 66, microbatches=2))
    if mistake == "kinds":
        plans["masks"] = {"near": ap.masks.sliding_window(4), "wide": ap.masks.causal()}
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for b in PlannedLoader(data, **plans, communicator=comm, shuffle=False, rows_multiple=2):
        if mistake == "skipped" and not b.microbatch:
            continue
        logits = (torch.compile(wrapped, backend="aot_eager") if mistake == "compiled" else wrapped)(b)
        valid, labels = b.valid_tokens, b.labels
        if mistake in ("here", "copied"):
            valid, labels = (labels != IGNORED).sum(), labels.clone() if mistake == "copied" else labels
        if mistake in ("next tokens", "next labels"):
            logits, labels = logits[:-1], (b.tokens if mistake == "next tokens" else b.labels)[1:]
        labels = b.tokens[None] if mistake == "tokens" else labels
        loss = ap.normalised_loss(logits, labels, valid, averaged_over)
        if mistake == "chunks":
            loss = sum(
                ap.normalised_loss(logits[i : i + 8], labels[i : i + 8], valid)
                for i in range(0, len(labels), 8)
            )
        scale = 1 / 2 if mistake == "halves" else comm.ranks if "by hand" in mistake else 1
        (loss * scale).backward()
        _evaluate(wrapped, plans, comm) if mistake == "evaluated" and not b.is_last else None
        if mistake == "twice":
            ap.sum_gradients(model, comm._base)
        if b.is_last or mistake == "early":
            if mistake == "clipped":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if mistake in _SUMMED or (mistake == "second" and not b.iteration):
                ap.sum_gradients(model, comm._base)
            if mistake == "every second" and b.iteration % 2 == 0:
                continue
            if " clipped by " in mistake:
                CLIPS[mistake.partition(" clipped by ")[2]]([*wrapped.parameters()])
            optimizer.step() if mistake != "no steps" else None
            optimizer.zero_grad()
    return model


@torch.no_grad()
def _evaluate(model: Any, plans: Any, comm: Communicator) -> None:
    for held in PlannedLoader(Recorded([30, 20, 9]), **plans, communicator=comm):
        ap.normalised_loss(model(held), held.labels, held.valid_tokens)


def replicated(comm: Communicator, mistake: str) -> None:
    """A loop with two groups of one rank."""
    own = dist.new_group([comm.rank], use_local_synchronization=True)
    model = Net(seed=comm.rank * (mistake == "seeds"))
    if mistake == "fsdp of a group":
        ap.sum_gradients(fully_shard(model, mesh=DeviceMesh.from_group(own, "cpu")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plans = planning(job(1, 66), communicator=Communicator(own), replicas=comm._base)
    for b in PlannedLoader(Recorded(), **plans):
        ap.normalised_loss(model(b), b.labels, b.valid_tokens).backward()
        if not mistake.startswith("fsdp"):
            ap.sum_gradients(model, own if mistake == "own group" else comm._base)
        optimizer.step()
        optimizer.zero_grad()


def sharded(comm: Communicator, kind: str) -> None:
    """A loop on four ranks with FSDP2 over two of them ("two"; "two by hand" adds the gradients of others) or over all,
    with two copies."""
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("copies", "shards"))
    model = ap.sum_gradients(fully_shard(Net(), mesh=mesh if kind == "all" else mesh["shards"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for b in PlannedLoader(Recorded(), **planning(job(4, 66)), communicator=comm):
        ap.normalised_loss(model(b), b.labels, b.valid_tokens).backward()
        grads: list[Any] = [param.grad for param in model.parameters()]
        for grad in grads if kind == "two by hand" else ():
            dist.all_reduce(grad.to_local(), group=mesh["copies"].get_group())
        optimizer.step()
        optimizer.zero_grad()


def _wrapped(model: Any, comm: Communicator, mistake: str) -> Any:
    if mistake == "experts":
        model.head.weight.data += comm.rank
        model.head.weight.rank_local = True
    if mistake.startswith("ddp"):
        wrapped = DistributedDataParallel(model, process_group=comm._base)
        return ap.sum_gradients(wrapped) if mistake in ("ddp summed", "ddp both averaged over") else wrapped
    if mistake.startswith("fsdp"):
        mesh = DeviceMesh.from_group(comm._base, "cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        if mistake.endswith("in backward"):
            wrapped.register_forward_pre_hook(
                lambda _, args: wrapped.set_requires_gradient_sync(args[0].is_last)
            )
            for param in wrapped.parameters():
                param.register_post_accumulate_grad_hook(StepInBackward(param))
        if mistake == "fsdp layers":
            for layer in model.layers:
                ap.sum_gradients(layer)
        return ap.sum_gradients(wrapped) if mistake.startswith(("fsdp summed", "fsdp both")) else wrapped
    return model
