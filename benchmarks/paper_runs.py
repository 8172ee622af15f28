"""Forecasts runs in a paper's setting, and makes rows that compare its figures with ours (`benchmarks/papers.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from apportion.ir.errors import ApportionError
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.planner.forecast.choices import static_grids
from apportion.planner.forecast.parallelism import Degrees, Parallelism
from apportion.planner.forecast.result import KEPT
from apportion.planner.forecast.run import steps_of
from apportion.planner.forecast.step import Setting, StepForecast
from apportion.planner.forecast.training import Training
from apportion.planner.recipe.recipes import find_recipe

K = 1024
GROUP = 8  # GPUs of a node, in all papers
#: GiB per rank if the paper offloads, tiles or caches data that the forecast keeps on the device: only times count
AMPLE_GIB = 2048.0
PLAIN = Degrees()

Row = dict[str, Any]
Theirs = float | tuple[float, float]  # a figure, or the smallest and largest published one


@dataclass(frozen=True, eq=False)
class Run:
    """A paper's training and its cluster. batches: one per step; degrees: the same for all its systems; memory_gib: per
    rank; hidden: whether plans for the actual links are priced as if communication were nearly free."""

    hardware_name: str
    nodes: int
    model: Model
    training: Training
    batches: tuple[Batch, ...]
    degrees: Degrees = PLAIN
    memory_gib: float = AMPLE_GIB
    hidden: bool = False

    @cached_property
    def hardware(self) -> Hardware:
        return Hardware.load(self.hardware_name)

    @cached_property
    def cluster(self) -> Cluster:
        return replace(self.hardware.cluster(self.nodes, GROUP), memory_gib=self.memory_gib)

    @cached_property
    def links(self) -> Cluster:
        """The cluster on which plans are priced."""
        if not self.hidden:
            return self.cluster
        return replace(
            self.cluster,
            intra_gbs=1e3 * self.cluster.intra_gbs,
            inter_gbs=1e3 * self.cluster.inter_gbs,
            intra_latency_us=1e-3 * self.cluster.intra_latency_us,
            inter_latency_us=1e-3 * self.cluster.inter_latency_us,
        )

    def setting(self, form: Parallelism, links: Cluster) -> Setting:
        return Setting(form, links, self.model, self.training, self.hardware)

    def fits(self, steps: Sequence[StepForecast]) -> bool:
        return max(step.memory.total for step in steps) <= self.memory_gib * 2**30

    @cache  # noqa: B019 - runs live as long as the process
    def steps(self, form: Parallelism) -> tuple[StepForecast, ...]:
        """Forecasts steps with nominal figures. Raises CapacityError, ConfigError."""
        return steps_of(
            [self.setting(form, self.cluster), self.setting(form, self.links)], self.batches, 0, []
        )[1]

    def whole(self, recipe: Recipe | str, ping_pong: bool = False) -> tuple[StepForecast, ...]:
        """Forecasts steps with one plan over all ranks; with `ping_pong`, one plan per half."""
        return self.steps(Parallelism(find_recipe(recipe), self.degrees, ping_pong=ping_pong))

    def best_grid(self, recipe: str) -> tuple[str, tuple[StepForecast, ...]]:
        """The name and steps of the recipe's fastest static grid that fits and keeps almost all pairs."""
        candidates = []
        for form in static_grids(self.cluster, [recipe], self.degrees):
            try:
                steps = self.steps(form)
            except ApportionError:
                continue
            covered = sum(step.pairs for step in steps) / sum(step.whole_pairs for step in steps)
            if covered >= KEPT and self.fits(steps):
                candidates.append((seconds(steps), str(form), steps))
        if not candidates:
            raise SystemExit(f"no grid of {recipe} fits")
        _, name, steps = min(candidates, key=lambda candidate: candidate[0])
        return name, steps


def seconds(steps: Sequence[StepForecast]) -> float:
    """The seconds per step, averaged over batches."""
    return float(np.mean([step.seconds for step in steps]))


def part(steps: Sequence[StepForecast], name: str) -> float:
    """The seconds of one part of a step, averaged over batches."""
    return float(np.mean([step.parts[name] for step in steps]))


def row(
    case: str, system: str, baseline: str, figure: str, theirs: Theirs, ours: float, assumed: str = ""
) -> Row:
    """A row of a table. system, baseline: names of the parallelisms that stand for them."""
    low, high = theirs if isinstance(theirs, tuple) else (theirs, theirs)
    nearest = min(max(ours, low), high)
    return {
        "case": case,
        "system": system,
        "baseline": baseline,
        "figure": figure,
        "theirs": theirs,
        "ours": ours,
        "ratio": ours / nearest,
        "assumed": assumed,
    }
