"""Forecasts: every part against a closed form on small cases, parts that add up, and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import apportion as ap
from apportion import Batch, Cluster, Degrees, Hardware, Model, Parallelism, Policy, Training, masks, simulate
from apportion.cli.printed import forecast as printed
from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.request.figures import Figure
from apportion.planner.cost import CostModel
from apportion.planner.forecast.attention import plan_attention
from apportion.planner.forecast.choices import recipe_parallelisms, search_space, static_grids
from apportion.planner.forecast.collectives import exposed_us, gather_us, reduce_us
from apportion.planner.forecast.grids import groups_of
from apportion.planner.forecast.host import copies
from apportion.planner.forecast.layers import Layers, model_flops
from apportion.planner.forecast.memory import Activations, activations, in_flight, kept_bytes, memory
from apportion.planner.forecast.result import ForecastRow
from apportion.planner.forecast.schedule import makespan_us, orders
from apportion.planner.forecast.step import PARTS, Setting, around_us
from apportion.planner.pack import Wlb
from apportion.planner.pipeline.feasibility import attention_bytes
from apportion.planner.problem import Problem
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.simulate.pair.run import turns_us
from tests.support.commands import Command

H100 = Hardware.load("h100")
SMALL = Model(q_heads=8, kv_heads=2, head_dim=64, hidden=512, ffn=1024, layers=4)
CLUSTER = Cluster(2, 4)
BATCH = Batch.from_lengths([6000, 3000, 2000, 1000, 4384])  # 2,048 tokens per rank


def one(form: Parallelism, training: Training | None = None, **extra: Any) -> ForecastRow:
    """The forecast of BATCH, or of another one."""
    batch = extra.pop("batch", BATCH)
    return ap.forecast([batch], CLUSTER, SMALL, [form], training or Training(vocab=1000), **extra).rows[0]


def refusal(*args: Any, **extra: Any) -> str:
    """The reason of a row that is refused."""
    reason = one(*args, **extra).reason
    assert reason is not None
    return reason


def parts_of(form: Parallelism, training: Training | None = None) -> dict[str, float]:
    found = one(form, training)
    assert found.reason is None, found.reason
    return found.parts()


def form(recipe: str = "fcp", **degrees: int) -> Parallelism:
    return Parallelism(find_recipe(recipe), Degrees(**degrees))


# ---------------------------------------------------------------------------------------------------- closed forms


def test_a_tensor_parallel_group_has_only_its_share_of_the_nics() -> None:
    """Two ranks for each of four NICs: a group of two has one NIC, of which each rank has half."""
    cluster = Cluster(2, 8, nics_per_node=4, inter_gbs=24.0)
    for tensor, nics, gbs in ((1, 4, 24.0), (2, 4, 12.0), (4, 2, 12.0), (8, 1, 12.0)):
        stage = form(tensor=tensor).stage(cluster)
        assert (stage.nics_per_node, stage.inter_gbs) == (nics, gbs)
        assert stage.nics_per_node * stage.inter_gbs * tensor == 4 * 24.0  # of a node
    for tensor in (1, 2, 4, 8):
        stage = form(tensor=tensor).stage(replace(cluster, nics_per_node=8))
        assert (stage.nics_per_node, stage.inter_gbs) == (8 // tensor, 24.0)


@pytest.mark.parametrize("nics", [1, 2, 3, 5, 6, 8, 16])
def test_a_rank_has_its_share_of_the_nics_under_any_degrees(nics: int) -> None:
    """Also holds if the number of NICs does not divide the ranks of a node, or ranks of other stages share the NICs."""
    cluster = Cluster(2, 8, nics_per_node=nics, inter_gbs=50.0)
    for tensor, pipeline in ((1, 1), (2, 1), (4, 1), (8, 1), (1, 4), (1, 8), (2, 4)):
        stage = form(tensor=tensor, pipeline=pipeline).stage(cluster)
        assert stage.inter_gbs_per_rank == pytest.approx(50 * min(1, nics / 8))
    assert form().stage(cluster) == cluster


def test_ping_pong_halves_add_only_the_time_that_nothing_hides() -> None:
    halves = replace(form("distca", tensor=2), ping_pong=True)
    training, group = Training(vocab=1000, recompute="none", sharding="ddp"), halves.stage(CLUSTER)
    model = halves.rank_model(SMALL)
    parts = Wlb(microbatches=2)(Problem(BATCH, group, model, Policy(halves.recipe), H100)).microbatches
    plans = [ap.plan(BATCH.take(own), group, model, "distca", hardware=H100) for own in parts]
    around = around_us(Setting(halves, CLUSTER, SMALL, training, H100), projects=False)
    turns = turns_us(*plans, CostModel(H100, model), around)
    tokens = np.sum([plan.layouts["attention"].rows_per_rank for plan in plans], 0).max()
    beyond = (us - sum(around[phase]) * tokens for (_, phase), us in turns.items())
    found, whole = parts_of(halves, training), parts_of(form("distca", tensor=2), training)
    assert found["attention"] == pytest.approx(SMALL.layers_of("default") * sum(beyond) / 1e6)
    layers = Layers(H100, model, training, 2)
    once = layers.linear_us(1) + layers.rows_us(1)
    tensor = layers.tensor_us(1, group) - layers.tensor_us(0, group)
    assert sum(around["forward"]) == pytest.approx(once + tensor)
    assert sum(around["backward"]) == pytest.approx(2 * once + tensor)
    for name in set(PARTS) - {"attention"}:
        assert found[name] == pytest.approx(whole[name], rel=0.1), name
    slow = replace(CLUSTER, inter_gbs=CLUSTER.inter_gbs / 8)
    forms = [halves, form("distca", tensor=2)]
    turns_s, whole_s = (row.seconds[0] for row in ap.forecast([BATCH], slow, SMALL, forms, training).rows)
    assert turns_s < whole_s


def test_each_part_of_a_step_equals_its_closed_form() -> None:
    """All parts written out for one small case."""
    plan = ap.plan(BATCH, CLUSTER, SMALL, recipe="fcp", hardware=H100)
    tokens = int(plan.layouts[plan.header.home_layout].rows_per_rank.max())
    simulated = simulate(plan, H100)
    found = parts_of(form(), Training(vocab=1000, recompute="full", sharding="ddp"))
    layers = 4
    products = 512 * ((8 + 2) * 2 * 64 + 3 * 1024)
    linear = 2 * products * tokens / (H100.linear_tflops.value * 1e12)
    byte_s = 1 / (H100.memory_gbs.value * 1e9)
    rows = tokens * 2 * (8 * 512 + 2 * (8 + 2) * 64 + 3 * 1024) * byte_s
    head = 2 * tokens * 1000 * 512 / (H100.linear_tflops.value * 1e12) + 3 * 2 * tokens * 1000 * byte_s
    attention = simulated.forward_ms / 1e3, simulated.backward_ms / 1e3
    assert found["attention"] == pytest.approx(layers * sum(attention))
    assert found["linear"] == pytest.approx(3 * layers * linear)
    assert found["rows"] == pytest.approx(3 * layers * rows)
    assert found["head"] == pytest.approx(3 * head)
    assert found["recomputation"] == pytest.approx(layers * (attention[0] + linear + rows))
    parameters = layers * (products + 2 * 512) + 2 * 1000 * 512
    assert found["optimizer"] == pytest.approx(parameters * (24 + 4 + 2) * byte_s)
    assert found["bubble"] == pytest.approx(0, abs=1e-12)
    assert found["tensor_parallel"] == found["remap"] == 0


def test_each_measured_rate_prices_only_its_own_work() -> None:
    training = Training(vocab=1000)
    half = Figure(H100.memory_gbs.value / 2, "measured")
    before = Layers(H100, SMALL, training)
    rates = dict.fromkeys(("rows_gbs", "loss_gbs", "optimizer_gbs", "memory_gbs"), half)
    after = Layers(replace(H100, **rates), SMALL, training)
    assert after.rows_us(100) == pytest.approx(2 * before.rows_us(100))
    assert after.optimizer_us(1e6) == pytest.approx(2 * before.optimizer_us(1e6))
    assert after.linear_us(100) == before.linear_us(100)
    for name, priced in (("rows_gbs", "rows_us"), ("optimizer_gbs", "optimizer_us"), ("loss_gbs", "head_us")):
        alone = Layers(replace(H100, **{name: half}), SMALL, training)
        works = ("rows_us", "optimizer_us", "head_us")
        slower = [work for work in works if getattr(alone, work)(1000) > getattr(before, work)(1000)]
        assert slower == [priced]


def test_backward_hides_all_gradients_except_one_layer_and_the_vocabulary() -> None:
    def all_reduce_us(parameters: int) -> float:
        inter = 4 * parameters * 1 / 2 / (4 * 50e3)  # four of eight NICs: one per rank
        intra = 4 * parameters * 3 / 4 / 450e3
        return 2 * (max(inter, intra) + 10 + 2 * 5)

    products = 512 * ((8 + 2) * 2 * 64 + 3 * 1024)
    found = parts_of(form(), Training(vocab=1000, sharding="ddp", recompute="none"))
    tokens = int(ap.plan(BATCH, CLUSTER, SMALL, recipe="fcp").layouts["attention"].rows_per_rank.max())
    layers = Layers(H100, SMALL, Training())
    behind = 2 * (layers.linear_us(tokens) + layers.rows_us(tokens))
    each = all_reduce_us(products + 2 * 512)
    assert each > behind  # so the links count
    expected = each + 3 * (each - behind) + all_reduce_us(2 * 1000 * 512)
    assert found["data_parallel"] == pytest.approx(expected / 1e6)
    alone = parts_of(form(), Training(vocab=1000, sharding="ddp", recompute="none", overlap=False))
    assert alone["data_parallel"] == pytest.approx((4 * each + all_reduce_us(2 * 1000 * 512)) / 1e6)
    assert {**alone, "data_parallel": 0} == {**found, "data_parallel": 0}


def test_without_overlap_the_head_is_exposed_too() -> None:
    """Exposed matrices: embedding and head of a single stage, one if they are tied, one at each end of a pipeline."""
    layers = Layers(H100, SMALL, Training(vocab=1000))
    for tied, matrices in ((False, 2), (True, 1)):
        training = Training(vocab=1000, tied=tied, sharding="fsdp", recompute="none", overlap=False)
        each = [gather_us(layers.parameters * size, CLUSTER) for size in (2, 4)]
        whole = sum(gather_us(1000 * 512 * size, CLUSTER) for size in (2, 4))
        assert parts_of(form(), training)["data_parallel"] == pytest.approx(
            (4 * (2 * each[0] + each[1]) + matrices * whole) / 1e6
        )
    even, stage = Batch.from_lengths([2048] * 16), form(pipeline=2).stage(CLUSTER)
    last = Training(vocab=1000, sharding="zero2", recompute="none", overlap=False)
    row = one(form(pipeline=2), last, batch=even)
    after = 2 * gather_us(layers.parameters * 2, stage) + gather_us(1000 * 512 * 2, stage)
    scattered = 2 * gather_us(layers.parameters * 4, stage) + gather_us(1000 * 512 * 4, stage)
    assert row.parts()["data_parallel"] == pytest.approx((after + 2 * scattered) / 1e6)


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_zero2_scatters_gradients_per_microbatch_and_gathers_weights_once(sharding: str) -> None:
    """ZeRO-2 keeps no full gradients, so it scatters those of every microbatch; transfers of vocabulary matrices are
    not hidden."""
    training = Training(vocab=1000, sharding=sharding, recompute="none")
    batches = {count: Batch.from_lengths([1024] * 16 * count) for count in (1, 2)}
    rows = (one(form(microbatches=count), training, batch=batch) for count, batch in batches.items())
    one_step, two = (row.parts() for row in rows)
    layers = Layers(H100, SMALL, training)
    scattered, gathered = (gather_us(layers.parameters * size, CLUSTER) for size in (4, 2))
    behind = layers.linear_us(2048) + layers.rows_us(2048)
    once = exposed_us(gathered, behind, 4) + gather_us(2 * 1000 * 512 * 2, CLUSTER)
    matrices = 2 if sharding == "zero1" else 1  # gradients of the head come first, and are hidden
    each = exposed_us(scattered, 2 * behind, 4) + gather_us(matrices * 1000 * 512 * 4, CLUSTER)
    assert one_step["data_parallel"] == pytest.approx((once + each) / 1e6)
    assert two["data_parallel"] == pytest.approx((once + each * (1 if sharding == "zero1" else 2)) / 1e6)


def test_layers_of_the_model_must_match_the_kinds_of_the_batch() -> None:
    """One number of layers for two kinds would count each layer twice; a kind without masks would be ignored."""
    kinds = {"full": masks.causal(), "local": masks.sliding_window(100)}
    lengths = [6000, 3000, 2000, 1000, 4384]
    two = {"full": 2, "local": 2}
    for layers, mask, text in (
        (4, kinds, "is one number, but the sequences have masks of 2 kinds"),
        (two, {"full": masks.causal()}, "has layers of kind local"),
        (two, kinds, "None"),
    ):
        batch, model = Batch.from_lengths(lengths, mask), replace(SMALL, layers=layers)
        assert text in str(ap.forecast([batch], CLUSTER, model, [form()]).rows[0].reason)


def test_fsdp_gathers_weights_twice_and_scatters_gradients_per_microbatch() -> None:
    found = parts_of(form(), Training(vocab=1000, sharding="fsdp", recompute="none"))
    layers, tokens = Layers(H100, SMALL, Training(vocab=1000)), parts_tokens(1)
    behind = layers.linear_us(tokens) + layers.rows_us(tokens)
    gathered, scattered = (gather_us(layers.parameters * size, CLUSTER) for size in (2, 4))
    vocabulary = sum(gather_us(1000 * 512 * size, CLUSTER) for size in (2, 4))
    forward = gathered + 3 * max(0, gathered - behind)
    backward = gathered + scattered + 3 * max(0, gathered + scattered - 2 * behind)
    assert found["data_parallel"] == pytest.approx((forward + backward + vocabulary) / 1e6)


def test_slow_ranks_take_longer_for_their_tokens() -> None:
    speeds = (1.0,) * 7 + (0.5,)
    cluster = replace(CLUSTER, speeds=speeds)
    found = ap.forecast([BATCH], cluster, SMALL, [form("ring")], Training(vocab=1000)).rows[0]
    rows = ap.plan(BATCH, cluster, SMALL, recipe="ring").layouts["attention"].rows_per_rank
    slowest = float((rows / np.array(speeds)).max())
    assert slowest > 1.5 * rows.max() / 1
    refused = ap.forecast([BATCH], cluster, SMALL, static_grids(cluster, ["ring"])).record()["rows"]
    assert all("static grids do not support speeds" in row["reason"] for row in refused)
    layers = Layers(H100, SMALL, Training(vocab=1000))
    assert found.parts()["linear"] == pytest.approx(3 * 4 * layers.linear_us(slowest) / 1e6)
    assert found.parts()["head"] == pytest.approx(3 * layers.head_us(slowest) / 1e6)


def test_collectives_take_their_bytes_over_the_slower_link() -> None:
    two = Cluster(2, 8)
    assert gather_us(8e9, Cluster(1, 8)) == pytest.approx(8e9 * 7 / 8 / 450e3 + 3 * 5)
    assert gather_us(8e9, two) == pytest.approx(max(8e9 / 2 / (8 * 50e3), 8e9 * 7 / 8 / 450e3) + 10 + 3 * 5)
    assert gather_us(8e9, replace(two, nics_per_node=2)) == pytest.approx(8e9 / 2 / (2 * 50e3) + 10 + 3 * 5)
    assert reduce_us(1e6, two) == 2 * gather_us(1e6, two)
    assert gather_us(8e9, Cluster(1, 1)) == 0
    assert exposed_us(5, 7, 10) == 5
    assert exposed_us(7, 5, 10) == 7 + 9 * 2
    assert exposed_us(0, 5, 10) == 0


def test_flops_are_six_per_parameter_and_token_plus_those_of_pairs() -> None:
    products = 512 * ((8 + 2) * 128 + 3 * 1024) * 4
    expected = 6 * 100 * (products + 512 * 1000) + 6 * 5050 * 4 * 8 * 128
    assert model_flops(SMALL, Training(vocab=1000), 4, 100, 4 * 5050) == expected


def test_tensor_parallel_ranks_share_products_and_wait_for_each_other() -> None:
    alone, shared = (parts_of(form(tensor=degree), Training(vocab=1000)) for degree in (1, 2))
    # twice the tokens, half of the products
    assert shared["linear"] == pytest.approx(alone["linear"], rel=0.03)
    moved = 4 * 2 * (parts_tokens(2) * 512 * 2 / 2 / 450e3 + 5) * 4  # forward and backward, four layers
    assert shared["tensor_parallel"] == pytest.approx(moved / 1e6)


def parts_tokens(tensor: int) -> int:
    chosen = form(tensor=tensor)
    plan = ap.plan(BATCH, chosen.group(CLUSTER), chosen.rank_model(SMALL), recipe="fcp", hardware=H100)
    return int(plan.layouts["attention"].rows_per_rank.max())


def test_memory_equals_its_closed_form() -> None:
    found = one(form(), Training(vocab=1000, sharding="zero1", recompute="none")).memory()
    products = 512 * ((8 + 2) * 128 + 3 * 1024)
    parameters = 4 * (products + 2 * 512) + 2 * 1000 * 512
    assert found.weights == 2 * parameters
    assert found.gradients == 4 * parameters
    assert found.optimizer == 12 * parameters / 8
    tokens = parts_tokens(1)
    saved = (8 + 2 + 2) * 64 * 2 + 8 * (64 * 2 + 4)  # Q, K, V, O and the LSE
    row = 4 * 512 * 2 + saved + 3 * 1024 * 2
    item = found.activations
    assert item.kept == tokens * row * 3  # the fourth is being computed
    assert item.feed_forward == tokens * (5 * 512 * 2 + saved + 4 * 1024 * 2)
    assert item.cross_entropy == tokens * 2 * 512 * 2 + min(tokens, 4096) * 1000 * (2 * 2 + 4)
    rows = attention_bytes(ap.plan(BATCH, CLUSTER, SMALL, recipe="fcp", hardware=H100))
    assert item.attention == tokens * 3 * 512 * 2 + rows
    states = found.weights + found.gradients + found.optimizer
    assert found.total == states + item.kept + max(item.attention, item.feed_forward, item.cross_entropy)
    sharded = one(form(), Training(vocab=1000, sharding="fsdp", recompute="full")).memory()
    vocabulary = 1000 * 512
    assert sharded.weights == 2 * (parameters / 8 + 2 * (products + 1024) + 2 * vocabulary)
    assert sharded.gradients == 4 * (parameters / 8 + products + 1024)
    head = item.cross_entropy + 4 * vocabulary  # the head's full gradient
    assert sharded.activations == replace(item, kept=tokens * 512 * 2 * 3, cross_entropy=head)


def test_only_stages_that_have_it_hold_the_whole_vocabulary() -> None:
    """Of two stages the first has the embedding and the last the head; a tied matrix is gathered once."""
    layers, none = Layers(H100, SMALL, Training(vocab=1000, tied=True)), Activations(0, 0, 0, 0, 0)
    first, last = (memory(layers, 2, 4, 1.0, none, head) for head in (False, True))
    shared = (2 * layers.parameters + 1000 * 512) / 4
    assert first.weights == last.weights == 2 * (shared + 2 * layers.parameters + 1000 * 512)
    assert (first.activations.cross_entropy, last.activations.cross_entropy) == (0, 4 * 1000 * 512)
    zero1 = memory(replace(layers, training=Training(vocab=1000, sharding="zero1")), 2, 4, 2.0, none)
    assert zero1.activations.cross_entropy == 0  # the head's gradient is in `gradients`


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "fsdp"])
def test_sharding_over_one_rank_changes_no_memory(sharding: str) -> None:
    none = Activations(0, 0, 0, 0, 0)
    trainings = (Training(vocab=1000, sharding=name) for name in ("ddp", sharding))
    alone, shared = (memory(Layers(H100, SMALL, one), 4, 1, 2.0, none) for one in trainings)
    assert shared == alone


def test_tensor_parallel_ranks_gather_the_rows_of_ffn_and_head() -> None:
    """FFN and head hold their input and its gradient for all tokens or for a tile; other rows are split over ranks."""
    ffn, vocabulary = 1024, 1000
    model = replace(SMALL, q_heads=4, kv_heads=1, ffn=ffn // 2)
    for tile, loss in ((None, 4096), (100, 50)):
        training = Training(vocab=vocabulary, sharding="ddp", mlp_tile=tile, loss_tokens=loss)
        found = activations(Layers(H100, model, training, tensor=2), 4, 2000, 0.0)
        saved = (4 + 2) * 64 * 2 + 4 * (64 * 2 + 4)  # Q, K, V, O and the LSE of half of the heads
        of_ffn, of_head = tile or 2000, min(loss, 2000)
        gathered = 2 * 512 * 2
        whole = 2000 * (5 * 512 * 2 // 2 + saved)
        assert found.feed_forward == whole + of_ffn * (4 * ffn // 2 * 2 + gathered)
        logits = of_head * (vocabulary // 2) * (2 * 2 + 4)
        assert found.cross_entropy == 2000 * 2 * 512 * 2 // 2 + of_head * gathered + logits


@pytest.mark.parametrize(("dtype", "state", "moved"), [("bf16", 12, 24 + 4 + 2), ("fp32", 8, 16 + 4 + 2 * 4)])
def test_float32_weights_have_no_second_copy(dtype: str, state: int, moved: int) -> None:
    layers = Layers(H100, replace(SMALL, dtype=dtype), Training(sharding="ddp", vocab=1000))
    parameters = layers.parameters * 4 + 2 * 1000 * 512
    assert memory(layers, 4, 8, 2.0, Activations(0, 0, 0, 0, 0)).optimizer == state * parameters
    assert layers.optimizer_us(1e6) == pytest.approx(1e6 * moved / (H100.memory_gbs.value * 1e3))
    extra = replace(layers, training=Training(optimizer_bytes=12))
    assert extra.optimizer_us(1.0) - layers.optimizer_us(1.0) == pytest.approx(
        2 * (12 - state) / (H100.memory_gbs.value * 1e3)
    )


def test_tiles_bound_the_memory_of_the_ffn_and_cost_another_forward() -> None:
    """Backward repeats the FFN's forward, as in ALST's tiled MLP."""
    tiles = (Training(vocab=1000, recompute="none", mlp_tile=tile) for tile in (None, 100))
    plain, tiled = (one(form(), training) for training in tiles)
    tokens, (before, after) = parts_tokens(1), (row.memory().activations for row in (plain, tiled))
    assert before.feed_forward - after.feed_forward == 4 * 1024 * 2 * (tokens - 100)
    # gate, up and their product, of three layers
    assert before.kept - after.kept == 3 * tokens * 3 * 1024 * 2
    products = 2 * 3 * 512 * 1024 / (H100.linear_tflops.value * 1e12)
    gate = 3 * 1024 * 2 / (H100.memory_gbs.value * 1e9)
    extra = tiled.parts()["recomputation"] - plain.parts()["recomputation"]
    assert extra == pytest.approx(4 * tokens * (products + gate))


#: parts of a step that hide transfers to the host
HIDING = ("attention", "linear", "rows", "remap", "recomputation", "data_parallel")
LONG = Batch.from_lengths([BATCH.tokens])


def offloaded(host_gbs: float, **extra: Any) -> ForecastRow:
    """The forecast of BATCH, or of a single sequence of equal length, since chunks need one."""
    hardware = replace(H100, host_gbs=Figure(host_gbs, "test"))
    training = Training(vocab=1000, recompute="full", offload=True, **extra)
    batch = LONG if training.chunks > 1 else BATCH
    row = one(form("ulysses"), training, hardware=hardware, batch=batch)
    assert row.reason is None, row.reason
    return row


def test_offloaded_inputs_cost_only_the_time_that_layers_do_not_hide() -> None:
    """ALST and UPipe: the input of every layer moves to the host and back; only the next layer's is on the device."""
    on_device = one(form("ulysses"), Training(vocab=1000, recompute="full"))
    row, slow = offloaded(50.0), offloaded(0.1)
    plan = ap.plan(BATCH, CLUSTER, SMALL, recipe="ulysses", hardware=H100)
    tokens = int(plan.layouts["attention"].rows_per_rank.max())
    each = tokens * 512 * 2
    assert row.memory().activations == replace(on_device.memory().activations, kept=each, host=4 * each)
    assert row.parts()["host"] == 0  # hidden
    assert row.seconds == on_device.seconds
    parts = slow.parts()
    work = sum(parts[name] for name in HIDING)
    assert parts["host"] == pytest.approx(2 * 4 * each / 0.1e9 - work)  # out in forward, back in backward


