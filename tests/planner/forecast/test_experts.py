"""Experts in forecasts: parameters of published models, and every part against its closed form on small cases."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import apportion as ap
from apportion import Batch, Cluster, ConfigError, Degrees, Hardware, Model, Parallelism, Training
from apportion.cli.printed import forecast as printed
from apportion.ir.request.hf_config import masks_of, model_of
from apportion.planner.forecast.choices import search_space
from apportion.planner.forecast.collectives import gather_us
from apportion.planner.forecast.experts import ExpertRanks, ExpertRows, Experts
from apportion.planner.forecast.layers import Layers, attention_parameters, whole_parameters
from apportion.planner.forecast.memory import Activations, activations, attention_row, kept_bytes, memory
from apportion.planner.forecast.result import ForecastRow
from apportion.planner.recipe.recipes import find_recipe

H100 = Hardware.load("h100")
SMALL = Model(q_heads=8, kv_heads=2, head_dim=64, hidden=512, ffn=1024, layers=4)
CLUSTER = Cluster(2, 4)
BATCH = Batch.from_lengths([6000, 3000, 2000, 1000, 4384])  # 2,048 tokens per rank
EXPERTS = Experts(count=16, active=2, width=256, shared=128, dense=1, imbalance=1.5)
SHARED = {"vocab": 1000, "sharding": "ddp", "recompute": "none"}


def training_with(**extra: Any) -> Training:
    return Training(**{**SHARED, "experts": EXPERTS, **extra})


def form(recipe: str = "fcp", context: int | None = None, **degrees: int) -> Parallelism:
    packing: Any = None if context is None else "order"
    return Parallelism(find_recipe(recipe), Degrees(**degrees), context, packing)


def row(form: Parallelism, training: Training, **extra: Any) -> ForecastRow:
    batch, model = extra.pop("batch", BATCH), extra.pop("model", SMALL)
    found = ap.forecast(batch, CLUSTER, model, [form], training).rows[0]
    assert found.reason is None, found.reason
    return found


# ------------------------------------------------------------------------------------------------- published models

QWEN3, GPT_OSS, DEEPSEEK, GLM = map(
    json.loads,
    (
        """{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
  "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
  "num_hidden_layers": 48, "vocab_size": 151936}""",
        """{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
  "num_key_value_heads": 8, "num_experts_per_tok": 4, "vocab_size": 201088, "sliding_window": 128}""",
        """{"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128,
  "num_key_value_heads": 128, "num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8,
  "n_shared_experts": 1, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "q_lora_rank": 1536,
  "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280}""",
        """{"model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288, "num_attention_heads": 96,
  "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 92, "n_routed_experts": 160, "n_shared_experts": 1,
  "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "first_k_dense_replace": 3, "vocab_size": 151552}""",
    ),
)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (QWEN3, 30.5, 3.3),
        (GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}, 20.9, 3.6),
        (GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}, 116.8, 5.1),
        (DEEPSEEK, 671, 37),
        (GLM, 355, 32),
    ],
)
def test_parameter_counts_match_published_ones(config: dict[str, Any], total: float, active: float) -> None:
    """In billions. Some publishers count the embedding as active, and GLM an extra layer that predicts a further
    token."""
    model, training = model_of(config), Training.from_data({}, config)
    layers = model.layers if isinstance(model.layers, int) else sum(model.layers.values())
    matrix = model.hidden * training.vocab / 1e9
    whole, per_token = (
        whole_parameters(model, training, layers, routed) / 1e9
        for routed in (training.experts.count, training.experts.active)
    )
    assert whole + 2 * matrix == pytest.approx(total, rel=0.01)
    assert 0.97 * (per_token + matrix) <= active <= 1.01 * (per_token + 2 * matrix)


def test_low_rank_projections_are_counted_as_separate_products() -> None:
    """DeepSeek-V3 has W_DQ, W_UQ, W_DKV with the rotary part, W_UK, W_UV, W_O."""
    model, training = model_of(DEEPSEEK), Training.from_data({}, DEEPSEEK)
    queries = 7168 * 1536 + 1536 * 128 * 192
    keys = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    assert attention_parameters(model, training) == queries + keys + 128 * 128 * 7168
    direct = replace(training, q_rank=0)
    assert attention_parameters(model, direct) == 7168 * 128 * 192 + keys + 128 * 128 * 7168
    ranks = replace(model, q_heads=16)  # the down projections are replicated on every rank
    whole = 7168 * (1536 + 512 + 64)
    split, all_heads = (attention_parameters(one, training) - whole for one in (ranks, model))
    assert split == all_heads / 8


# ------------------------------------------------------------------------------------------------- closed forms


