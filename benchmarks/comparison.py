"""Compares recipes on the shipped workloads and in the papers' settings: planned, verified and simulated.

Run: python benchmarks/comparison.py (half an hour on one core). Writes all rows to benchmarks/results/comparison.json
and the tables between the markers of docs/benchmarks.md and docs/papers.md. `--only NAME,...` measures only these cases
and keeps the other rows; `--only none` only writes the tables. Settings with published figures are in
`benchmarks/published.py`, rankings under other hardware figures in `benchmarks/sensitivity.py`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from apportion.bench import Source, cluster_of
from apportion.cli.printed.comparison import COLUMNS, comparison_cells, remarks
from apportion.comparison import Setting, compare_all
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.ir.request.sequences import Sequence as Sample
from apportion.ir.request.workload import lognormal_lengths, read_workload
from apportion.planner.cost import CostModel
from apportion.planner.recipe.recipes import find_recipe
from benchmarks import published, sensitivity
from benchmarks.published import PUBLISHED, PublishedSetting
from benchmarks.sensitivity import Sensitivity
from benchmarks.tables import ROOT, head, line, run

RESULTS = ROOT / "benchmarks/results/comparison.json"

LLAMA_8B = Model(q_heads=32, kv_heads=8, head_dim=128, hidden=4096, ffn=14336, layers=32)
LLAMA_70B = Model(q_heads=64, kv_heads=8, head_dim=128, hidden=8192, ffn=28672, layers=80)
#: multi-head, as in the paper; sizes (assumed) as in 3B models of that family
LLAMA_3B = Model(q_heads=32, kv_heads=32, head_dim=100, hidden=3200, ffn=8640, layers=26)

Draw = Callable[[int, int], Batch]  # (tokens, seed) -> batch


@dataclass(frozen=True)
class Case:
    """One table: `draw` fills `ranks` x `tokens_per_rank` tokens for each seed."""

    name: str
    title: str
    draw: Draw
    ranks: int
    tokens_per_rank: int
    seeds: int
    recipes: tuple[Recipe, ...]
    baseline: str = "ring"
    hardware: str = "h100"
    model: Model = LLAMA_8B
    unverified: tuple[str, ...] = ()

    @property
    def setting(self) -> Setting:
        hardware = Hardware.load(self.hardware)
        unverified = dict.fromkeys(self.unverified, "verification takes minutes")
        return Setting(cluster_of(self.ranks, None, hardware), self.model, hardware, unverified=unverified)


# --- batches


def code(tokens: int, seed: int) -> Batch:
    """Source files of public repositories."""
    return Source(read_workload(ROOT / "examples/code_lengths.json")).batch(tokens, seed)[0]


def doc_files(tokens: int, seed: int) -> Batch:
    """Documentation files of public repositories."""
    return Source(read_workload(ROOT / "examples/doc_lengths.json")).batch(tokens, seed)[0]


def lognormal(tokens: int, seed: int) -> Batch:
    """The documents of docs/benchmarks.md."""
    return Source().batch(tokens, seed)[0]


def window(tokens: int, seed: int) -> Batch:
    """Log-normal documents with a window of 4096 tokens."""
    return Source(mask=masks.sliding_window(4096)).batch(tokens, seed)[0]


def one_document(tokens: int, seed: int) -> Batch:
    return Batch.from_lengths([tokens])


def questions(tokens: int, seed: int) -> Batch:
    """Prompts (log-normal, median 1024, sigma 1) with eight answers each (median 1024, sigma 1, at most 16K) while they
    fit; a causal document fills the rest."""
    rng = np.random.Generator(np.random.PCG64(seed))
    samples: list[Sample] = []
    remaining = tokens
    while True:
        lengths = np.clip(np.rint(1024 * np.exp(rng.standard_normal(9))), 1, 16384).astype(np.int64).tolist()
        if sum(lengths) >= remaining:
            return Batch.from_sequences([*samples, Sample(remaining)])
        samples.append(Sample(sum(lengths), masks.shared_question(lengths[0], lengths[1:])))
        remaining -= sum(lengths)


def documents(median: float, sigma: float) -> Draw:
    """Log-normal documents of at most 512K tokens."""
    return lambda tokens, seed: Batch.from_lengths(lognormal_lengths(seed, tokens, median, sigma))


#: FCP publishes the distribution family of its trace and the longest sequence, 512K, but neither median nor sigma. Two
#: readings: half of the tokens in documents below 4K (its section 3.1), with an assumed sigma of 1.5; and an assumed
#: heavy tail
FCP_TRACES = {
    "short": documents(median=4096 / float(np.exp(1.5**2)), sigma=1.5),
    "long": documents(median=4096, sigma=1.6),
}
#: Zeppelin, Table 2: shares of sequences in bins of 0-1, 1-2, 2-4, ... 128-256 thousand tokens
ZEPPELIN = {
    "arxiv": (0.032, 0.03, 0.08, 0.219, 0.338, 0.224, 0.077, 0, 0),
    "github": (0, 0.34, 0.095, 0.104, 0.107, 0.102, 0.088, 0.064, 0.045),
    "prolong64k": (0.231, 0.042, 0.021, 0.012, 0.013, 0.008, 0.673, 0, 0),
}


def zeppelin(data: str) -> Draw:
    """Draws lengths of one of Zeppelin's data sets, log-uniform within the bins (assumed); skips lengths above the
    total and cuts the last."""
    shares = np.array(ZEPPELIN[data]) / sum(ZEPPELIN[data])
    edges = 1024 * 2.0 ** np.arange(-1, 9)  # the first bin from 512: shorter ones are negligible

    def draw(tokens: int, seed: int) -> Batch:
        rng = np.random.Generator(np.random.PCG64(seed))
        bins = rng.choice(len(shares), 4096, p=shares)
        values = edges[bins] * (edges[bins + 1] / edges[bins]) ** rng.random(4096)
        lengths = np.rint(values[values <= tokens]).astype(np.int64)
        last = int(np.searchsorted(np.cumsum(lengths), tokens))
        prefix = lengths[: last + 1]
        return Batch.from_lengths([*prefix[:-1].tolist(), tokens - int(prefix[:-1].sum())])

    return draw


# --- recipes


def with_steps(name: str, recipe: str, **steps: Any) -> Recipe:
    """A named recipe with steps added or replaced."""
    return Recipe(name, {**find_recipe(recipe).to_data()["steps"], **steps})


def ulysses(name: str) -> Recipe:
    """The named recipe between nodes of eight ranks, with heads split inside each node, as in FCP's evaluation."""
    return with_steps(name, name, inner={"ulysses": {"degree": 8}})


