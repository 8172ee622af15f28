"""Refuses Hugging Face configs whose layers are neither plain softmax attention nor a recurrence that is planned, by
field and by model type.

A field is refused if its name speaks of attention, kinds of layers or state, unless it is listed as one that
planning reads or may leave aside, or its value switches it off. Model types whose classes of transformers 5.23 do
something else without a field that says so are listed by type (`hf_types.toml`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from apportion.ir.errors import ConfigError


def table(name: str) -> Any:
    """A table of `hf_types.toml`, which says what each is."""
    return _tables()[name]


@cache
def words(name: str) -> frozenset[str]:
    """The words of a list of `hf_types.toml`."""
    return frozenset(table(name).split())


@cache
def _tables() -> dict[str, Any]:
    import tomllib

    return tomllib.loads(Path(__file__).with_name("hf_types.toml").read_text(encoding="utf-8"))


_SPEAKS = re.compile(
    "attn|attention|layers?_type|mixer|ssm|mamba|conv|linear|recurr|lru|rwkv|retention|window|chunk|slid|swa_|local|global"
    "|hybrid|pattern|_period|interval|index_|indexer|sparse|state|share|sharing|cross|encoder|causal|prefix|compress"
    "|lightning|delta|kda|mask|alibi|head|per_layer|stride|memory|mem_|lsh|cycle|block|layer_group|sink|directional"
    "|every_n|_idxs|layer_ids"
)
_REMEDY = "write a model file (q_heads, kv_heads, …) for the layers of softmax attention"


def check_layers(text: Mapping[str, Any], idle: Collection[str]) -> None:
    """Refuses a config with layers that are not planned, or with a field about that which is not understood. idle:
    pattern fields that are read, or need not be. Raises ConfigError."""
    kind = text["model_type"]
    for reason, listed in table("reasons").items():
        for field in listed.split():
            if _is_on(field, text.get(field)) and not _of_recurrence(kind, field):
                raise ConfigError(field, text[field], f"a model of type {kind} {reason}", _REMEDY)
    for reason, listed in table("types").items():
        if not {kind, f"{kind}_text"}.isdisjoint(listed.split()):
            raise ConfigError("model_type", kind, f"a model of this type {reason}", _REMEDY)
    for field, value in text.items():
        understood = field in words("understood") or field in idle or _of_recurrence(kind, field)
        if _SPEAKS.search(field.lower()) and not understood and _is_on(field, value):
            rule = f"not understood of a model of type {kind}: it may change what its layers attend to"
            raise ConfigError(field, value, rule, _REMEDY)


def recurrence_of(kind: str) -> str | None:
    """Which recurrence layers of a model type have, by the table `recurrent` of `hf_types.toml`; None without any."""
    named = {kind, f"{kind}_text"}
    families = ("gated_delta_net", "kimi_delta", "mamba2", "lightning")
    return next((name for name in families if not named.isdisjoint(table("recurrent")[name].split())), None)


def _of_recurrence(kind: str, field: str) -> bool:
    """Whether a type has recurrent layers that are planned, and the field is about these."""
    known = table("recurrent")
    own = field in known["fields"].split() or field.startswith(tuple(known["prefixes"].split()))
    return own and recurrence_of(kind) is not None


def _is_on(field: str, value: Any) -> bool:
    off = table("neutral").get(field, ())
    if isinstance(value, list | tuple):
        return any(item not in off for item in value)
    return bool(value) and value not in off
