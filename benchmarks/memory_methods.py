"""Compares the memory of published methods with UPipe's measurements: writes a section of docs/papers.md.

Run: python benchmarks/memory_methods.py (instant). A test checks that the page is up to date.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

import apportion as ap
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.planner.forecast.choices import recipe_parallelisms
from apportion.planner.forecast.host import copies
from apportion.planner.forecast.layers import Layers
from apportion.planner.forecast.memory import Activations, activations, attention_row, output_row
from apportion.planner.forecast.training import Training
from apportion.planner.pipeline.feasibility import attention_bytes
from benchmarks.tables import write_tables

GIB, M = 2**30, 2**20
H100 = Hardware.load("h100")
#: tokens per FPDT chunk: the default of FPDT's implementation; UPipe does not state which it used
CHUNK_TOKENS = 65536
#: bytes of a tile of logits and their log-softmax, in float32 (ALST)
LOGITS_TILE = 2**30
RECIPES = {"plain": "ulysses", "alst": "ulysses", "fpdt": "ulysses", "upipe": "upipe", "both": "upipe"}
#: recipe on one node -> on several: heads split within each node, a ring between nodes (UPipe, section 5.2.1)
BETWEEN_NODES = {"ulysses": "usp", "upipe": "upipe_ring"}


@dataclass(frozen=True)
class Run:
    """A model as UPipe ran it (sections 5.1 and 5.2), on `gpus` GPUs with `stages` head stages. memory: method ->
    M tokens -> GiB (Table 4); throughput: method -> M tokens -> tokens per second and GPU (Table 3)."""

    name: str
    model: Model
    vocabulary: int
    gpus: int
    stages: int
    memory: Mapping[str, Mapping[int, float]]
    throughput: Mapping[str, Mapping[int, float]]

    def training(self, method: str, tokens: int) -> Training:
        """The method's training on a sequence of `tokens` tokens: all methods recompute layers, all but `plain` offload
        layer inputs, `alst` and `upipe` tile the FFN by the hidden size (UPipe, section 4), `fpdt` and `both` use
        chunks."""
        plain = Training(vocab=self.vocabulary, recompute="full", loss_tokens=tokens)
        if method == "plain":
            return plain
        offloaded = replace(plain, offload=True, loss_tokens=LOGITS_TILE // (8 * self.vocabulary))
        if method in ("fpdt", "both"):
            return replace(offloaded, chunks=tokens // CHUNK_TOKENS)
        return replace(offloaded, mlp_tile=self.model.hidden)

    def layers(self, method: str, tokens: int) -> Layers:
        return Layers(H100, self.model, self.training(method, tokens))

    def activations(self, method: str, tokens: int, planned: bool = False) -> Activations:
        """A rank's activations for a sequence of `tokens` tokens, with attention as the papers count it or, if
        `planned`, as our plans of the same kind need it."""
        layers, rank_tokens = self.layers(method, tokens), tokens // self.gpus
        rows = self._planned(method, tokens) if planned else self.attention(method, tokens) * rank_tokens
        return activations(layers, self.model.layers_of(""), rank_tokens, rows, RECIPES[method] == "upipe")

    def attention(self, method: str, tokens: int) -> float:
        """The backward kernel's bytes per token (UPipe, Table 6): Q, K, V, O and their gradients; for UPipe, one
        stage's share of these and of a second Q."""
        layers, m = self.layers(method, tokens), self.model
        sent = 2 * (attention_row(layers) + output_row(layers) - 4 * m.q_heads)
        received = m.q_heads * m.head_dim * m.element_bytes
        return (sent + received) / self.stages if RECIPES[method] == "upipe" else sent

    def _planned(self, method: str, tokens: int) -> int:
        recipe = RECIPES[method] if self.gpus <= 8 else BETWEEN_NODES[RECIPES[method]]
        return planned_bytes(self.model, self.gpus, recipe, tokens)

    def seconds(self, method: str, tokens: int) -> tuple[float, float]:
        """The forecast seconds of a step, and how many of them are exposed copies."""
        result = ap.forecast(
            [ap.Batch.from_lengths([tokens])],
            ap.Cluster(self.gpus // 8, 8),
            self.model,
            recipe_parallelisms([RECIPES[method]]),
            self.training(method, tokens),
        ).rows[0]
        return result.seconds[0], result.parts()["host"]


@cache
def planned_bytes(model: Model, gpus: int, recipe: str, tokens: int) -> int:
    """The bytes of home and work rows in an attention call under a plan for one sequence."""
    cluster = ap.Cluster(gpus // 8, 8)
    return attention_bytes(
        ap.plan(ap.Batch.from_lengths([tokens]), cluster, model, recipe=recipe, verify=False)
    )


RUNS = (
    Run(
        "Llama3-8B, 8 GPUs",
        Model(32, 8, 128, hidden=4096, ffn=14336, layers=32),
        128256,
        8,
        4,
        {
            "alst": {1: 34.35, 2: 49.49, 3: 64.55},
            "upipe": {1: 29.90, 2: 40.50, 3: 51.10, 4: 61.70, 5: 72.30},
            "fpdt": {1: 27.09, 2: 35.17, 3: 43.35, 4: 51.42},
        },
        {"alst": {1: 475.33, 2: 246.05, 3: 162.41}, "fpdt": {1: 382.42, 2: 219.53, 3: 153.48}},
    ),
    Run(
        "Qwen3-32B, 16 GPUs",
        Model(64, 8, 128, hidden=5120, ffn=25600, layers=64),
        151936,
        16,
        8,
        {
            "alst": {1: 50.27, 2: 62.60},
            "upipe": {1: 46.84, 2: 55.65, 3: 64.47, 4: 73.28},
            "fpdt": {1: 42.66, 2: 46.91, 3: 52.27, 4: 57.77},
        },
        {"alst": {1: 117.02, 2: 59.98}, "fpdt": {1: 95.88, 2: 55.41}},
    ),
)
#: method -> its name in the tables
LABELS = {
    "plain": "Ulysses, plain",
    "alst": "ALST: Ulysses, tiles, offload",
    "upipe": "UPipe",
    "fpdt": "FPDT",
    "both": "FPDT's chunks of UPipe's stages",
}


def parts() -> Iterator[str]:
    """Yields the table of a rank's memory, computed by the formulas."""
    yield "| GiB a rank, 1M tokens | kept | attention | feed-forward | cross-entropy | peak | on the host |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for run in RUNS:
        for method, label in LABELS.items():
            memory = run.activations(method, M)
            phases = (memory.kept, memory.attention, memory.feed_forward, memory.cross_entropy, memory.peak)
            cells = " | ".join(f"{size / GIB:.2f}" for size in (*phases, memory.host))
            yield f"| {run.name}: {label} | {cells} |"


@dataclass(frozen=True)
class Growth:
    """GiB per additional M tokens. measured: by UPipe, from 1M to `most` M tokens; ours: by the formulas, with
    attention as the papers count it; planned: `ours` with the attention memory that our plans need."""

    run: Run
    method: str
    most: int
    measured: float
    ours: float
    planned: float

    @property
    def missed_tensors(self) -> float:
        """The memory that the formulas miss, in tensors of the hidden size."""
        row = self.run.model.hidden * self.run.model.element_bytes * M / self.run.gpus / GIB
        return (self.measured - self.ours) / row


def growths() -> Iterator[Growth]:
    for run in RUNS:
        for method, memory in run.memory.items():
            largest = max(memory)
            one, many = (
                [run.activations(method, m * M, planned).peak for planned in (False, True)]
                for m in (1, largest)
            )
            forecast, planned = ((b - a) / GIB / (largest - 1) for a, b in zip(one, many, strict=True))
            yield Growth(
                run, method, largest, (memory[largest] - memory[1]) / (largest - 1), forecast, planned
            )


def growth() -> Iterator[str]:
    """Yields the table of growth per additional M tokens, measured and computed by the formulas."""
    yield (
        "| GiB per extra 1M tokens | from 1M to | measured | formulas | difference | as tensors of the hidden size | "
        "formulas with our plans' rows |"
    )
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for record in growths():
        rest = f"{record.measured - record.ours:.2f} | {record.missed_tensors:.1f}"
        cells = f"{record.measured:.2f} | {record.ours:.2f} | {rest} | {record.planned:.2f}"
        yield f"| {record.run.name}: {LABELS[record.method]} | {record.most}M | {cells} |"


def times() -> Iterator[str]:
    """Yields the table of step times of Ulysses with ALST and of FPDT, measured and forecast, with FPDT's copies."""
    heading = f"moved a rank, GiB out, in | at {H100.host_gbs.value:.0f} GB/s, s | not hidden, s"
    yield f"| | tokens | Ulysses, measured, s | forecast | FPDT, measured, s | forecast | {heading} |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for run in RUNS:
        count = run.model.layers_of("")
        for millions in run.throughput["alst"]:
            tokens = millions * M
            ulysses, fpdt = (tokens / run.gpus / run.throughput[name][millions] for name in ("alst", "fpdt"))
            layers = run.layers("fpdt", tokens)
            transfers = [copies(layers, tokens // run.gpus, phase) for phase in ("forward", "backward")]
            out, back_gib = (count * sum(sizes) / GIB for sizes in zip(*transfers, strict=True))
            seconds = count * sum(transfer.us(H100.host_gbs.value) for transfer in transfers) / 1e6
            (ours, _), (chunked, exposed) = (run.seconds(name, tokens) for name in ("alst", "fpdt"))
            steps = f"{ulysses:.0f} | {ours:.0f} | {fpdt:.0f} | {chunked:.0f}"
            cells = f"{steps} | {out:,.0f}, {back_gib:,.0f} | {seconds:.0f} | {exposed:.0f}"
            yield f"| {run.name} | {millions}M | {cells} |"


def tables() -> str:
    return "\n\n".join("\n".join(lines()) for lines in (parts, growth, times))


def main() -> None:
    write_tables({"memory-of-methods": tables()})


if __name__ == "__main__":
    main()