EVEN = ("ring", "allgather", "contiguous", "ulysses", "upipe", "usp")
BY_LENGTH = (
    "hybrid_dp",
    "megatron_hybrid",
    "zeppelin",
    "wlb",
    "flexsp",
    "magi",
    "distca",
    "dcp",
    "blend",
    "fcp",
)
ALL = tuple(find_recipe(name) for name in (*EVEN, *BY_LENGTH, "mixed", "auto"))
BLOCKS_2K = with_steps("fcp-2k", "fcp", shard={"blocks": {"block": 2048, "zigzag": True}})
FCP_4K = with_steps(
    "fcp",
    "fcp",
    shard={"blocks": {"block": 4096, "zigzag": True}},
    schedule={"matchings": {"coalesce": 16, "buffers": 3}},
    inner={"ulysses": {"degree": 8}},
)
NODE = with_steps("fcp-2k-node", "fcp", shard={"blocks": {"block": 2048, "zigzag": True}}, route={"node": {}})
STAR = with_steps("fcp-2k-star", "fcp", shard={"blocks": {"block": 2048, "zigzag": True}}, route={"star": {}})
OF_FCP = (
    *(ulysses(name) for name in ("ring", "hybrid_dp", "wlb")),
    FCP_4K,
    replace(FCP_4K, name="fcp-reshuffled", steps={**FCP_4K.to_data()["steps"], "reshuffle": True}),
    find_recipe("auto"),
)
OF_ZEPPELIN = (
    *(find_recipe(name) for name in ("ring", "allgather", "hybrid_dp", "zeppelin", "fcp")),
    NODE,
    find_recipe("auto"),
)

#: case -> recipes that are not verified: verification takes minutes and 10 GB per plan
HEAVY = {"fcp-short-128": ("ring", "wlb"), "fcp-short-256": ("ring", "wlb"), "fcp-long-256": ("ring", "wlb")}


def _workload_case(name: str, title: str, draw: Draw, ranks: int, seeds: int) -> Case:
    return Case(name, title, draw, ranks, 32768, seeds, (*ALL, BLOCKS_2K))


def _fcp_case(trace: str, ranks: int, seeds: int) -> Case:
    name, title = f"fcp-{trace}-{ranks}", f"FCP's setting, {trace} documents, {ranks} ranks"
    draw = FCP_TRACES[trace]
    return Case(name, title, draw, ranks, 32768, seeds, OF_FCP, "ring", "h20", LLAMA_70B, HEAVY.get(name, ()))


def _zeppelin_case(data: str, ranks: int) -> Case:
    name, title = f"zeppelin-{data}-{ranks}", f"Zeppelin's setting, {data}, {ranks} ranks"
    return Case(name, title, zeppelin(data), ranks, 4096, 10, OF_ZEPPELIN, "ring", "a800", LLAMA_3B)


