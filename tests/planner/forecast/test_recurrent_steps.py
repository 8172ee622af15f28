"""Recurrent layers in forecasts: parameters of published models, and a step against its closed form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import apportion as ap
from apportion import Batch, Cluster, ConfigError, Degrees, Hardware, Model, Parallelism, Recurrent, Training
from apportion.ir.request.hf_config import model_of
from apportion.planner.forecast.layers import Layers, linear_parameters, model_flops, whole_parameters
from apportion.planner.forecast.memory import activations, kept_bytes
from apportion.planner.forecast.recurrent import attention_layers, layer_count, product_parameters
from apportion.planner.forecast.result import ForecastRow
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.simulate import recurrent as prices, simulate

H100 = Hardware.load("h100")
KIND = Recurrent(heads=4, key_heads=2, key_dim=32, value_dim=64, conv=4, layers=3)
SMALL = Model(8, 2, 64, hidden=512, ffn=1024, layers=1, recurrent={"linear": KIND})
CHANNELS, VALUES = 2 * 2 * 32 + 4 * 64, 4 * 64
RECURRENT = 512 * (CHANNELS + VALUES + 2 * 4) + VALUES * 512
ATTENTION, FFN = 512 * 64 * (8 + 2 + 2 + 8), 3 * 512 * 1024
TRAINING = Training(vocab=1000, sharding="ddp", recompute="none")


def form(recipe: str = "contiguous", ping_pong: bool = False, **degrees: int) -> Parallelism:
    return Parallelism(find_recipe(recipe), Degrees(**degrees), ping_pong=ping_pong)


WHOLE = form()


def row(batch: Batch, cluster: Cluster, training: Training = TRAINING, form: Any = WHOLE) -> ForecastRow:
    return ap.forecast(batch, cluster, SMALL, [form], training).rows[0]


def qwen3_next(layers: int, **own: Any) -> dict[str, Any]:
    widths = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": layers}
    experts = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    return {"intermediate_size": 5120, **widths, **experts, **own}


LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
KIMI = """{"model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 32,
  "num_key_value_heads": 32, "num_hidden_layers": 27, "num_experts": 256, "num_experts_per_token": 8,
  "num_shared_experts": 1, "moe_intermediate_size": 1024, "first_k_dense_replace": 1, "vocab_size": 163840,
  "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32}}"""
GRANITE = """{"model_type": "granitemoehybrid", "hidden_size": 4096, "intermediate_size": 768, "num_hidden_layers":
  40, "shared_intermediate_size": 1536, "num_attention_heads": 32, "num_key_value_heads": 8, "mamba_d_state": 128,
  "num_local_experts": 72, "num_experts_per_tok": 10, "vocab_size": 100352, "tie_word_embeddings": true}"""
MIXERS = ["attention" if number % 10 == 5 else "mamba" for number in range(40)]
MINIMAX = """{"model_type": "minimax_text_01", "hidden_size": 6144, "intermediate_size": 9216, "num_attention_heads":
  64, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 80, "num_local_experts": 32,
  "num_experts_per_tok": 2, "vocab_size": 200064}"""
NANO = """{"model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856, "num_attention_heads": 32,
  "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
  "ssm_state_size": 128, "conv_kernel": 4, "n_routed_experts": 128, "num_experts_per_tok": 6, "vocab_size": 131072,
  "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1,
  "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"}"""
FALCON = """{"model_type": "falcon_h1", "hidden_size": 5120, "intermediate_size": 21504, "num_attention_heads": 20,
  "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 72, "mamba_d_ssm": 4096, "mamba_n_heads": 32,
  "mamba_d_state": 256, "mamba_n_groups": 2, "vocab_size": 261120}"""
NEXT = qwen3_next(48, model_type="qwen3_next", num_experts=512, num_experts_per_tok=10, vocab_size=151936)
FIVE = qwen3_next(
    40, model_type="qwen3_5_moe_text", num_experts=256, num_experts_per_tok=8, vocab_size=248320
)


@pytest.mark.parametrize(
    ("config", "layers", "total", "active"),
    [
        (NEXT, 12, 80, 3),
        (FIVE, 10, 35, 3),
        (json.loads(KIMI) | LATENT, 7, 48, 3),
        (json.loads(GRANITE) | {"layer_types": MIXERS}, 4, 32, 9),
        (json.loads(MINIMAX) | {"attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10}, 10, 456, 45.9),
        (json.loads(NANO), 6, 31.6, 3.2),
        (json.loads(FALCON), 72, 33.6, 33.6),
    ],
)
def test_parameter_counts_match_published_ones(config: Any, layers: int, total: float, active: float) -> None:
    """In billions: Qwen3-Next-80B-A3B, Qwen3.5-35B-A3B, Kimi-Linear-48B-A3B, Granite-4.0-H-Small, MiniMax-Text-01,
    Nemotron-3-Nano-30B-A3B, Falcon-H1-34B. The gate of Qwen's attention, 8 million per layer, is left out; some
    publishers count head and embedding as active."""
    model, training = model_of(config), Training.from_data({}, config)
    experts, head = training.experts, model.hidden * training.vocab / 1e9
    assert attention_layers(model) == layers
    counted = model, training, layer_count(model)
    whole, per_token = (whole_parameters(*counted, n) / 1e9 for n in (experts.count, experts.active))
    assert whole + (1 if training.tied else 2) * head == pytest.approx(total, rel=0.025)
    assert 0.95 * per_token <= active <= per_token + 2 * head


def test_a_step_of_one_rank_equals_its_closed_form() -> None:
    """Three recurrent layers and one of attention, each with an FFN, on two whole documents."""
    tokens, batch = 4096, Batch.from_lengths([3000, 1096])
    found = row(batch, Cluster(1, 1)).parts()
    rate, rows_us = H100.linear_tflops.value * 1e6, H100.rate_gbs("rows_gbs") * 1e3
    parameters = 3 * RECURRENT + ATTENTION + 4 * FFN
    assert found["linear"] * 1e6 == pytest.approx(3 * 2 * parameters * tokens / rate)
    chunk, key, value = prices.CHUNK, 32, 64
    flops = 2 * chunk * (key + value) + 4 * key * value + 2 * chunk * (2 * key + value) + 2 * key * value
    kernel = 3 * 4 * flops * tokens / (rate * prices.SHARE)
    assert found["recurrent"] * 1e6 == pytest.approx(kernel * (1 + prices.BACKWARD))
    numbers = 4 * (8 * 512 + 3 * 1024) + 2 * (8 + 2) * 64 + 3 * (2 * CHANNELS + 3 * VALUES)
    assert found["rows"] * 1e6 == pytest.approx(3 * 2 * numbers * tokens / rows_us)
    recomputed = row(batch, Cluster(1, 1), replace(TRAINING, recompute="selective")).parts()
    more = 2 * (parameters / rate + numbers / rows_us) * tokens
    assert recomputed["recomputation"] * 1e6 == pytest.approx(kernel + more)


def test_recurrences_of_cut_documents_are_simulated() -> None:
    batch, cluster = Batch.from_lengths([6000, 2192]), Cluster(1, 4)
    made = simulate(ap.plan(batch, cluster, SMALL, recipe="contiguous", hardware=H100), H100)
    found = row(batch, cluster).parts()
    assert found["recurrent"] * 1e3 == pytest.approx(3 * made.recurrent_ms)
    assert found["attention"] * 1e3 == pytest.approx(made.forward_ms + made.backward_ms)
    halves = row(batch, cluster, form=form(pipeline=2)).parts()  # two of four layers per stage
    assert 0 < halves["recurrent"] < found["recurrent"]


def test_flops_and_memory_are_those_of_the_mean_layer() -> None:
    layers = Layers(H100, SMALL, TRAINING)
    assert linear_parameters(SMALL, TRAINING, 0.0) == (3 * RECURRENT + ATTENTION) / 4 + FFN
    products = 6 * (3 * RECURRENT + ATTENTION + 4 * FFN + 512 * 1000)
    states = 3 * 3 * prices.token_flops(KIND)
    assert model_flops(SMALL, TRAINING, 4, 100, 50) == 100 * (products + states) + 6 * 50 * 8 * 128
    attention, recurrent = 2 * (8 + 2 + 2) * 64 + 8 * (2 * 64 + 4), 2 * (2 * CHANNELS + 3 * VALUES)
    kept = 4 * 2 * 512 + (attention + 3 * recurrent) / 4 + 3 * 2 * 1024
    assert kept_bytes(layers, "none") == kept
    assert kept_bytes(layers, "selective") == 2 * 512 + 8 * (2 * 64 + 4) / 4
    states = 2 * 4 * 32 * 64 / prices.CHUNK
    memory = activations(layers, 4, 1000, attention_bytes=0.0)
    assert memory.attention == 1000 * (3 * 2 * 512 + 2 * recurrent + states)


def test_ungated_ffns_in_some_layers_are_counted() -> None:
    """Like Nemotron-H: four mixers, and two FFNs of two matrices."""
    training = replace(TRAINING, ffns=2, gated=False)
    layers = Layers(H100, SMALL, training)
    assert layers.linear_parameters == (3 * RECURRENT + ATTENTION + 2 * 2 * 512 * 1024) / 4
    numbers = 6 * 4 * 512 + 2 * 2 * 1024 + 2 * (8 + 2) * 64 + 3 * (2 * CHANNELS + 3 * VALUES)
    assert layers.rows_us(1) == pytest.approx(2 * numbers / 4 / (H100.rate_gbs("rows_gbs") * 1e3))
    with pytest.raises(ConfigError, match=r"^training.ffns = 5: must be at most the number of layers, 4"):
        whole_parameters(SMALL, replace(TRAINING, ffns=5), 4, 0)


def test_per_channel_decays_are_low_rank_projections() -> None:
    kind = Recurrent(heads=4, key_dim=32, value_dim=32, gate="diagonal", conv=4)
    gate = 512 * 32 + 32 * 4 * 32
    assert product_parameters(kind, 512) == 512 * (4 * 4 * 32 + 4) + 2 * gate


@pytest.mark.parametrize(
    ("form", "training", "text"),
    [
        (form("distca", ping_pong=True), {}, "forecasts do not support ping-pong with recurrent layers"),
        (form("ulysses"), {"chunks": 2, "offload": True, "recompute": "full"}, "states of recurrent layers"),
        (form(tensor=8), {}, r"must divide heads of model.recurrent.linear \(4\)"),
    ],
)
def test_options_without_a_price_are_refused(form: Parallelism, training: dict[str, Any], text: str) -> None:
    found = row(Batch.from_lengths([8192]), Cluster(1, 8), replace(TRAINING, **training), form)
    assert found.reason is not None
    assert text.replace("\\", "") in found.reason


def test_ranks_of_a_tensor_parallel_group_share_recurrent_heads() -> None:
    kind = form(tensor=4).rank_model(SMALL).recurrent["linear"]
    assert (kind.heads, kind.key_heads) == (1, 1)
