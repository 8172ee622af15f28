"""Hardware files and the cost model: exact on the grid, monotone between, saturated beyond, hostile files refused."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion import Cluster, ConfigError, Model, UnknownNameError
from apportion.ir.request.figures import Figure, MessageRates
from apportion.ir.request.hardware import MAX_FILE_BYTES, Hardware, ProfileOrigin
from apportion.planner.cost import PHASES, CostModel, causal_pairs
from benchmarks import chips
from tests.support.formats import schema_accepts, validator

LLAMA70 = Model(q_heads=64, kv_heads=8, head_dim=128, hidden=8192, ffn=28672, layers=80)
BUILTIN = Hardware.builtin()
H100 = Hardware.load("h100")
PEAK = H100.peak_tflops.value
MOST = 2**18

rows_st = st.integers(1, MOST)


def small(tile: int = 1) -> Hardware:
    """Axis 16, 32, 64, 256; full: 3 + pairs / 8 us; causal: 2 + causal pairs / 8; backward: three times that."""
    data = H100.to_data()
    axis = np.array([16, 32, 64, 256])
    full = 3 + axis[:, None] * axis / 8
    causal = 2 + causal_pairs(axis[:, None], axis[None, :]) / 8
    grid = {"launch_us": 1.5, "tile_us": 0.25, "source": "made up"}
    figures = data["figures"] | {"memory_gbs": {"value": 1e6, "source": "made up"}}
    data |= {"name": "small", "axis": axis.tolist(), "tile": tile, "q_heads": 4, "kv_heads": 2, "head_dim": 8}
    data |= {"figures": figures, "forward": grid | {"full": full.tolist(), "causal": causal.tolist()}}
    data["backward"] = grid | {"full": (3 * full).tolist(), "causal": (3 * causal).tolist()}
    return Hardware.from_data(data)


SMALL = small()
SMALL_COST = CostModel(SMALL, Model(q_heads=4, kv_heads=2, head_dim=8))
LLAMA_COST = {name: CostModel(Hardware.load(name), LLAMA70) for name in BUILTIN}


def full_us(cost: CostModel, phase: str, rows: Any, keys: Any) -> Any:
    heads = cost.model.q_heads, cost.model.kv_heads
    return cost.attention_us(phase, rows, keys, np.asarray(rows) * keys, *heads)


def causal_us(cost: CostModel, phase: str, rows: Any, keys: Any) -> Any:
    pairs = causal_pairs(rows, keys)
    return cost.attention_us(phase, rows, keys, pairs, cost.model.q_heads, cost.model.kv_heads)


def utilisation(name: str, phase: str, tokens: int) -> float:
    """Share of the peak that a causal document reaches in a long launch."""
    flops = causal_pairs(tokens, tokens) * 64 * 128 * (4 if phase == "forward" else 10)
    tflops = flops / causal_us(LLAMA_COST[name], phase, tokens, tokens)[0] / 1e6
    return float(tflops / Hardware.load(name).peak_tflops.value)


# ---- interpolation


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("cost", [SMALL_COST, *LLAMA_COST.values()], ids=["small", *BUILTIN])
def test_grid_points_are_exact(cost: CostModel, phase: str) -> None:
    axis, grid = np.array(cost.hardware.axis), cost.hardware.grid(phase)
    rows, keys = (side.ravel() for side in np.meshgrid(axis, axis, indexing="ij"))
    np.testing.assert_allclose(full_us(cost, phase, rows, keys), np.ravel(grid.full), rtol=1e-12)
    np.testing.assert_allclose(causal_us(cost, phase, rows, keys), np.ravel(grid.causal), rtol=1e-12)


def test_times_are_linear_between_grid_points() -> None:
    assert full_us(SMALL_COST, "forward", 24, 160)[0] == pytest.approx(3 + 24 * 160 / 8)
    corners = [2 + causal_pairs(n, n) / 8 for n in (32, 64)]
    assert causal_us(SMALL_COST, "forward", 48, 48)[0] == pytest.approx(sum(corners) / 2)


def test_pairs_between_causal_and_full_lie_between() -> None:
    causal, full = causal_us(SMALL_COST, "forward", 64, 64)[0], full_us(SMALL_COST, "forward", 64, 64)[0]
    half = (causal_pairs(64, 64) + 64 * 64) // 2
    found = SMALL_COST.attention_us("forward", 64, 64, half, 4, 2)[0]
    assert found == pytest.approx((causal + full) / 2, rel=1e-3)


def test_a_narrow_window_costs_its_tiles() -> None:
    """4096 rows with their last 128 keys: two tiles of keys per tile of queries, compared with 16.5 if causal."""
    cost, width = LLAMA_COST["h100"], 128
    window = 4096 * width - width * (width - 1) // 2
    time = cost.attention_us("forward", 4096, 4096, window, 64, 8)[0]
    one, two = (full_us(cost, "forward", 4096, tiles * 128)[0] for tiles in (1, 2))
    assert one < time < 1.05 * two
    assert time < 0.4 * causal_us(cost, "forward", 4096, 4096)[0]


def test_a_single_pair_costs_a_tile() -> None:
    cost = LLAMA_COST["h100"]
    assert cost.attention_us("forward", 1, 1, 1, 64, 8) == full_us(cost, "forward", 128, 128)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("kind", [full_us, causal_us])
@pytest.mark.parametrize("cost", [SMALL_COST, LLAMA_COST["h20"]], ids=["small", "h20"])
@settings(max_examples=60, deadline=None)
@given(rows=rows_st, keys=rows_st, more=st.integers(0, MOST))
def test_no_time_falls_with_more_rows_or_keys(
    cost: CostModel, kind: Any, phase: str, rows: int, keys: int, more: int
) -> None:
    sides = (rows, keys), (rows + more, keys), (rows, keys + more)
    base, taller, wider = (kind(cost, phase, *side)[0] for side in sides)
    assert taller >= base * (1 - 1e-12)
    assert wider >= base * (1 - 1e-12)


@settings(max_examples=100, deadline=None)
@given(rows=rows_st, keys=rows_st, share=st.floats(0, 1), more=st.floats(0, 1))
def test_no_time_falls_with_more_pairs(rows: int, keys: int, share: float, more: float) -> None:
    cost = LLAMA_COST["h100"]
    pairs = np.array(sorted(max(1, int(rows * keys * part)) for part in (share, more)))
    fewer, larger = cost.attention_us("forward", rows, keys, pairs, 64, 8)
    assert fewer <= larger * (1 + 1e-12)
    assert ((fewer, larger) >= cost.ideal_us("forward", pairs, 64)).all()


def test_pricing_columns_equals_pricing_each_task() -> None:
    rng = np.random.default_rng(0)
    rows, keys = rng.integers(1, 40_000, (2, 20_000))
    pairs = (rows * keys * rng.random(20_000)).astype(np.int64) + 1
    times = LLAMA_COST["h100"].attention_us("backward", rows, keys, pairs, 64, 8)
    for i in (0, 8191, 8192, 19_999):
        assert LLAMA_COST["h100"].attention_us("backward", rows[i], keys[i], pairs[i], 64, 8)[0] == times[i]


def test_no_tasks_take_no_time() -> None:
    none = np.zeros(0, np.int64)
    assert SMALL_COST.attention_us("forward", none, none, none, 4, 2).shape == (0,)


def test_an_unknown_phase_is_an_error() -> None:
    with pytest.raises(UnknownNameError, match="did you mean forward"):
        SMALL_COST.attention_us("foreward", 1, 1, 1, 4, 2)


def test_throughput_is_constant_beyond_the_grid() -> None:
    last = H100.axis[-1]
    cost = LLAMA_COST["h100"]
    square, tall = (full_us(cost, "forward", last, keys)[0] for keys in (last, 4 * last))
    assert tall == pytest.approx(4 * square)
    ratio = causal_pairs(8 * last, 8 * last) / causal_pairs(last, last)
    assert causal_us(cost, "forward", 8 * last, 8 * last)[0] == pytest.approx(
        ratio * causal_us(cost, "forward", last, last)[0]
    )
    # one row of queries costs its whole tile, for any number of keys
    row, tile = (full_us(cost, "forward", rows, 8 * last)[0] for rows in (1, 128))
    assert row == pytest.approx(tile)


def test_a_million_tasks_are_priced_at_once() -> None:
    tasks = np.full(1_000_000, 2048)
    start = time.thread_time()
    full_us(LLAMA_COST["h100"], "forward", tasks, tasks)
    assert time.thread_time() - start < 2  # took 0.03 s on the author's machine


# ---- measurements of papers


def test_short_documents_are_slow_as_in_fcp() -> None:
    """FCP, section 3.1 and Figure 3: 25 % at 512 tokens, low below 2K, saturating beyond 4K."""
    reached = [utilisation("h100", "forward", tokens) for tokens in (512, 1024, 2048, 4096, 8192, 131072)]
    assert reached[0] == pytest.approx(0.25, abs=0.01)
    assert reached == sorted(reached)
    assert reached[2] < 0.75 * reached[-1]
    assert reached[3] > 0.8 * reached[-1]


def test_long_documents_reach_the_times_measured_by_upipe() -> None:
    """UPipe, Table 5, 512K on 8 ranks: 4 heads each, 32 layers, forward twice in 25.71 s, backward in 36.74 s."""
    cost = CostModel(H100, Model(q_heads=4, kv_heads=1, head_dim=128))
    forward, backward = (32e-6 * causal_us(cost, phase, 2**19, 2**19)[0] for phase in PHASES)
    assert 2 * forward == pytest.approx(25.71, rel=0.03)
    assert backward == pytest.approx(36.74, rel=0.03)


def test_shards_of_a_tile_saturate_as_in_distca() -> None:
    """DistCA, section 4.1 and Figure 5: shards of 128 or more rows with long context are fast, shorter are padded."""
    h200, sizes = LLAMA_COST["h200"], (16, 64, 128, 2048)
    rate = {rows: rows * 16384 / full_us(h200, "forward", rows, 16384)[0] for rows in sizes}
    assert rate[128] == pytest.approx(rate[2048], rel=0.01)
    assert rate[64] == pytest.approx(rate[128] / 2, rel=0.01)
    assert rate[16] == pytest.approx(rate[128] / 8, rel=0.01)


def test_links_reach_the_rate_measured_by_zeppelin() -> None:
    """Zeppelin, section 5.4.1, Cluster A: a round of ring attention sends 4K tokens of KV of a 3B model (3200 wide, not
    grouped) in 2.18 ms over one NIC."""
    a800 = Hardware.load("a800")
    took = a800.inter_latency_us.value + 4096 * 2 * 3200 * 2 / (a800.inter_gbs.value * 1e3)
    assert took == pytest.approx(2180, rel=0.05)


def test_the_start_cost_matches_a_published_fixed_length_kernel() -> None:
    """Without the latency of varlen kernels, the start's bytes alone give a fixed-length kernel's published curve."""
    step, moved = 1.5552, 4 * 128 * 128 * 132 / 3350e3
    for tiles, measured in ((4, 430), (8, 517), (16, 566), (32, 590), (64, 614)):
        assert tiles * step / (tiles * step + moved) == pytest.approx(measured / 621, abs=0.025)
    assert H100.forward.tile_us == pytest.approx(step, rel=1e-3)


@pytest.mark.parametrize("name", BUILTIN)
def test_causal_tasks_are_cheaper_and_backward_more_expensive(name: str) -> None:
    rows, keys = (side.ravel() for side in np.meshgrid([64, 500, 3000, 40_000], [64, 500, 3000, 40_000]))
    cost = LLAMA_COST[name]
    for phase in PHASES:
        assert (causal_us(cost, phase, rows, keys) <= full_us(cost, phase, rows, keys)).all()
        assert causal_us(cost, phase, 4096, 4096)[0] < 0.6 * full_us(cost, phase, 4096, 4096)[0]
    for kind in (causal_us, full_us):
        ratio = kind(cost, "backward", rows, keys) / kind(cost, "forward", rows, keys)
        # a B200 takes as long to start as to compute
        assert (ratio > (1.1 if name == "b200" else 1.5)).all()
        assert len(set(np.round(ratio, 2).tolist())) > 3  # not a fixed multiple


# ---- heads and dims


def test_time_is_proportional_to_query_heads() -> None:
    h100 = LLAMA_COST["h100"]
    one, eight = (h100.attention_us("forward", 4096, 4096, 4096**2, heads, 1)[0] for heads in (1, 8))
    assert eight == pytest.approx(8 * one)


def test_heads_may_differ_by_task() -> None:
    heads = np.array([8, 64])
    times = LLAMA_COST["h100"].attention_us("forward", 4096, 4096, 4096**2, heads, np.array([1, 8]))
    assert times[1] == pytest.approx(8 * times[0])


def test_more_kv_heads_cost_where_memory_binds() -> None:
    h100 = LLAMA_COST["h100"]
    few, many = (h100.attention_us("forward", 128, 65536, 128 * 65536, 64, kv)[0] for kv in (8, 64))
    assert many > 1.1 * few
    few, many = (LLAMA_COST["h100"].attention_us("forward", 8192, 8192, 8192**2, 64, kv)[0] for kv in (8, 64))
    assert many == few


def test_head_dims_scale_by_their_products() -> None:
    wide = CostModel(H100, replace(LLAMA70, head_dim=192, v_head_dim=128))
    base = LLAMA_COST["h100"]
    for phase, ratio in (("forward", (192 + 128) / 256), ("backward", (3 * 192 + 2 * 128) / 640)):
        ours, theirs = (full_us(one, phase, 8192, 8192)[0] for one in (wide, base))
        assert ours == pytest.approx(ratio * theirs)
        assert wide.ideal_us(phase, 1000, 64) == pytest.approx(ratio * base.ideal_us(phase, 1000, 64))


def test_the_ideal_time_uses_the_best_rate_of_the_grid() -> None:
    assert float(SMALL_COST.ideal_us("forward", 256**2, 4)) == pytest.approx(3 + 256**2 / 8, rel=1e-2)
    for phase, flops in (("forward", 512), ("backward", 1280)):
        tflops = flops * 64 / float(LLAMA_COST["h100"].ideal_us(phase, 1_000_000, 64))
        achieved = chips.CHIPS["h100"].forward if phase == "forward" else chips.CHIPS["h100"].backward
        assert tflops == pytest.approx(PEAK * achieved.value, rel=0.01)


def test_the_longest_chain_of_an_instruction() -> None:
    cost = LLAMA_COST["h100"]
    assert cost.chain_us("forward", 512, 16384, 16895) == pytest.approx(128 * H100.forward.tile_us)
    assert cost.chain_us("backward", 512, 16384, 16895) == pytest.approx(4 * H100.backward.tile_us)
    lone = cost.attention_us("forward", 128, 16384, 128 * 16384, 1, 1)[0]
    assert cost.chain_us("forward", 128, 16384, 16511) > 50 * lone


def test_rows_and_linear_layers() -> None:
    cost = LLAMA_COST["h100"]
    assert cost.rowop_us(3_350_000_000) == pytest.approx(1000 + H100.rowop_us.value)
    parameters = 8192 * (2 * 64 * 128 + 2 * 8 * 128) + 3 * 8192 * 28672  # Llama-3-70B: 80 layers hold 68.5e9
    assert 80 * parameters == pytest.approx(68.5e9, rel=0.01)
    expected = 2e3 * parameters / H100.linear_tflops.value / 1e6
    assert cost.linear_us(np.array([0, 1000]))[1] == pytest.approx(expected)
    assert cost.launch_us("forward") == H100.forward.launch_us


@pytest.mark.parametrize(
    ("kernel", "forward", "backward"), [("full", 1534.8, 1359.8), ("causal", 1418.1, 1208.6)]
)
def test_blackwell_kernels_are_as_published(kernel: str, forward: float, backward: float) -> None:
    """FlashAttention-4, pull request 2280: 4 x 16 heads of 128, 8K tokens, bf16 on a B200, TFLOP/s."""
    cost, n = CostModel(Hardware.load("b200"), Model(q_heads=64, kv_heads=64, head_dim=128)), 8192
    pairs = n * n if kernel == "full" else int(causal_pairs(n, n))
    for phase, products, published in (("forward", 4, forward), ("backward", 10, backward)):
        us = float(cost.attention_us(phase, n, n, pairs, 64, 64)[0])
        assert products * pairs * 64 * 128 / us / 1e6 == pytest.approx(published, rel=0.06)


# ---- hardware


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_figures_have_sources(name: str) -> None:
    hardware = Hardware.load(name)
    assert hardware.name == name
    figures = hardware.figures()
    assert all(figure.source for figure in figures.values())
    assert [key for key, figure in figures.items() if not figure.value > 0] == ["contention"]
    assert figures["contention"].assumed
    assert figures["peak_tflops"].value > figures["linear_tflops"].value
    assert hardware.forward.assumed
    assert hardware.forward.source
    assert hardware.measured is None
    assert Hardware.from_data(json.loads(json.dumps(hardware.to_data()))) == hardware


def test_built_in_names_and_links() -> None:
    assert list(BUILTIN) == list(chips.CHIPS)
    assert sorted(BUILTIN) == sorted(path.stem for path in chips.FILES.iterdir())
    properties = validator("job").schema["properties"]
    assert properties["hardware"]["anyOf"][1]["enum"] == list(BUILTIN)
    assert H100.cluster(2, 8).to_data() == Cluster(2, 8).to_data()
    assert not H100.intra_gbs.assumed
    assert H100.inter_latency_us.assumed
    assert all(figure.assumed for figure in (Hardware.load("h20").inter_gbs, Hardware.load("h20").memory_gbs))
    ratio = 148e3 / (Hardware.load("h20").inter_gbs.value)  # FCP, Table 1: GPU-X
    assert ratio == pytest.approx(5920)


@pytest.mark.parametrize("name", BUILTIN)
def test_built_in_files_equal_the_output_of_the_kernel_model(name: str) -> None:
    assert Hardware.load(name) == chips.hardware_of(chips.CHIPS[name])


@pytest.mark.parametrize("name", ["h100", "h200", "h20", "a100", "a800", "b200"])
def test_stage_files_differ_from_flash_files_only_in_slower_kernels(name: str) -> None:
    flash, stage = Hardware.load(name), Hardware.load(f"{name}-stage")
    assert (flash.engine, stage.engine) == ("flash", "stage")
    assert stage.figures() == flash.figures()
    parts = {"h": (0.65, 0.55), "a": (0.95, 0.85), "b": (0.37, 0.37)}[name[0]]
    for phase, part in zip(PHASES, parts, strict=True):
        us = [float(LLAMA_COST[other.name].ideal_us(phase, 10**6, 64)) for other in (flash, stage)]
        assert us[0] / us[1] == pytest.approx(part, rel=0.01)
        assert stage.grid(phase).assumed
        assert "Triton" in stage.grid(phase).source
    assert stage.digest() != flash.digest()


def test_the_digest_covers_only_figures() -> None:
    dated = replace(H100, measured=ProfileOrigin("a machine", {"torch": "2.13"}, "2026-01-31"))
    assert dated.digest() == H100.digest() == Hardware.from_data(H100.to_data()).digest()
    assert len({Hardware.load(name).digest() for name in BUILTIN}) == len(BUILTIN)
    other = replace(H100, inter_gbs=Figure(25.0, H100.inter_gbs.source))
    assert other.digest() != H100.digest()


def test_mismatch_names_what_differs() -> None:
    assert H100.mismatch(H100.cluster(4)) == []
    assert H100.mismatch(Cluster(inter_gbs=48.0)) == []
    warnings = H100.mismatch(Cluster(inter_gbs=25.0, nics_per_node=4))
    assert len(warnings) == 2
    assert "cluster.inter_gbs is 25, but hardware h100 has 50" in warnings[0]


def test_measured_hardware_round_trips(tmp_path: Path) -> None:
    dated = replace(SMALL, measured=ProfileOrigin("a machine", {"torch": "2.13"}, "2026-01-31"))
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(dated.to_data()))
    assert Hardware.load(path) == Hardware.load(str(path)) == dated
    assert hash(Hardware.load(path)) == hash(dated)


@pytest.mark.parametrize("name", ["h1000", "", "H100", "a" * 1000])
def test_unknown_names_are_refused_with_the_known_names(name: str) -> None:
    with pytest.raises(UnknownNameError, match="h100"):
        Hardware.load(name)


def test_a_large_file_is_refused_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.write_bytes(b" " * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="must be at most"):
        Hardware.load(path)


# ---- hostile files


def changed(**changes: Any) -> dict[str, Any]:
    return SMALL.to_data() | changes


def in_grid(**changes: Any) -> dict[str, Any]:
    return changed(forward=SMALL.to_data()["forward"] | changes)


def in_figures(name: str, **changes: Any) -> dict[str, Any]:
    figures = SMALL.to_data()["figures"]
    return changed(figures=figures | {name: figures.get(name, {}) | changes})


def without(name: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
    return {key: value for key, value in (data or SMALL.to_data()).items() if key != name}


def without_figure(name: str) -> dict[str, Any]:
    return changed(figures=without(name, SMALL.to_data()["figures"]))


def cell(value: Any) -> list[list[Any]]:
    grid: list[list[Any]] = [list(row) for row in SMALL.forward.causal]
    grid[1][2] = value
    return grid


MEASURED = {"device": "x", "date": "now"}
REFUSED = [
    ([], "hardware"),
    (without("forward"), "hardware.forward"),
    (changed(other=1), "hardware.other"),
    (changed(version=2), "hardware.version"),
    (changed(name="a b"), "hardware.name"),
    (changed(device=""), "hardware.device"),
    (changed(device="x" * 1000), "hardware.device"),
    (without("engine"), "hardware.engine"),
    (changed(engine="fast"), "hardware.engine"),
    (changed(dtype="fp8"), "hardware.dtype"),
    (changed(tile=0), "hardware.tile"),
    (changed(kv_heads=5), "hardware.kv_heads"),
    (changed(axis="abc"), "hardware.axis"),
    (changed(axis=[16]), "hardware.axis"),
    (changed(axis=list(range(1, 10_000))), "hardware.axis"),
    (changed(axis=[16, 32, 32, 256]), "hardware.axis"),
    (changed(axis=[16, 32, 64, 2**40]), r"hardware.axis\[3\]"),
    (changed(axis=[16, 32, 256]), "hardware.forward.full"),
    (changed(figures={}), "hardware.figures.memory_gib"),
    (in_figures("memory_gbs", value=0), "hardware.figures.memory_gbs.value"),
    (in_figures("post_us", value=-1), "hardware.figures.post_us.value"),
    (in_figures("contention", value=-0.1), "hardware.figures.contention.value"),
    (in_figures("contention", value=11), "hardware.figures.contention.value"),
    (in_figures("peak_tflops", value=0), "hardware.figures.peak_tflops.value"),
    (in_figures("rows_gbs", value=0, source="x"), "hardware.figures.rows_gbs.value"),
    (in_figures("incast", value=11, source="x"), "hardware.figures.incast.value"),
    (in_figures("one_peer", value=1.5, source="x"), "hardware.figures.one_peer.value"),
    (in_figures("one_peer", value=0.5, source="x", interval=[0.6, 1]), "hardware.figures.interval"),
    (in_figures("adam_gbs", value=1, source="x"), "hardware.figures.adam_gbs"),
    (in_grid(window_us=-1), "hardware.forward.window_us"),
    (without_figure("peak_tflops"), "hardware.figures.peak_tflops"),
    (without_figure("contention"), "hardware.figures.contention"),
    (in_figures("memory_gbs", value=float("nan")), "hardware.figures.memory_gbs.value"),
    (in_figures("intra_gbs", value="450"), "hardware.figures.intra_gbs.value"),
    (in_figures("intra_latency_us", value=-1), "hardware.figures.intra_latency_us.value"),
    (in_figures("nics_per_node", value=1.5), "hardware.figures.nics_per_node.value"),
    (in_figures("nics_per_node", value=0), "hardware.figures.nics_per_node.value"),
    (in_figures("inter_gbs", source=""), "hardware.figures.inter_gbs.source"),
    (in_figures("inter_gbs", assumed="yes"), "hardware.figures.inter_gbs.assumed"),
    (in_grid(launch_us=float("inf")), "hardware.forward.launch_us"),
    (in_grid(full=[[1.0] * 4] * 3), "hardware.forward.full"),
    (in_grid(full=[[1.0] * 4] * 3 + [[1.0] * 5]), r"hardware.forward.full\[3\]"),
    (in_grid(full=7), "hardware.forward.full"),
    (in_grid(causal=cell(0)), r"hardware.forward.causal\[1\]\[2\]"),
    (in_grid(full=[[1e299] * 4] * 4), r"hardware.forward.full\[0\]\[0\]"),
    (in_grid(causal=cell(1.0)), r"hardware.forward.causal\[1\]\[2\]"),
    (in_grid(causal=(4 * np.array(SMALL.forward.full)).tolist()), r"hardware.forward.causal\[0\]\[0\]"),
    (changed(measured={"device": "x"}), "hardware.measured"),
    (changed(measured=MEASURED | {"versions": {"a": 1}}), "hardware.measured.versions.a"),
    (
        changed(measured=MEASURED | {"versions": {f"p{i}": "1" for i in range(99)}}),
        "hardware.measured.versions",
    ),
]


def test_rates_that_were_not_measured_default_to_memory_bandwidth() -> None:
    h100 = Hardware.load("h100")
    measured = replace(h100, rows_gbs=Figure(50.0, "measured"))
    assert h100.rate_gbs("rows_gbs") == h100.memory_gbs.value
    assert (measured.rate_gbs("rows_gbs"), measured.rate_gbs("loss_gbs")) == (50.0, h100.memory_gbs.value)
    assert Hardware.from_data(json.loads(json.dumps(measured.to_data()))) == measured
    assert schema_accepts("hardware", measured.to_data())
    assert "rows_gbs" not in h100.to_data()["figures"]  # earlier files keep their digests
    with pytest.raises(UnknownNameError, match="did you mean loss_gbs"):
        h100.rate_gbs("los_gbs")


def test_windows_are_priced_by_their_measured_cost() -> None:
    slow = replace(SMALL, forward=replace(SMALL.forward, window_us=0.5))
    assert schema_accepts("hardware", slow.to_data())
    assert Hardware.from_data(slow.to_data()) == slow
    model = Model(q_heads=4, kv_heads=2, head_dim=8, dtype="fp32")
    before, after = (CostModel(hardware, model) for hardware in (SMALL, slow))
    n, causal = 64, int(causal_pairs(64, 64))
    for pairs, longer in ((causal // 2, 0.5 * n), (causal, 0.0), (n * n, 0.0)):
        took = [float(cost.attention_us("forward", n, n, pairs, 4, 2)[0]) for cost in (before, after)]
        assert took[1] == pytest.approx(took[0] + longer)
    took = [float(cost.attention_us("backward", n, n, causal // 2, 4, 2)[0]) for cost in (before, after)]
    assert took[1] == took[0]


def test_causal_tasks_may_take_longer_than_full_ones() -> None:
    """CPU kernels compute a rectangle in one call, and one without its corner in two or three."""
    causal = np.array(SMALL.forward.causal) * 2
    causal[0, 0] = SMALL.forward.full[0][0]
    costly = Hardware.from_data(in_grid(causal=causal.tolist()))
    assert schema_accepts("hardware", costly.to_data())
    cost = CostModel(costly, SMALL_COST.model)
    rows, keys = (side.ravel() for side in np.meshgrid(costly.axis, costly.axis, indexing="ij"))
    np.testing.assert_allclose(causal_us(cost, "forward", rows, keys), causal.ravel(), rtol=1e-12)
    np.testing.assert_allclose(full_us(cost, "forward", rows, keys), np.ravel(SMALL.forward.full), rtol=1e-12)
    corner, full = int(causal_pairs(32, 64)), 32 * 64
    between = cost.attention_us("forward", 32, 64, (corner + full) // 2, 4, 2)[0]
    assert full_us(cost, "forward", 32, 64)[0] < between < causal_us(cost, "forward", 32, 64)[0]
    # a single row is both full and causal
    assert causal_us(cost, "forward", 1, 64)[0] <= SMALL.forward.full[0][2]
    far = causal_us(cost, "forward", 5000, 5000)[0] / full_us(cost, "forward", 5000, 5000)[0]
    assert far <= (causal / np.array(SMALL.forward.full)).max()


@pytest.mark.parametrize(("data", "field"), REFUSED, ids=range(len(REFUSED)))
def test_hostile_files_are_refused_by_field(data: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}"):
        Hardware.from_data(data)


def test_the_schema_accepts_what_is_read() -> None:
    dated = replace(SMALL, measured=ProfileOrigin("a machine", {"torch": "2.13"}, "2026-01-31"))
    rates = MessageRates((64,), (0.5,), (0.4,), (0.6,), "made up")
    figure = Figure(0.5, "made up", interval=(0, 1))
    busy = replace(SMALL, incast=figure, incast_peers=figure, one_peer=figure, message_rates=rates)
    for hardware in (SMALL, dated, busy, *map(Hardware.load, BUILTIN)):
        assert schema_accepts("hardware", hardware.to_data())


@pytest.mark.parametrize(
    "data",
    [data for data, _ in REFUSED[:15]]
    + [in_grid(full=7), in_figures("memory_gbs", value=0), in_figures("contention", value=11)]
    + [without_figure("peak_tflops"), without_figure("contention")],
)
def test_the_schema_refuses_what_is_refused(data: Any) -> None:
    if data != changed(kv_heads=5):  # a relation of two fields, which the schema cannot express
        assert not schema_accepts("hardware", data)
