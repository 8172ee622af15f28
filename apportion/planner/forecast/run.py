"""From batches to a forecast: every parallelism plans them, is simulated under every scenario, and is made a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from apportion.ir.errors import ApportionError, ConfigError
from apportion.ir.fields import instance, instances, integer
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.planner.forecast.attention import PlannedMicrobatch, plan_attention
from apportion.planner.forecast.choices import recipe_parallelisms, static_grids
from apportion.planner.forecast.parallelism import Parallelism
from apportion.planner.forecast.result import INTERVAL, Forecast, ForecastRow
from apportion.planner.forecast.step import Setting, StepForecast, step
from apportion.planner.forecast.training import Training
from apportion.planner.simulate.scenarios import Scenario, applied

Progress = Callable[[str], None]
T = TypeVar("T")


def forecast(
    batches: Batch | Iterable[Batch],
    cluster: Cluster,
    model: Model,
    parallelisms: Sequence[Parallelism] | None = None,
    training: Training | None = None,
    *,
    hardware: Hardware | str | None = None,
    baseline: str | None = None,
    seed: int = 0,
    progress: Progress = lambda done: None,
) -> Forecast:
    """What training steps take, for each parallelism: means over the batches, each of which is one step's sequences; or
    one batch.

    parallelisms: default `recipe_parallelisms()` and `static_grids(cluster)`. model: whole, also with tensor
    parallelism. hardware: kernel times, default the built-in H100; links, NICs and memory are the cluster's. baseline:
    the name of the parallelism that gains refer to, by default the fastest static grid that fits. progress: called with
    the name of each that is done. One that cannot serve a batch keeps its row, with the reason. Raises ConfigError.
    """
    instance("cluster", cluster, Cluster)
    instance("model", model, Model)
    seed = integer("seed", seed, 0)
    drawn = _listed("batches", batches, Batch, "give Batch.from_lengths(...), or several")
    usual = (*recipe_parallelisms(), *static_grids(cluster)) if parallelisms is None else parallelisms
    chosen = _listed(
        "parallelisms", usual, Parallelism, "use recipe_parallelisms([...]) and static_grids(...)"
    )
    trained = Training() if training is None else training
    _listed("training", [trained], Training, "use Training(...), or Training.from_data of a mapping")
    names = [str(form) for form in chosen]
    if baseline is not None and (not isinstance(baseline, str) or baseline not in names):
        raise ConfigError(
            "baseline", baseline, "is none of the parallelisms", f"use one of {'; '.join(names)}"
        )
    used = Hardware.named(hardware) or Hardware.load("h100")
    rows = []
    for form in chosen:
        rows.append(_row(Setting(form, cluster, model, trained, used), drawn, seed))
        progress(str(form))
    return Forecast(tuple(rows), cluster, model, trained, used, named=baseline)


def _listed(field: str, given: Any, kind: type[T], remedy: str) -> list[T]:
    """What is given, one or several, all of that kind. Raises ConfigError."""
    held = [given] if isinstance(given, kind) else list(instances(field, given, kind))
    if not held:
        raise ConfigError(field, [], "there is nothing to forecast", remedy)
    return held


def _row(setting: Setting, batches: Sequence[Batch], seed: int) -> ForecastRow:
    form = setting.parallelism
    try:
        for batch in batches:
            setting.check(batch)
        planned = [
            plan_attention(form, batch, setting.cluster, setting.model, setting.hardware, seed)
            for batch in batches
        ]
        steps = tuple(tuple(_steps(setting, scenario, planned, batches)) for scenario in INTERVAL)
    except ApportionError as error:
        return ForecastRow(form, reason=str(error))
    return ForecastRow(form, steps, None if form.context is None else form.groups(setting.cluster))


def _steps(
    setting: Setting,
    scenario: Scenario,
    planned: list[list[list[PlannedMicrobatch]]],
    batches: Sequence[Batch],
) -> Iterator[StepForecast]:
    hardware, cluster = applied(scenario, setting.hardware, setting.cluster)
    varied = Setting(setting.parallelism, cluster, setting.model, setting.training, hardware)
    return (step(varied, one, batch) for one, batch in zip(planned, batches, strict=True))
