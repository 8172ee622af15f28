"""Holds recipes against each other: every recipe plans the same batches, and what its plans cost is simulated.

    batches × recipes ──plan, verify, simulate──► Trial or Refusal ──batch of median time──► Row

A recipe that cannot serve a batch keeps its row, with the reason. Everything but the measured milliseconds
(`planning_ms`, `verify_ms`) is a function of batches, recipes, cluster, model, hardware and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from apportion.bench import Job, Times, timed_plan, timed_verify, warm_up
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ApportionError, ConfigError, VerifyError
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.planner.simulate import Simulation, simulate

if TYPE_CHECKING:
    from apportion.ir.request.hardware import Hardware

#: called after each plan with what was planned
Progress = Callable[[str], None]

#: names that a row takes from the reports of its plans as they are
REPORTED = (
    *("ranks", "tokens", "block_tokens", "heaviest_piece_over_mean", "imbalance_bound", "imbalance"),
    *("bytes", "slots", "max_degree", "rounds", "plan_bytes"),
)
UNVERIFIED = "cannot be verified"  # how the verifier begins where a plan is too large for one of its rules
SIMULATED = (
    *("forward_ms", "backward_ms", "efficiency", "attainable", "of_attainable", "time_imbalance", "lost_ms"),
    "exposed_ms",
)


@dataclass(frozen=True)
class Setting:
    """What all recipes are given. hardware: None is the built-in default; verify: check every plan, but for those of
    the recipes in `unverified`, name -> why not. keep: trials keep what was simulated."""

    cluster: Cluster
    model: Model
    hardware: Hardware | None = None
    seed: int = 0
    verify: bool = True
    unverified: Mapping[str, str] = field(default_factory=dict)
    keep: bool = False


@dataclass(frozen=True)
class Trial:
    """One recipe on one batch: what its report says, what was simulated (`SIMULATED` and `peak_rows`, for one attention
    call of each kind), and what was measured.

    verify_ms: None where the plan was not verified, because nobody asked for it or, as `unverified` says, because it is
    too large for the verifier.
    """

    report: Mapping[str, Any]
    simulated: Mapping[str, Any]
    planning_ms: float
    verify_ms: float | None
    unverified: str | None = None
    simulation: Simulation | None = field(default=None, repr=False, compare=False)

    @property
    def total_ms(self) -> float:
        return float(self.simulated["forward_ms"] + self.simulated["backward_ms"])

    def value(self, name: str) -> Any:
        return self.simulated[name] if name in self.simulated else self.report[name]


@dataclass(frozen=True)
class Refusal:
    """Why a recipe does not serve a batch. broken: it made a plan that breaks a rule."""

    reason: str
    broken: bool = False


@dataclass(frozen=True)
class Row:
    """A recipe over all batches: its trials and refusals, and the baseline's, batch by batch."""

    recipe: str
    outcomes: tuple[Trial | Refusal, ...]
    baseline: tuple[Trial | Refusal, ...]

    @property
    def trials(self) -> list[Trial]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Trial)]

    @property
    def refusals(self) -> list[Refusal]:
        return [outcome for outcome in self.outcomes if isinstance(outcome, Refusal)]

    @property
    def reason(self) -> str | None:
        """Why batches were refused: the first reason, and how many there were; None where all were served."""
        refused, batches = self.refusals, len(self.outcomes)
        if not refused:
            return None
        of = "" if len(refused) == batches else f"{len(refused)} of {batches} batches: "
        return of + refused[0].reason

    @property
    def speedups(self) -> list[float]:
        """The baseline's simulated time over this recipe's, for each batch that both serve."""
        return [
            base.total_ms / mine.total_ms
            for base, mine in zip(self.baseline, self.outcomes, strict=True)
            if isinstance(base, Trial) and isinstance(mine, Trial)
        ]

    @property
    def middle(self) -> Trial | None:
        """Of the batch of median time; None where none was served."""
        trials = sorted(self.trials, key=lambda trial: trial.total_ms)
        return trials[(len(trials) - 1) // 2] if trials else None

    def record(self) -> dict[str, Any]:
        """The row: names, nesting and units are documented in docs/comparison.md. Figures of one batch, that of median
        time, so that they belong together; speed-ups and times of planning are over all batches."""
        trials, middle = self.trials, self.middle
        names = (*SIMULATED, "peak_rows", *REPORTED)
        return {
            "recipe": self.recipe,
            "status": "ok" if trials else "refused",
            "reason": self.reason,
            "batches": len(trials),
            "refused": len(self.refusals),
            "verified": bool(trials) and all(trial.verify_ms is not None for trial in trials),
            "unverified": next((trial.unverified for trial in trials if trial.unverified), None),
            **{name: None if middle is None else middle.value(name) for name in names},
            "speedup": _spread(self.speedups),
            "bounds": None if middle is None else _bounds(middle.report),
            "planning_ms": _times([trial.planning_ms for trial in trials]),
            "verify_ms": _times([trial.verify_ms for trial in trials if trial.verify_ms is not None]),
        }


@dataclass(frozen=True)
class Comparison:
    """Rows in the order of the recipes; `baseline` names the one that speed-ups refer to."""

    rows: tuple[Row, ...]
    baseline: str

    @property
    def broken(self) -> list[str]:
        """Recipes of which a plan broke a rule."""
        return [row.recipe for row in self.rows if any(refusal.broken for refusal in row.refusals)]


def compare(
    batches: Iterable[Batch],
    recipes: Sequence[Recipe],
    baseline: Recipe,
    setting: Setting,
    progress: Progress = lambda done: None,
) -> Comparison:
    """Every recipe on every batch; the baseline gets a row first where it is not among them. Raises ConfigError where
    there is no batch."""
    recipes = recipes if baseline in recipes else [baseline, *recipes]
    for recipe in recipes:
        warm_up(recipe)
    outcomes = [
        tuple(_progressing(batch, recipe, setting, progress) for recipe in recipes) for batch in batches
    ]
    if not outcomes:
        raise ConfigError("batches", [], "there is nothing to compare on", "give at least one batch")
    columns = dict(zip(recipes, zip(*outcomes, strict=True), strict=True))
    rows = tuple(Row(recipe.name, columns[recipe], columns[baseline]) for recipe in recipes)
    return Comparison(rows, baseline.name)


def _progressing(batch: Batch, recipe: Recipe, setting: Setting, progress: Progress) -> Trial | Refusal:
    outcome = attempt(batch, recipe, setting)
    progress(recipe.name)
    return outcome


def attempt(batch: Batch, recipe: Recipe, setting: Setting) -> Trial | Refusal:
    """Plan, verify and simulate one batch by one recipe."""
    job = Job(batch, setting.cluster, setting.model, recipe, setting.seed, setting.hardware)
    try:
        plan, planning_ms, _ = timed_plan(job)
        skip = setting.unverified.get(recipe.name)
        verify_ms, unverified = _verified(plan) if setting.verify and skip is None else (None, skip)
        simulation = simulate(plan, setting.hardware)
    except VerifyError as error:
        return Refusal(f"the plan breaks a rule: {error}", broken=True)
    except ApportionError as error:
        return Refusal(str(error))
    simulated = {name: getattr(simulation, name) for name in SIMULATED}
    simulated |= {"peak_rows": simulation.peak_work_rows}
    kept = simulation if setting.keep else None
    return Trial(plan.report, simulated, planning_ms, verify_ms, unverified, kept)


def _verified(plan: Plan) -> tuple[float | None, str | None]:
    """(milliseconds of verification, why there was none). Raises VerifyError for a plan that breaks a rule."""
    try:
        return timed_verify(plan), None
    except VerifyError as error:
        held = [violation.message for violation in error.violations]
        if not all(message.startswith(UNVERIFIED) for message in held):
            raise
        return None, held[0]


def _bounds(report: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> bound, value and gap: None where the bound is void."""
    return {
        name: {key: bound[key] for key in ("bound", "value", "gap")}
        for name, bound in report["bounds"].items()
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"min": min(values), "median": float(np.median(values)), "max": max(values)}


def _times(values: Sequence[float]) -> dict[str, Any] | None:
    return Times(tuple(values)).summary() if values else None
