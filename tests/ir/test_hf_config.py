"""Models and masks of Hugging Face configs, as their files are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apportion.ir.errors import ConfigError
from apportion.ir.masks.spec import Mask
from apportion.ir.masks.windows import Causal, Chunked, SlidingWindow
from apportion.ir.request.hf_config import check_dense, head_fields, masks_of, model_of
from apportion.ir.request.model import Model

LLAMA = """{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}"""
QWEN3 = """{"model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32,
  "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128, "max_window_layers": 36, "sliding_window": null,
  "use_sliding_window": false, "torch_dtype": "bfloat16"}"""
QWEN2 = """{"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
  "num_hidden_layers": 24, "num_key_value_heads": 2, "max_window_layers": 21, "sliding_window": 32768,
  "use_sliding_window": false, "torch_dtype": "float16"}"""
GEMMA2 = """{"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8,
  "num_hidden_layers": 26, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
  "torch_dtype": "float32"}"""
GEMMA3 = """{"model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"num_attention_heads": 16},
  "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
    "sliding_window": 1024}}"""
GPT_OSS = """{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
  "num_hidden_layers": 4, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "dtype": "bfloat16",
  "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}"""
MISTRAL = """{"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 8, "sliding_window": 4096, "torch_dtype": "bfloat16"}"""
DEEPSEEK = """{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
  "num_hidden_layers": 61, "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
  "qk_rope_head_dim": 64, "v_head_dim": 128, "torch_dtype": "bfloat16"}"""
LLAMA4 = """{"model_type": "llama4", "text_config": {"model_type": "llama4_text", "hidden_size": 5120,
  "intermediate_size": 8192, "num_attention_heads": 40, "num_hidden_layers": 48, "num_key_value_heads": 8,
  "head_dim": 128, "attention_chunk_size": 8192, "no_rope_layers": [], "torch_dtype": "bfloat16"}}"""

TWO = ("full_attention", "sliding_attention")


def slide(window: int) -> dict[str, Mask]:
    return dict(zip(TWO, (Causal(), SlidingWindow(window)), strict=True))


CASES: dict[str, tuple[str, Model, Any]] = {
    "llama": (LLAMA, Model(32, 8, 128, None, "bf16", 4096, 14336, 32), None),
    "qwen3": (QWEN3, Model(32, 8, 128, None, "bf16", 2560, 9728, 36), None),
    "qwen2": (QWEN2, Model(14, 2, 64, None, "fp16", 896, 4864, 24), None),
    "gemma2": (
        GEMMA2,
        Model(8, 4, 256, None, "fp32", 2304, 9216, dict(zip(TWO, (13, 13), strict=True))),
        slide(4096),
    ),
    "gemma3": (
        GEMMA3,
        Model(8, 4, 256, None, "bf16", 2560, 10240, dict(zip(TWO, (5, 29), strict=True))),
        slide(1024),
    ),
    "gpt-oss": (
        GPT_OSS,
        Model(64, 8, 64, None, "bf16", 2880, 2880, dict(zip(TWO, (2, 2), strict=True))),
        slide(128),
    ),
    "mistral": (MISTRAL, Model(32, 8, 128, None, "bf16", 4096, 14336, 32), SlidingWindow(4096)),
    "deepseek": (DEEPSEEK, Model(128, 128, 192, 128, "bf16", 7168, 18432, 61), None),
    "llama4": (
        LLAMA4,
        Model(40, 8, 128, None, "bf16", 5120, 8192, {"chunked_attention": 36, "full_attention": 12}),
        {"chunked_attention": Chunked(8192), "full_attention": Causal()},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_configs_are_read(name: str, tmp_path: Path) -> None:
    text, model, masks = CASES[name]
    (tmp_path / "config.json").write_text(text)
    found = Model.load(tmp_path / "config.json")
    assert (found, found.layers) == (model, model.layers)
    assert masks_of(json.loads(text)) == masks
    if isinstance(masks, dict):
        assert isinstance(found.layers, dict)
        assert list(found.layers) == list(masks) == sorted(masks)


def changed(text: str, **fields: Any) -> dict[str, Any]:
    return {**json.loads(text), **fields}


def test_a_window_that_is_null_or_switched_off_is_none() -> None:
    assert masks_of(changed(MISTRAL, sliding_window=None)) is None
    without = {key: value for key, value in json.loads(MISTRAL).items() if key != "sliding_window"}
    assert masks_of(without) == SlidingWindow(4096)  # as the class of the model has it
    switched = changed(QWEN2, use_sliding_window=True)
    assert masks_of(switched) == slide(32768)
    assert model_of(switched).layers == {"full_attention": 21, "sliding_attention": 3}


def test_heads_and_dtypes_that_are_not_said_have_their_usual_values() -> None:
    bare = changed(LLAMA, num_key_value_heads=None, torch_dtype=None, head_dim=None)
    assert (model_of(bare).kv_heads, model_of(bare).head_dim, model_of(bare).dtype) == (32, 128, "bf16")
    assert model_of(changed(LLAMA, dtype="torch.float32")).dtype == "fp32"  # wins over torch_dtype


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (changed(LLAMA, layer_types=["linear_attention"] * 32), "linear_attention"),
        (changed(LLAMA, layer_types=["full_attention"] * 31), "31 types"),
        (changed(LLAMA, sliding_window=4096), "which layers of a llama"),
        (changed(LLAMA, num_attention_heads=None), "num_attention_heads"),
        (changed(LLAMA, torch_dtype="float8_e4m3fn"), "float8_e4m3fn"),
        (changed(DEEPSEEK, model_type="deepseek_v32", index_topk=2048), "index_topk"),
        ({"model_type": "t5"}, "num_attention_heads"),
    ],
)
def test_what_cannot_be_planned_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        model_of(config)


def test_models_that_look_ahead_need_masks_of_their_own() -> None:
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        masks_of(changed(GEMMA2, use_bidirectional_attention=True))


def test_vocabulary_and_ties_are_the_config_s() -> None:
    assert head_fields(changed(LLAMA, vocab_size=128256)) == {"vocab": 128256, "tied": False}
    assert head_fields(changed(LLAMA, vocab_size=32000, tie_word_embeddings=True))["tied"]
    assert head_fields(changed(GEMMA2, vocab_size=256000)) == {
        "vocab": 256000,
        "tied": True,
    }  # as its class has it
    nested = changed(GEMMA3, tie_word_embeddings=False)
    assert head_fields(nested, {"vocab"}) == {"tied": False}
    assert head_fields(nested)["vocab"] == 262_208
    with pytest.raises(ConfigError, match="vocab_size"):
        head_fields(changed(LLAMA, vocab_size=None))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            changed(LLAMA, model_type="mixtral", num_local_experts=8),
            "num_local_experts = 8: .* experts are not priced",
        ),
        (changed(QWEN3, model_type="qwen3_moe", num_experts=128), "num_experts = 128"),
        (changed(DEEPSEEK, n_routed_experts=256), "n_routed_experts = 256"),
        (json.loads(DEEPSEEK), r"kv_lora_rank = 512: .* low rank \(MLA\)"),
    ],
)
def test_experts_and_projections_of_low_rank_are_not_priced(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_dense(config)


def test_dense_layers_are_priced() -> None:
    check_dense(json.loads(QWEN2))
    check_dense(changed(LLAMA, num_local_experts=1, q_lora_rank=None))
