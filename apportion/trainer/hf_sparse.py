"""transformers adapter for models that select keys at run time (DeepSeek-V3.2, GLM-DSA): their layers on gathered rows.

    PlannedBatch ──inputs──► model(**kwargs): attention reads latents and the indexer's keys from a cache
                                              ◄── this cache: rows of all ranks that this rank's queries may see

Attention, indexer and selection are still the model's own. Written for transformers 5.23.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.request.model import Model
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.step import wiring
from apportion.trainer.step.microbatch import WEIGHTS
from apportion.trainer.step.moves import gather_visible

TYPES = ("deepseek_v32", "glm_moe_dsa")  # supported `model_type`s
_BY_LENGTH = ("dynamic", "longrope")  # rotary embeddings that depend on the largest position of a call


def model_of(config: Any, dtype: str) -> Model:
    """The planning model of a config: a row is a token's latent, rotated key and indexer key; a query counts as at most
    `index_topk` pairs. dtype: see `apportion.Model`. Raises ConfigError for other models."""
    _check(config)
    return Model(
        q_heads=config.num_attention_heads,
        kv_heads=1,
        head_dim=config.kv_lora_rank + config.qk_rope_head_dim,
        v_head_dim=config.index_head_dim,
        dtype=dtype,
        hidden=config.hidden_size,
        ffn=config.intermediate_size,
        layers=config.num_hidden_layers,
        balance={"default": {"keys": config.index_topk}},
    )


def _check(config: Any) -> None:
    if config.model_type not in TYPES:
        raise ConfigError(
            "model_type", config.model_type, f"is not one of {', '.join(TYPES)}", "use trainer.hf"
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope in _BY_LENGTH:
        raise ConfigError(
            "rope_type", rope, "depends on the largest position of a rank", "use yarn or default"
        )
    if config.attention_dropout:
        raise ConfigError("attention_dropout", config.attention_dropout, "is not supported", "set it to 0")


def inputs(batch: PlannedBatch, model: Any) -> dict[str, Any]:
    """The kwargs of the model's forward; its loss is this rank's share of the step's mean, so gradients are summed.
    Without labels if samples have `loss_weights`, as in `hf.inputs`. Raises ConfigError for other models and gradient
    checkpointing. Forward raises ExecutionError if a layer did not read gathered rows."""
    base = getattr(model, "module", model).base_model  # under DDP
    _check(base.config)
    if any(getattr(module, "gradient_checkpointing", False) for module in base.modules()):
        rule = "disables the cache, through which layers read gathered rows"
        raise ConfigError("gradient_checkpointing", True, rule, "leave it out")
    batch.check_unchanged()
    wiring.watch.expect(batch.handle)
    if not hasattr(base, "_reads_gathered"):
        base._reads_gathered = base.register_forward_hook(_check_layers, with_kwargs=True)
    mask = gather_visible(batch.tokens, batch.handle).mask()
    # finite in float32, the dtype of the layers' softmax, since padding sees no row
    floor = max(torch.finfo(dtype).min for dtype in (base.dtype, torch.float32))
    additive = torch.zeros(mask.shape, dtype=base.dtype, device=mask.device).masked_fill(~mask, floor)
    rows = {"input_ids": batch.tokens, "position_ids": batch.position_ids}
    rows |= {} if WEIGHTS in batch.fields else {"labels": batch.labels, "shift_labels": batch.labels}
    return {
        **{name: tensor[None] for name, tensor in rows.items()},
        "attention_mask": {"indexed_attention": additive[None, None]},
        "past_key_values": _RowCache(batch),
        "num_items_in_batch": max(batch.valid_tokens, 1),
        "use_cache": False,
    }


class _RowCache:
    """A cache that takes a layer's rows and returns the rows that its queries may see."""

    def __init__(self, batch: PlannedBatch) -> None:
        self._handle, self.layers = batch.handle, set[int]()

    def update(self, latents: Tensor, rotated: Tensor, layer_idx: int) -> tuple[Tensor, ...]:
        """Gathers latents and rotated keys: [1, 1, rows, width] -> [1, 1, visible, width] each."""
        self.layers.add(layer_idx)
        gathered = gather_visible([part[0, 0] for part in (latents, rotated)], self._handle)
        return tuple(part[None, None] for part in gathered.rows)

    def update_indexer(self, keys: Tensor, layer_idx: int) -> Tensor:
        """Gathers keys: [1, rows, width] -> [1, visible, width]."""
        rows: Tensor = gather_visible(keys[0], self._handle).rows
        return rows[None]


def _check_layers(base: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """Raises ExecutionError if a layer did not read gathered rows."""
    cache = kwargs.get("past_key_values")
    if isinstance(cache, _RowCache) and (missing := {*range(base.config.num_hidden_layers)} - cache.layers):
        raise ExecutionError(f"layers {sorted(missing)} of {type(base).__name__} did not read gathered rows")