def test_chunks_leave_one_chunk_of_a_layer_on_the_device() -> None:
    """FPDT: in attention, one chunk is on the device; in the FFN, only its own tensors are chunked."""
    whole, chunked = (offloaded(50.0, chunks=chunks).memory().activations for chunks in (1, 4))
    tokens = int(whole.host / (4 * 512 * 2))
    assert chunked.attention == whole.attention / 4
    assert chunked.kept == whole.kept / 4
    assert chunked.feed_forward == tokens * 3 * 512 * 2 + 4 * 1024 * 2 * -(-tokens // 4)
    parts = offloaded(0.1, chunks=4).parts()
    layers = Layers(H100, SMALL, Training(vocab=1000, recompute="full", offload=True, chunks=4))
    moved = [copies(layers, tokens, phase).us(0.1) / 1e6 for phase in ("forward", "backward")]
    work = sum(parts[name] for name in HIDING)
    assert parts["host"] == pytest.approx(4 * sum(moved) - work)


def test_chunks_of_head_stages_leave_a_chunk_of_a_stage_on_the_device() -> None:
    """FPDT's chunks and UPipe's stages divide different axes."""
    training = Training(vocab=1000, recompute="full", offload=True)
    rows = [one(form("upipe"), replace(training, chunks=chunks), batch=LONG) for chunks in (1, 4)]
    staged, both = (row.memory().activations.attention for row in rows)
    assert both == staged / 4


def test_chunks_are_refused_without_a_published_method() -> None:
    with pytest.raises(ConfigError, match=r"training\.chunks = 2: .* write offload: true, recompute: full"):
        Training(chunks=2)
    many = Training(recompute="full", offload=True, chunks=2049)
    few = replace(many, chunks=2)
    assert "use --recipes ulysses" in refusal(form("ring"), few)
    assert "must be at most the 2048 tokens of a rank" in refusal(form("ulysses"), many, batch=LONG)
    assert "one causal sequence per microbatch, but got 5 for 1" in refusal(form("ulysses"), few)
    full = Batch.from_lengths([16384], masks.full())
    assert "a mask is not causal" in refusal(form("ulysses"), few, batch=full)
    two = one(form("ulysses", microbatches=2), few, batch=Batch.from_lengths([16384] * 2))
    assert two.reason is None, two.reason


def test_selective_recomputation_keeps_attention_outputs() -> None:
    layers = Layers(H100, SMALL, Training())
    assert kept_bytes(layers, "full") == 512 * 2
    assert kept_bytes(layers, "selective") == 512 * 2 + 8 * (64 * 2 + 4)
    kinds = (Training(vocab=1000, recompute=kind) for kind in ("full", "selective", "none"))
    full, selective, none = (parts_of(form(), training) for training in kinds)
    assert none["recomputation"] == 0
    assert selective["recomputation"] == pytest.approx((none["linear"] + none["rows"]) / 3)
    assert full["recomputation"] > selective["recomputation"]


# -------------------------------------------------------------------------------------------------------- pipelines


@pytest.mark.parametrize(
    ("stages", "microbatches", "virtual"), [(1, 3, 1), (2, 2, 1), (4, 8, 1), (4, 8, 2), (2, 6, 3)]
)
def test_equal_microbatches_take_the_formulas_time(stages: int, microbatches: int, virtual: int) -> None:
    """m (f + b) of a stage, plus (p - 1) / v times (f + b) (Narayanan et al., 2021, section 2.2)."""
    forward, backward = np.full((stages, microbatches), 3.0), np.full((stages, microbatches), 6.0)
    found = makespan_us(forward, backward, virtual)
    assert found == pytest.approx(9 * (microbatches + (stages - 1) / virtual))


def test_every_stage_does_its_work_once_and_never_deadlocks() -> None:
    for stages, microbatches, virtual in ((3, 5, 1), (4, 4, 1), (4, 8, 3), (2, 2, 2)):
        for order in orders(stages, microbatches, virtual):
            assert len(order) == len(set(order)) == 2 * microbatches * virtual
        rng = np.random.default_rng(stages)
        forward, backward = rng.random((2, stages, microbatches))
        found = makespan_us(forward, backward, virtual, hop_us=0.1)
        assert found >= (forward + backward).sum(1).max()


def test_bubbles_of_a_pipeline_with_one_microbatch_per_stage() -> None:
    even = Batch.from_lengths([1024] * 16)
    alone, two = (one(form(pipeline=count), batch=even).parts() for count in (1, 2))
    assert alone["bubble"] == pytest.approx(0, abs=1e-12)
    assert two["bubble"] > 0.2 * sum(two.values())


@pytest.mark.parametrize(
    ("stages", "microbatches", "virtual"),
    [(1, 3, 1), (2, 8, 1), (4, 2, 1), (4, 16, 2), (4, 16, 8), (2, 2, 4), (8, 32, 4)],
)
def test_stages_hold_the_microbatches_of_the_schedule(stages: int, microbatches: int, virtual: int) -> None:
    """Counted over the work of the first and the last stage; if interleaved, the last one holds several too."""
    for stage, order in enumerate(orders(stages, microbatches, virtual)):
        if stage in (0, stages - 1):
            peak = np.cumsum([-1 if item.backward else 1 for item in order]).max() / virtual
            assert in_flight(stages, microbatches, virtual, last=stage > 0) == pytest.approx(peak)


def test_the_last_stage_of_an_interleaved_pipeline_holds_its_chunks() -> None:
    even = Batch.from_lengths([2048] * 16)
    training = Training(vocab=100_000, recompute="none", sharding="ddp")
    item = one(form(pipeline=2, virtual=2, microbatches=2), training, batch=even).memory()
    assert item.activations.cross_entropy > 0  # the last stage needs more
    tokens, row = 4096 * 2 // 4, 4 * 512 * 2 + (8 + 2 + 2) * 64 * 2 + 8 * (64 * 2 + 4) + 3 * 1024 * 2
    assert item.activations.kept == tokens * row * (2 * 1.5 - 1)


# ------------------------------------------------------------------------------------------------------ static grids


@pytest.mark.parametrize("packing", ["order", "balanced"])
def test_groups_hold_all_tokens_evenly(packing: str) -> None:
    rng = np.random.default_rng(0)
    for groups in (1, 2, 3, 8):
        batch = Batch.from_lengths(rng.integers(1, 5000, 40))
        found = groups_of(batch, groups, packing)
        tokens = [part.tokens for part in found]
        assert len(tokens) == groups
        assert sum(tokens) == batch.tokens
        assert max(tokens) <= -(-batch.tokens // groups)
        assert sum(part.area("default") for part in found) <= batch.area("default")


def test_sequences_that_fit_a_group_stay_whole() -> None:
    batch = Batch.from_lengths([400, 300, 200, 100, 300, 200, 300, 200])
    found = groups_of(batch, 2, "balanced")
    assert sorted(np.concatenate([part.lengths for part in found]).tolist()) == sorted(batch.lengths.tolist())


def test_masks_that_cannot_be_cut_are_refused() -> None:
    batch = Batch.from_lengths([3000, 100, 100, 100], masks.prefix_lm(50))
    with pytest.raises(CapacityError, match="cannot be cut: use larger groups"):
        groups_of(batch, 3, "balanced")


def test_a_static_grid_waits_for_its_slowest_group_and_reports_its_cuts() -> None:
    grid = Parallelism(find_recipe("ring"), Degrees(), 4, "order")
    row = one(grid)
    assert row.pairs_kept < 1  # 16,384 tokens are cut in the middle of a sequence
    groups = groups_of(BATCH, 2, "order")
    plans = [ap.plan(part, grid.group(CLUSTER), SMALL, recipe="ring", hardware=H100) for part in groups]
    times = [simulate(plan, H100) for plan in plans]
    slowest = max(found.forward_ms + found.backward_ms for found in times) / 1e3
    assert row.parts()["attention"] == pytest.approx(4 * slowest)


# ------------------------------------------------------------------------------------------------------------ results


def test_configurations_with_equal_attention_share_plans() -> None:
    static = Parallelism(find_recipe("ring"), Degrees(), 8, "order")
    assert static.canonical_form(CLUSTER) == form("ring").canonical_form(CLUSTER) == form("ring")
    whole, grid = ap.forecast(BATCH, CLUSTER, SMALL, [form("ring"), static], Training(vocab=1000)).rows
    assert (whole.steps, whole.groups, grid.groups) == (grid.steps, None, 1)
    assert replace(static, context=4).canonical_form(CLUSTER) == replace(static, context=4)


def test_only_the_slowest_of_many_groups_are_planned() -> None:
    """Plans groups with a long sequence, and the one with the most tokens; pairs of all groups are counted."""
    lengths = [512] * 14 + [1024] * 3 + [2048 - 64]
    batch = Batch.from_lengths(lengths)
    static = Parallelism(find_recipe("ring"), Degrees(), 1, "balanced")
    groups = groups_of(batch, 8, "balanced")
    planned, pairs = plan_attention(static, batch, CLUSTER, SMALL, H100, 0)
    assert pairs == 4 * sum(one.area("default") for one in groups)
    made = [item[0].plan.request.batch.area("default") for item in planned]
    assert sorted(made)[-3:] == sorted(one.area("default") for one in groups)[-3:]
    assert max(item[0].tokens for item in planned) == max(one.tokens for one in groups)
    assert len(planned) <= 4


def test_rows_add_up_and_gains_refer_to_the_best_grid_that_fits() -> None:
    batches = [BATCH, Batch.from_lengths([4096] * 4)]
    chosen = [*recipe_parallelisms(["blend", "ring"]), *static_grids(CLUSTER, ["ring", "usp"])]
    done: list[str] = []
    found = ap.forecast(batches, CLUSTER, SMALL, chosen, Training(vocab=1000), progress=done.append)
    record = found.record()
    names = [row["name"] for row in record["rows"]]
    assert sorted(done) == sorted(names)
    assert names == [str(form) for form in chosen]
    for row in record["rows"]:
        step = row["step_s"]
        assert tuple(row["parts_s"]) == PARTS
        assert sum(row["parts_s"].values()) == pytest.approx(step["value"])
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert step["low"] <= step["value"] <= step["high"]
        memory = row["memory_gib"]
        parts = ("weights", "gradients", "optimizer", "kept", "working")
        assert sum(memory[name] for name in parts) == pytest.approx(memory["total"])
        assert row["tokens_per_s_per_gpu"] == pytest.approx(16384 / step["value"] / 8)
        assert 0 < row["mfu"] < 1
    static = [row for row in record["rows"] if row["parallelism"]["context"] and row["pairs_kept"] >= 0.98]
    assert record["best"] in {row["name"] for row in record["rows"] if row["pairs_kept"] >= 0.98}
    best = min(static, key=lambda row: row["step_s"]["value"])
    assert record["baseline"] == best["name"]
    assert best["gain"] == {"value": 1, "low": 1, "high": 1, "steps": [1, 1]}
    for row in record["rows"]:
        assert row["gain"]["value"] == pytest.approx(best["step_s"]["value"] / row["step_s"]["value"])
        assert min(row["gain"]["steps"]) <= row["gain"]["value"] <= max(row["gain"]["steps"])
    json.dumps(record, allow_nan=False)


def test_static_grids_have_their_own_kernels() -> None:
    chosen = [*recipe_parallelisms(["ulysses"]), *static_grids(CLUSTER, ["ulysses"])]

    def seconds(**hardware: str) -> dict[bool, list[float]]:
        rows = ap.forecast(BATCH, CLUSTER, SMALL, chosen, Training(vocab=1000), **hardware).rows
        return {
            static: [row.seconds[0] for row in rows if (row.parallelism.context is not None) == static]
            for static in (False, True)
        }

    fast, slow, both = seconds(), seconds(hardware="h100-stage"), {"hardware": "h100-stage"}
    mixed = seconds(**both, grid_hardware="h100")
    assert mixed == {False: slow[False], True: fast[True]}
    assert fast[True] < slow[True]


def test_a_row_that_does_not_fit_is_reported_and_is_not_the_baseline() -> None:
    tight = replace(CLUSTER, memory_gib=0.05)
    grids = static_grids(CLUSTER, ["ring"])
    found = ap.forecast([BATCH], tight, SMALL, grids, Training(vocab=1000, sharding="ddp"))
    assert {row["status"] for row in found.record()["rows"]} <= {"too large", "refused"}
    assert found.baseline is None
    assert found.best is None


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ({"tensor": 3}, "must divide the 8 ranks"),
        ({"tensor": 8}, "must divide the ranks of a node"),
        ({"pipeline": 8}, "must divide the layers (4)"),
        ({"tensor": 4, "pipeline": 2, "virtual": 3}, "must divide the layers"),
    ],
)
def test_degrees_that_do_not_divide_are_refused_by_name(degrees: dict[str, int], text: str) -> None:
    assert text in refusal(form(**degrees))