def test_a_layer_is_the_mean_of_layers_with_and_without_experts() -> None:
    layers = Layers(H100, SMALL, training_with(), sparse=0.75, degree=4)
    attention, router, expert = 512 * 10 * 128, 512 * 16, 3 * 512
    linear = attention + 0.25 * expert * 1024 + 0.75 * (router + expert * 128)
    assert layers.linear_parameters == linear
    assert layers.expert_parameters == 0.75 * 4 * expert * 256
    assert layers.linear_us(100) == pytest.approx(100 * 2 * linear / (H100.linear_tflops.value * 1e6))
    moved = 2 * (3 * 256 + 4 * 512) / (H100.memory_gbs.value * 1e3)
    products = 2 * expert * 256 / (H100.linear_tflops.value * 1e6)
    assert layers.experts_us(100) == pytest.approx(0.75 * 100 * (products + moved))


def test_expert_rows_follow_the_tokens_of_the_ranks_that_share_them() -> None:
    tokens = np.array([100, 300, 200, 200])
    rows = ExpertRows.of(EXPERTS, tokens, 2, 1, spread=1.5)
    assert rows == (2 * 300, 2 * 1.5 * 200, 2 * 200 * 2 / 16, 300 / 200)
    assert ExpertRows.of(EXPERTS, tokens, 8, 1, 1.0) == (600, 400, 2 * 200 * 8 / 16, 1.5)  # two groups
    assert ExpertRows.of(EXPERTS, tokens, 8, 4, 1.0) == (150, 100, 2 * 200 / 4 * 8 / 16, 1.5)
    padded = ExpertRows.of(replace(EXPERTS, capacity=1.25), tokens, 2, 1, 1.25)
    assert padded[:2] == (2 * 300 * 1.25,) * 2  # all ranks wait for the fullest
    assert [EXPERTS.spread(degree, excess) for degree, excess in ((1, 2.0), (8, 0.0), (8, 2.0))] == [1, 1, 2]


def test_an_all_to_all_takes_the_slower_of_both_links() -> None:
    cluster = Cluster(4, 8, intra_gbs=450.0, inter_gbs=50.0, intra_latency_us=3.0, inter_latency_us=7.0)
    once = replace(EXPERTS, active=8, dispatch="node")
    sent, reached = 1200 * 1024, 4 * (1 - 0.75**8)  # nodes of a token's eight experts
    for degree, experts, us in (
        (4, EXPERTS, sent * 3 / 4 / 450e3 + 3),
        (32, EXPERTS, sent * 3 / 4 / 50e3 + 7),
        (32, once, sent / 8 * reached * 3 / 4 / 50e3 + 7),
        (32, replace(once, nodes=1), max(sent / 8 * 3 / 4 / 50e3, sent * 7 / 8 / 450e3) + 7),
        (1, EXPERTS, 0),
    ):
        rows = ExpertRows(1000.0, 1200.0, 0.0, 1.0)
        assert ExpertRanks(cluster, degree, 32).dispatch_us(experts, rows, 1024) == pytest.approx(us)


def test_ranks_with_the_same_experts_are_spread_over_nodes() -> None:
    cluster = Cluster(4, 8, nics_per_node=4)
    for degree, nodes, per_node in ((1, 4, 8), (4, 4, 2), (8, 4, 1), (16, 2, 1), (32, 1, 1)):
        copies = ExpertRanks(cluster, degree, 32).replica_cluster
        assert (copies.nodes, copies.ranks_per_node) == (nodes, per_node)
        assert copies.inter_gbs_per_rank == cluster.inter_gbs_per_rank


def test_memory_of_experts_depends_on_the_expert_degree() -> None:
    layers, none = Layers(H100, SMALL, training_with(), sparse=1.0, degree=4), Activations(0, 0, 0, 0, 0)
    expert = 4 * 3 * 512 * 256
    whole = memory(layers, 4, 8, 2.0, none, copies=2)
    parameters = 4 * (layers.parameters + expert) + 2 * 512 * 1000
    assert whole.weights == 2 * parameters
    assert (whole.gradients, whole.optimizer) == (4 * parameters, 12 * parameters)
    sharded = memory(replace(layers, training=training_with(sharding="zero1")), 4, 8, 2.0, none, copies=2)
    assert sharded.optimizer == 12 * ((4 * layers.parameters + 2 * 512 * 1000) / 8 + 4 * expert / 2)
    full = replace(layers, training=training_with(sharding="fsdp"))
    alone = memory(full, 4, 8, 0.0, none, copies=1)  # one rank has them all: nothing is gathered
    assert alone.weights == 2 * (4 * layers.parameters / 8 + 4 * expert + 2 * layers.parameters)


