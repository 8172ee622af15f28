"""What TorchTitan's models and activation checkpointing are given in the place of their own attention."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from apportion.ir.errors import ConfigError
from apportion.ir.masks.specs import causal, sliding_window
from apportion.ir.request.model import Model
from apportion.trainer.step.attention import PlanHandle, planned_attention

FULL, WINDOW = "basic_mask", "sliding_window_mask"  # kinds of attention, as Titan calls them


class PlannedMasks(dict[str, tuple[PlanHandle, str]]):
    """kind -> (handle, kind), where Titan's models look for their masks; its validator moves what loaders give."""

    @property
    def handle(self) -> PlanHandle:
        return next(iter(self.values()))[0]

    def to(self, *_: Any) -> PlannedMasks:
        return self


class PlannedAttention(Module):
    """window: tokens that a row of this layer sees, -1 for all; causal: none ahead of it; None: Titan does not say."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window: int | None = None
        causal: bool | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.says = {"window": config.window, "causal": config.causal}

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, **kw: Any
    ) -> Any:
        """[1, rows, heads, D] -> [1, rows, heads, Dv]."""
        transform, _ = kw.pop("out_transform", None), kw.pop("enable_gqa", None)
        if isinstance(attention_masks, dict):  # else the layer has taken its own
            name = WINDOW if (self.says["window"] or -1) > 0 else FULL
            attention_masks = attention_masks.get(name) or next(iter(attention_masks.values()))
        call = partial(planned_attention, q_BLNH, k_BLNH, v_BLNH, *attention_masks, **self.says, **kw)
        return call() if transform is None else transform(*call(return_lse=True))


def layers_of(parts: Any) -> list[PlannedAttention]:
    """Planned attention of the model's parts on this stage. Raises ConfigError where a layer has another."""
    own = {
        name: module.inner_attention
        for part in parts
        for name, module in part.named_modules()
        if hasattr(module, "inner_attention")
    }
    for name, attention in own.items():
        if not isinstance(attention, PlannedAttention):
            rule, remedy = "would not know the plan", 'build the layers with attn_backend="flex" or "varlen"'
            raise ConfigError(f"{name}.inner_attention", type(attention).__name__, rule, remedy)
    return list(own.values())


@override(target=FlexAttention.Config, description="context parallelism by Apportion's plans")
def planned_flex(config: FlexAttention.Config) -> Any:
    return derive(config, PlannedAttention.Config)


@override(target=VarlenAttention.Config, description="context parallelism by Apportion's plans")
def planned_varlen(config: VarlenAttention.Config) -> Any:
    left, right = config.window_size
    return derive(config, PlannedAttention.Config, window=-1 if left < 0 else left + 1, causal=right == 0)


class PlannedSelectiveAC(SelectiveAC):
    """Keeps what planned attention returned: recomputing a block does not communicate."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        return {*super().get_save_ops(), torch.ops.apportion.attend.default}


def model_of(config: Trainer.Config) -> Model:
    """Heads of one tensor-parallel rank, dtype and kinds."""
    model, tp = config.model_spec.model, config.parallelism.tensor_parallel_degree
    attention = model.first_attention
    heads, kv_heads = attention.n_heads, attention.n_kv_heads or attention.n_heads
    kinds = Counter(WINDOW if _window(layer) else FULL for layer in model.layers)
    layers = kinds.total() if list(kinds) == [FULL] else dict(kinds)
    dtype = {"bfloat16": "bf16", "float32": "fp32"}[config.training.mixed_precision_param]
    head_dim = attention.head_dim or model.dim // heads
    return Model(heads // tp, kv_heads // tp, head_dim, dtype=dtype, hidden=model.dim, layers=layers)


def masks_of(config: Trainer.Config) -> Any:
    """The mask of each kind; None where all layers are causal."""
    windows = {_window(layer) for layer in config.model_spec.model.layers}
    kinds = {WINDOW if window else FULL: sliding_window(window) if window else causal() for window in windows}
    return None if windows == {None} else kinds


def _window(layer: Any) -> int | None:
    return getattr(layer.attention, "sliding_window_size", None)
