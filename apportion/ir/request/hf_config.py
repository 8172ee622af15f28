"""Models and masks from a Hugging Face `config.json`, read as data, without transformers or torch.

    {"model_type": "gemma3", "text_config": {…, "layer_types": ["sliding_attention", …, "full_attention"]}}
      ──► Model(…, layers={"full_attention": 5, "sliding_attention": 29})
          {"full_attention": causal(), "sliding_attention": sliding_window(1024)}

`hf_fields` fills in omitted fields; the tables of `hf_layers` refuse unsupported layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from apportion.ir.errors import ConfigError
from apportion.ir.masks.spec import Mask
from apportion.ir.masks.windows import Causal, Chunked, Full, SlidingWindow
from apportion.ir.request.hf_fields import (
    BOTH,
    CHUNKED,
    FULL,
    SLIDING,
    SLIDING_WINDOW,
    WINDOW_OF,
    attention_types,
    count,
    layer_types,
    model_fields,
    text_config,
)
from apportion.ir.request.hf_layers import words
from apportion.ir.request.hf_recurrent import recurrent_kinds
from apportion.ir.request.model import Model


def model_of(config: Mapping[str, Any]) -> Model:
    """The model of a config. Attention kinds are the distinct layer types; with a single one, `layers` is a number. KV
    rows of MLA are latent rows. Raises ConfigError."""
    return Model(**model_fields(config), recurrent=recurrent_kinds(config))


def masks_of(config: Mapping[str, Any]) -> Mask | dict[str, Mask] | None:
    """The mask of each attention kind of `model_of`; if there is only one kind, its mask, or None for a causal mask,
    the default everywhere. These are the checkpoint's own masks: a trainer must add documents or trees itself. Raises
    ConfigError."""
    text = text_config(config)
    flags = {
        "use_bidirectional_attention": bool(text.get("use_bidirectional_attention")),
        "is_causal": text.get("is_causal") is False,
    }
    for field in filter(flags.__getitem__, flags):
        rule = "tokens see later ones, by a rule specific to the model"
        raise ConfigError(field, text[field], rule, "give masks= to the loader, or --mask to a command")
    masks = {kind: _mask(text, kind) for kind in sorted(set(attention_types(text)))}
    if len(masks) > 1:
        return masks
    (only,) = masks.values()
    return None if isinstance(only, Causal) else only


def windows_of(config: Mapping[str, Any]) -> list[int | None]:
    """Each layer's window, in tokens up to and including the row itself: -1 for no limit, None for chunked layers and
    layers without attention. Raises ConfigError."""
    text = text_config(config)
    fixed = {FULL: -1, BOTH: -1}
    return [count(text, SLIDING_WINDOW) if kind == SLIDING else fixed.get(kind) for kind in layer_types(text)]


def vocabulary_fields(config: Mapping[str, Any], overrides: Collection[str] = ()) -> dict[str, Any]:
    """Training fields `vocab` and `tied`, except those in `overrides`. Raises ConfigError."""
    text = text_config(config)
    tie_settings = (part.get("tie_word_embeddings") for part in (text, config))
    tied = next((bool(setting) for setting in tie_settings if setting is not None), _ties(text["model_type"]))
    if "vocab" not in overrides and text.get("vocab_size") is None:
        rule = f"a config of type {text['model_type']} must have it"
        raise ConfigError("vocab_size", None, rule, "add it, or set `vocab` of the training")
    vocab = {} if "vocab" in overrides else {"vocab": count(text, "vocab_size")}
    return vocab if "tied" in overrides else {**vocab, "tied": tied}


def _ties(kind: str) -> bool:
    return kind in words("tied") or kind in words("encoders") - words("untied")


def _mask(text: Mapping[str, Any], kind: str) -> Mask:
    is_encoder = text["model_type"] in words("encoders") and not text.get("is_decoder")
    if kind == FULL:
        return Full() if is_encoder else Causal()
    # tokens up to and including the query, in a chunk, or on each side in an encoder
    size = count(text, WINDOW_OF[kind])
    if kind == CHUNKED:
        return Chunked(size)
    return SlidingWindow(size + 1, size) if is_encoder else SlidingWindow(size)
