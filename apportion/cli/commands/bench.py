"""`apportion bench`: measure planning, and the cost of planned attention calls."""

from __future__ import annotations

import os
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from apportion.cli import inputs, options
from apportion.cli.environment import machine, versions
from apportion.cli.output import count, emit, note
from apportion.cli.request import RequestOptions
from apportion.ir.errors import CapacityError

if TYPE_CHECKING:
    from apportion.bench import BenchJob
    from apportion.trainer.measure.bench import Bench

app = typer.Typer(name="bench", help="Measure planning and attention.", no_args_is_help=True)

WIDTH = 160  # minimum width of the attention table, which has the most columns on GPUs


@app.command("plan")
def bench_plan(
    recipe: options.RecipeName = "fcp",
    ranks: Annotated[str, Option(help="Rank counts, separated by commas.")] = "8,64,256,1024",
    tokens_per_rank: Annotated[int, Option(help="Tokens sampled for each rank.", min=1)] = options.SAMPLED,
    block: options.Block = None,
    pods: options.Pods = None,
    workload: options.WorkloadFile = None,
    model: options.ModelFile = None,
    threads: options.Threads = 1,
    repeats: Annotated[int, Option(help="Timed runs per row.", min=5)] = 5,
    seeds: Annotated[str, Option(help="Seeds, separated by commas; one row for each.")] = "0",
    as_json: options.AsJson = False,
) -> None:
    """Time planning: from the parsed batch to the encoded bytes of all ranks and both phases, on one core.

    Without --workload the documents are log-normal (median 2048, sigma 1.5, at
    most 512K tokens), causal. A warm-up run comes first; verification is timed
    separately. Times are in milliseconds.

    [bold]Examples[/bold]

      apportion bench plan --ranks 8,64 --block 2048

      apportion bench plan --recipe fcp --ranks 8,64,256,1024 --block auto --seeds 0,1,2 --json
    """
    _limit_to_one_core()
    from apportion.bench import Grid
    from apportion.cli.printed import plans as printed
    from apportion.ir.fields import MAX_INT
    from apportion.ir.isa import MAX_RANKS

    source = RequestOptions(workload=workload).source()
    counts = inputs.integers("--ranks", ranks, 1, MAX_RANKS)
    grid = Grid(counts, inputs.integers("--seeds", seeds, 0, MAX_INT), tokens_per_rank, repeats, threads)
    rows = []
    for row in grid.rows(source, inputs.model_of(model), inputs.recipe_of(recipe, block, pods)):
        note(f"{row['ranks']} ranks, seed {row['seed']}: {row['planning_ms']['p50']:.1f} ms")
        rows.append(row)
    record = {
        "benchmark": "plan",
        "workload": RequestOptions(workload=workload).name,
        "versions": versions(),
        "rows": rows,
    }
    emit(record, as_json, lambda: printed.bench_table(rows))


TokensPerRank = Annotated[int, Option(help="Tokens sampled for each rank.", min=1)]
Engine = Annotated[str, Option(help="Engine: stage, flash, plain or all.")]


@app.command("attention")
def bench_attention(
    recipes: options.RecipeNames = "fcp,blend",
    ranks: Annotated[str, Option(help="Rank counts, separated by commas.")] = "8,64",
    tokens_per_rank: TokensPerRank = options.SAMPLED,
    engine: Engine = "all",
    workload: options.WorkloadFile = None,
    model: options.ModelFile = None,
    repeats: Annotated[int, Option(help="Timed calls; the fastest one counts.", min=1)] = 30,
    hardware: options.HardwareName = None,
    seed: options.Seed = 0,
    as_json: options.AsJson = False,
) -> None:
    """Time calls of planned attention, forward and backward: one row for the busiest rank of each plan.

    Without a GPU a recorder takes the place of the device: it counts launches and
    messages, and the host is timed. On a GPU it runs plans for one rank; under
    torchrun, plans for as many ranks as the job has, and measures the time that
    messages add. A note below the table lists figures that were not measured.
    Times are in milliseconds, the best of --repeats calls after a warm-up.

    [bold]Examples[/bold]

      apportion bench attention --ranks 8,64

      apportion bench attention --recipes all --ranks 1 --engine stage

      torchrun --nproc-per-node 8 -m apportion bench attention --recipes fcp,auto --ranks 8 --json
    """
    _limit_to_one_core()
    for package in ("torch", "triton"):
        inputs.need(package, package, "the benchmark of attention")
    from apportion.backends.torch.profile.device import device_name
    from apportion.bench import BenchJob, cluster_of
    from apportion.cli.printed import plans as printed
    from apportion.ir.isa import MAX_RANKS
    from apportion.trainer.measure.bench import job

    request = RequestOptions(workload=workload)
    used = inputs.hardware_of(hardware)
    shape = inputs.model_of(model)
    recipe_list, counts = inputs.recipes_of(recipes), inputs.integers("--ranks", ranks, 1, MAX_RANKS)
    skipped: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    with job(_engines(engine), repeats, skipped.setdefault) as bench:
        for size, recipe in product(counts, recipe_list):
            batch, _ = request.draw(size * tokens_per_rank, seed)
            rows += _rows(BenchJob(batch, cluster_of(size, hardware=used), shape, recipe, seed, used), bench)
        is_first = bench.communicator.rank == 0
    record = {
        "benchmark": "attention",
        "workload": request.name,
        "tokens_per_rank": tokens_per_rank,
        "hardware": hardware or "h100",
        "seed": seed,
        "repeats": repeats,
        "device": device_name(bench.device),
        "machine": machine(),
        "versions": versions(),
        "rows": rows,
        "skipped": list(skipped),
    }
    if is_first:
        emit(record, as_json, lambda: printed.attention_table(rows), lambda: "\n".join(skipped), width=WIDTH)


def _engines(name: str) -> tuple[str, ...]:
    from apportion.backends.torch.engines import ENGINES
    from apportion.ir.fields import choice

    return tuple(ENGINES) if choice("--engine", name, ("all", *ENGINES)) == "all" else (name,)


def _rows(job: BenchJob, bench: Bench) -> list[dict[str, Any]]:
    """The rows of one plan; none if the recipe cannot make the plan, in which case `bench` records the reason."""
    from apportion.bench import plan_unverified
    from apportion.planner.recipe.recipes import find_recipe

    title = f"{find_recipe(job.recipe).name}, {count(job.cluster.ranks, 'rank')}"
    try:
        rows = bench.measure(plan_unverified(job), job.hardware)
    except CapacityError as error:
        bench.skip(f"{title}: {str(error).splitlines()[0]}")
        return []
    for row in rows if bench.communicator.rank == 0 else ():
        if row.host_ms is not None:
            note(f"{title}, {row.engine} {row.phase}: {row.host_ms:.3f} ms of host time")
    return [row.record() for row in rows]


def _limit_to_one_core() -> None:
    """Limit numerical libraries that are not loaded yet to one thread."""
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
