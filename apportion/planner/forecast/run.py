"""Runs a forecast: for every parallelism, plans the batches, simulates them under every scenario, and builds a row."""

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
from apportion.planner.simulate.scenarios import apply

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

    parallelisms: default `recipe_parallelisms()` and `static_grids(cluster)`. model: the whole model, even with tensor
    parallelism. hardware: kernel times, default the built-in H100; links, NICs and memory are the cluster's.
    grid_hardware: kernel times of the static grids, default `hardware`: a current trainer may have faster kernels.
    baseline: name of the reference parallelism for speed-ups, by default the fastest static grid that fits. progress:
    called with the name of each finished parallelism. A parallelism that cannot run a batch gets a row with the reason.
    Raises ConfigError.
    """
    instance("cluster", cluster, Cluster)
    instance("model", model, Model)
    seed = integer("seed", seed, 0)
    batch_list = _checked_list("batches", batches, Batch, "give Batch.from_lengths(...), or several")
    defaults = (*recipe_parallelisms(), *static_grids(cluster)) if parallelisms is None else parallelisms
    forms = _checked_list(
        "parallelisms", defaults, Parallelism, "use recipe_parallelisms([...]) and static_grids(...)"
    )
    config = _training_of(training, model)
    names = [str(form) for form in forms]
    if baseline is not None and (not isinstance(baseline, str) or baseline not in names):
        raise ConfigError(
            "baseline", baseline, "is not one of the parallelisms", f"use one of {'; '.join(names)}"
        )
    gpu = Hardware.named(hardware) or Hardware.load("h100")
    grid_gpu = Hardware.named(grid_hardware) or gpu
    scenarios = INTERVAL + UNEVEN * bool(config.experts.count)
    variants = [
        [(case.experts, *apply(case, kernels, cluster)) for case in scenarios] for kernels in (gpu, grid_gpu)
    ]
    groups: dict[tuple[Parallelism, bool], list[int]] = {}
    for number, form in enumerate(forms):
        static = grid_gpu is not gpu and form.context is not None
        groups.setdefault((form.canonical_form(cluster), static), []).append(number)
    rows: dict[int, ForecastRow] = {}
    for (_, static), numbers in groups.items():
        shared: list[_Attention] = []
        for number in numbers:
            form = forms[number]
            settings = [
                Setting(form, links, model, config, kernels, excess)
                for excess, kernels, links in variants[static]
            ]
            rows[number] = _row(settings, batch_list, seed, shared)
            progress(str(form))
    result = tuple(rows[number] for number in range(len(forms)))
    return Forecast(result, cluster, model, config, gpu, grid_gpu, scenarios, named=baseline)


def _training_of(training: Training | None, model: Model) -> Training:
    """The training, by default `Training()`. Raises ConfigError if it does not match the model."""
    result = Training() if training is None else training
    _checked_list("training", [result], Training, "use Training(...), or Training.from_data(mapping)")
    if (mla := model.latent) is not None and (mla.rank, mla.rope) != (result.kv_rank, result.rope_dim):
        values = f"kv_rank {result.kv_rank}, rope_dim {result.rope_dim}"
        remedy = f"write kv_rank: {mla.rank}, rope_dim: {mla.rope}"
        raise ConfigError("training", values, "must match the model's latent rows", remedy)
    return result


def _checked_list(field: str, value: Any, kind: type[T], remedy: str) -> list[T]:
    """The value or values as a list, each checked to be of the class. Raises ConfigError."""
    items = [value] if isinstance(value, kind) else list(instances(field, value, kind))
    if not items:
        raise ConfigError(field, [], "there is nothing to forecast", remedy)
    return items


class _Attention(NamedTuple):
    """Simulated attention by batch, planned group and microbatch. attended: times under each scenario; pairs: computed
    pairs of each batch."""

    planned: list[list[list[PlannedMicrobatch]]]
    pairs: list[int]
    attended: list[list[list[list[AttentionTimes]]]]


def _row(
    settings: Sequence[Setting], batches: Sequence[Batch], seed: int, shared: list[_Attention]
) -> ForecastRow:
    """The row of one parallelism. settings: one per scenario. shared: attention of rows with the same plans, filled on
    first use; not kept for alternating halves, since the work around them differs between rows."""
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
    """Steps of all batches under each setting, planned for the first setting. shared: as in `_row`. Raises ConfigError,
    CapacityError."""
    nominal, *_ = settings
    for batch in batches:
        nominal.check(batch)
    if not shared:
        shared.append(_attention(settings, batches, seed))
    planned, pairs, attended = shared.pop() if nominal.parallelism.ping_pong else shared[0]
    return tuple(
        tuple(
            step(setting, groups, [[times[number] for times in group] for group in group_times], total, batch)
            for groups, total, group_times, batch in zip(planned, pairs, attended, batches, strict=True)
        )
        for number, setting in enumerate(settings)
    )


def _attention(settings: Sequence[Setting], batches: Sequence[Batch], seed: int) -> _Attention:
    nominal, *_ = settings
    form, model = nominal.parallelism, nominal.layers.model
    parts = [
        plan_attention(form, batch, nominal.cluster, nominal.model, nominal.hardware, seed)
        for batch in batches
    ]
    planned, pairs = (list(part) for part in zip(*parts, strict=True))
    projects = planned[0][0][0].projects
    if projects and nominal.training.kv_rank:
        rule = f"{form.recipe.name} computes Q, K and V of some heads at a time from hidden states, not low-rank rows"
        raise ConfigError("training.kv_rank", nominal.training.kv_rank, rule, "use another recipe")
    models = [(CostModel(item.hardware, model), form.group(item.cluster)) for item in settings]
    around = [around_us(item, projects) for item in settings]
    times = [[[attend(item, models, around) for item in group] for group in groups] for groups in planned]
    return _Attention(planned, pairs, times)
