"""Pool jobs with NeMo Automodel's sharder."""

from __future__ import annotations

from typing import Any

import torch
from nemo_automodel.components.distributed.context_parallel import ContextParallelSharder
from torch.distributed.device_mesh import init_device_mesh

from apportion.backends.torch.transport import Communicator
from apportion.trainer import hf
from apportion.trainer.automodel import planned
from apportion.trainer.loading.loader import PlannedLoader
from tests.adapters.documents import documents
from tests.adapters.jobs_hf import made
from tests.ranks.loading import job, planning


def verbs(comm: Communicator) -> Any:
    """Runs Automodel's own dispatch on a model with the hook: its operations on one microbatch, as plain data."""
    loader = PlannedLoader(documents(), **planning(job(comm.ranks, 128)), communicator=comm)
    batches = iter(loader)
    batch = next(batches)
    batches.close()
    mesh = init_device_mesh("cpu", (comm.ranks,), mesh_dim_names=("cp",))
    given = {"planned": batch, "attention_mask": None, "note": "kept"}
    full = torch.arange(int(batch.batch.tokens) * 2, dtype=torch.float32).view(1, -1, 2)
    mask = torch.arange(full.shape[1])[None] % 3 > 0
    model = planned(hf.enable(made("llama")))
    sharder = ContextParallelSharder(model, mesh, given, loss_mask=mask)
    context, local = sharder.shard(given)
    with context():
        shard = sharder.shard_token_tensor(full, fill=-1.0).requires_grad_()
        whole = sharder.gather_token_tensor(shard, trim=True)
        (whole * full).sum().backward()
    rows = batch.handle.rows
    kept = batch.shard_tokens(mask[0].long(), fill=0) > 0
    return {
        "full": bool((whole == full).all()),
        "shard": bool((shard[0, :rows] == batch.shard_tokens(full[0])).all()),
        "padding": shard[0, rows:].tolist(),
        "gradients": bool((shard.grad[0, :rows] == comm.ranks * shard.detach()[0, :rows]).all()),
        "tokens": bool((local["input_ids"][0, :rows] == batch.tokens).all()),
        "labels": bool((local["labels"][0, :rows] == batch.labels.masked_fill(~kept, -100)).all()),
        "ignored": set(local["labels"][0, rows:].tolist()),
        "plan": local["apportion"] is batch.handle,
        "keys": sorted(local),
        "rows": (rows, local["position_ids"].shape[1]),
    }
