"""What TorchTitan's models and activation checkpointing are given in the place of their own attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from apportion.ir.request.model import Model
from apportion.trainer.shared import kinds_of
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
        self.says: dict[str, Any] = {"window": config.window, "causal": config.causal}

    def forward(
        self, q_BLNH: Tensor, k_BLNH: Tensor, v_BLNH: Tensor, *, attention_masks: Any, **kw: Any
    ) -> Any:
        """[1, rows, heads, D] -> [1, rows, heads, Dv]."""
        transform, _ = kw.pop("out_transform", None), kw.pop("enable_gqa", None)
        if isinstance(attention_masks, dict):  # else the layer has taken its own
            name = WINDOW if (self.says["window"] or -1) > 0 else FULL
            attention_masks = attention_masks.get(name) or next(iter(attention_masks.values()))
        handle, kind = attention_masks
        kw |= {**self.says, "return_lse": transform is not None}
        found = planned_attention(q_BLNH, k_BLNH, v_BLNH, handle, kind, **kw)
        return found if transform is None else transform(*found)


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


def job_of(config: Trainer.Config) -> dict[str, Any]:
    """model: heads of one tensor-parallel rank, dtype and kinds; masks: of each kind, None where all are causal."""
    model, tp = config.model_spec.model, config.parallelism.tensor_parallel_degree
    attention = model.first_attention
    heads, kv_heads = attention.n_heads, attention.n_kv_heads or attention.n_heads
    windows = [getattr(layer.attention, "sliding_window_size", None) or 0 for layer in model.layers]
    layers, masks = kinds_of(windows, FULL, WINDOW)
    dtype = {"bfloat16": "bf16", "float32": "fp32"}[config.training.mixed_precision_param]
    head_dim = attention.head_dim or model.dim // heads
    shape = Model(heads // tp, kv_heads // tp, head_dim, dtype=dtype, hidden=model.dim, layers=layers)
    return {"model": shape, "masks": masks}
