"""Compares forecasts of whole steps with the end-to-end figures of five papers.

Run: python -m benchmarks.papers (ten minutes on one core). Writes all rows to benchmarks/results/papers.json and the
tables between the markers of docs/papers.md. `--only NAME,...` measures only these papers and keeps the rows of the
others; `--only none` only writes the tables.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.ir.request.sequences import Sequence as Sample
from apportion.ir.request.workload import lognormal_lengths
from apportion.planner.forecast.parallelism import Degrees
from apportion.planner.forecast.step import StepForecast
from apportion.planner.forecast.training import Training
from apportion.planner.recipe.recipes import find_recipe
from benchmarks import paper_distca
from benchmarks.comparison import FCP_TRACES, LLAMA_8B, LLAMA_70B, ZEPPELIN, ulysses, with_steps, zeppelin
from benchmarks.paper_runs import GROUP, K, Row, Run, Theirs, part, row, seconds
from benchmarks.tables import ROOT, line, run

RESULTS = ROOT / "benchmarks/results/papers.json"


# --- UPipe

#: tokens / 1024 -> tokens/s per GPU: UPipe, Table 3
UPIPE_8B = {
    "ulysses": {128: 2320.47, 256: 1503.80, 512: 878.63, 1024: 475.33, 2048: 246.05, 3072: 162.41},
    "upipe": {128: 2281.05, 256: 1487.29, 512: 867.17, 1024: 472.53, 2048: 246.07, 3072: 166.32},
    "ring": {128: 2064.90, 256: 1387.67, 512: 841.05, 1024: 458.51, 2048: 237.99, 3072: 159.96},
}
#: tokens / 1024 -> seconds of DS-Ulysses: its kernels and exchanges, and the rest (UPipe, Table 5)
UPIPE_PARTS = {
    128: (0.40 + 1.58 + 2.40, 3.03),
    512: (1.68 + 25.71 + 36.74, 10.08),
    2048: (16.30 + 421.67 + 588.73, 41.30),
}
#: the same for Qwen3-32B on 16 GPUs, heads split within nodes, a ring between them: UPipe, Table 3 and section 5.2.1
UPIPE_32B = {
    "usp": {128: 545.29, 256: 370.70, 512: 217.04, 1024: 117.02, 2048: 59.98},
    "upipe_ring": {128: 483.29, 256: 339.56, 512: 204.46, 1024: 113.26, 2048: 59.56},
    "ring": {128: 418.39, 256: 308.88, 512: 194.44, 1024: 110.27, 2048: 58.45},
}
QWEN_32B = Model(64, 8, 128, hidden=5120, ffn=25600, layers=64)
QWEN_VOCABULARY = 151936


def upipe() -> Iterator[Row]:
    assumed = "FSDP and full recomputation, as there; its offloading takes no time"
    yield from _upipe_8b(assumed)
    for tokens in UPIPE_32B["ring"]:
        training = Training(vocab=QWEN_VOCABULARY, recompute="full")
        run = Run("h100", 2, QWEN_32B, training, (Batch.from_lengths([tokens * K]),))
        for recipe, figures in UPIPE_32B.items():
            ours = tokens * K / (2 * GROUP) / seconds(run.whole(recipe))
            case = f"Qwen3-32B, {tokens}K tokens"
            yield row(case, recipe, "", "tokens/s a GPU", figures[tokens], ours, assumed)


def _upipe_8b(assumed: str) -> Iterator[Row]:
    for tokens in UPIPE_8B["ulysses"]:
        run = Run("h100", 1, LLAMA_8B, Training(recompute="full"), (Batch.from_lengths([tokens * K]),))
        for recipe, figures in UPIPE_8B.items():
            ours = tokens * K / GROUP / seconds(run.whole(recipe))
            yield row(f"8B, {tokens}K tokens", recipe, "", "tokens/s a GPU", figures[tokens], ours, assumed)
        if tokens in UPIPE_PARTS:
            steps = run.whole("ulysses")
            forward_s = (part(steps, "linear") + part(steps, "rows")) / 3  # which recomputation repeats
            attention = part(steps, "attention") + part(steps, "recomputation") - forward_s
            for figure, theirs, ours in zip(
                ("attention and exchanges, s", "all else, s"),
                UPIPE_PARTS[tokens],
                (attention, seconds(steps) - attention),
                strict=True,
            ):
                yield row(f"8B, {tokens}K tokens", "", "ulysses", figure, theirs, ours, assumed)


# --- Zeppelin

#: Megatron with a distributed optimizer; recomputation is not stated
MEGATRON = Training(vocab=32000, sharding="zero1", recompute="none")
#: sizes of the first LLaMA (from its paper), multi-head; those of 3B as in models of that family
ZEPPELIN_MODELS = {
    "3B": Model(32, 32, 100, hidden=3200, ffn=8640, layers=26, sent_gradients="model"),
    "7B": Model(32, 32, 128, hidden=4096, ffn=11008, layers=32, sent_gradients="model"),
    "13B": Model(40, 40, 128, hidden=5120, ffn=13824, layers=40, sent_gradients="model"),
    "30B": Model(52, 52, 128, hidden=6656, ffn=17920, layers=60, sent_gradients="model"),
}
#: model, cluster, tensor-parallel degree
ZEPPELIN_RUNS = (("7B", "a800", 1), ("13B", "a800", 2), ("30B", "h200", 2))


def _zeppelin(size: str, hardware: str, tensor: int, data: str, ranks: int, batches: int = 2) -> Run:
    draws = tuple(zeppelin(data)(ranks * 4 * K, seed) for seed in range(batches))
    return Run(hardware, ranks // GROUP, ZEPPELIN_MODELS[size], MEGATRON, draws, Degrees(tensor=tensor))


def zeppelin_recipe(parts: int) -> Recipe:
    """Zeppelin with its three-step routing: a transfer between nodes goes in parts, each through a different rank."""
    return with_steps(
        f"zeppelin-{parts}",
        "zeppelin",
        place={"zeppelin": {"parts": parts}},
        schedule={"queues": {"proxies": parts}},
    )


def of_zeppelin() -> Iterator[Row]:
    assumed = "lengths log-uniform in the bins; zero1, no recomputation; gradients travel in bf16"
    gains: list[float] = []
    for size, hardware, tensor in ZEPPELIN_RUNS:
        for data in ZEPPELIN:
            recipe, ratios = zeppelin_recipe(GROUP // tensor), []
            for ranks in (16, 32, 64):
                run = _zeppelin(size, hardware, tensor, data, ranks)
                ratios.append(seconds(run.whole("ring")) / seconds(run.whole(recipe)))
            gains += ratios
            yield row(
                f"{size}, {hardware}, TP {tensor}, {data}: 16 to 64 GPUs, mean",
                f"zeppelin-{GROUP // tensor}",
                "ring",
                "throughput over TE CP",
                (1.0, 6.60),
                float(np.mean(ratios)),
                assumed,
            )
    for case, theirs, ours in (
        ("all settings, mean", 2.80, float(np.mean(gains))),
        ("all settings, most", 6.60, max(gains)),
    ):
        yield row(case, "zeppelin, routed", "ring", "throughput over TE CP", theirs, ours, assumed)
    ablation = _zeppelin("3B", "a800", 1, "arxiv", 32, 4)
    gain = seconds(ablation.whole("ring")) / seconds(ablation.whole(zeppelin_recipe(GROUP)))
    yield row("3B, a800, arxiv, 32 GPUs", "zeppelin-8", "ring", "throughput over TE CP", 3.64, gain, assumed)
    for name, lengths, (all_layers, linear) in (
        ("balanced", BALANCED, (817 + 1108, 97)),
        ("skewed", SKEWED, (1002 + 1608, 105)),
    ):
        run = Run("h200", 4, ZEPPELIN_MODELS["7B"], MEGATRON, (Batch.from_lengths(lengths),))
        steps = run.whole(zeppelin_recipe(GROUP))
        layers = sum(part(steps, part_name) for part_name in ("attention", "linear", "rows", "remap"))
        for figure, published, ours in (
            ("forward and backward of the slowest rank, ms", all_layers, layers * 1e3),
            (
                "forward of linear modules, ms",
                linear,
                1e3 * (part(steps, "linear") + part(steps, "rows")) / 3,
            ),
        ):
            yield row(f"7B, h200, 32 GPUs, {name}", "zeppelin-8", "", figure, published, ours, LENGTHS)


#: one length from the middle of every bin up to 64K, the last cut to fill 128K; and one long sequence with short ones
BALANCED = (48 * K, 24 * K, 12 * K, 6 * K, 3 * K, 3 * K // 2, 768, 128 * K - 97536)
SKEWED = (112 * K, *(4 * K,) * 4)
LENGTHS = "lengths: one of every bin, or one of 112K and four of 4K"


# --- DCP

TE = Recipe("ring-heads-2", {**find_recipe("ring").to_data()["steps"], "inner": {"ulysses": {"degree": 2}}})
#: data set -> median and sigma of a log-normal: the paper shows its lengths only in a figure
DCP_DATA = {"LongDataCollections": (2048, 1.5), "LongAlign": (10240, 0.8)}
#: DCP's programs, but with all tiles received before any computation
NOTHING_HIDDEN = with_steps(
    "dcp-nothing-hidden", "dcp", place={"dcp": {"divisions": 1}}, schedule={"gather": {"whole": True}}
)
DCP_MASKS = ("causal", "lambda", "causal blockwise", "shared question")


def masked_batch(lengths: Sequence[int], name: str) -> Batch:
    """A batch under one of the masks of DCP's section 7.1."""
    if name == "shared question":
        return Batch.from_sequences(
            [
                Sample(n, masks.shared_question(n - 4 * (n // 5), [n // 5] * 4) if n >= 5 else masks.causal())
                for n in lengths
            ]
        )
    mask = {"lambda": masks.sink_window(64, 4096), "causal blockwise": masks.causal_blockwise(256, 2)}
    return Batch.from_lengths(lengths, mask=mask.get(name, masks.causal()))


def dcp() -> Iterator[Row]:
    assumed = "log-normal lengths (in table order: medians 2K, 10K; sigmas 1.5, 0.8); zero1, no recomputation"
    training = Training(sharding="zero1", recompute="none")
    model = replace(LLAMA_8B, sent_gradients="model")
    sparse: list[float] = []
    for data, (median, sigma) in DCP_DATA.items():
        for name in DCP_MASKS:
            lengths = [lognormal_lengths(seed, 128 * K, median, sigma).tolist() for seed in range(2)]
            draws = tuple(masked_batch(draw, name) for draw in lengths)
            run = Run("a100", 8, model, training, draws, Degrees(tensor=4))
            gain = seconds(run.whole(TE)) / seconds(run.whole("dcp"))
            theirs = (0.94, 1.16) if name == "causal" else (1.00, 1.46)
            sparse += [gain] * (name != "causal")
            yield row(f"{data}, {name}", "dcp", TE.name, "throughput over MLM", theirs, gain, assumed)
            if name == "causal":
                plain = seconds(run.whole(TE)) / seconds(run.whole(NOTHING_HIDDEN))
                case, system = f"{data}, {name}", NOTHING_HIDDEN.name
                yield row(case, system, TE.name, "throughput over MLM", theirs, plain, assumed)
    yield row("sparse masks, most", "dcp", TE.name, "throughput over MLM", 1.46, max(sparse), assumed)


# --- FCP


def _attention(steps: Sequence[StepForecast]) -> float:
    return part(steps, "attention")


def fcp() -> Iterator[Row]:
    assumed = "an H20's figures for GPU-X; lengths of the two readings below; one batch"
    system = with_steps("fcp_paper", "fcp_paper", inner={"ulysses": {"degree": 8}})
    for trace, draw in FCP_TRACES.items():
        for ranks in (16, 128):
            model = replace(LLAMA_70B, sent_gradients="model")
            run = Run("h20", ranks // GROUP, model, Training(), (draw(ranks * 32 * K, 0),))
            planned_s = _attention(run.whole(system))
            for baseline in ("ring", "hybrid_dp", "wlb"):
                gain = _attention(run.whole(ulysses(baseline))) / planned_s
                theirs: Theirs = 1.0 if ranks == 16 else (1.13, 2.21)
                case = f"`{trace}` documents, {ranks} GPUs"
                yield row(case, "fcp_paper", baseline, "attention's throughput", theirs, gain, assumed)


# --- the page


HEAD = (
    "case",
    "stands for theirs",
    "for the baseline",
    "figure",
    "theirs",
    "ours",
    "ours / theirs",
    "assumed",
)


@dataclass(frozen=True)
class Paper:
    """A paper. rows: computes the rows of its table."""

    name: str
    rows: Callable[[], Iterator[Row]]


PAPERS = (
    Paper("upipe", upipe),
    Paper("zeppelin", of_zeppelin),
    Paper("distca", paper_distca.rows),
    Paper("dcp", dcp),
    Paper("fcp", fcp),
)


def measure(paper: Paper) -> dict[str, Any]:
    start, rows = time.perf_counter(), []
    for record in paper.rows():
        rows.append(record)
        print(f" {paper.name}: {record['case']}, {record['figure']}: {record['ratio']:.3f}", file=sys.stderr)
    print(f" {paper.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return {"name": paper.name, "rows": rows}


def table(paper: Mapping[str, Any]) -> str:
    """A paper as a Markdown table, without figures inside a published range; common assumptions are below it."""
    assumptions = {record["assumed"] for record in paper["rows"]}
    head = HEAD if len(assumptions) > 1 else HEAD[:-1]
    visible = [record for record in paper["rows"] if not _is_inside(record)]
    lines = [line(head), line(["---"] * 4 + ["--:"] * 3 + ["---"] * (len(head) - 7))]
    lines += [line(_cells(record)[: len(head)]) for record in visible]
    if hidden := len(paper["rows"]) - len(visible):
        lines += ["", f"Figures inside a range that the paper prints are not shown: {hidden}."]
    return "\n".join(lines if len(assumptions) > 1 else [*lines, "", f"Assumed: {assumptions.pop()}."])


def _is_inside(record: Mapping[str, Any]) -> bool:
    return isinstance(record["theirs"], list | tuple) and record["ratio"] == 1.0


def _cells(record: Mapping[str, Any]) -> list[str]:
    published = record["theirs"]
    published_range = (
        " to ".join(map(_number, published)) if isinstance(published, list | tuple) else _number(published)
    )
    return [
        record["case"],
        record["system"] or "-",
        record["baseline"] or "-",
        record["figure"],
        published_range,
        _number(record["ours"]),
        f"{record['ratio']:.2f}",
        record["assumed"],
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 20 else f"{value:.2f}"


def main() -> None:
    run({paper.name: partial(measure, paper) for paper in PAPERS}, RESULTS, table, "paper-")


if __name__ == "__main__":
    main()
