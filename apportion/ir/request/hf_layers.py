"""Refuses Hugging Face configs with layers other than plain softmax attention and supported recurrences, by field and
by model type.

A field whose name mentions attention, layer kinds or state is refused unless it is listed as read or irrelevant, or its
value switches it off. Model types of transformers 5.23 that deviate without a field that reveals it are listed by type
(`hf_types.toml`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from apportion.ir.errors import ConfigError


def table(name: str) -> Any:
    """A table of `hf_types.toml`, described there."""
    return _tables()[name]


@cache
def words(name: str) -> frozenset[str]:
    """The words of a list of `hf_types.toml`."""
    return frozenset(table(name).split())


@cache
def _tables() -> dict[str, Any]:
    import tomllib

    return tomllib.loads(Path(__file__).with_name("hf_types.toml").read_text(encoding="utf-8"))


_ATTENTION_FIELD = re.compile(
    "attn|attention|layers?_type|mixer|ssm|mamba|conv|linear|recurr|lru|rwkv|retention|window|chunk|slid|swa_|local|global"
    "|hybrid|pattern|_period|interval|index_|indexer|sparse|state|share|sharing|cross|encoder|causal|prefix|compress"
    "|lightning|delta|kda|mask|alibi|head|per_layer|stride|memory|mem_|lsh|cycle|block|layer_group|sink|directional"
    "|every_n|_idxs|layer_ids"
)
_REMEDY = "write a model file (q_heads, kv_heads, …) for the softmax attention layers"


def check_layers(text: Mapping[str, Any], idle: Collection[str]) -> None:
    """Refuses a config with unsupported layers, or with an unknown field that may change them. idle: pattern fields
    that are read or irrelevant. Raises ConfigError."""
    kind = text["model_type"]
    for reason, names in table("reasons").items():
        for field in names.split():
            if _is_on(field, text.get(field)) and not _is_recurrent_field(kind, field):
                raise ConfigError(field, text[field], f"a model of type {kind} {reason}", _REMEDY)
    for reason, names in table("types").items():
        if not {kind, f"{kind}_text"}.isdisjoint(names.split()):
            raise ConfigError("model_type", kind, f"a model of this type {reason}", _REMEDY)
    for field, value in text.items():
        is_known = field in words("known_fields") or field in idle or _is_recurrent_field(kind, field)
        if _ATTENTION_FIELD.search(field.lower()) and not is_known and _is_on(field, value):
            rule = f"unknown field of a model of type {kind}: it may change its attention"
            raise ConfigError(field, value, rule, _REMEDY)


def recurrence_of(kind: str) -> str | None:
    """The recurrence of a model type, by the table `recurrent` of `hf_types.toml`; None if it has none."""
    names = {kind, f"{kind}_text"}
    families = ("gated_delta_net", "kimi_delta", "mamba2", "lightning")
    return next((name for name in families if not names.isdisjoint(table("recurrent")[name].split())), None)


def _is_recurrent_field(kind: str, field: str) -> bool:
    """True if a type has supported recurrent layers and the field describes them."""
    recurrent = table("recurrent")
    is_field = field in recurrent["fields"].split() or field.startswith(tuple(recurrent["prefixes"].split()))
    return is_field and recurrence_of(kind) is not None


def _is_on(field: str, value: Any) -> bool:
    neutral_values = table("neutral").get(field, ())
    if isinstance(value, list | tuple):
        return any(item not in neutral_values for item in value)
    return bool(value) and value not in neutral_values