def test_activations_of_experts_count_received_and_returned_rows() -> None:
    layers = Layers(H100, SMALL, training_with(), sparse=0.75, degree=4, spread=1.5)
    dense = Layers(H100, SMALL, Training(**SHARED))
    routed = 2 * 1.5
    numbers = 0.75 * (3 * (128 + routed * 256) + 2 * routed * 512) + 0.25 * 3 * 1024
    assert kept_bytes(layers, "none") - kept_bytes(dense, "none") == pytest.approx(2 * (numbers - 3 * 1024))
    most = max(4 * 1024, 4 * (128 + routed * 256) + 2 * routed * 512)
    found, without = (activations(one, 4, 100, 0.0).feed_forward for one in (layers, dense))
    assert found - without == pytest.approx(2 * (most - 4 * 1024) * 100)


# ------------------------------------------------------------------------------------------------- whole steps


def test_the_parts_of_a_step_with_experts_equal_their_closed_form() -> None:
    training, chosen = training_with(), form("ulysses", expert=4)
    parts, dense = row(chosen, training).parts(), row(form("ulysses"), Training(**SHARED)).parts()
    layers = Layers(H100, SMALL, training, sparse=0.75, degree=4, spread=1.5)
    received = 2048 * 2 * 1.5
    assert parts["experts"] == pytest.approx(3 * 4 * layers.experts_us(received) / 1e6)
    sent = ExpertRanks(CLUSTER, 4, 8).dispatch_us(EXPERTS, ExpertRows(4096, received, 0, 1), 1024)
    assert parts["all_to_all"] == pytest.approx(2 * 2 * 3 * sent / 1e6)  # three of four layers
    assert parts["linear"] == pytest.approx(3 * 4 * layers.linear_us(2048) / 1e6)
    assert parts["attention"] == dense["attention"]
    assert dense["experts"] == dense["all_to_all"] == 0
    recomputed = row(chosen, training_with(recompute="selective")).parts()["recomputation"]
    forward = parts["linear"] / 3 + parts["rows"] / 3 + parts["experts"] / 3 + parts["all_to_all"] / 2
    assert recomputed == pytest.approx(forward)


def test_gradients_of_experts_are_reduced_among_their_copies() -> None:
    training, chosen = training_with(overlap=False), form("ulysses", expert=4)
    layers = Layers(H100, SMALL, training, sparse=0.75, degree=4)
    each = gather_us(layers.parameters * 4, CLUSTER)
    each += gather_us(layers.expert_parameters * 4, ExpertRanks(CLUSTER, 4, 8).replica_cluster)
    vocabulary = gather_us(2 * layers.vocabulary_parameters * 4, CLUSTER)
    assert row(chosen, training).parts()["data_parallel"] == pytest.approx(2 * (4 * each + vocabulary) / 1e6)


def test_tensor_parallel_ranks_gather_nothing_for_routed_experts() -> None:
    chosen, experts = form("ulysses", tensor=2, expert=4), replace(EXPERTS, dense=0)
    with_shared, without = (
        row(chosen, training_with(experts=replace(experts, shared=shared))) for shared in (128, 0)
    )
    assert without.parts()["tensor_parallel"] == pytest.approx(with_shared.parts()["tensor_parallel"] / 2)


def test_groups_that_share_experts_wait_for_each_other_in_each_layer() -> None:
    """Two groups, one with a long sequence in the first microbatch, the other in the second."""
    lengths = [4096, 2048, 2048, 2048, 2048, 4096]
    batch, training = Batch.from_lengths(lengths), training_with()
    forms = [form("ulysses", 4, microbatches=2, expert=expert) for expert in (4, 8)]
    separate, together = (row(one, training, batch=batch) for one in forms)
    assert together.parts()["attention"] > 1.05 * separate.parts()["attention"]


def test_expert_imbalance_adds_its_own_range() -> None:
    found = row(form("ulysses", expert=4), training_with())
    nominal, even, uneven = found.seconds[0], *found.seconds[-2:]
    assert even < nominal < uneven
    assert uneven - nominal == pytest.approx(nominal - even, rel=0.2)
    assert len(row(form("ulysses"), Training(**SHARED)).seconds) == len(found.seconds) - 2


def test_a_capacity_turns_uneven_tokens_into_padding() -> None:
    batch, even = Batch.from_lengths([9000, 3000, 2000, 1000, 1384]), replace(EXPERTS, imbalance=1)
    trainings = (training_with(experts=replace(even, capacity=capacity)) for capacity in (None, 1.0))
    free, padded = (row(form("fcp", expert=8), training, batch=batch) for training in trainings)
    rows, more = free.experts(), padded.experts()
    assert rows["uneven"] == more["uneven"] >= 1
    assert more["received"] == pytest.approx(rows["received"] * rows["uneven"])
    assert padded.parts()["experts"] == pytest.approx(free.parts()["experts"] * rows["uneven"])


