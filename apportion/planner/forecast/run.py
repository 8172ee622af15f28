"""Runs a forecast: every parallelism plans the batches, is simulated under every scenario, and becomes a row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from apportion.ir.errors import ApportionError, ConfigError
from apportion.ir.fields import instance, instances, integer
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.planner.cost import CostModel
from apportion.planner.forecast.attention import AttentionTimes, PlannedMicrobatch, attend, plan_attention
from apportion.planner.forecast.choices import recipe_parallelisms, static_grids
from apportion.planner.forecast.parallelism import Parallelism
from apportion.planner.forecast.result import INTERVAL, UNEVEN, Forecast, ForecastRow
from apportion.planner.forecast.step import Setting, StepForecast, around_us, step
from apportion.planner.forecast.training import Training
from apportion.planner.simulate.scenarios import applied

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
    grid_hardware: Hardware | str | None = None,
    baseline: str | None = None,
    seed: int = 0,
    progress: Progress = lambda done: None,
) -> Forecast:
    """Forecasts training step times for each parallelism, averaged over batches, each with one step's sequences.

    parallelisms: default `recipe_parallelisms()` and `static_grids(cluster)`. model: the whole model, also with tensor
    parallelism. hardware: kernel times, default the built-in H100; links, NICs and memory are the cluster's.
    grid_hardware: kernel times of the static grids, default `hardware`: a current trainer may have faster kernels.
    baseline: name of the reference parallelism for speed-ups, by default the fastest static grid that fits. progress:
    called with the name of each finished one. A parallelism that cannot serve a batch keeps its row, with the reason.
    Raises ConfigError.
    """
    instance("cluster", cluster, Cluster)
    instance("model", model, Model)
    seed = integer("seed", seed, 0)
    drawn = _checked_list("batches", batches, Batch, "give Batch.from_lengths(...), or several")
    usual = (*recipe_parallelisms(), *static_grids(cluster)) if parallelisms is None else parallelisms
    chosen = _checked_list(
        "parallelisms", usual, Parallelism, "use recipe_parallelisms([...]) and static_grids(...)"
    )
    trained = _training_of(training, model)
    names = [str(form) for form in chosen]
    if baseline is not None and (not isinstance(baseline, str) or baseline not in names):
        raise ConfigError(
            "baseline", baseline, "is not one of the parallelisms", f"use one of {'; '.join(names)}"
        )
    used = Hardware.named(hardware) or Hardware.load("h100")
    grids = Hardware.named(grid_hardware) or used
    scenarios = INTERVAL + UNEVEN * bool(trained.experts.count)
    varied = [
        [(one.experts, *applied(one, kernels, cluster)) for one in scenarios] for kernels in (used, grids)
    ]
    alike: dict[tuple[Parallelism, bool], list[int]] = {}
    for number, form in enumerate(chosen):
        static = grids is not used and form.context is not None
        alike.setdefault((form.planned_as(cluster), static), []).append(number)
    rows: dict[int, ForecastRow] = {}
    for (_, static), numbers in alike.items():
        shared: list[_Attention] = []
        for number in numbers:
            form = chosen[number]
            settings = [
                Setting(form, links, model, trained, kernels, excess)
                for excess, kernels, links in varied[static]
            ]
            rows[number] = _row(settings, drawn, seed, shared)
            progress(str(form))
    found = tuple(rows[number] for number in range(len(chosen)))
    return Forecast(found, cluster, model, trained, used, grids, scenarios, named=baseline)


def _training_of(training: Training | None, model: Model) -> Training:
    """The training, by default `Training()`. Raises ConfigError if it does not match the model."""
    trained = Training() if training is None else training
    _checked_list("training", [trained], Training, "use Training(...), or Training.from_data of a mapping")
    if (own := model.latent) is not None and (own.rank, own.rope) != (trained.kv_rank, trained.rope_dim):
        said = f"kv_rank {trained.kv_rank}, rope_dim {trained.rope_dim}"
        remedy = f"write kv_rank: {own.rank}, rope_dim: {own.rope}"
        raise ConfigError("training", said, "must match the model's latent rows", remedy)
    return trained


def _checked_list(field: str, given: Any, kind: type[T], remedy: str) -> list[T]:
    """The value or values as a list, each checked to be of the class. Raises ConfigError."""
    held = [given] if isinstance(given, kind) else list(instances(field, given, kind))
    if not held:
        raise ConfigError(field, [], "there is nothing to forecast", remedy)
    return held


class _Attention(NamedTuple):
    """Simulated attention by batch, planned group and microbatch. attended: under each scenario; pairs: of each
    batch."""

    planned: list[list[list[PlannedMicrobatch]]]
    pairs: list[int]
    attended: list[list[list[list[AttentionTimes]]]]


def _row(
    settings: Sequence[Setting], batches: Sequence[Batch], seed: int, shared: list[_Attention]
) -> ForecastRow:
    """The row of one parallelism. settings: one per scenario. shared: attention of the first of several rows with the
    same plans, filled on first use; alternating halves differ in the work around them."""
    nominal, *_ = settings
    form = nominal.parallelism
    try:
        steps = steps_of(settings, batches, seed, shared)
    except ApportionError as error:
        return ForecastRow(form, reason=str(error))
    return ForecastRow(form, steps, None if form.context is None else form.groups(nominal.cluster))


def steps_of(
    settings: Sequence[Setting], batches: Sequence[Batch], seed: int, shared: list[_Attention]
) -> tuple[tuple[StepForecast, ...], ...]:
    """Steps of all batches under each setting, planned for the first one. shared: as in `_row`. Raises ConfigError,
    CapacityError."""
    nominal, *_ = settings
    for batch in batches:
        nominal.check(batch)
    if not shared:
        shared.append(_attention(settings, batches, seed))
    planned, pairs, attended = shared.pop() if nominal.parallelism.ping_pong else shared[0]
    return tuple(
        tuple(
            step(setting, groups, [[took[number] for took in held] for held in taken], kept, batch)
            for groups, kept, taken, batch in zip(planned, pairs, attended, batches, strict=True)
        )
        for number, setting in enumerate(settings)
    )


def _attention(settings: Sequence[Setting], batches: Sequence[Batch], seed: int) -> _Attention:
    nominal, *_ = settings
    form, model = nominal.parallelism, nominal.layers.model
    made = [
        plan_attention(form, batch, nominal.cluster, nominal.model, nominal.hardware, seed)
        for batch in batches
    ]
    planned, pairs = (list(part) for part in zip(*made, strict=True))
    projects = planned[0][0][0].projects
    if projects and nominal.training.kv_rank:
        rule = f"{form.recipe.name} computes Q, K and V of some heads at a time from hidden states, not low-rank rows"
        raise ConfigError("training.kv_rank", nominal.training.kv_rank, rule, "use another recipe")
    under = [(CostModel(one.hardware, model), form.group(one.cluster)) for one in settings]
    around = [around_us(one, projects) for one in settings]
    attended = [[[attend(one, under, around) for one in held] for held in groups] for groups in planned]
    return _Attention(planned, pairs, attended)
