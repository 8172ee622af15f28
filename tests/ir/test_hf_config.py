"""Models and masks read from Hugging Face configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apportion import ConfigError, Latent, Model, Recurrent
from apportion.ir.masks.spec import Mask
from apportion.ir.masks.windows import Causal, Chunked, Full, SlidingWindow
from apportion.ir.request.hf_config import masks_of, model_of, vocabulary_fields, windows_of
from apportion.ir.request.hf_experts import layer_fields

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

GPT2 = """{"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
  "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "summary_type": "cls_index", "vocab_size": 50257}"""
OPT = """{"model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
  "attention_dropout": 0.0, "word_embed_proj_dim": 768, "prefix": "</s>", "torch_dtype": "float16"}"""
FALCON = """{"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32,
  "alibi": false, "multi_query": true, "new_decoder_architecture": false, "parallel_attn": true}"""
FALCON_40B = """{"model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8,
  "num_hidden_layers": 60, "multi_query": true, "new_decoder_architecture": true, "parallel_attn": true}"""
MPT = """{"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 32, "expansion_ratio": 4,
  "attn_config": {"alibi": true, "alibi_bias_max": 8, "attn_type": "multihead_attention", "prefix_lm": false}}"""
GPT_NEO = """{"model_type": "gpt_neo", "hidden_size": 2048, "num_heads": 16, "num_layers": 4, "intermediate_size": null,
  "attention_layers": ["global", "local", "global", "local"], "attention_types": [[["global", "local"], 2]],
  "window_size": 256}"""
MODERNBERT = """{"model_type": "modernbert", "hidden_size": 768, "intermediate_size": 1152, "num_attention_heads": 12,
  "num_hidden_layers": 22, "global_attn_every_n_layers": 3, "local_attention": 128, "global_rope_theta": 160000.0,
  "local_rope_theta": 10000.0, "torch_dtype": "float32"}"""
BERT = """{"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
  "num_hidden_layers": 12, "attention_probs_dropout_prob": 0.1, "torch_dtype": "float32"}"""
DECODER = BERT[:-1] + ', "is_decoder": true}'
MINIMAX_M2 = """{"model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_attention_heads": 48,
  "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 3, "attn_type_list": [1, 1, 1],
  "num_local_experts": 256, "use_mtp": true, "num_mtp_modules": 3}"""

TWO = ("full_attention", "sliding_attention")


def both(full: Any, sliding: Any) -> dict[str, Any]:
    return dict(zip(TWO, (full, sliding), strict=True))


def causal_and_window(window: int) -> dict[str, Mask]:
    return both(Causal(), SlidingWindow(window))


CASES: dict[str, tuple[str, Model, Any]] = {
    "llama": (LLAMA, Model(32, 8, 128, None, "bf16", 4096, 14336, 32), None),
    "qwen3": (QWEN3, Model(32, 8, 128, None, "bf16", 2560, 9728, 36), None),
    "qwen2": (QWEN2, Model(14, 2, 64, None, "fp16", 896, 4864, 24), None),
    "gemma2": (GEMMA2, Model(8, 4, 256, None, "fp32", 2304, 9216, both(13, 13)), causal_and_window(4096)),
    "gemma3": (GEMMA3, Model(8, 4, 256, None, "bf16", 2560, 10240, both(5, 29)), causal_and_window(1024)),
    "gpt-oss": (GPT_OSS, Model(64, 8, 64, None, "bf16", 2880, 2880, both(2, 2)), causal_and_window(128)),
    "mistral": (MISTRAL, Model(32, 8, 128, None, "bf16", 4096, 14336, 32), SlidingWindow(4096)),
    "gpt2": (GPT2, Model(12, 12, 64, None, "bf16", 768, 3072, 12), None),
    "opt": (OPT, Model(12, 12, 64, None, "fp16", 768, 3072, 12), None),
    "falcon": (FALCON, Model(71, 1, 64, None, "bf16", 4544, 18176, 32), None),
    "falcon 40b": (FALCON_40B, Model(128, 8, 64, None, "bf16", 8192, 32768, 60), None),
    "mpt": (MPT, Model(32, 32, 128, None, "bf16", 4096, 16384, 32), None),
    "gpt-neo": (GPT_NEO, Model(16, 16, 128, None, "bf16", 2048, 8192, both(2, 2)), causal_and_window(256)),
    # |i - j| <= 64
    "modernbert": (
        MODERNBERT,
        Model(12, 12, 64, None, "fp32", 768, 1152, both(8, 14)),
        both(Full(), SlidingWindow(65, 64)),
    ),
    "bert": (BERT, Model(12, 12, 64, None, "fp32", 768, 3072, 12), Full()),
    "bert as a decoder": (DECODER, Model(12, 12, 64, None, "fp32", 768, 3072, 12), None),
    "minimax m2": (MINIMAX_M2, Model(48, 8, 128, None, "bf16", 3072, 1536, 3), None),
    "deepseek": (
        DEEPSEEK,
        Model(128, 1, 192, 128, "bf16", 7168, 18432, 61, latent=Latent(rank=512, rope=64)),
        None,
    ),
    "llama4": (
        LLAMA4,
        Model(40, 8, 128, None, "bf16", 5120, 8192, {"chunked_attention": 36, "full_attention": 12}),
        {"chunked_attention": Chunked(8192), "full_attention": Causal()},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_models_and_masks_are_read_from_configs(name: str, tmp_path: Path) -> None:
    text, model, masks = CASES[name]
    (tmp_path / "config.json").write_text(text)
    loaded = Model.load(tmp_path / "config.json")
    assert (loaded, loaded.layers) == (model, model.layers)
    assert masks_of(json.loads(text)) == masks
    if isinstance(masks, dict):
        assert isinstance(loaded.layers, dict)
        assert list(loaded.layers) == list(masks) == sorted(masks)


def changed(text: str, **fields: Any) -> dict[str, Any]:
    return {**json.loads(text), **fields}


GRANITE = LLAMA.replace('"llama"', '"granitemoehybrid"')


def test_a_null_or_disabled_window_is_no_window() -> None:
    assert masks_of(changed(MISTRAL, sliding_window=None)) is None
    without = {key: value for key, value in json.loads(MISTRAL).items() if key != "sliding_window"}
    assert masks_of(without) == SlidingWindow(4096)  # the default of the model's class
    enabled = changed(QWEN2, use_sliding_window=True)
    assert masks_of(enabled) == causal_and_window(32768)
    assert model_of(enabled).layers == {"full_attention": 21, "sliding_attention": 3}


def test_missing_heads_and_dtypes_have_their_defaults() -> None:
    bare = model_of(changed(LLAMA, num_key_value_heads=None, torch_dtype=None, head_dim=None))
    assert (bare.kv_heads, bare.head_dim, bare.dtype) == (32, 128, "bf16")
    assert model_of(changed(LLAMA, dtype="torch.float32")).dtype == "fp32"  # wins over torch_dtype


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (changed(LLAMA, layer_types=["linear_attention"] * 32), "linear_attention"),
        (changed(LLAMA, layer_types=["full_attention"] * 31), "31 types"),
        (changed(LLAMA, sliding_window=4096), "does not name the layers of a llama"),
        (changed(LLAMA, num_attention_heads=None), "num_attention_heads"),
        (changed(LLAMA, torch_dtype="float8_e4m3fn"), "float8_e4m3fn"),
        (changed(DEEPSEEK, model_type="deepseek_v32", index_topk=2048), "index_topk"),
        ({"model_type": "t5"}, "model_type"),
        (changed(GPT2, n_head=None), "must have it or n_head or n_heads"),
        (changed(GPT2, n_head="12"), "^n_head = '12': must be an integer"),
        (changed(GPT2, n_embd=2**25), "^n_embd = 33554432: must be in"),
        (
            changed(LLAMA, num_key_value_heads=5),
            r"^num_key_value_heads = 5: must divide num_attention_heads \(32\)",
        ),
        (changed(LLAMA, layer_types="full_attention"), "^layer_types = 'full_attention': must be a list"),
        ({"model_type": "gemma3", "text_config": [1]}, "^text_config = .*must be a mapping"),
        (changed(LLAMA, model_type="deepseek_v3"), "^qk_nope_head_dim = None"),
        (changed(LLAMA, model_type="nemotron_h"), "^layer_types = None: .*attention layers of a nemotron_h"),
        (
            changed(GRANITE, layer_types=["mamba"] * 32),
            "^layer_types = '32 layers': no layer has softmax attention",
        ),
        (
            changed(LLAMA, model_type="nemotron_h", layers_block_type=["gru"] * 32),
            "^layers_block_type = 'gru': layers of this type are not supported",
        ),
    ],
)
def test_unsupported_configs_are_refused_by_field(config: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        model_of(config)


LINEAR = {f"linear_{name}": value for name, value in (("num_value_heads", 32), ("num_key_heads", 16))}
LINEAR |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
GATED = (32, 128, 128, 16)
MAMBA = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 8}
#: model type -> fields that differ from a Llama's, number of attention layers, the recurrence
HYBRIDS: dict[str, tuple[dict[str, Any], int, Recurrent]] = {
    "qwen3_next": ({**LINEAR, "full_attention_interval": 4}, 8, Recurrent(*GATED, conv=4, layers=24)),
    "qwen3_5_text": (
        {"layer_types": ["linear_attention", "full_attention"] * 16}, 16, Recurrent(*GATED, conv=4, layers=16),
    ),
    "qwen3_5_moe_text": ({"linear_conv_kernel_dim": 2}, 8, Recurrent(*GATED, conv=2, layers=24)),
    "olmo_hybrid": ({}, 8, Recurrent(32, 96, 192, conv=4, layers=24)),
    "kimi_linear": (
        {
            "linear_attn_config": {
                "full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7],
                "head_dim": 64, "num_heads": 16, "short_conv_kernel_size": 3,
            },
            "num_hidden_layers": 8,
        },
        2,
        Recurrent(16, 64, 64, gate="diagonal", conv=3, layers=6),
    ),
    "bailing_hybrid": (
        {"layer_group_size": 8, "head_dim": 96},
        4,
        Recurrent(32, 96, 96, gate="diagonal", conv=4, layers=28),
    ),
    "nemotron_h": (
        {
            "hybrid_override_pattern": "M-M*-ME", "num_hidden_layers": 7, "mamba_num_heads": 16, "mamba_head_dim": 32,
            "n_groups": 4, "ssm_state_size": 64, "conv_kernel": 4, "attention_head_dim": 128,
        },
        1,
        Recurrent(16, 64, 32, 4, delta=False, conv=4, layers=3),
    ),
    "granitemoehybrid": (
        {"layer_types": ["mamba", "mamba", "mamba", "attention"] * 8, **MAMBA},
        8,
        Recurrent(128, 128, 64, 8, delta=False, conv=4, layers=24),
    ),
    "bamba": (
        {"attn_layer_indices": [3, 9], "mamba_d_head": "auto", "mamba_d_conv": 3},
        2,
        Recurrent(128, 256, 64, 1, delta=False, conv=3, layers=30),
    ),
    "falcon_h1": ({}, 32, Recurrent(128, 256, 8, 1, delta=False, conv=4, layers=32)),
    "minimax": ({}, 16, Recurrent(32, 128, 128, delta=False, layers=16)),
    "minimax_m1": (
        {"attn_type_list": [0] * 7 + [1], "num_hidden_layers": 8}, 1, Recurrent(32, 128, 128, delta=False, layers=7),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", HYBRIDS)
def test_recurrent_layers_are_read(kind: str) -> None:
    fields, layers, recurrent = HYBRIDS[kind]
    data = changed(LLAMA, model_type=kind, **fields)
    loaded = model_of(data)
    assert (loaded.layers, loaded.recurrent) == (layers, {"linear_attention": recurrent})
    assert masks_of(data) is None
    windows = windows_of(data)
    assert (len(windows), windows.count(-1)) == (data["num_hidden_layers"], layers)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("qwen5", "full_attention_interval", 4),
        ("kimi", "linear_attn_config", {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}),
        ("nemotron", "hybrid_override_pattern", "M-M-M-M*-M-M-M-M-M*-M-"),
        ("minimax_m2", "attn_type_list", [0, 0, 0, 0, 0, 0, 0, 1]),
        ("jamba", "attn_layer_period", 8),
        ("recurrent_gemma", "block_types", ["recurrent", "recurrent", "attention"]),
        ("zamba2", "layers_block_type", ["mamba", "hybrid"]),
        ("falcon_h2", "mamba_d_state", 256),
        ("mamba", "state_size", 16),
        ("lfm2", "conv_L_cache", 3),
        ("minicpm", "sparse_config", {"topk": 64}),
        ("hunyuan", "use_cla", True),
        ("gemma3n_text", "num_kv_shared_layers", 15),
        ("gemma3n_text", "altup_num_inputs", 4),
        ("gemma4_text", "global_head_dim", 512),
        ("nemotron-nas", "block_configs", [{"attention": {"no_op": True}}]),
        ("mllama_text_model", "cross_attention_layers", [3, 8]),
        ("mpt", "attn_config.prefix_lm", True),
        ("diffllama", "lambda_std_dev", 0.1),
        ("made_up", "yarn_mixer_stride", 3),  # neither of a known type nor with a known field
        ("made_up", "multi_query_attention", True),
    ],
)
def test_other_layers_than_attention_are_refused(kind: str, field: str, value: Any, tmp_path: Path) -> None:
    name = field.rpartition(".")[2]
    fields = {name: value} if name == field else {"attn_config": {name: value}}
    data = changed(LLAMA, model_type=kind, **fields)
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=f"^{name} = .*model of type {kind}"):
        Model.load(tmp_path / "config.json")


