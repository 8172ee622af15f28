"""`apportion forecast`: estimates time, speed-up and memory of training steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from apportion.cli import inputs, options
from apportion.cli.output import FAILED, OK, emit, progress
from apportion.cli.request import BatchOptions, command
from apportion.ir.errors import ConfigError

if TYPE_CHECKING:
    from apportion.ir.request.cluster import Cluster
    from apportion.ir.request.model import Model
    from apportion.ir.request.policy import Recipe
    from apportion.planner.forecast.experts import Experts
    from apportion.planner.forecast.parallelism import Degrees, Parallelism
    from apportion.planner.forecast.training import Training

BATCHES = 3  # batches drawn if the option is not given
WIDTH = 118


Recipes = Annotated[
    str, Option(help="Recipes over all data x context ranks: names, files, all or none.", metavar="NAME,...")
]
Grids = Annotated[
    str,
    Option(
        help="Recipes of static DP x CP grids at all CP degrees, or none. Groups have their own sequences."
    ),
]
Baseline = Annotated[
    str | None,
    Option(
        help="Row that speed-ups refer to, such as 'usp, CP 16, balanced'. Default: the fastest static grid that "
        "fits and keeps at least 98 % of the pairs."
    ),
]
GridHardware = Annotated[
    str | None,
    Option(help="Kernel times of static grids, if they differ. Default: --hardware.", metavar="NAME|H.json"),
]
Expert = Annotated[int, Option(help="Expert-parallel degree: ranks of a stage that share experts.", min=1)]
PingPong = Annotated[
    bool,
    Option(
        "--ping-pong",
        help="Plan each microbatch of the recipes' rows as two halves that alternate in every layer: messages of one "
        "travel during the work of the other.",
    ),
]
Search = Annotated[
    bool,
    Option(
        "--search",
        help="Try every tensor, pipeline and expert degree for the recipes, and propose the fastest.",
    ),
]
TrainingOption = Annotated[
    str | None,
    Option(
        help="Training options, as a file or YAML: vocab, tied, sharding (ddp, zero1, zero2, fsdp), "
        "gradients (fp32, model), optimizer_bytes, recompute (none, selective, full), loss_tokens, "
        "mlp_tile, offload, chunks, overlap, ffns, gated, experts, q_rank, kv_rank, rope_dim.",
        metavar="T.yaml|YAML",
    ),
]
Batches = Annotated[
    int | None, Option(help=f"Steps, each drawn with its own seed. Default: {BATCHES}.", min=1)
]


@command
def forecast(
    request: BatchOptions,
    recipes: Recipes = "all",
    grids: Grids = "ring,allgather,ulysses,usp",
    baseline: Baseline = None,
    grid_hardware: GridHardware = None,
    tensor: Annotated[int, Option(help="Tensor-parallel degree.", min=1)] = 1,
    pipeline: Annotated[int, Option(help="Pipeline stages.", min=1)] = 1,
    virtual: options.Virtual = 1,
    microbatches: options.Microbatches = 1,
    expert: Expert = 1,
    ping_pong: PingPong = False,
    search: Search = False,
    training: TrainingOption = None,
    batches: Batches = None,
    wide: Annotated[bool, Option("--wide", help="Show every static grid.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Forecast a training step on your lengths and your cluster: seconds, tokens/s, MFU, memory, and the speed-up
    of a plan for all ranks over the static grid that you run today.

    Attention is simulated, the rest is in closed form. Ranges show the result
    if one assumption is wrong, for the row and its baseline alike: kernels 10 %
    faster or slower, half the bandwidth, four times the latency, contention and
    others; gains of single steps are shown next to the ranges. --model counts
    the heads of the whole model.
    --tokens-per-rank is the mean per microbatch: sequences stay whole, and none
    is longer than a microbatch. Exit code 1 if no row fits.

    [bold]Examples[/bold]

      apportion forecast --workload examples/code_lengths.json --ranks 64

      apportion forecast --ranks 64 --recipes auto --grids usp --training '{sharding: zero1, recompute: full}'

      apportion forecast --ranks 64 --hardware h100-stage --grid-hardware h100

      apportion forecast --ranks 128 --recipes auto,blend --grids none --search --microbatches 4 --json
    """
    from apportion.cli.printed import forecast as printed
    from apportion.planner.forecast.parallelism import Degrees
    from apportion.planner.forecast.run import forecast as engine

    cluster, model, hardware = request.setting()
    setup = _training(training, inputs.config_of(request.model))
    tokens = cluster.ranks * request.rank_tokens  # in the microbatches of all stages together
    draws, skipped = request.batches(tokens * microbatches, batches, BATCHES, max(1, tokens // pipeline))
    degrees = Degrees(tensor, pipeline, virtual, microbatches, expert)
    recipe_list = [] if recipes == "none" else inputs.recipes_of(recipes)
    forms = _planned_forms(recipe_list, search, degrees, cluster, model, setup.experts, draws[0].kinds)
    candidates = [*(replace(form, ping_pong=ping_pong) for form in forms), *_grids(grids, degrees, cluster)]
    with progress("forecasting", len(candidates)) as report:
        settings: dict[str, Any] = {"hardware": hardware, "baseline": baseline, "seed": request.seed}
        settings["grid_hardware"] = inputs.hardware_of(grid_hardware)
        result = engine(draws, cluster, model, candidates, setup, progress=report, **settings)
    record = result.record() | {
        "batches": len(draws),
        "tokens": round(sum(batch.tokens for batch in draws) / len(draws)),
        "skipped_samples": skipped,
        "seed": request.seed,
        "workload": request.name,
    }
    emit(record, as_json, *printed.views(record, wide), width=WIDTH)
    raise typer.Exit(OK if result.best is not None else FAILED)


def _planned_forms(
    recipes: list[Recipe],
    search: bool,
    degrees: Degrees,
    cluster: Cluster,
    model: Model,
    experts: Experts,
    kinds: tuple[str, ...],
) -> list[Parallelism]:
    from apportion.planner.forecast.choices import recipe_parallelisms, search_space
    from apportion.planner.forecast.step import all_layers

    if not recipes:
        return []
    if not search:
        return recipe_parallelisms(recipes, degrees)
    flags = {f"--{name}": getattr(degrees, name) for name in ("tensor", "pipeline", "virtual", "expert")}
    flags = {name: degree if degree > 1 else None for name, degree in flags.items()}
    inputs.refuse(flags, "is a degree that --search varies", "drop --search or")
    return search_space(cluster, model, all_layers(model, kinds), recipes, degrees.microbatches, experts)


def _grids(text: str, degrees: Degrees, cluster: Cluster) -> list[Parallelism]:
    from apportion.planner.forecast.choices import static_grids

    if text == "none":
        return []
    return static_grids(cluster, inputs.recipes_of(text, "--grids"), degrees)


def _training(text: str | None, config: Mapping[str, Any] | None) -> Training:
    """The training options of a file or of YAML; a Hugging Face config provides missing ones. Raises ConfigError."""
    import yaml

    from apportion.ir import fields
    from apportion.planner.forecast.training import Training

    if text is None:
        return Training.from_data({}, config)
    if Path(text).suffix in (".yaml", ".yml", ".json"):
        data: Any = fields.load(text)
    else:
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError:
            rule, remedy = "is not YAML", "write '{sharding: zero1, recompute: full}'"
            raise ConfigError("--training", text, rule, remedy) from None
    return Training.from_data(fields.mapping("--training", data), config)
