"""Forecast results: rows of recipes and static grids side by side, with intervals and speed-ups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.planner.forecast.layers import whole_parameters
from apportion.planner.forecast.memory import Memory
from apportion.planner.forecast.parallelism import Parallelism
from apportion.planner.forecast.recurrent import layer_count
from apportion.planner.forecast.step import PARTS, StepForecast
from apportion.planner.forecast.training import Training
from apportion.planner.simulate.scenarios import SCENARIOS, Scenario

#: single-scenario variations for an interval: `SCENARIOS` except their combination, and kernels a tenth faster.
#: Bandwidths and latencies of hardware files are data-sheet values, so real ones are not expected to be better
INTERVAL = (*(case for case in SCENARIOS if case.name != "all"), Scenario("fast-kernels", compute=0.9))
#: for models with experts: perfectly even experts, and twice the assumed unevenness
UNEVEN = (Scenario("even-experts", experts=0.0), Scenario("uneven-experts", experts=2.0))
#: minimum fraction of the pairs that a static grid must compute to qualify as best or baseline: one that cuts long
#: sequences trains a different objective
KEPT = 0.98
HOURS_A_WEEK = 168


@dataclass(frozen=True)
class ForecastRow:
    """Forecast of one parallelism over all batches. steps: by scenario, then batch; groups: data-parallel degree of a
    static grid; reason: why the parallelism is refused, in which case it has no steps."""

    parallelism: Parallelism
    steps: tuple[tuple[StepForecast, ...], ...] = ()
    groups: int | None = None
    reason: str | None = None

    @property
    def seconds(self) -> list[float]:
        """Mean seconds over batches, for each scenario."""
        return [float(np.mean([step.seconds for step in steps])) for steps in self.steps]

    @property
    def nominal(self) -> tuple[StepForecast, ...]:
        return self.steps[0]

    @property
    def pairs_kept(self) -> float:
        """Fraction of the pairs of whole sequences that is computed: below 1 if a static grid cuts sequences. 1 for
        masks without pairs."""
        total = sum(step.whole_pairs for step in self.nominal)
        return sum(step.pairs for step in self.nominal) / total if total else 1.0

    def parts(self) -> dict[str, float]:
        """Mean seconds by part over batches."""
        return {name: float(np.mean([step.parts[name] for step in self.nominal])) for name in PARTS}

    def experts(self) -> dict[str, float] | None:
        """Rows of experts and unevenness of tokens, for the microbatch that sends the most rows; None if there are no
        experts."""
        rows = [step.experts for step in self.nominal if step.experts is not None]
        return max(rows)._asdict() if rows else None

    def memory(self) -> Memory:
        """Memory of the batch that needs the most."""
        return max((step.memory for step in self.nominal), key=lambda memory: memory.total)


@dataclass(frozen=True, eq=False)
class Forecast:
    """Rows in the order of the request; the baseline (`named`, or the fastest static grid that fits) is the reference
    for speed-ups."""

    rows: tuple[ForecastRow, ...]
    cluster: Cluster
    model: Model
    training: Training
    hardware: Hardware
    grid_hardware: Hardware
    scenarios: tuple[Scenario, ...] = INTERVAL
    named: str | None = None

    def fits(self, row: ForecastRow) -> bool:
        """True if the row has a forecast and fits in memory."""
        return bool(row.steps) and row.memory().total <= self.cluster.memory_gib * 2**30

    @cached_property
    def baseline(self) -> ForecastRow | None:
        """The reference row, if any."""
        if self.named is not None:
            return next((row for row in self.rows if row.steps and str(row.parallelism) == self.named), None)
        return _fastest(row for row in self._candidates if row.parallelism.context is not None)

    @cached_property
    def best(self) -> ForecastRow | None:
        """The fastest row that fits and cuts almost nothing, or None."""
        return _fastest(self._candidates)

    @property
    def _candidates(self) -> list[ForecastRow]:
        return [row for row in self.rows if self.fits(row) and row.pairs_kept >= KEPT]

    def gain(self, row: ForecastRow) -> dict[str, Any] | None:
        """Speed-up of the row over the baseline: nominal, minimum and maximum over scenarios, each applied to both
        rows, and the nominal speed-up of each step."""
        if self.baseline is None or not row.steps:
            return None
        ratios = [base / step for base, step in zip(self.baseline.seconds, row.seconds, strict=True)]
        steps = [
            base.seconds / step.seconds for base, step in zip(self.baseline.nominal, row.nominal, strict=True)
        ]
        return {"value": ratios[0], "low": min(ratios), "high": max(ratios), "steps": steps}

    def record(self) -> dict[str, Any]:
        """Plain data: rows and inputs."""
        return {
            "rows": [self._record(row) for row in self.rows],
            "baseline": None if self.baseline is None else str(self.baseline.parallelism),
            "refused_baseline": self.named if self.baseline is None else None,
            "best": None if self.best is None else str(self.best.parallelism),
            "scenarios": [scenario.name for scenario in self.scenarios],
            "cluster": self.cluster.to_data(),
            "model": self.model.to_data(),
            "training": self.training.to_data(),
            "parameters": self._parameters(),
            "hardware": {"name": self.hardware.name, "digest": self.hardware.digest()},
            "grid_hardware": {"name": self.grid_hardware.name, "digest": self.grid_hardware.digest()},
        }

    def _parameters(self) -> dict[str, float]:
        """Parameters of the whole model without norms: total, and active per token, including the head but not the
        embedding."""
        model, training = self.model, self.training
        layers = layer_count(model)
        head, experts = model.hidden * training.vocab, training.experts
        total = whole_parameters(model, training, layers, experts.count) + head * (1 if training.tied else 2)
        return {"total": total, "active": whole_parameters(model, training, layers, experts.active) + head}

    def _record(self, row: ForecastRow) -> dict[str, Any]:
        data = {"name": str(row.parallelism), "parallelism": row.parallelism.to_data() | {"data": row.groups}}
        if not row.steps:
            return {**data, "status": "refused", "reason": row.reason}
        seconds, parts = row.seconds, row.parts()
        step_s = seconds[0]
        tokens = float(np.mean([item.tokens for item in row.nominal]))
        flops = float(np.mean([item.flops for item in row.nominal]))
        ranks, gain = self.cluster.ranks, self.gain(row)
        peak = ranks * self.hardware.peak_tflops.value * 1e12
        return {
            **data,
            "status": "ok" if self.fits(row) else "too large",
            "reason": None,
            "step_s": {"value": step_s, "low": min(seconds), "high": max(seconds)},
            "tokens_per_s_per_gpu": tokens / step_s / ranks,
            "mfu": flops / step_s / peak,
            "pairs_kept": row.pairs_kept,
            "memory_gib": row.memory().to_data(self.cluster.memory_gib),
            "parts_s": parts,
            "experts": row.experts(),
            "shares": {name: part / step_s for name, part in parts.items()},
            "gain": gain,
            "saved_gpu_hours_a_week": gain and ranks * HOURS_A_WEEK * (1 - 1 / gain["value"]),
            "scenarios_s": dict(zip((item.name for item in self.scenarios), seconds, strict=True)),
        }


def _fastest(rows: Iterable[ForecastRow]) -> ForecastRow | None:
    return min(rows, key=lambda row: row.seconds[0], default=None)
