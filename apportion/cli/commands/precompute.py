"""`apportion precompute`: the plans of a training run, made before it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType
from typer import Option

from apportion.cli import inputs, options
from apportion.cli.output import INTERRUPTED, count, emit, note, progress

if TYPE_CHECKING:
    from apportion.ir.bytes.job import Job
    from apportion.planner.iteration.ticks import TickTable
    from apportion.service.precompute import Summary, Work

LINE_S = 30.0  # a line of progress so often, where stderr is a file
PLAN_S = 3600.0  # nobody waits; a plan that takes longer is taken for one that never ends


Out = Annotated[Path, Option("--out", help="Folder of the plans; made, or gone on with.", metavar="DIR")]
Shuffle = Annotated[
    bool, Option("--shuffle/--no-shuffle", help="Draw the samples in a new order in each epoch.")
]

Mask = Annotated[
    str | None,
    Option(
        "--mask",
        help="Mask of all samples: a name, or YAML; {kind: mask} for a model with several kinds. Default: causal, "
        "or what each sample of the workload has.",
    ),
]
Stages = Annotated[
    int,
    Option(
        "--stages",
        help="Stages of a pipeline: plan its ticks, for a PlannedLoader with ticks=tick_table(stages, microbatches, "
        "virtual). Ranks are those of all stages.",
        min=1,
    ),
]
Virtual = Annotated[int, Option("--virtual", help="With --stages: chunks of layers of a stage.", min=1)]
Ray = Annotated[
    str | None,
    Option("--ray", help="Plan on a Ray cluster: its address, or `local`.", metavar="ADDRESS|local"),
]


def precompute(
    iterations: Annotated[int, Option("--iterations", help="Optimizer steps to plan.", min=1)],
    out: Out,
    lengths: options.LengthsFile = None,
    workload: options.WorkloadFile = None,
    mask: Mask = None,
    cluster: options.ClusterFile = None,
    model: options.ModelFile = None,
    hardware: options.HardwareName = None,
    ranks: options.Ranks = None,
    ranks_per_node: options.RanksPerNode = None,
    tokens_per_rank: options.MicrobatchTokens = options.SAMPLED,
    microbatches: options.Microbatches = 1,
    stages: Stages = 1,
    virtual: Virtual = 1,
    recipe: options.RecipeName = "auto",
    block: options.Block = None,
    pods: options.Pods = None,
    seed: options.Seed = 0,
    shuffle: Shuffle = True,
    workers: options.Workers = 0,
    ray: Ray = None,
    as_json: options.AsJson = False,
) -> None:
    """Plan the iterations of a training run ahead of it, verified, into a folder.

    The samples of the file are drawn epoch after epoch, as a PlannedLoader with
    the same seed draws them; source="DIR" has it read the plans. A run that was
    stopped goes on with the same command, and a folder takes more --iterations
    later. Servers may share the folder: equal requests have equal plans.

    [bold]Examples[/bold]

      apportion precompute --workload examples/doc_lengths.json --ranks 64 --iterations 1000 --out plans/

      apportion precompute --lengths lengths.jsonl --cluster cluster.yaml --model model.yaml --recipe wlb
      --microbatches 4 --iterations 100000 --out plans/ --workers 16
    """
    from apportion.ir.bytes.job import Job
    from apportion.ir.request.policy import Policy
    from apportion.planner.iteration.ticks import RECIPE as TICKS, tick_table

    the_cluster, the_model, the_hardware = inputs.setting_of(cluster, ranks, ranks_per_node, model, hardware)
    table = tick_table(stages, microbatches, virtual) if stages > 1 else None
    taken = inputs.recipe_of(recipe, block, pods) if table is None or recipe != "auto" else TICKS
    policy = Policy(taken, seed=seed)
    job = Job(the_cluster, the_model, policy, tokens_per_rank, microbatches, the_hardware)
    work = _work(job, inputs.Files(None, lengths, workload), mask, (iterations, shuffle, table))
    try:
        summary = _run(work, out, workers, ray)
    except KeyboardInterrupt:
        note(f"apportion: stopped; what is in {out} is whole, and the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    record = _record(work, summary, out)
    emit(record, as_json, lambda: _table(record))


def _work(job: Job, files: inputs.Files, mask: str | None, more: tuple[int, bool, TickTable | None]) -> Work:
    from apportion.bench import Source
    from apportion.service.precompute import Work

    samples = inputs.samples_of(files)
    if samples is None or len(files.given) != 1:
        raise files.not_one("--lengths and --workload")
    given = Source(samples, inputs.masks_of(mask)).mask
    return Work(job, samples.lengths, given or samples.masks, *more)


def _run(work: Work, out: Path, workers: int, ray: str | None) -> Summary:
    from apportion.service.precompute import precompute as run
    from apportion.service.workers import executor_of

    executor, workers = executor_of(workers, PLAN_S, ray=ray)
    began = said = time.monotonic()
    try:
        with progress("planning", work.iterations) as step:

            def report(there: int, planned: int) -> None:
                nonlocal said
                now = time.monotonic()
                rate = planned / (now - began)
                left = timedelta(seconds=round((work.iterations - there) / rate)) if rate else "?"
                told = f"{rate:,.1f} /s, {left} left"
                step(at=there, detail=told)
                if planned and not sys.stderr.isatty() and now - said >= LINE_S:
                    said = now
                    note(f"planned {there:,} of {work.iterations:,} iterations, {told}")

            return run(work, out, executor, workers, report)
    finally:
        executor.shutdown(cancel_futures=True)


def _record(work: Work, summary: Summary, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "recipe": work.job.policy.recipe.name,
        "ranks": work.job.ranks,
        **asdict(summary),
        "rate": round(summary.planned / summary.seconds, 3),
    }


def _table(record: Mapping[str, Any]) -> RenderableType:
    from apportion.cli.printed import plans as printed
    from apportion.ir.plan.summary import human_bytes

    rows = (
        ("iterations", f"{record['iterations']:,} ({record['planned']:,} planned now, and verified)"),
        ("plans", f"{record['packs']:,} in the folder, {human_bytes(record['size'])}"),
        ("rate", f"{record['rate']:,.1f} iterations/s"),
    )
    title = f"plans in {record['out']}, recipe {record['recipe']}, {count(record['ranks'], 'rank')}"
    return printed.summary(title, rows)
