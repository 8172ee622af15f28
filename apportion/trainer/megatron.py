"""Megatron-Core 0.16: planned attention in its layer spec, and a forward step for its schedules.

    model = GPTModel(config, planned_spec(get_gpt_layer_local_spec()), ...)
    loader = planned_loader(dataset, config, source="http://127.0.0.1:8321/v1/jobs/run1", key=key)
    get_forward_backward_func()(forward_step_func=forward_step, data_iterator=endless(loader), model=model, ...)

Context parallelism stays 1: the data-parallel ranks are the ranks of the job. `calculate_per_token_loss` must be set,
and `variable_seq_lengths` with pipeline stages. Kinds of attention are called "full" and "window".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from apportion.backends.torch.transport import Communicator
from apportion.ir.errors import ExecutionError, MissingDependencyError
from apportion.ir.masks import causal, sliding_window
from apportion.ir.model import Model
from apportion.trainer.attention import planned_attention
from apportion.trainer.batch import PlannedBatch
from apportion.trainer.configured import endless, require
from apportion.trainer.loader import PlannedLoader

try:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.utils import is_layer_window_attention
    from megatron.core.utils import get_model_config, unwrap_model
except ModuleNotFoundError as error:
    raise MissingDependencyError("megatron-core", "megatron", "apportion.trainer.megatron") from error

__all__ = ["endless", "forward_step", "model_of", "planned_loader", "planned_spec"]


@dataclass
class PlannedSeqParams(PackedSeqParams):
    """What reaches core attention and RoPE. qkv_format stays None: rows keep [rows, 1, heads, D]."""

    batch: PlannedBatch | None = None
    positions: int = 0  # at least as many as the largest position id and one


class PlannedCoreAttention(DotProductAttention):
    """q [rows, 1, heads, D], k and v of this tensor-parallel rank -> [rows, 1, heads D]. Its parameters, `softmax_type`
    ones, are those of Megatron's own."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        require("context_parallel_size", config.context_parallel_size, 1, "data-parallel ranks are the job's")
        require(
            "attention_dropout", config.attention_dropout, 0.0, "forward and backward would draw elsewhere"
        )
        super().__init__(config, layer_number, *args, **kwargs)
        self.kind, self.window = _kind(config, layer_number)
        scaled = config.apply_query_key_layer_scaling
        self.scale = self.softmax_scale * (layer_number if scaled else 1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **given: Any) -> Tensor:
        params = given.get("packed_seq_params")
        if not isinstance(params, PlannedSeqParams) or params.batch is None:
            raise ExecutionError("planned core attention got no plan: call the model by `forward_step`")
        handle, rows = params.batch.handle, (x.squeeze(1) for x in (query, key, value))
        says = {"window": self.window, "causal": "causal" in self.attn_mask_type.name}
        kind = self.kind if len(handle.kinds) > 1 else None
        out = planned_attention(*rows, handle, kind, self.scale, sinks=self.softmax_offset, **says)
        return out.flatten(1).unsqueeze(1)


class PlannedRotary(torch.nn.Module):
    """Megatron's rotary embedding counts rows from 0; this takes those of the rows' positions from its table."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def get_rotary_seq_len(self, *given: Any, **others: Any) -> Any:
        params = given[4] if len(given) > 4 else None
        return (
            params if isinstance(params, PlannedSeqParams) else self.own.get_rotary_seq_len(*given, **others)
        )

    def forward(self, rows: Any, *given: Any, **others: Any) -> Any:
        if not isinstance(rows, PlannedSeqParams):
            return self.own(rows, *given, **others)
        table, at = self.own(rows.positions), rows.batch.position_ids
        return (table[0][at], table[1]) if isinstance(table, tuple) else table[at]


def planned_spec(spec: Any) -> Any:
    """The layer spec, with planned core attention."""
    spec.submodules.self_attention.submodules.core_attention = PlannedCoreAttention
    return spec


def planned_loader(dataset: Any, config: Any, stream: str = "train", **options: Any) -> PlannedLoader:
    """`PlannedLoader` for a TransformerConfig; every tensor-parallel rank and pipeline stage makes one."""
    group, hosts = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_group_gloo()
    tp, pp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    rows = config.tensor_model_parallel_size if config.sequence_parallel else 1
    given = {"model": model_of(config), "masks": masks_of(config), "rows_multiple": rows, "drop_last": True}
    options = {**given, "communicator": Communicator(group, hosts=hosts), **options}
    return PlannedLoader(dataset, stream=f"{stream}-{pp}-{tp}", **options)


def forward_step(data_iterator: Iterator[PlannedBatch], model: Any) -> tuple[Tensor, Any]:
    """(loss of each row, or hidden states of a stage; what makes of it (sum, tokens, report)) of the next batch."""
    config, module = get_model_config(model), unwrap_model(model)
    require("calculate_per_token_loss", config.calculate_per_token_loss, True, "ranks have unequal tokens")
    if not isinstance(module.rotary_pos_emb, PlannedRotary):
        module.rotary_pos_emb = PlannedRotary(module.rotary_pos_emb)
    here = next(data_iterator)
    positions = (
        1 << int(here.position_ids.max()).bit_length()
    )  # few sizes, so that Megatron's tables are kept
    batch = here.to(next(model.parameters()).device)
    labels = batch.labels.clamp(min=0)  # its cross entropy knows no -100
    given = (batch.tokens[None], batch.position_ids[None], None)
    params = PlannedSeqParams(batch=batch, positions=positions)
    return model(*given, labels=labels[None], packed_seq_params=params), partial(loss_of, batch)


def loss_of(batch: PlannedBatch, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Megatron divides the sum by the tokens of all ranks and microbatches."""
    seen = batch.labels >= 0
    weights = batch.fields.get("loss_weights", torch.ones_like(losses[0]))
    total = (losses[0] * seen * weights).sum() * (batch.valid_tokens / batch.total_weight)
    return total, seen.sum().int(), {"lm loss": torch.stack((total.detach(), seen.sum()))}


def model_of(config: Any) -> Model:
    """Heads of one tensor-parallel rank, dtype and kinds."""
    tp, kinds = config.tensor_model_parallel_size, Counter(_kinds(config))
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(config.params_dtype, "fp32")
    heads, kv_heads = config.num_attention_heads // tp, max(config.num_query_groups // tp, 1)
    layers = {kind: count for (kind, _), count in kinds.items()}
    layers = layers if "window" in layers else config.num_layers
    return Model(heads, kv_heads, config.kv_channels, dtype=dtype, hidden=config.hidden_size, layers=layers)


def masks_of(config: Any) -> Any:
    """The mask of each kind; None where all layers are causal."""
    kinds = {name: sliding_window(window) if window > 0 else causal() for name, window in _kinds(config)}
    return kinds if "window" in kinds else None


def _kinds(config: Any) -> list[tuple[str, int]]:
    return [_kind(config, number) for number in range(1, config.num_layers + 1)]


def _kind(config: Any, layer_number: int) -> tuple[str, int]:
    """A layer's kind, and the tokens that a row sees, itself among them; -1 for all."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return "full", -1
    return "window", config.window_size[0] + 1
