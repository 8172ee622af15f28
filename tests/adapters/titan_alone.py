"""Lets TorchTitan run on CPUs in tests, with attention that needs no compiler. Import before torchtitan."""

from __future__ import annotations

import sys
import time
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention as attend

sys.path.append(str(Path(__file__).parents[2] / "examples" / "titan"))
import titan_cpu  # noqa: F401


def dense_flex(
    q_BNLH: Any, k_BNLH: Any, v_BNLH: Any, *, block_mask: Any, scale: Any, enable_gqa: Any, **_: Any
) -> Any:
    """Replaces flex_attention for Titan's masks, since torch's has no backward on CPUs. Returns (out, aux)."""
    repeats = q_BNLH.shape[1] // k_BNLH.shape[1]
    k_BNLH, v_BNLH = (x.repeat_interleave(repeats, 1) for x in (k_BNLH, v_BNLH))
    scores = q_BNLH @ k_BNLH.transpose(2, 3) * (q_BNLH.shape[-1] ** -0.5 if scale is None else scale)
    visible = create_mask(block_mask.mask_mod, *scores.shape[:1], None, *scores.shape[2:], device="cpu")
    scores = scores.float().masked_fill(~visible, float("-inf"))
    out = scores.softmax(-1).to(v_BNLH.dtype) @ v_BNLH
    return out, types.SimpleNamespace(lse=scores.logsumexp(-1))


def causal_flex(
    q_BNLH: Any, k_BNLH: Any, v_BNLH: Any, *, block_mask: Any, scale: Any, enable_gqa: Any, **_: Any
) -> Any:
    """Like `dense_flex`, but one causal document at a time, for too many rows for a dense mask."""
    rows = torch.arange(1, q_BNLH.shape[2])
    continues = block_mask.mask_mod(torch.zeros_like(rows), torch.zeros_like(rows), rows, rows - 1)
    cuts = [0, *rows[~continues].tolist(), len(rows) + 1]
    documents = zip(
        *(x.split([b - a for a, b in pairwise(cuts)], 2) for x in (q_BNLH, k_BNLH, v_BNLH)), strict=True
    )
    outs = [attend(*one, is_causal=True, scale=scale, enable_gqa=enable_gqa) for one in documents]
    return torch.cat(outs, 2), None


def own_attention(flex: Any = dense_flex) -> None:
    """Makes Titan's own attention run without torch.compile and GPUs."""
    import torchtitan.trainer
    from torchtitan.models.common.attention import FlexAttention

    torch.Tensor.bfloat16 = lambda self: (
        self  # type: ignore[return-value]
    )  # the dtype of its experts, whose output is added to float32
    FlexAttention._compiled_flex_attn = staticmethod(flex)
    torchtitan.trainer.time = types.SimpleNamespace(sleep=lambda _: None, perf_counter=time.perf_counter)
