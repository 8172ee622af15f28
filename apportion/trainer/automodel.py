"""NeMo Automodel 0.7 adapter: a `ContextParallelSharder` that uses a plan's layout.

    planned(model)                      # trains on batches {"planned": PlannedBatch, ...} from a PlannedLoader

Automodel's context-parallel mesh contains the ranks of the job. The model's kwargs pass the plan to attention, see
`apportion.trainer.hf`. The caller's tensors cover the samples of the microbatch end to end, [1, tokens, ...].
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ConfigError, MissingDependencyError
from apportion.trainer.hf import LAST, NAME, require_enabled
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.shared import digest_of, require_equal
from apportion.trainer.step import wiring
from apportion.trainer.step.microbatch import IGNORED

try:
    from nemo_automodel.components.distributed.context_parallel.sharder import (
        ContextParallelSharder,
        ShardLayout,
    )
except ModuleNotFoundError as error:
    raise MissingDependencyError("nemo-automodel", "automodel", "apportion.trainer.automodel") from error


def planned(model: Any) -> Any:
    """Adds to the model the hook through which Automodel's recipes get a sharder; returns it. Raises ConfigError for a
    model that is not enabled (`hf.enable`)."""
    require_enabled(model)
    model.prepare_model_inputs_for_cp = lambda batch, **_: {"cp_sharder": planned_sharder(batch["planned"])}
    model.register_forward_pre_hook(_require_plan, with_kwargs=True)
    return model


def _require_plan(model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises ConfigError for a forward with gradients and without a plan: a recipe without context parallelism requests
    no sharder, and drops the planned batch."""
    if torch.is_grad_enabled() and kwargs.get(NAME) is None:
        rule = "the recipe requested no sharder, so the plan would be ignored"
        remedy = "set it to the plan's number of ranks, and evaluate under torch.no_grad()"
        raise ConfigError("cp_size", "not the plan's number of ranks", rule, remedy)


def planned_sharder(batch: PlannedBatch, device_mesh: Any = None) -> ContextParallelSharder:
    """The sharder of one microbatch; a collective on CPU tensors. Automodel gathers equal shards, so all ranks pad to
    the largest number of rows, and padding rows are numbered after the tokens."""
    layout, labels = _layout(batch)
    shard = partial(_shard, batch, layout, labels)
    return ContextParallelSharder(device_mesh=device_mesh, shard_batch=shard, shard_layout=layout)


def _layout(batch: PlannedBatch) -> tuple[ShardLayout, int]:
    """The layout of a microbatch, and its number of labels on all ranks."""
    handle, labels = batch.handle, int((batch.labels != IGNORED).sum())
    gathered = handle.communicator.all_gather([len(batch.tokens), handle.rows, labels], "rows")
    rows = max(row[0] for row in gathered)
    tokens, labels = (sum(row[column] for row in gathered) for column in (1, 2))
    offset = sum(rows - row[1] for row in gathered[: handle.communicator.rank])
    padding = torch.arange(rows - handle.rows) + tokens + offset
    return ShardLayout(torch.cat((handle.tokens, padding)), tokens, rows * len(gathered)), labels


def _check_labels(targets: Tensor | None, labels: int) -> None:
    """Raises ConfigError if the recipe's batch does not have as many labels as the microbatch on all ranks."""
    if targets is not None and (count := int((targets != IGNORED).sum())) != labels:
        rule = f"recipes divide by their number, and the microbatch has {labels} on all ranks"
        remedy = "pass planned.gather_tokens(planned.labels)[None]"
        raise ConfigError("labels", f"{count} labels", rule, remedy)


def _check_meshes(planned: PlannedBatch, cp_mesh: Any, tp_mesh: Any) -> None:
    """Raises ConfigError if the context-parallel mesh has other ranks than the plan, since recipes would count labels
    several times or split matrices over ranks with different tokens; and if the loader does not know the mesh's data
    parallelism, and gives each group the same samples. Raises ExecutionError if tensor-parallel ranks have
    read different batches. A collective."""
    if cp_mesh is not None:
        mesh = cp_mesh.mesh.flatten().tolist()
        communicator = planned.handle.communicator
        ranks = communicator.global_ranks if isinstance(communicator, Communicator) else mesh
        root, groups = cp_mesh._get_root_mesh(), 1 if planned._replicas is None else planned._replicas.ranks
        sizes = zip(root.mesh_dim_names, root.shape, strict=True)
        degree = math.prod(size for name, size in sizes if name.startswith("dp"))
        remedy = "make the loader with communicator=ap.Communicator(cp group) and replicas=dp group"
        if sorted(mesh) != sorted(ranks):
            rule = f"the loader plans for ranks {ranks}, but the cp mesh has ranks {mesh}"
            raise ConfigError("cp_size", len(mesh), rule, remedy)
        if 1 < degree != groups:
            rule = f"the loader gives {groups} groups of ranks their own samples, but the mesh has {degree}"
            raise ConfigError("replicas", groups, rule, remedy)
    if tp_mesh is not None and tp_mesh.size() > 1:
        digest = digest_of(planned.handle, (planned.tokens, planned.labels))
        require_equal([digest], [tp_mesh.get_group()], torch.device(tp_mesh.device_type))


def _shard(
    planned: PlannedBatch,
    layout: ShardLayout,
    count: int,
    cp_mesh: Any,
    tp_mesh: Any,
    batch: dict[str, Any],
    *,
    loss_mask: Tensor | None = None,
    padding_token_id: int = 0,
) -> tuple[Any, dict[str, Any], ShardLayout]:
    """Automodel's shard function: this rank's rows, including the label to predict for each, and the plan."""
    planned.check_unweighted("the recipe's loss")
    _check_meshes(planned, cp_mesh, tp_mesh)
    _check_labels(batch.get("labels"), count)
    wiring.watch.expect(planned.handle)
    wiring.watch.trust()
    rows = len(layout.local_token_global_indices)  # of the fullest rank
    planned.handle.padding = rows - planned.handle.rows
    planned = planned if cp_mesh is None else planned.to(cp_mesh.device_type)
    padding = rows - len(planned.tokens)
    labels = pad(planned.labels, (0, padding), value=IGNORED)
    if loss_mask is not None:
        mask = planned.shard_tokens(loss_mask.flatten().bool(), fill=False)
        labels = labels.masked_fill(~pad(mask, (0, padding)), IGNORED)
    tokens = pad(planned.tokens, (0, padding), value=padding_token_id)
    positions = pad(planned.position_ids, (0, padding))
    fields: dict[str, Any] = {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        "labels": labels[None],
    }
    fields |= {NAME: planned.handle, LAST: positions.new_tensor([planned.batch.last_position])}
    others = {
        name: value for name, value in batch.items() if name not in (*fields, "planned", "attention_mask")
    }
    return nullcontext, {**others, **fields}, layout
