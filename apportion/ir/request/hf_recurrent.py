"""Recurrent layers of a Hugging Face `config.json`.

Gated DeltaNet          Qwen3-Next, Qwen3.5, OLMo Hybrid          decay per head, delta rule
Kimi Delta Attention    Kimi Linear, Bailing                      decay per channel, delta rule
Mamba-2                 Nemotron-H, Granite 4, Bamba, Falcon-H1   decay per head
lightning attention     MiniMax                                   decay per head, no convolution
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from apportion.ir.fields import mapping
from apportion.ir.request.hf_fields import BOTH, LINEAR, count, field_value, layer_types, text_config
from apportion.ir.request.hf_layers import recurrence_of
from apportion.ir.request.recurrent import Recurrent

Text = Mapping[str, Any]


def recurrent_kinds(config: Mapping[str, Any]) -> dict[str, Recurrent]:
    """The recurrent kinds for `Model.recurrent`: none, or `linear_attention`. Raises ConfigError."""
    text = text_config(config)
    family = recurrence_of(text["model_type"])
    if family is None or not (layers := sum(kind in (LINEAR, BOTH) for kind in layer_types(text))):
        return {}
    return {LINEAR: _READERS[family](text, layers)}


def _gated_delta_net(text: Text, layers: int) -> Recurrent:
    key_heads = _count(text, "linear_num_key_heads", text["num_attention_heads"])
    heads = _count(text, "linear_num_value_heads", text["num_attention_heads"])
    key = _count(text, "linear_key_head_dim", int(0.75 * count(text, "hidden_size") / key_heads))
    value = _count(text, "linear_value_head_dim", 2 * key)
    conv = count(text, "linear_conv_kernel_dim")
    return Recurrent(heads, key, value, key_heads, conv=conv, layers=layers)


def _kimi_delta(text: Text, layers: int) -> Recurrent:
    config = mapping("linear_attn_config", text.get("linear_attn_config") or {})  # Kimi's own files
    fields = {field: config[name] for name, field in _KIMI.items() if name in config}
    heads = _count({**text, **fields}, "linear_num_heads", text["num_attention_heads"])
    width = _count({**text, **fields}, "linear_head_dim", text.get("head_dim"))
    conv = _count({**text, **fields}, "linear_conv_kernel_dim", text.get("short_conv_kernel_size"))
    return Recurrent(heads, width, width, gate="diagonal", conv=conv, layers=layers)


def _mamba2(text: Text, layers: int) -> Recurrent:
    heads = count(text, "mamba_n_heads")
    value = field_value(text, "mamba_d_head")[1]
    if value == "auto":
        inner = text.get("mamba_d_ssm") or count(text, "mamba_expand") * count(text, "hidden_size")
        text = {**text, "mamba_d_head": inner // heads}
    key, value, groups, conv = (
        count(text, f"mamba_{suffix}") for suffix in ("d_state", "d_head", "n_groups", "d_conv")
    )
    return Recurrent(heads, key, value, groups, delta=False, conv=conv, layers=layers)


def _lightning(text: Text, layers: int) -> Recurrent:
    heads = count(text, "num_attention_heads")
    width = _count(text, "head_dim", count(text, "hidden_size") // heads)
    return Recurrent(heads, width, width, delta=False, layers=layers)


def _count(text: Text, field: str, default: Any) -> int:
    """A positive integer field with a default."""
    return count({**text, field: default} if text.get(field) is None else text, field)


#: field of `linear_attn_config` -> name in transformers
_KIMI = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
_READERS: Mapping[str, Callable[[Text, int], Recurrent]] = MappingProxyType(
    {
        "gated_delta_net": _gated_delta_net,
        "kimi_delta": _kimi_delta,
        "mamba2": _mamba2,
        "lightning": _lightning,
    }
)