def test_a_search_tries_expert_degrees_and_plans_once_for_all() -> None:
    found = search_space(CLUSTER, SMALL, 4, ["ulysses"], experts=replace(EXPERTS, shared=0))
    degrees = {(one.tensor, one.pipeline, one.expert) for one in found}
    assert {expert for tensor, pipeline, expert in degrees if (tensor, pipeline) == (1, 1)} == {1, 2, 4, 8}
    assert {one.canonical_form(CLUSTER).expert for one in found} == {1}
    assert {one.expert for one in search_space(CLUSTER, SMALL, 4, ["ulysses"])} == {1}


def test_the_command_prints_expert_rows_and_the_effect_of_imbalance() -> None:
    phrases = {None: "imbalance 1.5 assumed, dropless", 1.25: "padded to 1.25 times an even share"}
    for capacity, phrase in phrases.items():
        training = training_with(experts=replace(EXPERTS, capacity=capacity))
        record = ap.forecast(BATCH, CLUSTER, SMALL, [form("ulysses", expert=4)], training).record()
        facts = {"batches": 1, "tokens": BATCH.tokens, "workload": "lengths"}
        text = " ".join(" ".join(str(view()).split()) for view in printed.views(record | facts, False))
        assert "an expert gets 1,024 rows per microbatch on average" in text
        assert phrase in text
    assert record["parameters"]["total"] > record["parameters"]["active"]


@pytest.mark.parametrize(
    "config", [QWEN3, GPT_OSS | {"num_hidden_layers": 2, "num_local_experts": 32}, DEEPSEEK, GLM]
)
def test_steps_of_published_models_are_forecast(config: dict[str, Any]) -> None:
    batch, training = Batch.from_lengths([6000, 2192], masks_of(config)), Training.from_data({}, config)
    (found,) = ap.forecast(batch, Cluster(1, 8), model_of(config), [form("fcp", expert=8)], training).rows
    assert found.reason is None
    assert all(found.parts()[name] > 0 for name in ("attention", "linear", "experts", "all_to_all"))


@pytest.mark.parametrize(
    ("degrees", "training", "message"),
    [
        ({"expert": 2}, {"experts": Experts()}, "^parallelism.expert = 2: requires a model with experts"),
        ({"expert": 3}, {}, r"^parallelism.expert = 3: must divide the experts of a layer \(16\)"),
        ({"expert": 16}, {}, "^parallelism.expert = 16: must divide the 8 ranks of a stage"),
        (
            {},
            {"experts": replace(EXPERTS, dense=5)},
            "^training.experts.dense = 5: must be at most .* layers, 4",
        ),
        ({"tensor": 2}, {"experts": replace(EXPERTS, shared=3)}, "^parallelism.tensor = 2: .*experts.shared"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_by_name(degrees: dict, training: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        form("ulysses", **degrees).check(CLUSTER, SMALL, 4, training_with(**training).experts)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"count": 8, "active": 9, "width": 4}, "^training.experts.active = 9: must be from 1 to count"),
        ({"count": 8, "active": 2}, "^training.experts.width = 0"),
        ({"width": 4}, "^training.experts.width = 4: requires layers with experts"),
        ({"imbalance": 0.5}, "^training.experts.imbalance = 0.5: must be a number from 1"),
        ({"many": 1}, "^training.experts = 'many'"),
    ],
)
def test_inconsistent_experts_are_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Training.from_data({"experts": extra})


def test_options_that_are_not_priced_with_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^training.experts.count = 16: FFNs in tiles"):
        training_with(mlp_tile=64)
    with pytest.raises(ConfigError, match=r"^parallelism.ping_pong = True"):
        replace(form(), ping_pong=True).check(CLUSTER, SMALL, 4, EXPERTS)
    with pytest.raises(ConfigError, match=r"^cluster.speeds"):
        form().check(replace(CLUSTER, speeds=(1.0,) * 7 + (0.5,)), SMALL, 4, EXPERTS)
    ranks = training_with(experts=Experts(), kv_rank=64, rope_dim=16)
    model = replace(SMALL, kv_heads=8)
    found = ap.forecast(BATCH, CLUSTER, model, [form("upipe")], ranks).rows[0]
    assert found.reason is not None
    assert found.reason.startswith("training.kv_rank = 64: upipe computes Q, K and V")


def test_latent_expansion_is_counted_as_attention() -> None:
    """W_UK and W_UV run where attention is computed; a token keeps its latent row, of 512 + 64 numbers."""
    model, training = model_of(DEEPSEEK), Training.from_data({}, DEEPSEEK)
    moved, expanded = (Layers(H100, one, training) for one in (model, model.expanded))
    flops = 2 * 512 * 128 * (128 + 128)
    us = 1e3 * flops / (H100.linear_tflops.value * 1e6)
    assert expanded.linear_us(1e3) - moved.linear_us(1e3) == pytest.approx(us)
    assert attention_row(moved) == 2 * (128 * 192 + 512 + 64)
