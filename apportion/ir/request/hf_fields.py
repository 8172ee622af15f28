"""Fields of a Hugging Face `config.json`, with the defaults of transformers.

Files of older releases lack fields that the configuration classes of transformers 5.23 fill in: `hf_types.toml` lists
these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, TypedDict

from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, mapping, sequence, suggestion
from apportion.ir.latent import Latent
from apportion.ir.request.hf_layers import check_layers, recurrence_of, table, words

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR = "linear_attention"  # recurrent layers
BOTH = "hybrid"  # attention and a recurrence side by side
SLIDING_WINDOW = "sliding_window"
WINDOW_OF = MappingProxyType({SLIDING: SLIDING_WINDOW, CHUNKED: "attention_chunk_size"})
_MAX_SIZE = 2**24
_DTYPES = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"})
# Layer types by their names before transformers 5, or in GPT-Neo.
_LEGACY = MappingProxyType({"attention": FULL, "global": FULL, "local": SLIDING, "mamba": LINEAR})
_NO_MIXING = ("mlp", "moe")  # layers of Nemotron-H without token mixing
# letters of hybrid_override_pattern
_PATTERN = MappingProxyType({"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"})


def is_config(data: Any) -> bool:
    """True for the data of a Hugging Face `config.json`, as opposed to this package's own model files."""
    return isinstance(data, Mapping) and not {
        "architectures",
        "model_type",
        "num_attention_heads",
    }.isdisjoint(data)


class ModelFields(TypedDict):
    """Fields of `ir.request.model.Model`."""

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None
    dtype: str
    hidden: int
    ffn: int
    layers: int | dict[str, int]
    latent: Latent | None


