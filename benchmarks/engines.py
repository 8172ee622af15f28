"""What plans are worth with the kernels of one engine or another: a flash library's, or the executor's own.

    python -m benchmarks.engines [--recipes fcp,blend,auto,distca] [--ranks 8,64] [--seeds 0,1,2]

Log-normal documents (docs/performance.md), 32K tokens a rank, 8 ranks a node, Llama-3-8B's attention, on the built-in
h100 (FlashAttention-3) and h100-stage. `auto` searches on the hardware that it is simulated on. Writes JSON to
benchmarks/results/engines.json, a row a recipe, rank count and hardware: means over the seeds of simulated milliseconds
of a layer, and of what the busiest rank starts. Writes the table of docs/performance.md from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from apportion.bench import Source, cluster_of
from apportion.cli.environment import versions
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.planner import api
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.simulate import Simulation, simulate
from benchmarks.targets import write_tables

RESULTS = Path(__file__).resolve().parent / "results/engines.json"
MODEL = Model(q_heads=32, kv_heads=8, head_dim=128, layers=32)
TOKENS_PER_RANK = 32_768
HARDWARE = ("h100", "h100-stage")
STARTED = ("instructions", "launches", "messages", "rounds")


def simulated(recipe: str, ranks: int, seed: int, hardware: Hardware) -> Simulation:
    batch, _ = Source().batch(ranks * TOKENS_PER_RANK, seed)
    wanted = {"recipe": find_recipe(recipe), "verify": False, "hardware": hardware}
    return simulate(api.plan(batch, cluster_of(ranks), MODEL, **wanted), hardware)


def rows(recipes: Sequence[str], ranks: Sequence[int], seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
    for recipe in recipes:
        for count in ranks:
            for name in HARDWARE:
                found = [simulated(recipe, count, seed, Hardware.load(name)) for seed in seeds]
                yield {"recipe": recipe, "ranks": count, "hardware": name, "seeds": list(seeds)} | _means(
                    found
                )


def _means(found: Sequence[Simulation]) -> dict[str, Any]:
    figures = ("forward_ms", "backward_ms", "exposed_ms", "efficiency")
    return {
        **{name: round(mean(getattr(run, name) for run in found), 4) for name in figures},
        **{name: round(mean(run.busiest[name] for run in found), 1) for name in STARTED},
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """A line a recipe and rank count, engines side by side."""
    by = {(row["recipe"], row["ranks"], row["hardware"]): row for row in found}
    heads = ["recipe", "ranks", *(f"`{name}` ms (efficiency)" for name in HARDWARE)]
    heads += ["instructions", "kernels", "messages", "rounds"]
    lines = [_line(heads), _line(["---", *["--:"] * (len(heads) - 1)])]
    for recipe, ranks in dict.fromkeys((row["recipe"], row["ranks"]) for row in found):
        sides = [by[recipe, ranks, name] for name in HARDWARE]
        times = [
            f"{side['forward_ms']:.2f} + {side['backward_ms']:.2f} ({side['efficiency']:.3f})"
            for side in sides
        ]
        counts = [f"{sides[-1][name]:.0f}" for name in STARTED]
        lines.append(_line([f"`{recipe}`", str(ranks), *times, *counts]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", default="fcp,blend,auto,distca", help="names, separated by commas")
    parser.add_argument("--ranks", default="8,64", help="rank counts, separated by commas")
    parser.add_argument("--seeds", default="0,1,2", help="seeds, separated by commas")
    told = parser.parse_args()
    ranks, seeds = ([int(number) for number in text.split(",")] for text in (told.ranks, told.seeds))
    found = list(rows(told.recipes.split(","), ranks, seeds))
    RESULTS.write_text(json.dumps({"versions": versions(), "rows": found}, indent=1) + "\n", encoding="utf-8")
    write_tables({"engines": table(found)})


if __name__ == "__main__":
    main()
