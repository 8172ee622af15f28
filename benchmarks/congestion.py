"""Fits congestion between nodes to three papers' results: FCP's Table 2, Zeppelin's Figure 11 and MagiAttention's
benchmark on H100s; compares the fits with the current figures.

Run: python -m benchmarks.congestion (a few minutes on one core). Writes all rows to benchmarks/results/congestion.json
and the tables between the markers of docs/papers.md; `--only NAME,...` measures only these papers, `--only none` only
writes the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np

from apportion.bench import cluster_of
from apportion.ir.arrays import Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.request.figures import Figure
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.policy import Recipe
from apportion.planner import api
from apportion.planner.cost import CostModel
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.schedule.rounds import Matchings
from apportion.planner.simulate import simulate
from apportion.planner.simulate.scenarios import INCAST_PEERS
from benchmarks.comparison import FCP_TRACES, LLAMA_3B, LLAMA_70B, zeppelin
from benchmarks.published import FLOPS, PUBLISHED
from benchmarks.tables import ROOT, head, line, run

RESULTS = ROOT / "benchmarks/results/congestion.json"


@dataclass(frozen=True)
class Figures:
    """Assumed figures of the network between nodes. rate: fraction of the hardware's bandwidth per NIC."""

    rate: float = 1.0
    incast: float = 0.0
    one_peer: float = 1.0

    def hardware(self, hardware: Hardware) -> Hardware:
        fitted = {"incast": self.incast, "incast_peers": INCAST_PEERS, "one_peer": self.one_peer}
        rate = Figure(self.rate * hardware.inter_gbs.value, "fitted", True)
        figures: dict[str, Any] = {name: Figure(value, "fitted", True) for name, value in fitted.items()}
        return replace(hardware, inter_gbs=rate, **figures)


TODAY = Figures()
TRIED = [Figures(*row) for row in product((1.0, 0.5, 0.32, 0.16), (0.0, 0.085, 0.17, 0.34), (1.0, 0.65))]

#: step -> published results, and a function that simulates them for given figures
Pairs = dict[str, tuple[tuple[float, ...], Callable[[Figures], tuple[float, ...]]]]


@dataclass(frozen=True)
class Paper:
    """A paper. name: its marker in docs/papers.md; figures: titles of the results; steps: see `Pairs`."""

    name: str
    title: str
    figures: tuple[str, ...]
    steps: Callable[[], Pairs]


# --- FCP, Table 2

FCP_RANKS, FCP_BATCHES = 128, 1
FCP_BLOCKS = {"blocks": {"block": 4096, "zigzag": True}}
SINGLE = {"matchings": {"coalesce": 1, "buffers": 3}}
COALESCED = {"matchings": {"coalesce": 16, "buffers": 3}}


def _pull_slots(self: Matchings, src: Ints, dst: Ints, ranks: int) -> Ints:
    """Assigns slots without matchings: each receiver pulls its tiles one after another, in its own order."""
    order = np.random.default_rng(1).permutation(len(dst))
    order = order[np.argsort(dst[order], kind="stable")]
    first = np.searchsorted(dst[order], np.arange(ranks))
    slot = np.empty(len(dst), np.int32)
    slot[order] = np.arange(len(dst)) - first[dst[order]]
    return slot


def fcp() -> Pairs:
    """Attention of Llama 70B on 128 H20s, as MFU relative to a single GPU: base gathers everything, #1 pipelines
    blocks, #2 matches them, #3 coalesces 16 slots per round."""
    hardware = Hardware.load("h20")
    batch = FCP_TRACES["long"](FCP_RANKS * 32768, 0)
    cluster = cluster_of(FCP_RANKS, None, hardware)
    steps: dict[str, tuple[tuple[float, ...], Any, AbstractContextManager[Any]]] = {
        "base": ((0.29, 0.37), {"gather": {}}, nullcontext()),
        "#1, pipelined": ((0.48, 0.46), SINGLE, patch.object(Matchings, "_colour", _pull_slots)),
        "#2, matchings": ((0.62, 0.59), SINGLE, nullcontext()),
        "#3, coalesced": ((0.70, 0.69), COALESCED, nullcontext()),
    }

    def efficiency(figures: Figures, schedule: Any, mode: AbstractContextManager[Any]) -> tuple[float, ...]:
        fitted = figures.hardware(hardware)
        links = replace(cluster, inter_gbs=fitted.inter_gbs.value)
        recipe = Recipe("fcp", {"shard": FCP_BLOCKS, "place": {"lpt": {}}, "schedule": schedule})
        # only coalesced slots are replanned; the other schedules are not split for incast
        planned_for = fitted if schedule is COALESCED else hardware
        with mode:
            plan = _planned(batch, links, LLAMA_70B, recipe, planned_for)
        runs = simulate(plan, fitted, links).runs
        efficiencies = []
        for phase in FLOPS:
            group = [run for (_, run_phase), run in runs.items() if run_phase == phase]
            efficiencies.append(sum(run.ideal_us for run in group) / sum(run.makespan_us for run in group))
        return tuple(efficiencies)

    return {
        name: (published, lambda figures, s=schedule, h=mode: efficiency(figures, s, h))  # type: ignore[misc]
        for name, (published, schedule, mode) in steps.items()
    }