def test_kv_heads_that_ranks_cannot_share_evenly_are_refused() -> None:
    model = replace(SMALL, q_heads=24, kv_heads=6, ffn=1536)
    for tensor in (1, 2, 12):
        assert form(tensor=tensor).rank_model(model).kv_heads == max(1, 6 // tensor)
    for tensor in (4, 8):
        with pytest.raises(ConfigError, match=r"must divide model\.kv_heads \(6\), or be a multiple"):
            form(tensor=tensor).rank_model(model)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Degrees(virtual=2), r"parallelism\.virtual = 2: requires several pipeline stages"),
        (lambda: Parallelism(find_recipe("ring"), packing="order"), r"parallelism\.packing"),
        (lambda: Parallelism(find_recipe("ring"), context=4), r"parallelism\.packing"),
        (lambda: ap.forecast([], CLUSTER, SMALL), "nothing to forecast"),
        (lambda: one(form(), baseline="usp"), "is not one of the parallelisms"),
        (lambda: Training.from_data({"sharding": "zero9"}), r"training\.sharding"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_one_batch_is_a_list_of_it_and_other_types_are_refused() -> None:
    one_batch, listed = (ap.forecast(batch, CLUSTER, SMALL, [form()]) for batch in (BATCH, [BATCH]))
    assert one_batch.record() == listed.record()
    for extra, field in (
        (([BATCH, 5], CLUSTER, SMALL, [form()]), "batches"),
        ((BATCH, CLUSTER, SMALL, ["fcp"]), "parallelisms"),
        ((BATCH, CLUSTER, SMALL, []), "parallelisms"),
        ((BATCH, CLUSTER, SMALL, [form()], {"recompute": "full"}), "training"),
    ):
        with pytest.raises(ConfigError, match=rf"{field}(\[\d\])? = .*; (use|give|make)"):
            ap.forecast(*extra)


def test_masks_without_pairs_drop_no_pairs() -> None:
    row = one(form(), batch=Batch.from_lengths([64, 64], masks.bands([])))
    assert row.reason is None, row.reason
    assert row.pairs_kept == 1


def test_rows_that_drop_pairs_are_not_reported_as_too_large() -> None:
    """A group holds half of the sequence."""
    grids = [Parallelism(find_recipe("ring"), Degrees(), 4, "order")]
    record = ap.forecast(LONG, CLUSTER, SMALL, grids, Training(vocab=1000)).record()
    assert (record["rows"][0]["status"], record["best"]) == ("ok", None)
    facts = {"batches": 1, "tokens": 16384, "workload": "one"}
    text = " ".join(str(view()) for view in printed.views(record | facts, wide=True))
    assert "nothing is proposed: the grids that fit cut sequences and drop pairs" in text
    assert "nothing fits" not in text


def test_recipes_that_defer_sequences_are_refused() -> None:
    pack = {"pack": {"wlb": {"defer": True, "outlier_tokens": 4000}}}
    steps = find_recipe("wlb").to_data()["steps"] | pack
    deferring = find_recipe({"name": "deferring", "steps": steps})
    refused = refusal(Parallelism(deferring, Degrees(microbatches=3)))
    assert "2 sequences would be deferred to a later step" in refused


def test_the_search_tries_all_degrees_that_model_and_cluster_allow() -> None:
    found = search_space(CLUSTER, SMALL, 4, ["fcp"], microbatches=2)
    degrees = {(item.tensor, item.pipeline, item.virtual) for item in found}
    assert (1, 1, 1) in degrees
    assert (4, 2, 2) in degrees
    assert (1, 4, 2) not in degrees  # four layers cannot be eight chunks
    assert all(pipeline <= 4 for _, pipeline, _ in degrees)
    model = replace(SMALL, q_heads=12, kv_heads=6, ffn=1536, layers=6)
    of_three = {(item.tensor, item.pipeline) for item in search_space(Cluster(1, 6), model, 6, ["fcp"])}
    assert of_three == {(1, 1), (1, 2), (1, 3), (1, 6), (2, 1), (2, 3), (3, 1), (3, 2), (6, 1)}


# ------------------------------------------------------------------------------------------------- the command line

SIZE = ("forecast", "--ranks", 8, "--tokens-per-rank", 2048, "--batches", 1)
BLEND = (*SIZE, "--recipes", "blend", "--grids", "none")


def test_the_command_prints_a_table_bars_and_the_saving(run: Command) -> None:
    result = run(*SIZE, "--recipes", "blend,ring", "--grids", "ring,usp")
    assert result.code == 0
    for phrase in ("speed-up", "where the time of a step goes", "fastest that fits"):
        assert phrase in result.out
    bars = [line for line in result.out.splitlines() if line.startswith("blend ") and "AL" in line]
    assert len(bars) == 1


def test_the_command_gives_one_json_object(run: Command, tmp_path: Path) -> None:
    path = tmp_path / "training.yaml"
    path.write_text("{sharding: zero1, recompute: none, vocab: 32000}", encoding="utf-8")
    result = run(*BLEND, "--training", path, "--json")
    assert result.code == 0
    assert result.json["training"]["sharding"] == "zero1"
    assert (result.row["name"], result.row["gain"]) == ("blend", None)


def test_the_search_proposes_degrees(run: Command) -> None:
    result = run(*BLEND, "--search", "--microbatches", 2, "--json")
    rows = result.json["rows"]
    assert result.code == 0
    assert result.json["best"] in {row["name"] for row in rows if row["status"] == "ok"}
    assert any(row["parallelism"]["pipeline"] > 1 for row in rows)
    assert run(*SIZE, "--search", "--tensor", 2).code == 2
    refused = run(*BLEND, "--tensor", 3)
    assert refused.code == 1
    assert "nothing was planned" in refused.out
    assert "nothing fits" not in refused.out
    assert run(*SIZE, "--training", "{sharding: x}").code == 2
