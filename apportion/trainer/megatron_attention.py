"""What Megatron-Core's models are given in the place of their own core attention and rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from apportion.ir.errors import ExecutionError
from apportion.ir.request.model import Model
from apportion.trainer.shared import kinds_of
from apportion.trainer.step.attention import planned_attention


@dataclass
class PlannedSeqParams(PackedSeqParams):
    """What reaches core attention and RoPE. qkv_format stays None: rows keep [rows, 1, heads, D]."""

    batch: Any = None  # PlannedBatch
    positions: int = 0  # at least as many as the largest position id and one


class PlannedCoreAttention(DotProductAttention):
    """q [rows, 1, heads, D], k and v of this tensor-parallel rank -> [rows, 1, heads D]. Its parameters, `softmax_type`
    ones, are those of Megatron's own."""

    def __init__(self, config: Any, layer_number: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, layer_number, *args, **kwargs)
        self.kind, self.window = kind_of(config, layer_number)
        scaled = config.apply_query_key_layer_scaling
        self.scale = self.softmax_scale * (layer_number if scaled else 1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **given: Any) -> Tensor:
        params = given.get("packed_seq_params")
        if not isinstance(params, PlannedSeqParams) or params.batch is None:
            raise ExecutionError("planned core attention got no plan: call the model by `forward_step`")
        handle = params.batch.handle
        kind = self.kind if len(handle.kinds) > 1 else None
        says: Any = {"window": self.window, "causal": "causal" in self.attn_mask_type.name}
        says |= {"sinks": self.softmax_offset, "layer": self.layer_number}
        q, k, v = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        out: Tensor = planned_attention(q, k, v, handle, kind, self.scale, **says)
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


def model_of(config: Any) -> Model:
    """Heads of one tensor-parallel rank, dtype and kinds."""
    tp = config.tensor_model_parallel_size
    dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(config.params_dtype, "fp32")
    heads, kv_heads = config.num_attention_heads // tp, max(config.num_query_groups // tp, 1)
    sizes = {"dtype": dtype, "hidden": config.hidden_size, "layers": kinds(config)[0]}
    return Model(heads, kv_heads, config.kv_channels, **sizes)


def kinds(config: Any) -> tuple[Any, Any]:
    """As `kinds_of`."""
    windows = [kind_of(config, number)[1] for number in range(1, config.num_layers + 1)]
    return kinds_of(windows, "full", "window")


def kind_of(config: Any, layer_number: int) -> tuple[str, int]:
    """A layer's kind, and the tokens that a row sees, itself among them; -1 for all."""
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return "full", -1
    return "window", config.window_size[0] + 1