def model_fields(config: Mapping[str, Any]) -> ModelFields:
    """The model's fields. Attention kinds are the distinct layer types; with a single one, `layers` is a number. KV
    rows of MLA are latent rows. Raises ConfigError."""
    text = text_config(config)
    heads, hidden = count(text, "num_attention_heads"), count(text, "hidden_size")
    kinds = Counter(attention_types(text))
    kv_heads, head_dim, v_head_dim, latent = _widths(text, heads, hidden)
    return {
        "q_heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "dtype": _dtype(text, config),
        "hidden": hidden,
        "ffn": _ffn(text, hidden),
        "layers": dict(sorted(kinds.items())) if len(kinds) > 1 else kinds.total(),
        "latent": latent,
    }


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the language model, with the defaults of its class. Raises ConfigError for unsupported layers."""
    nested = config.get("text_config")
    text = config if nested is None else mapping("text_config", nested)
    kind = str(text.get("model_type") or f"{config.get('model_type')}{'' if text is config else '_text'}")
    parts = (mapping(field, text.get(field) or {}) for field in ("ffn_config", "attn_config"))  # MPT, DBRX
    defaults = table("defaults").get(kind, {})
    merged = {
        **defaults,
        **{key: value for part in parts for key, value in part.items()},
        **text,
        "model_type": kind,
    }
    check_layers(merged, defaults if field_value(merged, "layer_types")[1] is None else words("patterns"))
    if merged.get("local_attention") is not None:  # keys on both sides
        merged[SLIDING_WINDOW] = count(merged, "local_attention") // 2
    return merged


def field_value(text: Mapping[str, Any], field: str) -> tuple[str, Any]:
    """(name, value) of a field under any of its names; value None if absent."""
    names = (field, *table("aliases").get(field, ()))
    name = next((name for name in names if text.get(name) is not None), field)
    return name, text.get(name)


def count(text: Mapping[str, Any], field: str) -> int:
    """Reads a positive integer field under any of its names. Raises ConfigError."""
    name, value = field_value(text, field)
    if value is None:
        others = " or ".join(("it", *table("aliases").get(field, ())))
        rule = f"a config of type {text['model_type']} must have {others}"
        raise ConfigError(field, None, rule, "add it, or write a model file (q_heads, kv_heads, …)")
    return integer(name, value, 1, _MAX_SIZE)


def _ffn(text: Mapping[str, Any], hidden: int) -> int:
    if text["model_type"] not in words("wide_ffn") or field_value(text, "intermediate_size")[1] is not None:
        return count(text, "intermediate_size")
    return hidden * count({"expansion_ratio": 4, **text}, "expansion_ratio")


def _widths(text: Mapping[str, Any], heads: int, hidden: int) -> tuple[int, int, int | None, Latent | None]:
    """(KV heads, head dim, head dim of V or None if equal, latent rows or None)."""
    if text.get("qk_nope_head_dim") is not None or text["model_type"] in words("mla"):
        nope, rope, width = map(partial(count, text), ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        return 1, nope + rope, width, Latent(count(text, "kv_lora_rank"), rope)
    dim = hidden // heads if field_value(text, "head_dim")[1] is None else count(text, "head_dim")
    return _kv_heads(text, heads), dim, None, None


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    if text.get("multi_query") and not text.get("new_decoder_architecture"):
        return 1
    name, value = field_value(text, "num_key_value_heads")
    kv_heads = heads if value is None else count(text, "num_key_value_heads")
    if heads % kv_heads:
        rule = f"must divide {field_value(text, 'num_attention_heads')[0]} ({heads})"
        raise ConfigError(name, kv_heads, rule, "give each KV head the same number of query heads")
    return kv_heads


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    names = (part.get(field) for part in (text, config) for field in ("dtype", "torch_dtype"))
    name = str(next((value for value in names if value is not None), "bfloat16")).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError("dtype", name, "attention does not support it", suggestion(name, _DTYPES))
    return _DTYPES[name]


def attention_types(text: Mapping[str, Any]) -> list[str]:
    """The type of each layer with attention. Raises ConfigError for an unsupported or unknown type, and if no layer has
    attention."""
    types = layer_types(text)
    result = [FULL if kind == BOTH else kind for kind in types if kind not in (LINEAR, *_NO_MIXING)]
    if not result:
        rule = "no layer has softmax attention"
        raise ConfigError("layer_types", f"{len(types)} layers", rule, "train it without context parallelism")
    return result


def layer_types(text: Mapping[str, Any]) -> list[str]:
    """The type of each layer. Raises ConfigError for an unsupported or unknown type."""
    name, value = _types_field(text)
    has_layer_count = field_value(text, "num_hidden_layers")[1] is not None or not isinstance(value, list)
    # Nemotron-H, where only the types give the number
    layers = count(text, "num_hidden_layers") if has_layer_count else len(value)
    types = (
        _inferred_types(text, layers)
        if value is None
        else [_LEGACY.get(str(kind), kind) for kind in sequence(name, value)]
    )
    if len(types) != layers:
        rule = f"there must be one for each of the {layers} layers"
        raise ConfigError(name, f"{len(types)} types", rule, "correct the config")
    supported: tuple[str, ...] = (FULL, SLIDING, CHUNKED)
    if recurrence_of(text["model_type"]) is not None:
        supported += (LINEAR, BOTH, *_NO_MIXING)
    for kind in types:
        if kind not in supported:
            remedy = f"use {', '.join(supported)}, or write a model file for the supported layers"
            raise ConfigError(name, kind, "layers of this type are not supported", remedy)
    return types


def _types_field(text: Mapping[str, Any]) -> tuple[str, Any]:
    """(field, types) of the field that lists the type of each layer; types None if there is none."""
    name, value = field_value(text, "layer_types")
    if value is not None or recurrence_of(text["model_type"]) is None:
        return name, value
    for name in ("layers_block_type", "hybrid_override_pattern", "attn_type_list", "attn_layer_indices"):
        if (entry := text.get(name)) is not None:
            break
    else:
        return _kimi_types(text)
    if name == "hybrid_override_pattern":
        return name, [_PATTERN.get(kind, kind) for kind in str(entry)]
    if name == "attn_type_list":  # MiniMax
        return name, [FULL if kind else LINEAR for kind in sequence(name, entry)]
    if name == "attn_layer_indices":  # Bamba
        attention_layers = {*sequence(name, entry)}
        layers = count(text, "num_hidden_layers")
        return name, [FULL if number in attention_layers else LINEAR for number in range(layers)]
    return name, entry


def _kimi_types(text: Mapping[str, Any]) -> tuple[str, Any]:
    """Like `_types_field`, for Kimi Linear's own files, which number layers from 1."""
    config = mapping("linear_attn_config", text.get("linear_attn_config") or {})
    if "full_attn_layers" not in config:
        return "layer_types", None
    attention = {*sequence("full_attn_layers", config["full_attn_layers"])}
    layers = count(text, "num_hidden_layers")
    return "linear_attn_config", [FULL if number + 1 in attention else LINEAR for number in range(layers)]


