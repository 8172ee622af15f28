"""`apportion compare`: recipes compared on the same batches."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Option

from apportion.cli import files, inputs, options
from apportion.cli.output import FAILED, OK, WIDTH, emit, progress
from apportion.cli.request import BatchOptions, command

BATCHES = 5  # batches drawn if the option is not given
WIDE = 280  # characters of the table with all columns


Baseline = Annotated[str, Option(help="The recipe, by name or file, that speed-ups refer to.")]
Batches = Annotated[
    int | None, Option(help=f"Batches, each drawn with its own seed. Default: {BATCHES}.", min=1)
]


@command
def compare(
    request: BatchOptions,
    recipes: options.RecipeNames = "all",
    baseline: Baseline = "ring",
    batches: Batches = None,
    verify: Annotated[bool, Option("--verify/--no-verify", help="Check every plan.")] = True,
    wide: Annotated[bool, Option("--wide", help=f"Print every column ({WIDE} characters).")] = False,
    html: options.Html = None,
    as_json: options.AsJson = False,
) -> None:
    """Plan the same batches with several recipes, verify and simulate the plans, and compare them in one table.

    Times are simulated milliseconds of one attention call of each kind, medians
    over batches; the speed-up is that of forward and backward together. A recipe
    that cannot serve the batch keeps its row, with the reason; exit code 1 if
    none can. Without a batch, workload or lengths file the documents are
    log-normal (median 2048, sigma 1.5, at most 512K tokens).

    [bold]Examples[/bold]

      apportion compare --workload examples/code_lengths.json --ranks 8 --tokens-per-rank 8192

      apportion compare --ranks 64 --recipes ring,fcp,mine.yaml --baseline ring --batches 20 --json

      apportion compare --ranks 16 --mask '{sliding_window: {window: 1024}}' --hardware a800 --wide

      apportion compare --ranks 64 --html comparison.html
    """
    from apportion import comparison as engine
    from apportion.cli.printed import comparison

    files.check_output("--html", html)
    cluster, model, hardware = request.setting()
    recipe_list, reference = inputs.recipes_of(recipes), inputs.recipe_of(baseline)
    drawn_batches, skipped = request.batches(cluster.ranks * request.rank_tokens, batches, BATCHES)
    setting = engine.Setting(cluster, model, hardware, request.seed, verify, keep=html is not None)
    with progress("comparing", len(drawn_batches) * len({*recipe_list, reference})) as report:
        result = engine.compare_all(drawn_batches, recipe_list, reference, setting, report)
    record = result.record() | {"skipped_samples": skipped, "workload": request.name}
    if html is not None:
        from apportion.report import compare_html

        files.write(html, compare_html(record, result.simulations).encode())
    emit(record, as_json, *comparison.comparison(record, wide), width=WIDE if wide else WIDTH)
    raise typer.Exit(FAILED if result.broken or not any(row.trials for row in result.rows) else OK)
