"""Pool jobs with NeMo Automodel's sharder."""

from __future__ import annotations

from typing import Any

import torch
from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder
from torch.distributed.device_mesh import init_device_mesh

from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ApportionError
from apportion.trainer import hf
from apportion.trainer.automodel import planned
from apportion.trainer.loading.loader import PlannedLoader
from tests.adapters.documents import documents
from tests.adapters.jobs_hf import VOCABULARY, Documents, loader, new_model
from tests.ranks.loading import job, planning


class Shifted(Documents):
    """Documents whose tokens are increased by `by`."""

    by = 0

    def __getitem__(self, index: int) -> Any:
        return (super().__getitem__(index) + self.by) % VOCABULARY


def train_step(
    comm: Communicator,
    cp: int,
    whole: bool,
    training: bool = True,
    tp: int = 1,
    apart: bool = False,
    grouped: bool = False,
) -> tuple[str, float]:
    """Runs a step as an Automodel recipe does; returns (error, or "" if none; the loss summed over all ranks). cp, tp:
    sizes of the mesh; whole: whether the sharder receives all ranks' tokens and labels; apart: whether tensor-parallel
    ranks read different tokens; grouped: whether each data-parallel group has plans of its own."""
    mesh = init_device_mesh("cpu", (comm.ranks // cp // tp, cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    model = planned(hf.enable(new_model("llama"))).train(training)
    of_plan = comm if tp == 1 and not grouped else Communicator(mesh["cp"].get_group())
    data = loader(model, of_plan.ranks, of_plan, lengths=[61, 40, 9])
    data.dataset = Shifted([61, 40, 9])
    data.dataset.by = mesh["tp"].get_local_rank() if apart else 0
    batch = next(batches := iter(data))
    batches.close()
    columns = {"input_ids": batch.tokens, "labels": batch.labels}
    inputs: Any = {name: batch.gather_tokens(x) if whole else x for name, x in columns.items()}
    inputs = {name: x[None] for name, x in inputs.items()}
    divisor = int((inputs["labels"] != -100).sum())
    inputs |= {"planned": batch}
    try:
        _, local = ContextParallelSharder(model, mesh, inputs).shard(inputs)
        labels = local.pop("labels")
        logits = model(**{name: x for name, x in local.items() if name != "planned"}).logits
    except ApportionError as error:
        return str(error), 0.0
    loss = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="sum") / divisor
    loss.backward()
    return "", sum(row[0] for row in of_plan.gather_floats([float(loss)], "losses"))


def plain(lengths: tuple[int, ...]) -> float:
    """The mean loss of documents of these lengths in one process."""
    model, losses, labels = new_model("llama"), 0.0, 0
    for number, length in enumerate(lengths):
        tokens = torch.from_numpy(Documents(lengths)[number])[None]
        losses += float(model(input_ids=tokens, labels=tokens).loss.detach()) * (length - 1)
        labels += length - 1
    return losses / labels


def sharder_operations(comm: Communicator) -> Any:
    """Runs Automodel's own dispatch on a planned model: results of its operations on one microbatch, as plain data."""
    batches = iter(PlannedLoader(documents(), **planning(job(comm.ranks, 128)), communicator=comm))
    batch = next(batches)
    batches.close()
    mesh = init_device_mesh("cpu", (comm.ranks,), mesh_dim_names=("cp",))
    inputs = {"planned": batch, "attention_mask": None, "note": "kept"}
    full = torch.arange(int(batch.batch.tokens) * 2, dtype=torch.float32).view(1, -1, 2)
    mask = torch.arange(full.shape[1])[None] % 3 > 0
    model = planned(hf.enable(new_model("llama")))
    sharder = ContextParallelSharder(model, mesh, inputs, loss_mask=mask)
    context, local = sharder.shard(inputs)
    with context():
        shard = sharder.shard_token_tensor(full, fill=-1.0).requires_grad_()
        whole = sharder.gather_token_tensor(shard, trim=True)
        (whole * full).sum().backward()
    rows = batch.handle.rows
    labelled = batch.shard_tokens(mask[0].long(), fill=0) > 0
    return {
        "full": bool((whole == full).all()),
        "shard": bool((shard[0, :rows] == batch.shard_tokens(full[0])).all()),
        "padding": shard[0, rows:].tolist(),
        "gradients": bool((shard.grad[0, :rows] == comm.ranks * shard.detach()[0, :rows]).all()),
        "tokens": bool((local["input_ids"][0, :rows] == batch.tokens).all()),
        "labels": bool((local["labels"][0, :rows] == batch.labels.masked_fill(~labelled, -100)).all()),
        "ignored": set(local["labels"][0, rows:].tolist()),
        "plan": local["apportion"] is batch.handle,
        "keys": sorted(local),
        "rows": (rows, local["position_ids"].shape[1]),
    }
