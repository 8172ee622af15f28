"""Compares recipes: every recipe plans the same batches, and its plans are simulated.

    batches × recipes ──plan, verify, simulate──► Trial or Refusal ──batch of median time──► Row

A recipe that cannot serve a batch keeps its row, with the reason. Everything but the measured milliseconds
(`planning_ms`, `verify_ms`) is a function of batches, recipes, cluster, model, hardware and seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from apportion.bench import BenchJob, Times, timed_plan, timed_verify, warm_up
from apportion.ir import cards
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ApportionError, ConfigError, MissingDependencyError, VerifyError
from apportion.ir.fields import flag, instance, instances, integer
from apportion.ir.plan.summary import human_bytes, percent
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.planner.recipe.recipes import entries, find_recipe, find_recipes
from apportion.planner.simulate import Simulation, simulate

#: called after each plan with a description of it
Progress = Callable[[str], None]

#: fields that a row copies from the reports of its plans
REPORTED = (
    *("ranks", "tokens", "block_tokens", "heaviest_piece_over_mean", "imbalance_bound", "imbalance"),
    *("bytes", "slots", "max_degree", "rounds", "plan_bytes"),
)
UNVERIFIED = "cannot be verified"  # prefix of verifier errors for plans too large for one of its rules
SIMULATED = (
    *("forward_ms", "backward_ms", "efficiency", "attainable", "of_attainable", "time_imbalance", "lost_ms"),
    *("exposed_ms", "recurrent_ms"),
)


@dataclass(frozen=True)
class Setting:
    """Settings common to all recipes. hardware: None is the built-in default; verify: check every plan, except for
    recipes in `unverified`, name -> reason. keep: True if trials keep their simulation."""

    cluster: Cluster
    model: Model
    hardware: Hardware | None = None
    seed: int = 0
    verify: bool = True
    unverified: Mapping[str, str] = field(default_factory=dict)
    keep: bool = False


@dataclass(frozen=True)
class Trial:
    """One recipe on one batch: its report, simulated figures (`SIMULATED` and `peak_rows`, for one attention call of
    each kind), and measurements.

    verify_ms: None if the plan was not verified, because verification is off or, as `unverified` states, because the
    plan is too large for the verifier.
    """

    report: Mapping[str, Any]
    simulated: Mapping[str, Any]
    planning_ms: float
    verify_ms: float | None
    unverified: str | None = None
    simulation: Simulation | None = field(default=None, repr=False, compare=False)

    @property
    def total_ms(self) -> float:
        """Time of one call of each kind, including recurrent ones."""
        return float(sum(self.simulated[name] for name in ("forward_ms", "backward_ms", "recurrent_ms")))

    def value(self, name: str) -> Any:
        return self.simulated[name] if name in self.simulated else self.report[name]


@dataclass(frozen=True)
class Refusal:
    """Reason why a recipe cannot serve a batch. broken: True if its plan violates a rule."""

    reason: str
    broken: bool = False


@dataclass(frozen=True)
class Row:
    """A recipe over all batches: its trials and refusals, and the baseline's, in batch order."""

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
        """Why batches were refused: the first reason, and how many were; None if none was refused."""
        refusals, batches = self.refusals, len(self.outcomes)
        if not refusals:
            return None
        prefix = "" if len(refusals) == batches else f"{len(refusals)} of {batches} batches: "
        return prefix + refusals[0].reason

    @property
    def speedups(self) -> list[float]:
        """Baseline's simulated time over this recipe's, for each batch that both serve."""
        return [
            base.total_ms / trial.total_ms
            for base, trial in zip(self.baseline, self.outcomes, strict=True)
            if isinstance(base, Trial) and isinstance(trial, Trial)
        ]

    @property
    def middle(self) -> Trial | None:
        """The trial of median time; None if no batch was served."""
        trials = sorted(self.trials, key=lambda trial: trial.total_ms)
        return trials[(len(trials) - 1) // 2] if trials else None

    def record(self) -> dict[str, Any]:
        """The row: names, nesting and units are documented in docs/benchmarks.md. Figures are of one batch, the one of
        median time, so that they belong together; speed-ups and measured times cover all batches."""
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
    """Rows in the order of the recipes; `baseline` is the reference for speed-ups."""

    rows: tuple[Row, ...]
    baseline: str
    setting: Setting

    def __repr__(self) -> str:
        return f"<Comparison: {', '.join(row.recipe for row in self.rows)}>"

    @property
    def broken(self) -> list[str]:
        """Recipes with a plan that violates a rule."""
        return [row.recipe for row in self.rows if any(refusal.broken for refusal in row.refusals)]

    @property
    def simulations(self) -> dict[str, Simulation]:
        """Recipe -> simulation of its plan for the batch of median time, if the setting keeps them."""
        by_recipe = {row.recipe: row.middle.simulation for row in self.rows if row.middle is not None}
        return {name: simulation for name, simulation in by_recipe.items() if simulation is not None}

    def record(self) -> dict[str, Any]:
        """Output of `apportion compare --json` without the origin of its batches; docs/benchmarks.md has names and
        units."""
        setting, hardware = self.setting, self.setting.hardware
        return {
            "rows": [row.record() for row in self.rows],
            "baseline": self.baseline,
            "batches": len(self.rows[0].outcomes),
            "seed": setting.seed,
            "cluster": setting.cluster.to_data(),
            "model": setting.model.to_data(),
            "hardware": None if hardware is None else {"name": hardware.name, "digest": hardware.digest()},
            "verified": setting.verify,
        }

    def to_pandas(self) -> Any:
        """A frame with a row per recipe; nested names have dots: `speedup.median`. Raises MissingDependencyError
        without pandas."""
        try:
            pandas = import_module("pandas")
        except ModuleNotFoundError:
            raise MissingDependencyError("pandas", "notebook", "to_pandas") from None
        return pandas.json_normalize([row.record() for row in self.rows])

    def _repr_html_(self) -> str:
        """HTML for notebooks: a row per recipe."""
        record, hardware = self.record(), self.setting.hardware
        hardware_name = "h100" if hardware is None else hardware.name
        batches = "one batch" if record["batches"] == 1 else f"{record['batches']} batches"
        title = f"{batches} on {self.setting.cluster.ranks} ranks, simulated on {hardware_name}"
        names = (
            "recipe",
            f"speed-up over {self.baseline}",
            "forward ms",
            "backward ms",
            "of balanced work",
            "moved",
        )
        return cards.table(title, (*names, "planned in ms"), map(_table_cells, record["rows"]))


def compare(
    batches: Batch | Iterable[Batch],
    cluster: Cluster,
    model: Model,
    recipes: Sequence[Recipe | str] | None = None,
    *,
    baseline: Recipe | str = "ring",
    hardware: Hardware | str | None = None,
    seed: int = 0,
    verify: bool = True,
) -> Comparison:
    """Plans the batches with every recipe; verifies and simulates the plans, one attention call of each kind.

    recipes: names or recipes, by default all built-in ones. baseline: reference for speed-ups; it gets a row in any
    case. hardware: simulated hardware, by default the built-in H100. A recipe that cannot serve a batch keeps its row,
    with the reason. Raises ConfigError, UnknownNameError.
    """
    batch_list = instances("batches", [batches] if isinstance(batches, Batch) else batches, Batch)
    chosen = find_recipes("recipes", list(entries()) if recipes is None else recipes)
    instance("cluster", cluster, Cluster)
    instance("model", model, Model)
    seed, verify = integer("seed", seed, 0), flag("verify", verify)
    setting = Setting(cluster, model, Hardware.named(hardware), seed, verify, keep=True)
    return compare_all(batch_list, chosen, find_recipe(baseline), setting)


def compare_all(
    batches: Iterable[Batch],
    recipes: Sequence[Recipe],
    baseline: Recipe,
    setting: Setting,
    progress: Progress = lambda done: None,
) -> Comparison:
    """Runs every recipe on every batch; a baseline not among the recipes gets the first row. Raises ConfigError if no
    batch is given."""
    recipes = recipes if baseline in recipes else [baseline, *recipes]
    for recipe in recipes:
        warm_up(recipe)
    outcomes = [
        tuple(_report_attempt(batch, recipe, setting, progress) for recipe in recipes) for batch in batches
    ]
    if not outcomes:
        raise ConfigError("batches", [], "there is no batch to compare on", "give at least one batch")
    columns = dict(zip(recipes, zip(*outcomes, strict=True), strict=True))
    rows = tuple(Row(recipe.name, columns[recipe], columns[baseline]) for recipe in recipes)
    return Comparison(rows, baseline.name, setting)


def _report_attempt(batch: Batch, recipe: Recipe, setting: Setting, progress: Progress) -> Trial | Refusal:
    outcome = attempt(batch, recipe, setting)
    progress(recipe.name)
    return outcome


def attempt(batch: Batch, recipe: Recipe, setting: Setting) -> Trial | Refusal:
    """Plans, verifies and simulates one batch with one recipe."""
    job = BenchJob(batch, setting.cluster, setting.model, recipe, setting.seed, setting.hardware)
    try:
        plan, planning_ms, _ = timed_plan(job)
        reason = setting.unverified.get(recipe.name)
        verify_ms, unverified = _verify_timed(plan) if setting.verify and reason is None else (None, reason)
        simulation = simulate(plan, setting.hardware)
    except VerifyError as error:
        return Refusal(f"the plan breaks a rule: {error}", broken=True)
    except ApportionError as error:
        return Refusal(str(error))
    simulated = {name: getattr(simulation, name) for name in SIMULATED}
    simulated |= {"peak_rows": simulation.peak_work_rows}
    kept = simulation if setting.keep else None
    return Trial(plan.report, simulated, planning_ms, verify_ms, unverified, kept)


def _verify_timed(plan: Plan) -> tuple[float | None, str | None]:
    """(milliseconds of verification, reason if it did not run). Raises VerifyError for a plan that violates a rule."""
    try:
        return timed_verify(plan), None
    except VerifyError as error:
        messages = [violation.message for violation in error.violations]
        if not all(message.startswith(UNVERIFIED) for message in messages):
            raise
        return None, messages[0]


def _bounds(report: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> bound, value, and gap (None if the bound is void)."""
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


def _table_cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of a row in a notebook's table: figures, or the reason if all batches were refused."""
    if row["status"] != "ok":
        return [row["recipe"], str(row["reason"]), "", "", "", "", ""]
    speedup = "" if row["speedup"] is None else f"{row['speedup']['median']:.2f}"
    times = (f"{row['forward_ms']:.3f}", f"{row['backward_ms']:.3f}", percent(row["efficiency"]))
    return [
        row["recipe"],
        speedup,
        *times,
        human_bytes(row["bytes"]["total"]),
        f"{row['planning_ms']['p50']:.1f}",
    ]
