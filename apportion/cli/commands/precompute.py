"""`apportion precompute`: the plans of a training run, made before it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from apportion.cli import inputs, options, output
from apportion.cli.output import INTERRUPTED, count, emit, note
from apportion.ir.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Task

    from apportion.ir.bytes.job import Job
    from apportion.ir.request.workload import Workload
    from apportion.service.precompute import Summary, Work

LINE_S = 30.0  # a line of progress so often, where stderr is a file


Out = Annotated[
    Path, typer.Option("--out", help="Folder of the plans; made, or gone on with.", metavar="DIR")
]
Lengths = Annotated[
    Path | None,
    typer.Option("--lengths", help="The length of each sample, one a line.", metavar="L.jsonl"),
]
WorkloadOption = Annotated[
    Path | None,
    typer.Option("--workload", help="Workload file: lengths and masks of the samples.", metavar="W.json"),
]
Mask = Annotated[
    str | None,
    typer.Option(
        "--mask",
        help="Mask of all samples: a name, or YAML; {kind: mask} for a model with several kinds. Default: causal, "
        "or what each sample of the workload has.",
    ),
]
Shuffle = Annotated[
    bool, typer.Option("--shuffle/--no-shuffle", help="Draw the samples in a new order in each epoch.")
]
Workers = Annotated[
    str | None,
    typer.Option("--workers", help="Worker processes, or `ray`. Default: one a core.", metavar="N|ray"),
]


def precompute(
    iterations: Annotated[int, typer.Option("--iterations", help="Optimizer steps to plan.", min=1)],
    out: Out,
    lengths: Lengths = None,
    workload: WorkloadOption = None,
    mask: Mask = None,
    cluster: options.ClusterFile = None,
    model: options.ModelFile = None,
    hardware: options.HardwareName = None,
    ranks: options.Ranks = None,
    ranks_per_node: options.RanksPerNode = None,
    tokens_per_rank: options.MicrobatchTokens = options.SAMPLED,
    microbatches: options.Microbatches = 1,
    recipe: options.RecipeName = "fcp",
    block: options.Block = None,
    pods: options.Pods = None,
    seed: options.Seed = 0,
    shuffle: Shuffle = True,
    workers: Workers = None,
    as_json: options.AsJson = False,
) -> None:
    """Plan the iterations of a training run ahead of it, verified, into a folder.

    The samples of the file are drawn epoch after epoch, as a PlannedLoader with
    the same seed draws them; source="DIR" has it read the plans. A run that was
    stopped goes on with the same command, and a folder takes more --iterations
    later.

    [bold]Examples[/bold]

      apportion precompute --workload examples/doc_lengths.json --ranks 64 --iterations 1000 --out plans/

      apportion precompute --lengths lengths.jsonl --cluster cluster.yaml --model model.yaml --recipe wlb
      --microbatches 4 --iterations 100000 --out plans/ --workers 16
    """
    from apportion.ir.bytes.job import Job
    from apportion.ir.request.policy import Policy
    from apportion.service.precompute import precompute as run
    from apportion.service.workers import Planner

    the_hardware = inputs.hardware_of(hardware)
    the_cluster = inputs.cluster_of(cluster, ranks, ranks_per_node, the_hardware)
    the_recipe, the_model = inputs.recipe_of(recipe, block, pods), inputs.model_of(model)
    policy = Policy(the_recipe, seed=seed)
    job = Job(the_cluster, the_model, policy, tokens_per_rank, microbatches, the_hardware)
    work = _work(job, _samples(lengths, workload), mask, shuffle, iterations)
    processes = _cores() if workers is None else inputs.workers_of(workers)
    try:
        with Planner(processes) as planner, _meter(iterations) as report:
            summary = run(work, out, planner, report)
    except KeyboardInterrupt:
        note(f"apportion: stopped; what is in {out} is whole, and the same command goes on from there")
        raise typer.Exit(INTERRUPTED) from None
    record = _record(work, summary, out)
    emit(record, as_json, lambda: _table(record))


def _samples(lengths: Path | None, workload: Path | None) -> Workload:
    from apportion.ir.request.workload import read_lengths, read_workload

    given = [path for path in (lengths, workload) if path is not None]
    if len(given) != 1:
        rule = "exactly one of --lengths and --workload must be there"
        raise ConfigError("input", [str(path) for path in given] or "nothing", rule, "name one file")
    return (read_lengths if lengths else read_workload)(given[0])


def _work(job: Job, samples: Workload, mask: str | None, shuffle: bool, iterations: int) -> Work:
    from apportion.service.precompute import Work

    if mask is not None and any(samples.masks):
        rule = "the samples of this workload have masks of their own"
        raise ConfigError("--mask", mask, rule, "leave it out")
    masks = samples.masks if any(samples.masks) else inputs.masks_of(mask)
    return Work(job, samples.lengths, masks, iterations, shuffle)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------------------------------------- progress


class _Rate(ProgressColumn):
    """Iterations a second, of this run."""

    def render(self, task: Task) -> Text:
        return Text("- /s" if task.speed is None else f"{task.speed:,.1f} /s")


@contextmanager
def _meter(iterations: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr with rate and time left, or a line from time to time where that is no terminal. Call what is
    yielded with the number of iterations that are there, and of those that this run added."""
    console = Console(stderr=True)
    columns = (TextColumn("planning"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn(True))
    lines = Lines(iterations, math.inf if console.is_terminal else LINE_S)
    with Progress(
        *columns, console=console, transient=True, disable=output.quiet or not console.is_terminal
    ) as bar:
        task = bar.add_task("planning", total=iterations)

        def report(done: int, new: int) -> None:
            if not new:  # what was there already is not this run's rate
                bar.reset(task, completed=done)
            bar.update(task, completed=done)
            lines(done, new)

        yield report


@dataclass
class Lines:
    """Progress as lines of text, at least `every_s` seconds apart."""

    iterations: int
    every_s: float
    began: float = field(default_factory=time.monotonic)
    last: float = field(default_factory=time.monotonic)

    def __call__(self, done: int, new: int) -> None:
        now = time.monotonic()
        if now - self.last < self.every_s or not new:
            return
        self.last, rate = now, new / (now - self.began)
        left = timedelta(seconds=round((self.iterations - done) / rate))
        note(f"planned {done:,} of {self.iterations:,} iterations, {rate:,.1f} /s, {left} left")


# ---------------------------------------------------------------------------------------------- result


def _record(work: Work, summary: Summary, out: Path) -> dict[str, Any]:
    return {
        "out": str(out),
        "recipe": work.job.policy.recipe.name,
        "ranks": work.job.ranks,
        "iterations": summary.iterations,
        "planned": summary.planned,
        "packs": summary.packs,
        "bytes": summary.size,
        "bytes_per_iteration": round(summary.size / summary.iterations),
        "seconds": round(summary.seconds, 3),
        "rate": round(summary.planned / summary.seconds, 3),
        "ids": summary.ids.hex(),
    }


def _table(record: Mapping[str, Any]) -> RenderableType:
    from apportion import views
    from apportion.ir.plan.summary import human_bytes

    size, each = human_bytes(record["bytes"]), human_bytes(record["bytes_per_iteration"])
    rows = (
        ("iterations", f"{record['iterations']:,} ({record['planned']:,} planned now, and verified)"),
        ("size", f"{size}, {each} an iteration"),
        ("rate", f"{record['rate']:,.1f} iterations/s"),
        ("ids", record["ids"][:16]),
    )
    title = f"plans in {record['out']}, recipe {record['recipe']}, {count(record['ranks'], 'rank')}"
    return views.summary(title, rows)
