"""`apportion report`: a plan as a page that a browser opens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from apportion.cli import files, inputs, options
from apportion.cli.output import emit
from apportion.ir.errors import ConfigError

if TYPE_CHECKING:
    from apportion.ir.bytes.codec import Plan

Output = Annotated[
    Path, typer.Option("--output", "-o", help="Write the page here.", metavar="R.html", show_default=True)
]


def report(
    plan: Annotated[
        Path,
        typer.Argument(help="A plan file, or a folder of `apportion precompute`.", metavar="PLAN|FOLDER"),
    ],
    output: Output = Path("report.html"),
    epoch: Annotated[int, typer.Option("--epoch", help="With a folder: of this epoch.", min=0)] = 0,
    iteration: Annotated[
        int, typer.Option("--iteration", help="With a folder: this iteration's microbatches.", min=0)
    ] = 0,
    hardware: options.HardwareName = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a page about a plan: one HTML file that opens offline in any browser.

    It has the figures beside their bounds, what every rank does when (simulated),
    who computes which part of the mask, who sends to whom, and what a search tried.

    [bold]Examples[/bold]

      apportion report first.plan

      apportion report first.plan -o first.html --hardware h200

      apportion report plans --epoch 0 --iteration 12
    """
    from apportion.report import report_html

    files.check_output("--output", output)
    the_hardware, plans = inputs.hardware_of(hardware), _plans(plan, epoch, iteration)
    inputs.warn_of_mismatch(the_hardware, plans[0][1].request.cluster)
    page = report_html(plans, the_hardware).encode()
    files.write(output, page)
    record = {"ids": [each.id.hex() for _, each in plans], "file": str(output), "bytes": len(page)}
    emit(record, as_json, lambda: f"{output}: {len(page) / 1e6:.2f} MB, open it in a browser")


def _plans(path: Path, epoch: int, iteration: int) -> list[tuple[str, Plan]]:
    """(name, plan) of the file, or of each microbatch of an iteration of the folder."""
    if not path.is_dir():
        if epoch or iteration:
            rule = "says which plan of a folder, and this is a file"
            raise ConfigError("--iteration", iteration, rule, "drop --epoch and --iteration")
        return [(path.name, files.read_plan(path))]
    from apportion.service.offline import open_offline

    with open_offline(path) as held:
        found = held.iteration(held.key(epoch, iteration)).plans
    return [(f"microbatch {number}", each) for number, each in enumerate(found)]
