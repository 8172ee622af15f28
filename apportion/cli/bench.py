"""`apportion bench`: measure planning."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from apportion.cli import inputs, options
from apportion.cli.house import versions
from apportion.cli.output import emit, note

app = typer.Typer(help="Measure planning.", no_args_is_help=True)


@app.command("plan")
def bench_plan(
    recipe: options.RecipeName = "fcp",
    ranks: Annotated[
        str, typer.Option("--ranks", help="Rank counts, separated by commas.")
    ] = "8,64,256,1024",
    tokens_per_rank: Annotated[
        int, typer.Option("--tokens-per-rank", help="Tokens sampled for each rank.", min=1)
    ] = options.SAMPLED,
    block: options.Block = None,
    workload: options.WorkloadFile = None,
    model: options.ModelFile = None,
    repeats: Annotated[int, typer.Option("--repeats", help="Timed runs of each row.", min=5)] = 5,
    seeds: Annotated[str, typer.Option("--seeds", help="A row for each of these seeds.")] = "0",
    as_json: options.AsJson = False,
) -> None:
    """Time planning on one core: from the parsed batch to the encoded bytes of all ranks and both phases.

    Without --workload the documents are log-normal (median 2048, sigma 1.5, at most 512K tokens), causal.
    A warm-up run comes first; verification is timed by itself. Times are milliseconds.

    [bold]Examples[/bold]

      apportion bench plan --ranks 8,64 --block 2048

      apportion bench plan --recipe fcp --ranks 8,64,256,1024 --block auto --seeds 0,1,2 --json
    """
    _one_core()
    from apportion import views
    from apportion.bench import Grid, Source
    from apportion.ir.fields import MAX_INT
    from apportion.ir.isa import MAX_RANKS
    from apportion.ir.workload import read_workload

    source = Source(None if workload is None else read_workload(workload))
    counts = inputs.integers("--ranks", ranks, 1, MAX_RANKS)
    grid = Grid(counts, inputs.integers("--seeds", seeds, 0, MAX_INT), tokens_per_rank, repeats)
    rows = []
    for row in grid.rows(source, inputs.model_of(model), inputs.recipe_of(recipe, block)):
        note(f"{row['ranks']} ranks, seed {row['seed']}: {row['planning_ms']['p50']:.1f} ms")
        rows.append(row)
    name = "log-normal documents" if workload is None else str(workload)
    record = {"benchmark": "plan", "workload": name, "versions": versions(), "rows": rows}
    emit(record, as_json, lambda: views.bench_table(rows))


def _one_core() -> None:
    """Keep numerical libraries that are not loaded yet to one thread."""
    for library in ("OMP", "OPENBLAS", "MKL", "NUMBA"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
