"""The table of docs/compatibility.md matches the guard of `hf.enable`, which accepts or refuses models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from apportion.ir.errors import ConfigError
from apportion.trainer import hf

PAGE = Path(__file__).parents[2] / "docs/compatibility.md"
WIDTHS = ("hidden_size", "n_embd", "word_embed_proj_dim")
#: small values of config fields, used if a config has the field
SMALL = {
    **dict.fromkeys(WIDTHS, 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id"), 1),
    "vocab_size": 128,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "attn_layer_indices": [1],
    "pad_token_id": 0,
    "eos_token_id": 2,
}
#: one model per family of layers; the whole table takes minutes
TRIED = [
    "bamba",
    "bart",
    "bloom",
    "cohere2",
    "deepseek_v3",
    "doge",
    "ernie4_5",
    "gemma2",
    "glm4",
    "gpt2",
    "gpt_neox",
    "granitemoeshared",
    "jamba",
    "kimi_linear",
    "llama4_text",
    "minimax",
    "ministral3",
    "mixtral",
    "mpt",
    "nemotron",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "phimoe",
    "qwen2_moe",
    "qwen3_next",
    "roberta",
    "rwkv",
]


def table() -> dict[str, str]:
    text = (
        PAGE.read_text(encoding="utf-8").split("<!-- table: hugging face -->\n")[1].split("<!-- end -->")[0]
    )
    rows = [line.strip("|\n ").split("|") for line in text.splitlines()]
    return {row[0].strip(): row[1].strip() for row in rows[2:]}


def tiny(kind: str) -> Any:
    """A model of two layers, of different types if its architecture has several."""
    form = transformers.CONFIG_MAPPING[kind]
    text = form().get_text_config()
    small = {name: value for name, value in SMALL.items() if hasattr(text, name)}
    if hasattr(text, "qk_rope_head_dim"):
        small |= {"num_key_value_heads": 4}
        small.pop("head_dim", None)
    listed = getattr(type(text), type(text).attribute_map.get("layer_types", "layer_types"), None)
    if (types := getattr(text, "layer_types", None)) and not isinstance(listed, property):
        small["layer_types"] = (list(dict.fromkeys(types)) * 2)[-2:]
    torch.manual_seed(0)
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])(type(text)(**small))
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(std=0.05)
    return model


@pytest.mark.parametrize("kind", TRIED)
def test_the_compatibility_table_matches_the_guard(kind: str) -> None:
    model, verdict = tiny(kind), "right"
    try:
        hf.enable(model)
    except ConfigError:
        verdict = "refused"
    assert table()[kind] == verdict


def test_the_compatibility_table_has_at_least_forty_models() -> None:
    assert len(table()) >= 40
    assert set(table().values()) == {"right", "refused"}
