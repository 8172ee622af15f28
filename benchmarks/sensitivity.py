"""Ranks recipes under figures that differ from the hardware file: cases of `benchmarks/comparison.py`.

Plans are made for nominal figures and priced under every scenario. The row `auto, told` is planned for each scenario;
in the column `incast, told` every recipe is planned for `incast`, since that splits rounds (`docs/decisions/0027`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from apportion.bench import cluster_of
from apportion.ir.request.batch import Batch
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.planner import api
from apportion.planner.simulate import simulate
from apportion.planner.simulate.scenarios import SCENARIOS, apply
from benchmarks.tables import head, line

FORM = "sensitivity"
BASE, REPLANNED = "auto", "auto, told"
#: the scenario for which all recipes are also planned
KNOWN = "incast"
RECIPES = (
    *(BASE, "mixed", "blend", "fcp", "fcp_paper", "distca", "dcp", "zeppelin", "flexsp", "magi"),
    *("usp", "ulysses", "megatron_hybrid", "hybrid_dp", "allgather", "ring"),
)
#: recipes whose verification takes minutes and 10 GB per plan
UNVERIFIED = ("allgather", "ring")


@dataclass(frozen=True)
class Sensitivity:
    """One table: `seeds` batches of `ranks` x `tokens_per_rank` tokens."""

    name: str
    title: str
    draw: Callable[[int, int], Batch]  # (tokens, seed) -> batch
    model: Model
    ranks: int = 64
    tokens_per_rank: int = 32768
    seeds: int = 3
    hardware: str = "h100"
    recipes: tuple[str, ...] = RECIPES


def measure(case: Sensitivity) -> dict[str, Any]:
    """The milliseconds, forward plus backward, of each recipe under each scenario: means over the batches."""
    hardware = Hardware.load(case.hardware)
    cluster = cluster_of(case.ranks, None, hardware)
    settings = {scenario.name: apply(scenario, hardware, cluster) for scenario in SCENARIOS}
    results: dict[str, list[list[float]]] = {recipe: [] for recipe in (*case.recipes, REPLANNED)}
    for seed in range(case.seeds):
        batch = case.draw(case.ranks * case.tokens_per_rank, seed)

        def planned(recipe: str, setting: Any, batch: Batch = batch, seed: int = seed) -> Any:
            figures, links = setting
            check = recipe not in UNVERIFIED
            return api.plan(
                batch, links, case.model, recipe=recipe, seed=seed, hardware=figures, verify=check
            )

        for recipe in case.recipes:
            plan = planned(recipe, (hardware, cluster))
            reference = simulate(planned(recipe, settings[KNOWN]), *settings[KNOWN])
            results[recipe].append(
                [*(_ms(simulate(plan, *setting)) for setting in settings.values()), _ms(reference)]
            )
        row = [_ms(simulate(planned(BASE, pair), *pair)) for pair in settings.values()]
        results[REPLANNED].append([*row, row[list(settings).index(KNOWN)]])
    return {
        "form": FORM,
        "name": case.name,
        "title": case.title,
        "ranks": case.ranks,
        "tokens_per_rank": case.tokens_per_rank,
        "batches": case.seeds,
        "hardware": case.hardware,
        "model": case.model.to_data(),
        "rows": [
            {
                "recipe": recipe,
                "ms": dict(zip(_columns(), np.array(times).mean(0).round(4).tolist(), strict=True)),
            }
            for recipe, times in results.items()
        ],
    }


def _ms(simulation: Any) -> float:
    return float(simulation.forward_ms + simulation.backward_ms)


# --- the page


def table(case: Mapping[str, Any]) -> str:
    """A Markdown table: each recipe's time relative to `auto` and its place among the recipes, fastest first; and the
    number of pairs of recipes whose order differs from nominal."""
    names = _columns()
    times = {row["recipe"]: row["ms"] for row in case["rows"]}
    order = sorted(
        (recipe for recipe in times if recipe != REPLANNED), key=lambda recipe: times[recipe]["nominal"]
    )
    lines = [
        f"{case['ranks']} ranks x {case['tokens_per_rank']:,} tokens, {case['hardware']}, batches: {case['batches']}",
        "",
        *head(["recipe", *names]),
    ]
    for recipe in (*order, REPLANNED):
        cells = [f"{times[recipe][name] / times[BASE][name]:.2f}" for name in names]
        if recipe != REPLANNED:
            ranking = [sum(times[first][name] < times[recipe][name] for first in order) + 1 for name in names]
            cells = [f"{cell} ({place})" for cell, place in zip(cells, ranking, strict=True)]
        lines.append(line([recipe, *cells]))
    ms = [f"{times[BASE][name]:.1f}" for name in names]
    lines.append(line([f"{BASE}, ms", *ms]))
    swaps = [
        sum(
            (times[first][name] < times[second][name]) != (times[first]["nominal"] < times[second]["nominal"])
            for first, second in combinations(order, 2)
        )
        for name in names
    ]
    pairs = len(order) * (len(order) - 1) // 2
    lines.append(line([f"pairs of {pairs} in another order", *map(str, swaps)]))
    return "\n".join(lines)


def _columns() -> list[str]:
    return [*(scenario.name for scenario in SCENARIOS), f"{KNOWN}, told"]