CASES: tuple[Case | PublishedSetting | Sensitivity, ...] = (
    _workload_case("code-8", "source files, causal, 8 ranks", code, 8, 5),
    _workload_case("code-64", "source files, causal, 64 ranks", code, 64, 3),
    _workload_case("code-256", "source files, causal, 256 ranks", code, 256, 1),
    _workload_case("question-64", "a prompt and eight answers, 64 ranks", questions, 64, 3),
    _workload_case("window-64", "documents under a window of 4096 tokens, 64 ranks", window, 64, 3),
    _workload_case("document-64", "one causal document, 64 ranks", one_document, 64, 1),
    *(_fcp_case(trace, *size) for trace in FCP_TRACES for size in ((16, 5), (128, 3), (256, 1))),
    *(_zeppelin_case(data, ranks) for data in ZEPPELIN for ranks in (16, 32, 64)),
    Case(
        "node-1024",
        "documents, 1,024 ranks, tiles straight or once a node",
        lognormal,
        1024,
        32768,
        3,
        (STAR, NODE),
        STAR.name,
    ),
    *PUBLISHED,
    Sensitivity("sensitivity-log-normal", "log-normal documents under other figures", lognormal, LLAMA_8B),
    Sensitivity("sensitivity-doc", "documentation under other figures", doc_files, LLAMA_8B),
    Sensitivity("sensitivity-code", "source files under other figures", code, LLAMA_8B),
)


# --- measuring


def measure(case: Case | PublishedSetting | Sensitivity) -> dict[str, Any]:
    """The rows of a case and their setting."""
    start = time.perf_counter()
    if isinstance(case, Case):
        result = _compare_case(case)
    else:
        result = published.measure(case) if isinstance(case, PublishedSetting) else sensitivity.measure(case)
    print(f" {case.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return result


def _compare_case(case: Case) -> dict[str, Any]:
    batches = [case.draw(case.ranks * case.tokens_per_rank, seed) for seed in range(case.seeds)]
    baseline = next(recipe for recipe in case.recipes if recipe.name == case.baseline)
    result = compare_all(
        batches, case.recipes, baseline, case.setting, lambda done: print(".", end="", file=sys.stderr)
    )
    if result.broken:
        raise SystemExit(f"{case.name}: plans of {', '.join(result.broken)} break a rule")
    return {
        "name": case.name,
        "title": case.title,
        "ranks": case.ranks,
        "tokens_per_rank": case.tokens_per_rank,
        "batches": case.seeds,
        "sequences": [len(batch.lengths) for batch in batches],
        "longest": [int(batch.lengths.max()) for batch in batches],
        "hardware": case.hardware,
        "cluster": case.setting.cluster.to_data(),
        "model": case.model.to_data(),
        "baseline": case.baseline,
        "rows": [row.record() | _throughput(case, row.record()) for row in result.rows],
    }


def _throughput(case: Case, row: Mapping[str, Any]) -> dict[str, Any]:
    """Thousands of tokens per second through whole layers, forward and backward: simulated attention, then linear
    layers at the pace of the rank with the most tokens, with backward twice as long as forward."""
    if row["status"] != "ok":
        return {"ktokens_per_s": None}
    fullest = row["tokens"] / row["ranks"] * (1 + row["imbalance"]["tokens"])
    linear_us = 3 * float(CostModel(Hardware.load(case.hardware), case.model).linear_us(round(fullest)))
    layer_ms = row["forward_ms"] + row["backward_ms"] + linear_us / 1e3
    layers = case.model.layers_of("default")
    return {"ktokens_per_s": round(row["tokens"] / (layer_ms * layers), 3)}


# --- the page


ON_PAGE = (
    "recipe",
    "forward\nms",
    "backward\nms",
    "speed-up\n(min-max)",
    "attain-\ned",
    "exposed\nms",
    "compute\nimbalance",
    "token\nimbalance",
    "bytes\nmoved",
    "between\nnodes",
    "plan\nms",
)


def table(case: Mapping[str, Any]) -> str:
    """A case as a Markdown table, with refusals below it."""
    if table_of := {published.FORM: published.table, sensitivity.FORM: sensitivity.table}.get(
        case.get("form", "")
    ):
        return table_of(case)
    columns = [column for column in COLUMNS if column.title in ON_PAGE]
    shows_throughput = case["name"].startswith("zeppelin")
    titles = [column.title.replace("-\n", "").replace("\n", " ") for column in columns]
    lines = [
        f"{case['ranks']} ranks x {case['tokens_per_rank']:,} tokens, {case['hardware']}, batches: {case['batches']}; "
        f"sequences: {_range(case['sequences'])}, the longest {_range(case['longest'])} tokens",
        "",
        *head([*titles, *(["thousand tokens/s, whole layers"] if shows_throughput else [])]),
    ]
    for row in case["rows"]:
        cells = comparison_cells(row, columns)
        lines.append(line([*cells, *([f"{row['ktokens_per_s'] or 0:.1f}"] if shows_throughput else [])]))
    return "\n".join([*lines, *(f"\n{remark}" for remark in remarks(case["rows"]))])


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def main() -> None:
    run({case.name: partial(measure, case) for case in CASES}, RESULTS, table)


if __name__ == "__main__":
    main()