# --- Zeppelin, Figure 11


def _zeppelin(place: Any, schedule: Any, **extra: Any) -> Recipe:
    steps = {"shard": {"sequences": {}}, "place": place, "schedule": schedule}
    return Recipe("zeppelin", steps | extra)


def zeppelin_ablation() -> Pairs:
    """Throughput of a 3B model's layers on 32 A800s relative to a ring, for arXiv lengths: routing over all NICs; zones
    and queues; both; and, in addition, even tokens for linear layers."""
    hardware, ranks, batches = Hardware.load("a800"), 32, 4
    cluster = cluster_of(ranks, None, hardware)
    ring = find_recipe("ring")
    routed, parts = {"queues": {"proxies": 8}}, {"zeppelin": {"parts": 8}}
    recipes = {
        "routing": (1.6, _zeppelin({"zigzag": {"over": "sequence"}}, routed)),
        "engine": (3.2, _zeppelin({"zeppelin": {}}, {"queues": {}})),
        "both": (3.51, _zeppelin(parts, routed)),
        "all": (3.64, _zeppelin(parts, routed, remap={"flow": {}})),
    }
    draws = [zeppelin("arxiv")(ranks * 4096, seed) for seed in range(batches)]

    def layer_ms(figures: Figures, recipe: Recipe) -> float:
        fitted = figures.hardware(hardware)
        links, total = replace(cluster, inter_gbs=fitted.inter_gbs.value), 0.0
        costs = CostModel(fitted, LLAMA_3B)
        for batch in draws:
            plan = _planned(batch, links, LLAMA_3B, recipe, hardware)
            run = simulate(plan, fitted, links)
            fullest = batch.tokens / ranks * (1 + plan.report["imbalance"]["tokens"])
            if recipe.step("remap") is not None:
                fullest = batch.tokens / ranks
            total += run.forward_ms + run.backward_ms + 3 * float(costs.linear_us(round(fullest))) / 1e3
        return total

    return {
        name: ((gain,), lambda figures, r=recipe: (layer_ms(figures, ring) / layer_ms(figures, r),))  # type: ignore[misc]
        for name, (gain, recipe) in recipes.items()
    }


# --- MagiAttention, H100


