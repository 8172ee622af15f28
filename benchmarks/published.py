"""Settings of other systems with their published figures, and our simulations of the same settings.

`measure` plans the batches of a setting once, for nominal figures, and prices the plans under every scenario. The
tables are in docs/papers.md; `benchmarks/comparison.py` runs the settings as cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from apportion.bench import cluster_of
from apportion.ir.request.batch import Batch
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.planner import api
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.simulate import simulate
from apportion.planner.simulate.scenarios import SCENARIOS, apply
from benchmarks.tables import head, line

FORM = "published"
#: FLOPs per pair, query head and column of the head dim: QK and PV; backward QK again, dP, dV, dQ and dK
FLOPS = {"forward": 4, "backward": 10}

Pair = tuple[float, float]  # forward, backward


@dataclass(frozen=True)
class System:
    """Published TFLOP/s per GPU by number of GPUs (none for ours), and the recipe that stands for the system."""

    name: str
    recipe: Recipe
    tflops: Mapping[int, Pair]


@dataclass(frozen=True)
class PublishedSetting:
    """A setting: for each number in `ranks`, `batches` batches of that many ranks x `tokens_per_rank` tokens."""

    name: str
    title: str
    hardware: str
    tokens_per_rank: int
    systems: tuple[System, ...]
    model: Model
    batches: int = 20
    ranks: tuple[int, ...] = (8, 16, 32, 64)

    def draw(self, tokens: int, seed: int) -> Batch:
        return magi_documents(tokens, seed)


# --- MagiAttention's benchmark

#: documents of the benchmark's default data set: middle of a histogram bin (which the benchmark takes as length) ->
#: number of documents (SandAI-org/MagiAttention, exps/dist_attn, Apache-2.0)
MAGI_DOCUMENTS = {
    5: 30_254,
    30: 391_188,
    75: 699_596,
    150: 1_377_757,
    350: 3_794_735,
    762: 3_316_785,
    1536: 2_106_566,
    3072: 988_525,
    6144: 410_002,
    12288: 173_574,
    24576: 115_007,
    49152: 18_428,
    98304: 22_513,
    163840: 18_284,
}
SHARE = 4  # documents are cut into pieces of at most a pack's tokens / SHARE


def magi_documents(tokens: int, seed: int) -> Batch:
    """Draws a pack of random documents, cut into pieces if longer than a quarter of it; the last fills the rest."""
    lengths = np.array(list(MAGI_DOCUMENTS), np.int64)
    counts, limit = np.array(list(MAGI_DOCUMENTS.values()), np.int64), tokens // SHARE
    pieces = np.append(lengths % limit, limit)
    number = np.append(counts * (lengths % limit > 0), (lengths // limit * counts).sum())
    rng = np.random.Generator(np.random.PCG64(seed))
    sizes = pieces[rng.choice(len(pieces), tokens // 64, p=number / number.sum())]
    last = int(np.searchsorted(np.cumsum(sizes), tokens))
    prefix = sizes[:last].tolist()
    return Batch.from_lengths([*prefix, tokens - sum(prefix)])


def _variant(name: str, recipe: str, **steps: Any) -> Recipe:
    return Recipe(name, {**find_recipe(recipe).to_data()["steps"], **steps})


_CHUNKS = {"chunks": {"size": 2048}}
_NATIVE = _variant("magi-2k", "magi", shard=_CHUNKS)
_STAR = _variant("magi-2k-star", "magi", shard=_CHUNKS, route={"star": {}})
#: partial gradients of keys and values are sent in bf16, MagiAttention's default
_MODEL = Model(q_heads=64, kv_heads=8, head_dim=128, hidden=8192, ffn=28672, sent_gradients="model")
_OURS = tuple(System("", find_recipe(name), {}) for name in ("fcp", "auto"))

PUBLISHED = (
    PublishedSetting(
        "magi-h100",
        "MagiAttention's H100 setting",
        "h100",
        8192,
        (
            System(
                "MagiAttention, native",
                _NATIVE,
                {8: (459, 361), 16: (426, 371), 32: (315, 333), 64: (237, 264)},
            ),
            System("MagiAttention, all-to-all-v", _STAR, {8: (387, 335), 64: (207, 242)}),
            System(
                "Megatron HybridCP",
                find_recipe("megatron_hybrid"),
                {8: (277, 226), 16: (222, 220), 32: (190, 190), 64: (161, 163)},
            ),
            *_OURS,
        ),
        _MODEL,
    ),
    PublishedSetting(
        "magi-b200",
        "MagiAttention's B200 setting",
        "b200",
        16384,
        (
            System(
                "MagiAttention, native",
                _NATIVE,
                {8: (870, 647), 16: (804, 657), 32: (668, 616), 64: (561, 552)},
            ),
            *_OURS,
        ),
        _MODEL,
    ),
)


# --- measuring


def measure(case: PublishedSetting) -> dict[str, Any]:
    """The rows of a setting: means over its batches of TFLOP/s per GPU, forward and backward, under each scenario."""
    return {
        "form": FORM,
        "name": case.name,
        "title": case.title,
        "hardware": case.hardware,
        "tokens_per_rank": case.tokens_per_rank,
        "batches": case.batches,
        "model": case.model.to_data(),
        "rows": [
            _row(case, system, ranks) for system in case.systems for ranks in system.tflops or case.ranks
        ],
    }


def _row(case: PublishedSetting, system: System, ranks: int) -> dict[str, Any]:
    hardware = Hardware.load(case.hardware)
    cluster, rates, losses = cluster_of(ranks, None, hardware), [], []
    for seed in range(case.batches):
        batch = case.draw(ranks * case.tokens_per_rank, seed)
        plan = api.plan(batch, cluster, case.model, recipe=system.recipe, seed=seed, hardware=hardware)
        runs = [simulate(plan, *apply(scenario, hardware, cluster)) for scenario in SCENARIOS]
        pairs = int((batch.lengths * (batch.lengths + 1) // 2).sum())
        rates.append([[_tflops(case.model, pairs, ranks, run, phase) for phase in FLOPS] for run in runs])
        lost = runs[0].lost_ms
        losses.append([lost[name] / sum(lost.values()) for name in ("imbalance", "stalls")])
    means, deviation = np.mean(rates, axis=0), np.std(rates, axis=0)[0]
    imbalance, stalls = np.mean(losses, axis=0).tolist()
    return {
        "system": system.name,
        "recipe": system.recipe.name,
        "ranks": ranks,
        "published": dict(zip(FLOPS, system.tflops[ranks], strict=True)) if ranks in system.tflops else None,
        "tflops": {
            scenario.name: dict(zip(FLOPS, np.round(mean, 1).tolist(), strict=True))
            for scenario, mean in zip(SCENARIOS, means, strict=True)
        },
        "deviation": dict(zip(FLOPS, np.round(deviation, 1).tolist(), strict=True)),
        "imbalance": round(imbalance, 4),
        "stalls": round(stalls, 4),
    }


def _tflops(model: Model, pairs: int, ranks: int, run: Any, phase: str) -> float:
    ms = run.forward_ms if phase == "forward" else run.backward_ms
    return float(FLOPS[phase] * pairs * model.q_heads * model.head_dim / ranks / ms / 1e9)


# --- the page

HEAD = (
    *(
        "theirs",
        "stands for it",
        "GPUs",
        "forward, theirs",
        "ours",
        "ratio",
        "backward, theirs",
        "ours",
        "ratio",
    ),
    *("imbalance", "stalls"),
    *(f"ratio, {scenario.name}" for scenario in SCENARIOS[1:]),
)


def table(case: Mapping[str, Any]) -> str:
    """A setting as a Markdown table of TFLOP/s per GPU: ours as mean and standard deviation over batches, and ours over
    theirs; under the other scenarios only that ratio, forward and backward."""
    lines = [
        f"{case['tokens_per_rank']:,} tokens a GPU, {case['hardware']}, batches: {case['batches']}; TFLOP/s a GPU",
        "",
        *head(HEAD, 2),
        *(line(_cells(row)) for row in case["rows"]),
    ]
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    theirs, nominal = row["published"], row["tflops"]["nominal"]
    cells = [row["system"] or "-", row["recipe"], str(row["ranks"])]
    for phase in FLOPS:
        ours = f"{nominal[phase]:.0f} ± {row['deviation'][phase]:.0f}"
        cells += (
            ["-", ours, "-"]
            if theirs is None
            else [f"{theirs[phase]:.0f}", ours, _ratio(nominal, theirs, phase)]
        )
    cells += [f"{100 * row[name]:.0f} %" for name in ("imbalance", "stalls")]
    for scenario in SCENARIOS[1:]:
        ours = row["tflops"][scenario.name]
        cells.append("-" if theirs is None else " / ".join(_ratio(ours, theirs, phase) for phase in FLOPS))
    return cells


def _ratio(ours: Mapping[str, float], theirs: Mapping[str, float], phase: str) -> str:
    return f"{ours[phase] / theirs[phase]:.2f}"
