"""Commands about the installation: demo, selftest, and the versions."""

from __future__ import annotations

import signal
import sys
from typing import Annotated

import typer
from typer import Option

from apportion.cli import inputs, options
from apportion.cli.environment import versions


def demo(
    workload: options.WorkloadFile = None,
    steps: Annotated[int, Option(help="Optimizer steps.", min=1)] = 20,
    as_json: options.AsJson = False,
) -> None:
    """Train a small transformer on 4 CPU processes with plans, and the same one without plans in one process.

    Starts a planning service on a free loopback port, which streams to each
    process its part of every plan. Documents are as long as the package's source
    files, or as samples of --workload. Prints both losses, and figures of the
    plans next to those of the recipes `contiguous` and `ring`. Exit code 1 if
    losses or plans differ.

    [bold]Examples[/bold]

      apportion demo

      apportion demo --workload examples/doc_lengths.json --steps 5 --json
    """
    inputs.need("torch", "torch", "the demo")
    inputs.need("uvicorn", "service", "the demo")
    from apportion.demo.run import run

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # a normal exit ends children too
    raise typer.Exit(run(workload, steps, as_json))


def selftest(as_json: options.AsJson = False) -> None:
    """Compare planned with plain attention on the ranks and the backend of this job.

    Tests every engine of the device in float32, float16 and bfloat16. Under
    torchrun all ranks take part, and rank 0 prints errors and milliseconds;
    without it, one rank is tested. Exit code 1 if an error is too large.

    [bold]Examples[/bold]

      torchrun --nproc-per-node 8 -m apportion selftest

      apportion selftest --json
    """
    inputs.need("torch", "torch", "the selftest")
    from apportion.trainer.measure import selftest as trainer

    raise typer.Exit(trainer.run(as_json))


def print_versions(value: bool) -> None:
    """Print the versions of Apportion, the plan format, Python and the dependencies, and exit."""
    if value:
        print("\n".join(f"{name:<10}{value or '-'}" for name, value in versions().items()))
        raise typer.Exit
