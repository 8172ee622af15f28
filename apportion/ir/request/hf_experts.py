"""Experts and low-rank MLA projections of layers in a Hugging Face `config.json`, as the classes of transformers 5.23
read them.

    {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, …}
      ──► {"experts": {"count": 128, "active": 8, "width": 768, "shared": 0, "dense": 0, "nodes": 0}, …}
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, sequence
from apportion.ir.request.hf_fields import count, field_value, layer_types, text_config
from apportion.ir.request.hf_layers import words

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_SHARED = (
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "moe_shared_expert_intermediate_size",
)
_MLA = MappingProxyType({"q_rank": "q_lora_rank", "kv_rank": "kv_lora_rank", "rope_dim": "qk_rope_head_dim"})


def layer_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Training fields `experts`, `q_rank`, `kv_rank` and `rope_dim`, for some types also `ffns` and `gated`. Raises
    ConfigError for types whose use of experts is unknown, or whose recurrent layers are not priced."""
    text = text_config(config)
    if text["model_type"] in words("unpriced"):
        rule = "its layers are planned, but their parts other than attention are not priced"
        raise ConfigError("model_type", text["model_type"], rule, "forecast another model of its size")
    fields: dict[str, Any] = {
        name: _number(text, field) for name, field in _MLA.items() if text.get("kv_lora_rank")
    }
    types = layer_types(text)
    if text["model_type"] == "falcon_h1":  # a layer is both mixers, then an FFN
        fields["ffns"] = len(types)
    if text["model_type"] == "nemotron_h":  # a layer is a mixer, or an FFN
        fields |= {"ffns": sum(kind in ("mlp", "moe") for kind in types), "gated": False}
        if "moe" not in types:
            return {"experts": {}, **fields}
    field = next((name for name in _COUNTS if text.get(name) not in (None, 0, 1)), None)
    return {"experts": {} if field is None else _experts(text, field), **fields}


def _experts(text: Mapping[str, Any], field: str) -> dict[str, int]:
    kind = text["model_type"]
    if kind not in words("experts") | words("leading_dense"):
        rule = f"unknown use of experts in layers of a {kind}"
        raise ConfigError(
            field, text[field], rule, "plan, compare and simulate its attention, without a forecast"
        )
    width = count(text, "intermediate_size" if kind in words("wide_experts") else "moe_intermediate_size")
    shared = max(_number(text, field) for field in _SHARED) or width * _number(text, "n_shared_experts")
    if text.get("moe_latent_size"):
        rule = "rows of routed experts that are narrower than hidden states are not priced"
        raise ConfigError("moe_latent_size", text["moe_latent_size"], rule, "forecast another model")
    nodes = _number(text, "topk_group") if _number(text, "n_group") > 1 else 0
    return {
        "count": count(text, field),
        "active": count(text, "num_experts_per_tok"),
        "width": width,
        "shared": shared,
        "dense": sum(not is_sparse for is_sparse in _has_experts(text)),
        "nodes": nodes,
    }


def _has_experts(text: Mapping[str, Any]) -> list[bool]:
    """For each layer with an FFN, True if it has experts."""
    if text["model_type"] == "nemotron_h":
        return [kind == "moe" for kind in layer_types(text) if kind in ("mlp", "moe")]
    layers = count(text, "num_hidden_layers")
    types = text.get("mlp_layer_types")
    if types is not None:
        kinds = sequence("mlp_layer_types", types)
        if len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
            rule = f"must be dense or sparse for each of the {layers} layers"
            raise ConfigError("mlp_layer_types", kinds, rule, "correct the config")
        return [kind == "sparse" for kind in kinds]
    if text["model_type"] in words("leading_dense"):
        first = integer("first_k_dense_replace", text.get("first_k_dense_replace"), 0)
        interval = text.get("moe_layer_freq", 1)
        step = integer("moe_layer_freq", interval)
        return [number >= first and number % step == 0 for number in range(layers)]
    dense_layers = {*sequence("mlp_only_layers", text.get("mlp_only_layers") or [])}
    step = integer("decoder_sparse_step", text.get("decoder_sparse_step", 1))
    return [number not in dense_layers and (number + 1) % step == 0 for number in range(layers)]


def _number(text: Mapping[str, Any], field: str) -> int:
    name, value = field_value(text, field)
    return 0 if value is None else integer(name, value, 0)
