"""Whole training steps of the papers' end-to-end evaluations, beside what is forecast in the same setting.

Cases of `benchmarks/comparison.py`, which runs them; the tables are those of docs/comparison.md. Every line is a figure
that a paper prints, and ours: tokens a second and GPU, or how much faster one system is than another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

import apportion as ap
from apportion.ir import masks
from apportion.ir.hardware import Hardware
from apportion.ir.masks import Mask
from apportion.planner.forecast.choices import static_grids
from apportion.planner.forecast.parallelism import Degrees, Parallelism
from apportion.planner.forecast.result import Row
from apportion.planner.forecast.training import Training
from apportion.planner.recipes import find_recipe
from benchmarks.targets import line

FORM = "steps"
HEAD = ("what", "theirs", "ours", "ratio")
K = 1024


@dataclass(frozen=True)
class Line:
    """A printed figure, and what makes ours. what: as the table calls it; digits: of both."""

    what: str
    theirs: float
    ours: Callable[[], float]
    digits: int = 2


@dataclass(frozen=True)
class Steps:
    """The lines of a paper. assumed: what it does not say."""

    name: str
    title: str
    assumed: str
    lines: tuple[Line, ...]


def measure(case: Steps) -> dict[str, Any]:
    """Plain data of a case."""
    rows = [
        {"what": one.what, "theirs": one.theirs, "ours": one.ours(), "digits": one.digits}
        for one in case.lines
    ]
    return {"form": FORM, "name": case.name, "title": case.title, "assumed": case.assumed, "rows": rows}


def table(case: Mapping[str, Any]) -> str:
    """A case as a Markdown table."""
    lines = [
        f"{case['title']}; assumed: {case['assumed']}",
        "",
        line(HEAD),
        line(["---", "--:", "--:", "--:"]),
    ]
    for row in case["rows"]:
        figures = [f"{row[name]:.{row['digits']}f}" for name in ("theirs", "ours")]
        lines.append(line([row["what"], *figures, f"{row['ours'] / row['theirs']:.2f}"]))
    return "\n".join(lines)


# --- UPipe


UPIPE_MODELS = {
    "Llama3-8B": (1, ap.Model(32, 8, 128, hidden=4096, ffn=14336, layers=32), 128256),
    "Qwen3-32B": (2, ap.Model(64, 8, 128, hidden=5120, ffn=25600, layers=64), 151936),
}
#: Table 3, tokens a second and GPU, at so many thousand tokens
UPIPE_TABLE: Mapping[tuple[str, str], Mapping[int, float]] = {
    ("Llama3-8B", "ulysses"): {128: 2320.47, 512: 878.63, 1024: 475.33, 2048: 246.05, 3072: 162.41},
    ("Llama3-8B", "upipe"): {
        128: 2281.05,
        512: 867.17,
        1024: 472.53,
        2048: 246.07,
        3072: 166.32,
        5120: 98.25,
    },
    ("Llama3-8B", "ring"): {512: 841.05, 1024: 458.51, 2048: 237.99},
    ("Qwen3-32B", "upipe"): {512: 204.46, 1024: 113.26, 2048: 59.56},
}
#: on two nodes UPipe splits heads in each and goes around a ring between them (section 5.3.2)
UPIPE_RECIPES = {("Qwen3-32B", "upipe"): "upipe_ring"}


def _upipe(model: str, method: str, thousands: int) -> float:
    nodes, held, vocabulary = UPIPE_MODELS[model]
    cluster = replace(
        Hardware.load("h100").cluster(nodes, 8), memory_gib=10000.0
    )  # inputs of layers are on the host
    form = Parallelism(find_recipe(UPIPE_RECIPES.get((model, method), method)))
    training = Training(vocab=vocabulary, recompute="full")
    found = ap.forecast([ap.Batch.from_lengths([thousands * K])], cluster, held, [form], training)
    return float(_served(found.rows[0]).nominal[0].tokens / found.rows[0].seconds[0] / cluster.ranks)


UPIPE = Steps(
    "upipe-steps",
    "UPipe, Table 3: tokens a second and GPU, one document on 8 and 16 H100s",
    "offloading of layer inputs is hidden, whole recomputation, fsdp",
    tuple(
        Line(f"{model}, {method}, {size}K", theirs, lambda key=(model, method, size): _upipe(*key))  # type: ignore[misc]
        for (model, method), held in UPIPE_TABLE.items()
        for size, theirs in held.items()
    ),
)


# --- Zeppelin


#: Zeppelin, Table 2: shares of sequences in bins of 0-1, 1-2, 2-4, ... 128-256 thousand tokens
ZEPPELIN_SHARES = {
    "arxiv": (0.032, 0.03, 0.08, 0.219, 0.338, 0.224, 0.077, 0, 0),
    "github": (0, 0.34, 0.095, 0.104, 0.107, 0.102, 0.088, 0.064, 0.045),
    "prolong64k": (0.231, 0.042, 0.021, 0.012, 0.013, 0.008, 0.673, 0, 0),
}


def zeppelin(data: str) -> Callable[[int, int], ap.Batch]:
    """Lengths of one of Zeppelin's data sets: log-uniform inside the bins (assumed), those that do not fit skipped, the
    last one cut."""
    shares = np.array(ZEPPELIN_SHARES[data]) / sum(ZEPPELIN_SHARES[data])
    edges = 1024 * 2.0 ** np.arange(-1, 9)  # the first bin from 512: shorter ones weigh nothing

    def draw(tokens: int, seed: int) -> ap.Batch:
        rng = np.random.Generator(np.random.PCG64(seed))
        bins = rng.choice(len(shares), 4096, p=shares)
        drawn = edges[bins] * (edges[bins + 1] / edges[bins]) ** rng.random(4096)
        lengths = np.rint(drawn[drawn <= tokens]).astype(np.int64)
        last = int(np.searchsorted(np.cumsum(lengths), tokens))
        kept = lengths[: last + 1]
        return ap.Batch.from_lengths([*kept[:-1].tolist(), tokens - int(kept[:-1].sum())])

    return draw


def _llama(hidden: int, ffn: int, layers: int) -> ap.Model:
    """Multi-head, heads of 128."""
    return ap.Model(hidden // 128, hidden // 128, 128, hidden=hidden, ffn=ffn, layers=layers)


ZEPPELIN_3B = ap.Model(32, 32, 100, hidden=3200, ffn=8640, layers=26)
ZEPPELIN_7B = _llama(4096, 11008, 32)
ZEPPELIN_TRAINING = Training(vocab=32000, sharding="zero1", gradients="model", recompute="none")
ZEPPELIN_SEEDS = 4


@cache
def _zeppelin_ratio(hardware: str, model: ap.Model, data: str, ranks: int) -> float:
    """Steps of `zeppelin` in the time of one of the ring over all ranks, 4K tokens each: of their throughputs."""
    draw = zeppelin(data)
    batches = [draw(ranks * 4096, seed) for seed in range(ZEPPELIN_SEEDS)]
    cluster = Hardware.load(hardware).cluster(ranks // 8, 8)
    forms = [Parallelism(find_recipe(name)) for name in ("zeppelin", "ring")]
    found = ap.forecast(batches, cluster, model, forms, ZEPPELIN_TRAINING, hardware=hardware)
    mine, base = (_served(row).seconds[0] for row in found.rows)
    return base / mine


def _zeppelin_mean() -> float:
    cells = [
        _zeppelin_ratio(hardware, ZEPPELIN_7B, data, ranks)
        for hardware in ("a800", "h200")
        for data in ("arxiv", "github", "prolong64k")
        for ranks in (16, 32, 64)
    ]
    return float(np.mean(cells))


ZEPPELIN = Steps(
    "zeppelin-steps",
    "Zeppelin, sections 5.1 and 5.3: speed-up over Transformer Engine's ring",
    "sizes of the 3B model, lengths inside bins, sharded Adam with gradients in bf16, no recomputation; the mean is of "
    "7B alone, theirs of four models",
    (
        Line(
            "3B, ArXiv, 32 GPUs of cluster A", 3.64, lambda: _zeppelin_ratio("a800", ZEPPELIN_3B, "arxiv", 32)
        ),
        Line("mean over data sets, 64K to 256K tokens, clusters A and C", 2.80, _zeppelin_mean),
    ),
)


# --- DistCA


SHARES = (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 1)
#: quantiles of the lengths that DistCA's simulator has for its two distributions
DISTCA_LENGTHS = {
    "Pretrain": (1, 63, 326, 645, 1588, 3221, 4833, 5783, 6112, 10113, 27795, 66525, 119810, 124817),
    "ProLong": (582, 679, 804, 921, 1241, 1921, 3470, 6065, 8342, 12113, 16440, 21133, 45665, 309251),
}
DISTCA_MODELS = {
    "8B": ap.Model(32, 8, 128, hidden=4096, ffn=14336, layers=32),
    "34B": ap.Model(64, 16, 128, hidden=8192, ffn=22016, layers=48),
}
DISTCA_TRAINING = Training(sharding="zero1", recompute="selective")
DISTCA_SEEDS = 2


def _documents(data: str, tokens: int, longest: int, seed: int) -> list[int]:
    """Lengths by the quantiles, cut at the longest, until the batch is full."""
    rng, lengths, total = np.random.Generator(np.random.PCG64(seed)), [], 0
    while total < tokens:
        drawn = int(np.interp(rng.random(), SHARES, DISTCA_LENGTHS[data]))
        lengths.append(max(1, min(drawn, longest, tokens - total)))
        total += lengths[-1]
    return lengths


@cache
def _distca(model: str, data: str, longest: int, batch: int, gpus: int) -> Mapping[str, float]:
    """Seconds of a step by system, TP 8, the best degree of each grid."""
    tokens = longest * K * batch
    batches = [
        ap.Batch.from_lengths(_documents(data, tokens, longest * K, seed)) for seed in range(DISTCA_SEEDS)
    ]
    hardware = Hardware.load("h200")
    cluster, degrees = hardware.cluster(gpus // 8, 8), Degrees(tensor=8)
    forms = {
        "distca": [Parallelism(find_recipe("distca"), degrees)],
        "flexsp": [Parallelism(find_recipe("flexsp"), degrees)],
        "wlb": [Parallelism(find_recipe("wlb"), degrees), *static_grids(cluster, ["wlb"], degrees)],
        "megatron": static_grids(cluster, ["allgather"], degrees),
    }
    every = [form for held in forms.values() for form in held]
    found = ap.forecast(batches, cluster, DISTCA_MODELS[model], every, DISTCA_TRAINING, hardware=hardware)
    rows = dict(zip(every, found.rows, strict=True))
    return {
        name: min(rows[form].seconds[0] for form in held if rows[form].steps and rows[form].kept > 0.98)
        for name, held in forms.items()
        if any(rows[form].steps and rows[form].kept > 0.98 for form in held)
    }


def _over(system: str) -> float:
    """The most that `distca` gains over a system in the settings below."""
    return max(found[system] / found["distca"] for found in map(_setting, DISTCA_SETTINGS) if system in found)


DISTCA_SETTINGS = (
    ("8B", "Pretrain", 128, 8, 64),
    ("8B", "Pretrain", 128, 32, 256),
    ("8B", "ProLong", 512, 8, 256),
    ("34B", "Pretrain", 128, 16, 256),
    ("34B", "ProLong", 512, 8, 256),
)


def _setting(setting: tuple[str, str, int, int, int]) -> Mapping[str, float]:
    return _distca(*setting)


DISTCA = Steps(
    "distca-steps",
    "DistCA, section 6.2, no pipeline: up to so many times faster than",
    "sharded Adam, selective recomputation, no ping-pong; five of 36 settings",
    (
        Line("WLB-ideal: the best of `wlb` over all ranks and in static grids", 1.20, lambda: _over("wlb")),
        Line("FlexSP+: `flexsp`", 1.35, lambda: _over("flexsp")),
        Line("Megatron: the best static grid of `allgather`", 1.92, lambda: _over("megatron")),
    ),
)


# --- DCP


#: their Transformer Engine: heads in two, zig-zag around a ring for the rest
DCP_BASE = {
    "name": "te",
    "steps": {
        "inner": {"ulysses": {"degree": 2}},
        "shard": {"sequences": {}},
        "place": {"zigzag": {"over": "sequence"}},
        "schedule": {"ring": {"over": "ranks"}},
    },
}
DCP_MASKS: Mapping[str, Mask] = {
    "causal": masks.causal(),
    "lambda": masks.sink_window(64, 4096),
    "causal blockwise": masks.causal_blockwise(256, 2),
}
DCP_SEEDS = 3


@cache
def _dcp(mask: str) -> float:
    """Steps of `dcp` in the time of one of theirs: TP 4, 16 ranks, 131,072 tokens."""
    lengths = [_documents("ProLong", 131072, 131072, seed) for seed in range(DCP_SEEDS)]
    batches = [ap.Batch.from_lengths(one, DCP_MASKS[mask]) for one in lengths]
    hardware, degrees = Hardware.load("a100"), Degrees(tensor=4)
    forms = [Parallelism(find_recipe(recipe), degrees) for recipe in ("dcp", DCP_BASE)]  # type: ignore[arg-type]
    training = Training(sharding="zero1", recompute="none")
    found = ap.forecast(
        batches, hardware.cluster(8, 8), DISTCA_MODELS["8B"], forms, training, hardware=hardware
    )
    mine, base = (_served(row).seconds[0] for row in found.rows)
    return base / mine


DCP = Steps(
    "dcp-steps",
    "DCP, section 7.2: up to so many times faster than Megatron-LM with their Transformer Engine, 64 A100s",
    "ProLong's lengths for LongDataCollections', sharded Adam, no recomputation",
    (
        Line("causal", 1.16, lambda: _dcp("causal")),
        Line("the sparse mask that gains most", 1.46, lambda: max(map(_dcp, ("lambda", "causal blockwise")))),
    ),
)

#: cases of `benchmarks/comparison.py`
PAPERS = (UPIPE, ZEPPELIN, DISTCA, DCP)


def _served(row: Row) -> Row:
    if not row.steps:
        raise SystemExit(f"{row.parallelism}: {row.reason}")
    return row
