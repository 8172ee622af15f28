"""The data of a Hugging Face `config.json`: what it says and leaves out, as transformers has it.

Written after the configuration classes of transformers 5.23: files of older releases lack what these fill in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypedDict

from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, suggestion

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
WINDOW_OF = MappingProxyType({SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"})
_DTYPES = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"})
_LEGACY = MappingProxyType({"attention": FULL})  # of layer types, by their name before transformers 5
# What a file may leave out, by model_type, as transformers has it. pattern: every so many layers one is full.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
        "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2},
        "gemma3_text": {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_208,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
        },
        "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
        "llama4_text": {"head_dim": 128, "attention_chunk_size": 8192, "no_rope_layer_interval": 4},
        "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
        "olmo3": {"sliding_window": 4096, "sliding_window_pattern": 4},
        "qwen3": {"head_dim": 128},
    }
)
_ALL_SLIDE = ("ministral", "mistral", "mixtral", "phi3", "phimoe", "starcoder2")  # where they have a window
_SWITCHED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")  # by use_sliding_window, from max_window_layers on
# Fields of models with layers that are no attention, choose their keys as they run, or differ in their heads.
_STRANGE = ("attn_layer_period", "global_head_dim", "index_topk", "layers_block_type", "mamba_d_state")


def is_config(data: Any) -> bool:
    """Whether this is the data of a `config.json` of Hugging Face, and none of this package's own."""
    return isinstance(data, Mapping) and ("model_type" in data or "num_attention_heads" in data)


class ModelFields(TypedDict):
    """Fields of `ir.model.Model`."""

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None
    dtype: str
    hidden: int
    ffn: int
    layers: int | dict[str, int]


def model_fields(config: Mapping[str, Any]) -> ModelFields:
    """What planning must know of the layers. Attention kinds are the distinct layer types; where there is one, `layers`
    is a number. Of MLA the heads as training has them: as many of K as of Q. Raises ConfigError."""
    text = text_config(config)
    heads, hidden = count(text, "num_attention_heads"), count(text, "hidden_size")
    kinds = Counter(layer_types(text))
    kv_heads, head_dim, v_head_dim = _widths(text, heads, hidden)
    return {
        "q_heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "dtype": _dtype(text, config),
        "hidden": hidden,
        "ffn": count(text, "intermediate_size"),
        "layers": dict(sorted(kinds.items())) if len(kinds) > 1 else kinds.total(),
    }


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part about the language model, with what its class fills in."""
    nested = config.get("text_config")
    own = nested if isinstance(nested, Mapping) else config
    kind = own.get("model_type") or f"{config.get('model_type')}text_config"
    found = {**_DEFAULTS.get(str(kind), {}), **own, "model_type": kind}
    for field in _STRANGE:
        if found.get(field) is not None:
            rule = f"a model of type {kind} has layers that are not planned"
            raise ConfigError(field, found[field], rule, "write a model file for the layers that are")
    return found


def count(text: Mapping[str, Any], field: str) -> int:
    if text.get(field) is None:
        rule = f"a config of type {text['model_type']} must say it"
        raise ConfigError(field, None, rule, "write it down, or write a model file (q_heads, kv_heads, …)")
    return integer(field, text[field])


def _widths(text: Mapping[str, Any], heads: int, hidden: int) -> tuple[int, int, int | None]:
    """KV heads, head dim, head dim of V (None: equal)."""
    if text.get("qk_nope_head_dim") is not None:  # MLA
        both = count(text, "qk_nope_head_dim") + count(text, "qk_rope_head_dim")
        return heads, both, count(text, "v_head_dim")
    kv_heads = heads if text.get("num_key_value_heads") is None else count(text, "num_key_value_heads")
    return kv_heads, hidden // heads if text.get("head_dim") is None else count(text, "head_dim"), None


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    held = (part.get(field) for part in (text, config) for field in ("dtype", "torch_dtype"))
    name = str(next((found for found in held if found is not None), "bfloat16")).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError("dtype", name, "attention is not planned in it", suggestion(name, _DTYPES))
    return _DTYPES[name]


def layer_types(text: Mapping[str, Any]) -> list[str]:
    """One a layer. Raises ConfigError where one is not planned, or it cannot be told."""
    layers, told = count(text, "num_hidden_layers"), text.get("layer_types")
    found = _inferred(text, layers) if told is None else [_LEGACY.get(str(kind), str(kind)) for kind in told]
    if len(found) != layers:
        rule = f"there must be one for each of the {layers} layers"
        raise ConfigError("layer_types", f"{len(found)} types", rule, "correct the config")
    for kind in found:
        if kind not in (FULL, SLIDING, CHUNKED):
            remedy = f"there is {FULL}, {SLIDING}, {CHUNKED}; write a model file for the layers that are"
            raise ConfigError("layer_types", kind, "layers of this type are not planned", remedy)
    return found


def _inferred(text: Mapping[str, Any], layers: int) -> list[str]:
    """What the configuration class makes where the file has no `layer_types`."""
    kind, window = text["model_type"], text.get("sliding_window")
    if kind == "llama4_text":
        every = count(text, "no_rope_layer_interval")
        roped = text.get("no_rope_layers") or [(number + 1) % every for number in range(layers)]
        return [CHUNKED if has_rope else FULL for has_rope in roped]
    if window is None or (kind in _SWITCHED and not text.get("use_sliding_window")):
        return [FULL] * layers
    if kind in _SWITCHED:
        below = min(count(text, "max_window_layers"), layers)
        return [FULL] * below + [SLIDING] * (layers - below)
    if kind in _ALL_SLIDE:
        return [SLIDING] * layers
    if "sliding_window_pattern" not in _DEFAULTS.get(kind, {}):
        rule = f"which layers of a {kind} have this window is not said"
        raise ConfigError("sliding_window", window, rule, "write layer_types, as transformers 5 saves them")
    every = count(text, "sliding_window_pattern")
    return [SLIDING if (number + 1) % every else FULL for number in range(layers)]
