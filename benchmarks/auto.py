"""What `auto` promises: its simulated efficiency beside the best single recipe's, and its mean on many ranks.

Run: python benchmarks/auto.py [--ranks 8,64,256] [--seeds 0,1,2,3,4] [--singles all|none|NAME,...] [--json]. Built-in
h100, the README's model, 32K tokens a rank, 8 ranks a node, forward and backward: log-normal documents
(docs/performance.md) and the shipped workloads. Every plan of `auto` is verified. Writes all rows to
benchmarks/results/auto.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from apportion.bench import Source, cluster_of, warm_up
from apportion.cli.environment import versions
from apportion.comparison import Refusal, Setting, Trial, attempt
from apportion.ir.request.batch import Batch
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.ir.request.workload import read_workload
from apportion.planner.recipe.recipes import entries, find_recipe

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/auto.json"
MODEL = Model(q_heads=32, kv_heads=8, head_dim=128, layers=32)
TOKENS = 32768
WORKLOADS = {
    "lognormal": None,
    "documents": ROOT / "examples/doc_lengths.json",
    "code": ROOT / "examples/code_lengths.json",
}
#: `auto` with and without recipes that split heads
AUTOS = {
    "auto": find_recipe("auto"),
    "auto-whole-heads": Recipe("auto-whole-heads", {"search": {"portfolio": {"inner": "none"}}}),
}
#: plans of these take minutes on so many ranks; on fewer they are far below the best
HEAVY = {"dcp": 64, "flexsp": 64, "ring": 64, "wlb": 64, "allgather": 64}


def batch_of(workload: str, ranks: int, seed: int) -> Batch:
    path = WORKLOADS[workload]
    return Source(None if path is None else read_workload(path)).batch(ranks * TOKENS, seed)[0]


def rows(
    workloads: Sequence[str], ranks: Sequence[int], seeds: Sequence[int], singles: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """One record per workload, rank count and seed."""
    hardware = Hardware.load("h100")
    for workload in workloads:
        for count in ranks:
            setting = Setting(cluster_of(count, None, hardware), MODEL, hardware)
            for seed in seeds:
                batch = batch_of(workload, count, seed)
                yield {"workload": workload, "ranks": count, "seed": seed} | _row(
                    batch, setting, count, singles
                )


def _row(batch: Batch, setting: Setting, ranks: int, singles: Sequence[str]) -> dict[str, Any]:
    found = {name: _auto(attempt(batch, recipe, setting)) for name, recipe in AUTOS.items()}
    unchecked = replace(setting, verify=False)
    named = [name for name in singles if ranks <= HEAVY.get(name, ranks)]
    single = {name: _efficiency(attempt(batch, find_recipe(name), unchecked)) for name in named}
    served = {name: value for name, value in single.items() if value is not None}
    best = max(served, key=lambda name: served[name]) if served else None
    ratio = None if best is None else found["auto"]["efficiency"] / served[best]
    return {**found, "single": single, "best_single": best, "ratio": ratio}


def _efficiency(outcome: Trial | Refusal) -> float | None:
    return outcome.simulated["efficiency"] if isinstance(outcome, Trial) else None


def _auto(outcome: Trial | Refusal) -> dict[str, Any]:
    if isinstance(outcome, Refusal):
        raise SystemExit(f"auto refused: {outcome.reason}")
    search, report = outcome.report["search"], outcome.report
    return {
        "efficiency": outcome.simulated["efficiency"],
        "of_attainable": outcome.simulated["of_attainable"],
        "lost_ms": outcome.simulated["lost_ms"],
        "recipe": search["recipe"],
        "steps": search["steps"],
        "stopped": search["stopped"],
        "planning_ms": round(outcome.planning_ms, 1),
        "verify_ms": None if outcome.verify_ms is None else round(outcome.verify_ms, 1),
        "imbalance": report["imbalance"],
        "kv_gap": report["bounds"]["kv_bytes"]["gap"],
        "exposed_ms": outcome.simulated["exposed_ms"],
        "largest_part": report["plan_bytes"]["largest_rank"],
    }


def summary(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each workload and rank count: means over seeds, and the worst ratio to the best single recipe."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in found:
        groups.setdefault((row["workload"], row["ranks"]), []).append(row)
    return [
        {
            "workload": workload,
            "ranks": ranks,
            "seeds": len(held),
            **{name: float(np.mean([row[name]["efficiency"] for row in held])) for name in AUTOS},
            "of_attainable": float(np.mean([row["auto"]["of_attainable"] for row in held])),
            "planning_ms": float(np.median([row["auto"]["planning_ms"] for row in held])),
            "worst_ratio": min((row["ratio"] for row in held if row["ratio"] is not None), default=None),
        }
        for (workload, ranks), held in groups.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--ranks", default="8,64,256")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--singles", default="all", help="recipes to hold it against: all, none, or names")
    parser.add_argument("--json", action="store_true", help="print the whole record")
    told = parser.parse_args()
    every = [name for name in entries() if name != "auto"]
    singles = every if told.singles == "all" else [] if told.singles == "none" else told.singles.split(",")
    warm_up(AUTOS["auto"])
    found = []
    ranks, seeds = ([int(text) for text in held.split(",")] for held in (told.ranks, told.seeds))
    for row in rows(told.workloads.split(","), ranks, seeds, singles):
        found.append(row)
        print(_line(row), file=sys.stderr, flush=True)
    record = {"versions": versions(), "summary": summary(found), "rows": found}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record if told.json else record["summary"], indent=1))


def _line(row: dict[str, Any]) -> str:
    values = "  ".join(
        f"{name} {row[name]['efficiency']:.3f} ({row[name]['of_attainable']:.3f})" for name in AUTOS
    )
    chosen = row["auto"]["recipe"]["name"]
    best = (
        "" if row["best_single"] is None else f"  best single {row['best_single']}, ratio {row['ratio']:.3f}"
    )
    took = f"{row['auto']['planning_ms']:.0f} ms, {row['auto']['steps']} steps"
    return f"{row['workload']} {row['ranks']} ranks seed {row['seed']}: {values}  ({chosen}, {took}){best}"


if __name__ == "__main__":
    main()
