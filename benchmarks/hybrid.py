"""Simulates a group of three recurrent layers and one softmax layer: `auto` against two common methods.

Run: python -m benchmarks.hybrid [WORKLOAD ...] [--ranks 8,64,256] [--json]. Gated DeltaNet as in Qwen3-Next-80B (32
heads of 128 x 128, convolution of 4) and softmax attention of its sizes, 32K tokens per rank, H100s, eight per node;
forward and backward. Without WORKLOAD files it uses the lengths of the benchmarks and examples.

    auto           one layout for all four layers; states of cut documents travel
    all-to-all     softmax like `auto`; around each recurrent layer, an all-to-all of q, k, v and gates to whole
                   sequences split by heads, and back
    converted      contiguous rows for recurrent layers, states travel; hidden states move to the rows of softmax
                   (the faster of `ring` and `megatron_hybrid`) and back; last runs computed early or late, as is faster

Recurrent kernels are priced at an assumed rate (`planner.simulate.recurrent`), the same for all three; `--share`
changes it. Writes rows to benchmarks/results/hybrid.json and a table to docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from apportion.bench import Source
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.recurrent import Recurrent
from apportion.ir.request.workload import lognormal_lengths, read_workload
from apportion.planner import api
from apportion.planner.cost import CostModel
from apportion.planner.simulate import Simulation, recurrent as prices, simulate
from benchmarks.comparison import zeppelin
from benchmarks.tables import head, line, write_tables

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/hybrid.json"
TOKENS, HIDDEN, RECURRENT = 32768, 2048, 3
KIND = Recurrent(heads=32, key_heads=16, key_dim=128, value_dim=128, conv=4, layers=RECURRENT)
MODEL = Model(q_heads=16, kv_heads=2, head_dim=256, layers=1, recurrent={"linear_attention": KIND})
Draw = Callable[[int], Batch]


def built_in_workloads() -> Iterator[tuple[str, Draw]]:
    """Yields pairs (name, function from a number of tokens to a batch)."""
    yield "log-normal", lambda tokens: Batch.from_lengths(lognormal_lengths(0, tokens))
    for name, file in (("source files", "code_lengths.json"), ("documents", "doc_lengths.json")):
        yield name, file_draw(ROOT / "examples" / file)
    yield "GitHub (Zeppelin)", lambda tokens: zeppelin("github")(tokens, 0)
    yield (
        "short samples",
        lambda tokens: Batch.from_lengths(lognormal_lengths(0, tokens, median=400, sigma=0.9)),
    )


def file_draw(path: Path) -> Draw:
    return lambda tokens: Source(read_workload(path)).batch(tokens, 0)[0]


def planned(batch: Batch, cluster: Cluster, recipe: str, hardware: Hardware) -> Simulation:
    return simulate(api.plan(batch, cluster, MODEL, recipe=recipe, hardware=hardware, verify=False), hardware)


def softmax_ms(simulation: Simulation) -> float:
    return simulation.forward_ms + simulation.backward_ms


def row(name: str, batch: Batch, cluster: Cluster, hardware: Hardware) -> dict[str, Any]:
    """The milliseconds of a group of layers, forward and backward."""
    auto, contiguous = (planned(batch, cluster, recipe, hardware) for recipe in ("auto", "contiguous"))
    with patch.object(prices, "EARLY_SHARE", 1.0):
        baseline = simulate(contiguous.plan, hardware)
    in_order = min(contiguous.recurrent_ms, baseline.recurrent_ms)
    converted_ms = min(
        softmax_ms(planned(batch, cluster, recipe, hardware)) for recipe in ("ring", "megatron_hybrid")
    )
    costs = CostModel(hardware, MODEL)
    kernel_ms = sum(run.ideal_us for run in auto.recurrent.values()) / 1e3
    numbers = KIND.conv_channels + 2 * KIND.heads + KIND.heads * KIND.value_dim
    heads_ms = 2 * all_to_all_ms(batch.tokens, numbers, cluster, costs)
    convert_ms = 4 * all_to_all_ms(batch.tokens, HIDDEN, cluster, costs)
    times = {
        "auto": softmax_ms(auto) + RECURRENT * auto.recurrent_ms,
        "all-to-all": softmax_ms(auto) + RECURRENT * (kernel_ms + heads_ms),
        "converted": converted_ms + RECURRENT * in_order + convert_ms,
    }
    parts = {
        "recipe": auto.plan.report["search"]["recipe"],
        "softmax_ms": softmax_ms(auto),
        "recurrent_ms": auto.recurrent_ms,
        "kernel_ms": kernel_ms,
        "all_to_all_ms": heads_ms,
        "convert_ms": convert_ms,
        "softmax_converted_ms": converted_ms,
        "recurrent_contiguous_ms": in_order,
    }
    gains = {method: times[method] / times["auto"] for method in ("all-to-all", "converted")}
    bound_ms = softmax_ms(auto) + RECURRENT * kernel_ms
    bounds = {method: times[method] / bound_ms for method in gains}
    return {"lengths": name, "ranks": cluster.ranks, "ms": times, "gains": gains, "bounds": bounds, **parts}


def all_to_all_ms(tokens: int, numbers: int, cluster: Cluster, costs: CostModel) -> float:
    """The milliseconds of an all-to-all of rows with `numbers` bf16 values each, spread evenly over the ranks."""
    size = 2 * numbers * tokens / cluster.ranks
    peers, node = cluster.ranks - 1, cluster.ranks_per_node
    inter_us = size * (cluster.ranks - node) / cluster.ranks / (cluster.inter_gbs_per_rank * 1e3)
    intra_us = size * (node - 1) / cluster.ranks / (cluster.intra_gbs * 1e3)
    latency = cluster.inter_latency_us if cluster.nodes > 1 else cluster.intra_latency_us
    packing_us = 2 * float(costs.rowop_us(int(2 * size)))
    return (max(inter_us, intra_us) + latency + packing_us) / 1e3 if peers else 0.0


def table(rows: Sequence[dict[str, Any]]) -> str:
    titles = (
        "lengths, ranks, `auto` ms, of these recurrent, all-to-all over heads, at most, converted, at most"
    )
    lines = head(titles.split(", "))
    for case in rows:
        figures = [case["ms"]["auto"], RECURRENT * case["recurrent_ms"]]
        figures += [case[of][method] for method in ("all-to-all", "converted") for of in ("gains", "bounds")]
        lines.append(line([case["lengths"], str(case["ranks"]), *(f"{figure:.2f}" for figure in figures)]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", type=Path)
    parser.add_argument("--ranks", default="8,64,256")
    parser.add_argument("--share", type=float, default=prices.SHARE)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    prices.SHARE, hardware, rows = args.share, Hardware.load("h100"), list[dict[str, Any]]()
    for name, draw in [(path.stem, file_draw(path)) for path in args.workloads] or [*built_in_workloads()]:
        for ranks in map(int, args.ranks.split(",")):
            record = row(name, draw(ranks * TOKENS), replace(Cluster(), nodes=ranks // 8), hardware)
            rows.append(record)
            gains = ", ".join(f"{method} {gain:.2f}" for method, gain in record["gains"].items())
            print(
                json.dumps(record)
                if args.json
                else f"{name:20} {ranks:4} {record['ms']['auto']:8.2f} ms; {gains}"
            )
    if not args.workloads and args.share == prices.SHARE:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        write_tables({"hybrid": table(rows)})


if __name__ == "__main__":
    main()