@pytest.mark.parametrize(
    "kind", ["qwen4_exp", "jamba", "mamba2", "mimo_v2_flash", "longcat_flash", "jetmoe", "xlstm"]
)
def test_model_types_with_unsupported_layers_are_refused_by_type(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"^model_type = '{kind}'"):
        model_of(changed(LLAMA, model_type=kind))


def test_disabled_and_irrelevant_fields_are_ignored() -> None:
    disabled = {"sparse_config": None, "cross_attention_hidden_size": None, "chunk_size_feed_forward": 0}
    irrelevant = {"attention_bias": True, "attn_logit_softcapping": 50.0, "num_nextn_predict_layers": 1}
    more = {"prefix_lm": False, "sep_token_id": 5}
    assert model_of(changed(LLAMA, **disabled, **irrelevant, **more)) == CASES["llama"][1]


def test_a_pattern_is_read_only_without_layer_types() -> None:
    pattern = changed(LLAMA, model_type="exaone4", sliding_window_pattern="LLLG")
    with pytest.raises(ConfigError, match=r"^sliding_window_pattern = 'LLLG'"):
        model_of(pattern)
    assert model_of({**pattern, "layer_types": ["full_attention"] * 32}) == CASES["llama"][1]


def test_models_that_look_ahead_need_their_own_masks() -> None:
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        masks_of(changed(GEMMA2, use_bidirectional_attention=True))


