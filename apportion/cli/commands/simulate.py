"""`apportion simulate`: the simulated time of each rank, and its critical path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Option

from apportion.cli import files, inputs, options
from apportion.cli.output import emit


def simulate(
    plan: options.PlanFile,
    hardware: options.HardwareName = None,
    trace: Annotated[
        Path | None, Option(help="Write a trace that ui.perfetto.dev opens.", metavar="T.json")
    ] = None,
    timelines: Annotated[int, Option(help="Number of longest-waiting ranks to draw.", min=0)] = 16,
    path: Annotated[int, Option(help="Print this many of the critical path's longest steps.", min=0)] = 10,
    spans: Annotated[
        bool, Option("--spans/--no-spans", help="With --json: the intervals of every rank.")
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Run a plan's programs against the cost model: the time of each rank, and its waits.

    Simulates one attention call of each kind, forward and backward, on the links
    of the plan's cluster. In the timelines █ is work, ▒ work and waiting,
    · waiting for a round, and blank is idle time.

    [bold]Examples[/bold]

      apportion simulate first.plan

      apportion simulate first.plan --hardware mine.json --trace first.json
    """
    from apportion.cli.printed import timelines as printed
    from apportion.planner.simulate import simulate as run

    files.check_output("--trace", trace)
    the_plan = files.read_plan(plan)
    simulation = run(the_plan, inputs.hardware_for(hardware, the_plan))
    if trace is not None:
        files.write(trace, json.dumps(simulation.trace(), separators=(",", ":")).encode())
    record = {
        "id": the_plan.id.hex(),
        "trace": None if trace is None else str(trace),
        **(simulation.to_data(spans) if as_json else {}),
    }
    views = [lambda run=run: printed.run_view(run, timelines, path) for run in simulation.runs.values()]
    emit(record, as_json, lambda: printed.headline(simulation), *views)