def magi() -> Pairs:
    """TFLOP/s per GPU, forward and backward, of the native collective and the all-to-all-v, mean of 3 packs."""
    (case,) = (setting for setting in PUBLISHED if setting.name == "magi-h100")
    hardware = Hardware.load(case.hardware)

    def tflops(figures: Figures, recipe: Recipe, ranks: int) -> tuple[float, ...]:
        fitted, rates = figures.hardware(hardware), []
        cluster = cluster_of(ranks, None, hardware)
        links = replace(cluster, inter_gbs=fitted.inter_gbs.value)
        for seed in range(3):
            batch = case.draw(ranks * case.tokens_per_rank, seed)
            run = simulate(_planned(batch, links, case.model, recipe, hardware), fitted, links)
            pairs = int((batch.lengths * (batch.lengths + 1) // 2).sum())
            flops = pairs * case.model.q_heads * case.model.head_dim / ranks / 1e9
            times = run.forward_ms, run.backward_ms
            rates.append([scale * flops / ms for scale, ms in zip(FLOPS.values(), times, strict=True)])
        return tuple(np.mean(rates, axis=0).tolist())

    return {
        f"{system.name.split(', ')[1]}, {ranks}": (
            system.tflops[ranks],
            lambda figures, r=system.recipe, n=ranks: tflops(figures, r, n),  # type: ignore[misc]
        )
        for system in case.systems
        if system.name.startswith("MagiAttention")
        for ranks in system.tflops
    }


_PLANS: dict[str, Plan] = {}


def _planned(batch: Any, cluster: Any, model: Any, recipe: Recipe, hardware: Hardware) -> Plan:
    """The plan, from a cache: of the network's figures, only `incast` changes the plans of these recipes."""
    hardware_key = hardware.digest() if hardware.incast is not None else hardware.name
    colour = Matchings._colour.__name__
    key = repr((batch.lengths.tolist(), cluster.ranks, recipe.to_data(), hardware_key, colour))
    if key not in _PLANS:
        _PLANS[key] = api.plan(batch, cluster, model, recipe=recipe, hardware=hardware, verify=False)
    return _PLANS[key]


PAPERS = (
    Paper("fcp-table-2", "FCP, Table 2", ("forward", "backward"), fcp),
    Paper("zeppelin-figure-11", "Zeppelin, Figure 11", ("over the ring",), zeppelin_ablation),
    Paper("magi-h100", "MagiAttention, H100", ("forward", "backward"), magi),
)


# --- measuring


def measure(paper: Paper) -> dict[str, Any]:
    """Simulates every step under all candidate figures; adds the mean error of each candidate."""
    steps = paper.steps()
    published = {name: list(theirs) for name, (theirs, _) in steps.items()}
    tried = []
    for figures in TRIED:
        results = {
            name: [round(value, 4) for value in simulated(figures)] for name, (_, simulated) in steps.items()
        }
        tried.append({"figures": figures.__dict__, "ours": results, "error": _error(published, results)})
    return {"name": paper.name, "columns": list(paper.figures), "published": published, "tried": tried}


def _error(published: Mapping[str, Sequence[float]], results: Mapping[str, Sequence[float]]) -> float:
    """The geometric mean of max(ours / theirs, theirs / ours), minus 1."""
    ratios = np.concatenate([np.log(np.divide(results[name], published[name])) for name in published])
    return round(float(np.exp(np.abs(ratios).mean()) - 1), 4)


# --- the page


def table(paper: Mapping[str, Any]) -> str:
    """One row per step: the paper's result, then ours and its ratio to the paper's, for three sets of figures: current,
    the best at the current rate, and the best of all."""
    tried = paper["tried"]
    today = next(fit for fit in tried if fit["figures"] == TODAY.__dict__)
    at_rate = min((fit for fit in tried if fit["figures"]["rate"] == 1.0), key=lambda fit: fit["error"])
    best = min(tried, key=lambda fit: fit["error"])
    columns = {"today": today, "best at today's rate": at_rate, "best": best}
    names = [f"{name}{_describe(fit['figures'])}" for name, fit in columns.items()]
    lines = head(["step", "theirs", *names])
    for step, paper_row in paper["published"].items():
        lines.append(line([step, *_cells(paper_row, [fit["ours"][step] for fit in columns.values()])]))
    lines.append(line(["mean error", "", *(f"{fit['error']:.0%}" for fit in columns.values())]))
    return "\n".join([f"{' / '.join(paper['columns'])}; in brackets ours over theirs", "", *lines])


def _describe(figures: Mapping[str, float]) -> str:
    named = {"rate": "rate x", "incast": "incast ", "one_peer": "one peer "}
    differences = [f"{named[key]}{value:g}" for key, value in figures.items() if value != TODAY.__dict__[key]]
    return f": {', '.join(differences)}" if differences else ""


def _cells(reference: Sequence[float], results: Sequence[Sequence[float]]) -> Iterator[str]:
    yield " / ".join(f"{value:.3g}" for value in reference)
    for row in results:
        ratios = " / ".join(f"{value / expected:.2f}" for value, expected in zip(row, reference, strict=True))
        yield f"{' / '.join(f'{value:.3g}' for value in row)} ({ratios})"


def main() -> None:
    run({paper.name: partial(measure, paper) for paper in PAPERS}, RESULTS, table, "congestion-")


if __name__ == "__main__":
    main()
