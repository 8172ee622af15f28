"""`apportion precompute`: plans a training run ahead of time."""

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
from apportion.cli.request import RequestOptions, command

if TYPE_CHECKING:
    from apportion.ir.bytes.job import Job
    from apportion.planner.iteration.ticks import TickTable
    from apportion.service.precompute import Summary, Work

LINE_S = 30.0  # interval between lines of progress if stderr is a file
PLAN_S = 3600.0  # nobody is waiting; planning that takes longer is assumed never to end


Out = Annotated[Path, Option(help="Folder of the plans, created or continued.", metavar="DIR")]
Shuffle = Annotated[
    bool, Option("--shuffle/--no-shuffle", help="Draw the samples in a new order in each epoch.")
]
Pipeline = Annotated[
    int,
    Option(
        help="Pipeline stages: plan their ticks, for a PlannedLoader with ticks=tick_table(pipeline, microbatches, "
        "virtual). --ranks counts the ranks of all stages.",
        min=1,
    ),
]


@command
def precompute(
    request: RequestOptions,
    iterations: Annotated[int, Option(help="Optimizer steps to plan.", min=1)],
    out: Out,
    microbatches: options.Microbatches = 1,
    pipeline: Pipeline = 1,
    virtual: options.Virtual = 1,
    recipe: options.RecipeName = "auto",
    block: options.Block = None,
    pods: options.Pods = None,
    shuffle: Shuffle = True,
    workers: options.Workers = 0,
    ray: options.Ray = None,
    as_json: options.AsJson = False,
) -> None:
    """Plan and verify the iterations of a training run ahead of time, into a folder.

    Samples are drawn epoch after epoch, as a PlannedLoader with the same seed
    draws them; PlannedLoader(source="DIR") reads the plans. The same command
    continues a stopped run, also with more --iterations. Servers may
    share the folder: equal requests have equal plans. With --overlong drop or
    cut, give the loader ap.Samples with the same limit and rule.

    [bold]Examples[/bold]

      apportion precompute --workload examples/doc_lengths.json --ranks 64 --iterations 1000 --out plans/

      apportion precompute --lengths lengths.jsonl --cluster cluster.yaml --model model.yaml --recipe wlb
      --microbatches 4 --iterations 100000 --out plans/ --workers 16
    """
    from apportion.ir.bytes.job import Job
    from apportion.ir.request.policy import Policy
    from apportion.planner.iteration.ticks import RECIPE as TICKS, tick_table

    cluster, model, hardware = request.setting()
    table = tick_table(pipeline, microbatches, virtual) if pipeline > 1 else None
    recipe_or_ticks = inputs.recipe_of(recipe, block, pods) if table is None or recipe != "auto" else TICKS
    policy = Policy(recipe_or_ticks, seed=request.seed)
    job = Job(cluster, model, policy, request.rank_tokens, microbatches, hardware)
    work = _work(job, request, (iterations, shuffle, table))
    try:
        summary = _run(work, out, workers, ray)
    except KeyboardInterrupt:
        note(f"apportion: stopped; files in {out} are complete, and the same command continues from there")
        raise typer.Exit(INTERRUPTED) from None
    record = _record(work, summary, out)
    emit(record, as_json, lambda: _table(record))


def _work(job: Job, request: RequestOptions, rest: tuple[int, bool, TickTable | None]) -> Work:
    from apportion.service.precompute import Work

    request.check_files("--lengths", "--workload")
    source = request.source()
    samples, (_, _, table) = source.workload, rest
    assert samples is not None
    samples = samples.drop_overlong(
        job.tokens // (1 if table is None else table.stages), request.overlong or "refuse"
    )
    return Work(job, samples.lengths, source.mask or samples.masks, *rest)


def _run(work: Work, out: Path, workers: int, ray: str | None) -> Summary:
    from apportion.service.precompute import precompute as run
    from apportion.service.workers import executor_of

    executor, workers = executor_of(workers, PLAN_S, ray=ray)
    start = noted_at = time.monotonic()
    try:
        with progress("planning", work.iterations) as step:

            def report(done: int, planned: int) -> None:
                nonlocal noted_at
                now = time.monotonic()
                rate = planned / (now - start)
                remaining = timedelta(seconds=round((work.iterations - done) / rate)) if rate else "?"
                progress_text = f"{rate:,.1f} /s, {remaining} left"
                step(at=done, detail=progress_text)
                if planned and not sys.stderr.isatty() and now - noted_at >= LINE_S:
                    noted_at = now
                    note(f"planned {done:,} of {work.iterations:,} iterations, {progress_text}")

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
