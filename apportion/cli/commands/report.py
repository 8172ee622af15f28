"""`apportion report`: a plan as a page that a browser opens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apportion.cli import files, inputs, options
from apportion.cli.output import emit

Output = Annotated[
    Path, typer.Option("--output", "-o", help="Write the page here.", metavar="R.html", show_default=True)
]


def report(
    plan: options.PlanFile,
    output: Output = Path("report.html"),
    hardware: options.HardwareName = None,
    as_json: options.AsJson = False,
) -> None:
    """Write a page about a plan: one HTML file that opens offline in any browser.

    It has the figures beside their bounds, what every rank does when (simulated),
    who computes which part of the mask, who sends to whom, and what a search tried.

    [bold]Examples[/bold]

      apportion report first.plan

      apportion report first.plan -o first.html --hardware h200
    """
    from apportion.report import report_html

    files.check_output("--output", output)
    the_hardware, the_plan = inputs.hardware_of(hardware), files.read_plan(plan)
    inputs.warn_of_mismatch(the_hardware, the_plan.request.cluster)
    page = report_html([(plan.name, the_plan)], the_hardware).encode()
    files.write(output, page)
    record = {"id": the_plan.id.hex(), "file": str(output), "bytes": len(page)}
    emit(record, as_json, lambda: f"{output}: {len(page) / 1e6:.2f} MB, open it in a browser")
