"""Measuring the backend's own kernels and links: a small profile that the cost model can use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from apportion import ConfigError, ExecutionError, Model, UnknownNameError
from apportion.backends.torch.kernels.attention import Band, Score
from apportion.backends.torch.profile import clock, device as profile_module
from apportion.backends.torch.profile.clock import Runs
from apportion.backends.torch.profile.device import (
    ARENA_BYTES,
    LAYER_FIGURES,
    ProfileScope,
    TimedTask,
    _Arena,
    _estimate_us,
    _grid,
    _peak_tflops,
    _with_windows,
    profile,
)
from apportion.backends.torch.profile.links import Line, Links, fit, profile_links, with_links
from apportion.backends.torch.profile.peers import Pattern, PatternShares, congestion, patterns
from apportion.ir.request.figures import Figure
from apportion.ir.request.hardware import MOST_CONTENTION, Hardware
from tests.ranks import jobs_profile
from tests.ranks.rank_pool import Pool

SMALL = Model(4, 2, 8, dtype="fp32", hidden=32, ffn=64)  # layers that take no time
TINY = ProfileScope((16, 64, 256), SMALL, sweeps=2, runs=Runs(most=3), tokens=128, vocab=64)
SIZES = (1024, 65536, 1 << 20)


Measured = tuple[Hardware, list[tuple[Any, Any]]]


@pytest.fixture(scope="module")
def measured() -> Measured:
    progress = []
    hardware = profile(progress=lambda *step: progress.append(step), name="tiny", device="cpu", effort=TINY)
    return hardware, progress


def test_a_profile_records_where_and_when_it_was_measured(measured: Measured) -> None:
    hardware, _ = measured
    assert hardware.measured.device == hardware.device
    assert "torch" in hardware.measured.versions
    assert hardware.measured.date.count("-") == 2
    assert not hardware.forward.assumed
    assert hardware.engine == "flash"


def test_engines_that_cannot_be_timed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine = .stage.: the stage kernels run on GPUs.*use flash"):
        profile(device="cpu", effort=TINY, engine="stage")
    with pytest.raises(UnknownNameError, match="did you mean stage"):
        profile(device="cpu", effort=TINY, engine="stagee")


def test_links_are_assumed_until_measured(measured: Measured) -> None:
    assert {name for name, figure in measured[0].figures().items() if figure.assumed} == {
        *("intra_gbs", "inter_gbs", "intra_latency_us", "inter_latency_us", "post_us", "nics_per_node"),
        *("host_gbs", "peak_tflops", "contention"),
    }
    assert measured[0].peak_tflops.value == measured[0].linear_tflops.value


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA H100 80GB HBM3", "fp32", 1.5),
        ("NVIDIA H100 PCIe", "bf16", 1.5),
        ("NVIDIA H1000", "bf16", 1.5),
        ("CPU x86_64, 2 threads", "fp32", 1.5),
    ],
)
def test_the_peak_comes_from_a_known_device_or_is_assumed(device: str, dtype: str, tflops: float) -> None:
    figure = _peak_tflops(device, dtype, Figure(1.5, "measured"))
    assert figure.value == tflops
    assert figure.assumed == (tflops == 1.5)


def test_progress_rises_to_its_total(measured: Measured) -> None:
    progress = measured[1]
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    total = 2 * 2 * 9 + LAYER_FIGURES
    assert progress[-1] == (total, total)


def test_no_sweep_begins_after_the_time_limit() -> None:
    progress = []
    effort = ProfileScope((16, 32), SMALL, sweeps=5, seconds=0.0, runs=Runs(1, 1), tokens=128, vocab=64)
    profile(progress=lambda *step: progress.append(step), device="cpu", effort=effort)
    assert len(progress) == 2 * 4 + LAYER_FIGURES + 1
    assert progress[-1] == (2 * 5 * 4 + LAYER_FIGURES, 2 * 5 * 4 + LAYER_FIGURES)


@pytest.fixture
def work_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the clock with a cost per pair and per call, plus noise that only adds time, as on a busy machine, so
    that timing tests do not depend on the machine's load."""
    noise, done = np.random.default_rng(0), []
    grad, forward = profile_module.attend_grad, profile_module.attend  # type: ignore[attr-defined]

    def counting(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(q: torch.Tensor, k: torch.Tensor, *rest: Band | torch.Tensor | Score) -> None:
            done.append(1e3 + len(q) * len(k))
            return kernel(q, k, *rest)

        return run

    def noisy_time(work: Callable[..., Any], device: torch.device) -> float:
        done.clear()
        work()
        return sum(done) * (1 + noise.exponential(0.5)) if done else 1.0

    monkeypatch.setattr(profile_module, "attend", counting(forward))
    monkeypatch.setattr(profile_module, "attend_grad", counting(grad))
    monkeypatch.setattr(clock, "once_us", noisy_time)


@pytest.mark.usefixtures("work_clock")
def test_more_work_takes_no_less_time() -> None:
    hardware = profile(name="tiny", device="cpu", effort=TINY)
    for grid in (hardware.forward, hardware.backward):
        full, causal = np.array(grid.full), np.array(grid.causal)
        for axis in (0, 1):
            assert (np.diff(full, axis=axis) >= 0).all()
            assert (np.diff(causal, axis=axis) >= 0).all()
        assert (causal <= 3 * full * (1 + 1e-9)).all()
        assert full[-1, -1] > full[0, 0]
        pairs = np.outer(TINY.axis, TINY.axis)
        assert (full >= 1e3 + pairs - 1e-3).all()  # time per task: divided by the number of positions
        assert (full <= 3 * (1e3 + pairs)).all()


def test_each_task_is_timed_in_rows_outside_the_cache() -> None:
    """Each run uses the next rows of an arena that is larger than a last-level cache."""
    effort = ProfileScope((64, 512), Model(4, 2, 64, dtype="fp32"))
    arena = _Arena.of(torch.device("cpu"), effort)
    tensors = (*arena.queries, *arena.keys, *arena.rows[:1])
    assert sum(tensor.nbytes for tensor in tensors) > 0.95 * ARENA_BYTES
    runs = [np.array(arena.places(TimedTask(rows, 64, False))) for rows in (64, 512, 64)]
    assert [places.shape for places in runs] == [(11, 8), (11, 1), (11, 8)]
    starts = np.concatenate([places.ravel() for places in runs])
    lengths = np.repeat([64, 512, 64], [88, 11, 88])
    assert (starts[1:] == (starts + lengths)[:-1]).all()
    assert (starts + lengths).max() <= len(arena.queries[0])
    end = len(arena.queries[0])
    arena.cursor[0] = end - 100
    assert arena.places(TimedTask(512, 64, False))[0] == [0]


def test_windows_are_priced_by_tasks_of_several_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median additional time per row over the longer half of the axis, not only over the longest tasks."""
    times = np.add.outer(np.array(TINY.axis, float), np.zeros(3))
    grids = [_grid("flash", times, times)] * 2
    arena = _Arena.of(torch.device("cpu"), TINY)
    extra = {64: 2.0, 256: 5.0}  # microseconds per row

    def known_time(arena: Any, engine: str, task: TimedTask) -> list[float]:
        index = TINY.axis.index(task.rows)
        return [_estimate_us(grids[0], index, task.rows, task.window) + extra[task.rows] * task.rows] * 2

    monkeypatch.setattr(profile_module, "_task_us", known_time)
    assert _with_windows(arena, "flash", *grids)[0].window_us == pytest.approx(3.5)


def test_causal_times_are_kept_as_measured_up_to_three_times_the_full_ones() -> None:
    full = np.array([[1.1664, 2.0], [2.0, 4.0]])
    grid = _grid("flash", full, full * [[9.0, 1.5], [1.5, 0.8]])
    assert np.array(grid.full).tolist() == [[1.166, 2.0], [2.0, 4.0]]
    # no time exceeds that of more rows or keys
    assert np.array(grid.causal).tolist() == [[3.0, 3.0], [3.0, 3.2]]
    grid = _grid("flash", full, np.full((2, 2), 99.0))
    assert np.array(grid.causal).tolist() == [[3.498, 6.0], [6.0, 12.0]]


def test_layers_are_timed_at_the_models_sizes(measured: Measured) -> None:
    hardware = measured[0]
    for name in ("linear_tflops", "rows_gbs"):
        figure = hardware.figures()[name]
        assert figure.value > 0
        assert not figure.assumed
        assert "hidden 32, ffn 64, 128 tokens" in figure.source
    assert "128 x 64 logits" in hardware.loss_gbs.source
    assert "fused" in hardware.optimizer_gbs.source
    model = Model(q_heads=8, kv_heads=4, head_dim=16, dtype="fp32", hidden=96, ffn=256)
    effort = ProfileScope.of(torch.device("cpu"), True, model, 77)
    layer = effort.model
    assert (layer.q_heads, layer.kv_heads, layer.head_dim, layer.hidden, layer.ffn) == (8, 4, 16, 96, 256)
    assert effort.tokens == 77


def test_windows_are_timed_in_addition_to_causal_tasks(measured: Measured) -> None:
    for grid in (measured[0].forward, measured[0].backward):
        assert grid.window_us >= 0
    assert measured[0].forward.window_us > 0  # CPU kernels have no windows: they are computed under a mask


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_grids_reach_from_short_to_long(device: str, quick: bool) -> None:
    effort = ProfileScope.of(torch.device(device), quick)
    assert effort.axis[0] <= 128
    assert effort.axis[-1] >= 2048
    assert list(effort.axis) == sorted(set(effort.axis))


def test_links_of_two_processes(pool: Pool) -> None:
    lines = pool.run(jobs_profile.links, 2, SIZES, None)
    assert lines[0] == lines[1]
    links = lines[0]
    assert (links["inter"], links["backend"], links["nics"]) == (None, "gloo", 1)
    assert links["intra"]["latency_us"] >= 0
    assert links["intra"]["gbs"] > 0
    assert links["post_us"] >= 0
    assert 0 <= links["contention"] <= MOST_CONTENTION


def test_all_ranks_of_two_nodes_are_measured_at_once(pool: Pool) -> None:
    links, *others = pool.run(jobs_profile.links, 4, SIZES, each=[7, 7, 9, 9])
    assert all(other == links for other in others)
    assert 1 <= links["nics"] <= 2  # two pairs of ranks can keep at most two NICs busy
    hardware = with_links(Hardware.load("h100"), jobs_profile.from_data(links))
    measured = {name for name, figure in hardware.figures().items() if "over gloo" in figure.source}
    assert measured == {
        *("post_us", "contention", "nics_per_node"),
        *("intra_gbs", "intra_latency_us", "inter_gbs", "inter_latency_us"),
    }
    assert Hardware.from_data(hardware.to_data()) == hardware


def test_numbers_of_peers_are_swept_if_there_are_several_nodes(pool: Pool) -> None:
    """Four nodes of one rank each: there are one or two peers; fitting a line needs more numbers of senders."""
    links, *others = pool.run(jobs_profile.links, 4, SIZES, each=[3, 1, 2, 5])
    assert all(other == links for other in others)
    hardware = with_links(Hardware.load("h100"), jobs_profile.from_data(links))
    assert hardware.one_peer is not None
    assert hardware.one_peer.interval is not None
    assert hardware.incast is None


@pytest.mark.parametrize("shape", [(2, 1), (4, 2), (9, 3)])
def test_sends_and_receives_of_patterns_match(shape: tuple[int, int]) -> None:
    """Every send has a matching receive, on another node."""
    nodes = np.arange(shape[0] * shape[1]).reshape(shape).tolist()
    patterns_found = patterns(nodes)
    assert {one.peers for one in patterns_found} == {peers for peers in (1, 2, 4, 8) if peers < shape[0]}
    for pattern in patterns_found:
        ends = [pattern.ends(nodes, rank) for rank in range(shape[0] * shape[1])]
        sent = {(rank, to) for rank, (targets, _) in enumerate(ends) for to in targets}
        assert sent == {(sender, rank) for rank, (_, sources) in enumerate(ends) for sender in sources}
        assert all(a // shape[1] != b // shape[1] for a, b in sent)
        assert all(a % shape[1] == b % shape[1] for a, b in sent)
        assert max(len(sources) for _, sources in ends) == pattern.peers
    assert patterns([[0, 1], [2]]) == patterns([[0, 1]]) == []


def test_congestion_figures_are_recovered_from_synthetic_rates() -> None:
    """Shares are relative to the rate of eight senders, which is itself reduced by incast."""
    incast, one_peer, crowd = 0.2, 0.6, 8
    base = 1 + incast * 7
    shares = {peers: one_peer if peers == 1 else 1 / (1 + incast * (peers - 1)) for peers in (1, 2, 4, 8)}
    sweep = [
        PatternShares(Pattern(peers, balanced), (share * base,) * 3)
        for balanced in (True, False)
        for peers, share in shares.items()
    ]
    figures = congestion(sweep, crowd, "gloo")
    assert (figures["incast"].value, figures["incast_peers"].value) == (0.2, 7)
    assert figures["one_peer"].value == pytest.approx(one_peer, abs=1e-3)
    assert congestion([one for one in sweep if one.pattern.peers == 1], 1, "gloo") == {}


def test_one_rank_has_no_links() -> None:
    with pytest.raises(ExecutionError, match="torchrun"):
        profile_links()


def test_measured_links_replace_assumed_ones(measured: Measured) -> None:
    links = Links(Line(3.0, 200.0), None, "nccl", 1, post_us=0.5, contention=0.07)
    hardware = with_links(measured[0], links)
    assert (hardware.intra_gbs.value, hardware.intra_latency_us.value) == (200.0, 3.0)
    assert not hardware.intra_gbs.assumed
    assert hardware.inter_gbs == measured[0].inter_gbs
    assert hardware.nics_per_node == measured[0].nics_per_node
    assert (hardware.post_us.value, hardware.contention.value) == (0.5, 0.07)
    assert Hardware.from_data(hardware.to_data()) == hardware


def test_fit_finds_bandwidth_and_a_latency_that_is_not_negative() -> None:
    sizes = np.array([1000, 10_000, 1_000_000])
    line = fit(sizes, 12.0 + sizes / 5e3)
    assert (line.latency_us, line.gbs) == pytest.approx((12.0, 5.0))

    assert fit([1000, 2000, 4000], [0.1, 0.5, 2.0]).latency_us == 0.0
    assert fit([1000, 2000], [5.0, 4.0]).gbs > 0
