"""Memory of published methods, beside UPipe's measurements: the last section of docs/comparison.md.

Run: python benchmarks/memory_methods.py (at once). A test holds the page to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from apportion.ir.model import Model
from apportion.planner.memory_model import Activations, activation_bytes, activations, fpdt_offload

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/comparison.md"
BEGIN, END = "<!-- memory of methods -->\n", "<!-- end of memory of methods -->"
GIB, M = 2**30, 2**20
#: tokens of a chunk of FPDT: the default of its implementation; UPipe does not say which it used
CHUNK_TOKENS = 65536
#: of a host's link to one GPU, PCIe 5.0 x16, each way, as it is reached
HOST_GBS = 50.0


@dataclass(frozen=True)
class Run:
    """A model as UPipe ran it (sections 5.1 and 5.2): on so many GPUs, of which `stages` make a group's head stages.
    memory: method -> GiB at so many M tokens (Table 4); throughput: tokens a second and GPU (Table 3)."""

    name: str
    model: Model
    vocabulary: int
    gpus: int
    stages: int
    memory: Mapping[str, Mapping[int, float]]
    throughput: Mapping[str, Mapping[int, float]]

    def of(self, method: str, tokens: int) -> Activations:
        """What a rank holds of a sequence of so many tokens."""
        return activations(
            method, self.model, tokens // self.gpus, self.vocabulary, self.chunks(method, tokens)
        )

    def chunks(self, method: str, tokens: int) -> int:
        return {"fpdt": tokens // CHUNK_TOKENS, "upipe": self.stages}.get(method, 1)


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
#: method -> as the tables call it
TOLD = {
    "plain": "Ulysses, plain",
    "alst": "ALST: Ulysses, tiles, offload",
    "upipe": "UPipe",
    "fpdt": "FPDT",
}


def parts() -> Iterator[str]:
    """What a rank holds, by the formulas."""
    yield "| GiB a rank, 1M tokens | kept | attention | feed-forward | cross-entropy | peak | on the host |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for run in RUNS:
        for method, told in TOLD.items():
            found = run.of(method, M)
            phases = (found.kept, found.attention, found.feed_forward, found.cross_entropy, found.peak)
            cells = " | ".join(f"{size / GIB:.2f}" for size in (*phases, found.host))
            yield f"| {run.name}: {told} | {cells} |"


@dataclass(frozen=True)
class Growth:
    """GiB for each M tokens more: as UPipe measured it from 1M to `most` M tokens, and by the formulas."""

    run: Run
    method: str
    most: int
    measured: float
    ours: float

    @property
    def rest(self) -> float:
        """What is not counted, in tensors of the hidden size."""
        row = self.run.model.hidden * self.run.model.element_bytes * M / self.run.gpus / GIB
        return (self.measured - self.ours) / row


def growths() -> Iterator[Growth]:
    for run in RUNS:
        for method, memory in run.memory.items():
            most = max(memory)
            tokens = (M, most * M)
            low, high = (
                activation_bytes(
                    method, run.model, size // run.gpus, run.vocabulary, run.chunks(method, size)
                )
                for size in tokens
            )
            measured = (memory[most] - memory[1]) / (most - 1)
            yield Growth(run, method, most, measured, (high - low) / GIB / (most - 1))


def growth() -> Iterator[str]:
    """Measured and by the formulas, for each M tokens more."""
    yield "| GiB more for 1M tokens more | from 1M to | measured | formulas | rest | in tensors of the hidden size |"
    yield "|---|--:|--:|--:|--:|--:|"
    for one in growths():
        cells = f"{one.measured:.2f} | {one.ours:.2f} | {one.measured - one.ours:.2f} | {one.rest:.1f}"
        yield f"| {one.run.name}: {TOLD[one.method]} | {one.most}M | {cells} |"


def times() -> Iterator[str]:
    """FPDT's steps, and what it moves in them."""
    moved = f"moved a rank, GiB out, in | at {HOST_GBS:.0f} GB/s, s"
    yield f"| | tokens | step of Ulysses, s | step of FPDT, s | more, s | {moved} |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    for run in RUNS:
        layers = run.model.layers_of("")
        for most in run.throughput["alst"]:
            tokens = most * M
            ulysses, fpdt = (tokens / run.gpus / run.throughput[name][most] for name in ("alst", "fpdt"))
            chunks = run.chunks("fpdt", tokens)
            each = [
                fpdt_offload(run.model, tokens // run.gpus, chunks, phase)
                for phase in ("forward", "backward")
            ]
            out, back = (layers * sum(sizes) / GIB for sizes in zip(*each, strict=True))
            seconds = layers * sum(one.ms(HOST_GBS) for one in each) / 1e3
            cells = (
                f"{ulysses:.0f} | {fpdt:.0f} | {fpdt - ulysses:.0f} | {out:,.0f}, {back:,.0f} | {seconds:.0f}"
            )
            yield f"| {run.name} | {most}M | {cells} |"


def tables() -> str:
    """What stands between the markers of the page."""
    return "\n\n".join("\n".join(lines()) for lines in (parts, growth, times)) + "\n"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{tables()}{END}{rest.split(END)[1]}", encoding="utf-8")
    print(tables())


if __name__ == "__main__":
    main()