def _hybrid_types(text: Mapping[str, Any], layers: int) -> list[str]:
    """Layer types of a model with recurrent layers according to its configuration class, if the file lists none."""
    kind, numbers = text["model_type"], range(layers)
    if kind == "falcon_h1":
        return [BOTH] * layers
    if kind == "minimax":
        return [LINEAR if number % 2 else FULL for number in numbers]
    if kind == "kimi_linear":
        return [LINEAR if number % 4 or not number else FULL for number in numbers]
    interval_field = next(
        (field for field in ("full_attention_interval", "layer_group_size") if text.get(field)), None
    )
    if interval_field is None:
        rule = f"the file does not name the attention layers of a {kind}"
        raise ConfigError("layer_types", None, rule, "write layer_types, as transformers 5 saves them")
    interval = count(text, interval_field)
    types = [LINEAR if (number + 1) % interval else FULL for number in numbers]
    if kind == "olmo_hybrid" and FULL not in types:
        types[-1] = FULL
    return types


def _inferred_types(text: Mapping[str, Any], layers: int) -> list[str]:
    """Layer types according to the configuration class, if the file has no `layer_types`."""
    kind, (field, window) = text["model_type"], field_value(text, SLIDING_WINDOW)
    if recurrence_of(kind) is not None:
        return _hybrid_types(text, layers)
    if kind in words("needs_layer_types"):
        rule = f"the file does not name the layers of a {kind} with a window"
        raise ConfigError("layer_types", None, rule, "write layer_types, as transformers 5 saves them")
    if kind == "llama4_text":
        interval = count(text, "no_rope_layer_interval")
        roped = text.get("no_rope_layers") or [(number + 1) % interval for number in range(layers)]
        return [CHUNKED if has_rope else FULL for has_rope in sequence("no_rope_layers", roped)]
    if window is None or (
        (kind in words("switched") or "use_sliding_window" in text) and not text.get("use_sliding_window")
    ):
        return [FULL] * layers
    if kind in words("switched"):
        full_count = min(count(text, "max_window_layers"), layers)
        return [FULL] * full_count + [SLIDING] * (layers - full_count)
    return [SLIDING] * layers if kind in words("sliding") else _every_nth_full(text, layers, field, window)


def _every_nth_full(text: Mapping[str, Any], layers: int, field: str, window: Any) -> list[str]:
    """Full attention in one layer of each group of layers: the last, or the first as in ModernBERT."""
    kind = text["model_type"]
    defaults = table("defaults").get(kind, {})
    if "global_attn_every_n_layers" in defaults:
        interval = count(text, "global_attn_every_n_layers")
        return [SLIDING if number % interval else FULL for number in range(layers)]
    if "sliding_window_pattern" not in defaults:
        rule = f"the file does not name the layers of a {kind} with this window"
        raise ConfigError(field, window, rule, "write layer_types, as transformers 5 saves them")
    interval = count(text, "sliding_window_pattern")
    return [SLIDING if (number + 1) % interval else FULL for number in range(layers)]
