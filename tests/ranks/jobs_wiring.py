"""What ranks of the pool do with loops that forget something."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import apportion as ap
from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ApportionError
from apportion.trainer.loading.loader import PlannedLoader
from apportion.trainer.step import wiring
from apportion.trainer.step.loss import IGNORED
from tests.ranks.loading import Recorded, job, planning


class Layer(nn.Module):
    """Two query heads and one of keys; sinks are learnt. How it attends: by the plan, alone, or alone by hand."""

    def __init__(self, how: str = "plan") -> None:
        super().__init__()
        self.how, self.qkv, self.sinks = how, nn.Linear(16, 32), nn.Parameter(torch.zeros(2))

    def forward(self, hidden: Tensor, handle: Any) -> Tensor:
        q, k, v = self.qkv(hidden).view(-1, 4, 8).split((2, 1, 1), 1)
        if self.how == "plan":
            return hidden + ap.planned_attention(q, k, v, handle, sinks=self.sinks).flatten(1)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if self.how == "sdpa":
            out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = (q @ k.mT).softmax(-1) @ v
        return hidden + out[0].transpose(0, 1).flatten(1)


class Net(nn.Module):
    def __init__(self, *how: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table, self.head = nn.Embedding(800, 16), nn.Linear(16, 800)
        self.layers = nn.ModuleList(map(Layer, how or ("plan", "plan")))

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


def trained(comm: Communicator, what: str, steps: int = 2) -> str:
    """Why a loop with this mistake ends; "" where it does not."""
    wiring.watch = wiring.Watch()
    how = {"sdpa": ("plan", "sdpa"), "softmax": ("by hand", "plan"), "deaf": ("sdpa", "sdpa")}.get(what, ())
    model = Net(*how, seed=comm.rank * (what == "seeds"))
    if what == "sinks":
        model.get_parameter("layers.1.sinks").data += comm.rank
    wrapped, averaged_over = _wrapped(model, comm, what), comm.ranks * what.endswith("averaged over") or 1
    data = Weighted() if what == "weights" else Recorded()
    plans = planning(job(comm.ranks, 66, microbatches=2))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    try:
        for b in PlannedLoader(data, **plans, communicator=comm, shuffle=False, rows_multiple=2):
            logits = (torch.compile(wrapped, backend="aot_eager") if what == "compiled" else wrapped)(b)
            valid, labels = b.valid_tokens, b.labels[None] if what == "tokens" else b.labels
            if what in ("here", "copied"):
                valid, labels = (labels != IGNORED).sum(), labels.clone() if what == "copied" else labels
            labels = b.tokens[None] if what == "tokens" else labels
            loss = ap.normalised_loss(logits, labels, valid, averaged_over)
            (loss * comm.ranks if what.endswith("by hand") else loss).backward()
            if what == "twice":
                ap.sum_gradients(model, comm._base)
            if b.is_last or what == "early":
                if what in ("", "seeds", "sinks", "here", "experts", "early", "both averaged over") or (
                    what == "second" and not b.iteration
                ):
                    ap.sum_gradients(model, comm._base)
                optimizer.step()
                optimizer.zero_grad()
    except ApportionError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _wrapped(model: Any, comm: Communicator, what: str) -> Any:
    if what == "experts":
        model.head.weight.data += comm.rank
        model.head.weight.rank_local = True
    if what.startswith("ddp"):
        wrapped = DistributedDataParallel(model, process_group=comm._base)
        return ap.sum_gradients(wrapped) if what in ("ddp summed", "ddp both averaged over") else wrapped
    if what.startswith("fsdp"):
        mesh = DeviceMesh.from_group(comm._base, "cpu")
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        return ap.sum_gradients(wrapped) if what in ("fsdp summed", "fsdp both averaged over") else wrapped
    return model