def test_vocabulary_and_tied_weights_are_read_from_the_config() -> None:
    assert vocabulary_fields(changed(LLAMA, vocab_size=128256)) == {"vocab": 128256, "tied": False}
    assert vocabulary_fields(changed(LLAMA, vocab_size=32000, tie_word_embeddings=True))["tied"]
    # the default of its class
    assert vocabulary_fields(changed(GEMMA2, vocab_size=256000)) == {"vocab": 256000, "tied": True}
    assert vocabulary_fields(json.loads(GPT2)) == {"vocab": 50257, "tied": True}
    nested = changed(GEMMA3, tie_word_embeddings=False)
    assert vocabulary_fields(nested, {"vocab"}) == {"tied": False}
    assert vocabulary_fields(nested)["vocab"] == 262_208
    with pytest.raises(ConfigError, match="vocab_size"):
        vocabulary_fields(changed(LLAMA, vocab_size=None))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            changed(LLAMA, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2),
            (8, 2, 14336, 0, 0),
        ),
        (
            changed(QWEN3, model_type="qwen3_moe", num_experts=128, num_experts_per_tok=8)
            | {"moe_intermediate_size": 768, "mlp_only_layers": [1, 3], "decoder_sparse_step": 2},
            (128, 8, 768, 0, 20),
        ),
        (
            changed(DEEPSEEK, n_routed_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048)
            | {"n_shared_experts": 2, "first_k_dense_replace": 3},
            (256, 8, 2048, 4096, 3),
        ),
    ],
)
def test_experts_are_read_from_the_config(config: dict[str, Any], expected: tuple[int, ...]) -> None:
    names = ("count", "active", "width", "shared", "dense", "nodes")
    assert layer_fields(config)["experts"] == dict(zip(names, (*expected, 0), strict=True))


def test_low_rank_projections_are_read_from_the_config() -> None:
    found = layer_fields(changed(DEEPSEEK, q_lora_rank=1536))
    assert found == {"experts": {}, "q_rank": 1536, "kv_rank": 512, "rope_dim": 64}
    assert layer_fields(changed(LLAMA, num_local_experts=1, q_lora_rank=None)) == {"experts": {}}


ROUTED = changed(DEEPSEEK, n_routed_experts=256, moe_intermediate_size=2048, num_experts_per_tok=8)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            changed(LLAMA, model_type="dbrx", num_local_experts=16),
            "num_local_experts = 16: .* layers of a dbrx",
        ),
        (ROUTED, "first_k_dense_replace = None"),
        (ROUTED | {"mlp_layer_types": ["sparse"]}, "^mlp_layer_types = "),
        (changed(QWEN3, model_type="qwen3_moe", num_experts=128), "^moe_intermediate_size = None"),
        (
            changed(LLAMA, model_type="bailing_hybrid"),
            "^model_type = 'bailing_hybrid': its layers are planned, but",
        ),
    ],
)
def test_layers_that_a_forecast_does_not_support_are_named(config: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        layer_fields(config)
