"""Commands about the installation: demo, selftest, warmup, version."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from apportion.cli import inputs, options
from apportion.cli.environment import versions
from apportion.cli.output import count, emit, progress

if TYPE_CHECKING:
    from apportion.planner.warm import Warmed


def demo(
    workload: options.WorkloadFile = None,
    steps: Annotated[int, Option("--steps", help="Optimizer steps.", min=1)] = 20,
    as_json: options.AsJson = False,
) -> None:
    """Train a small transformer on 4 CPU processes under plans, and the same one in one process without.

    A planning service is started on a free loopback port, and streams each process its part of every plan. Documents
    are as long as the package's source files, or as samples of --workload. Prints both losses, and what the plans cost
    beside those of the recipes `contiguous` and `ring`. Exit code 1 if losses or plans differ.

    [bold]Examples[/bold]

      apportion demo

      apportion demo --workload examples/doc_lengths.json --steps 5 --json
    """
    inputs.need("torch", "torch", "the demo")
    inputs.need("uvicorn", "service", "the demo")
    from apportion.demo.run import run

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what it started ends with it
    raise typer.Exit(run(workload, steps, as_json))


def selftest(as_json: options.AsJson = False) -> None:
    """Hold planned attention against plain attention on the ranks and the backend of this job.

    Every engine that the device has is held to it, in float32, float16 and bfloat16. Under torchrun every rank
    takes part and rank 0 prints errors and milliseconds; without it, one rank is tested. Exit code 1 if an error is
    too large.

    [bold]Examples[/bold]

      torchrun --nproc-per-node 8 -m apportion selftest

      apportion selftest --json
    """
    inputs.need("torch", "torch", "the selftest")
    from apportion.trainer.measure import selftest as trainer

    raise typer.Exit(trainer.run(as_json))


def warmup(
    recipes: Annotated[
        str, Option("--recipes", help="Names or files, separated by commas, or all.", metavar="NAMES")
    ] = "all",
    into: Annotated[
        Path | None, Option("--into", help="Folder for loops that other machines can use.", metavar="DIR")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compile the planner's hot loops, once for each installation.

    A wheel may have brought them. Else they are compiled when they are first needed, too: the first plans then take
    minutes. What is compiled lies beside the installed package, or in NUMBA_CACHE_DIR, and serves CPUs of one kind: run
    it when an image is built, or on each machine, as the user of the training, before a run or a server starts.

    With --into they are compiled for all CPUs that have x86-64-v3 (AVX2), or for arm64: as `apportion/_compiled` of an
    installed package they serve every machine that has the same Apportion, Python and numba. `make wheel` does it.

    [bold]Examples[/bold]

      apportion warmup

      apportion warmup --recipes fcp
    """
    if into:
        inputs.need("numba", "numba", "compiling")
        from apportion.ir.errors import ConfigError
        from apportion.ir.loops.jit import COMPILES, shelf

        if not COMPILES:
            raise ConfigError("--into", str(into), "nothing is compiled under NUMBA_DISABLE_JIT", "unset it")
        shelf.write_into(into)
    from apportion.planner import warm

    cases = warm.cases_of(inputs.recipes_of(recipes))
    with progress("compiling", len(cases), not as_json) as report:
        found = warm.warm(cases, report)
    emit(found._asdict(), as_json, lambda: _warmed(found))


def _warmed(found: Warmed) -> str:
    if not found.jit:
        return "nothing to compile: numba is not installed, or NUMBA_DISABLE_JIT is set"
    said = f"compiled {count(found.loops, 'loop')} in {found.seconds:.0f} s"
    missing = f"; without {', '.join(found.missing)}, whose package is not installed" if found.missing else ""
    return (said if found.loops else "all loops were compiled already") + missing


def version(as_json: options.AsJson = False) -> None:
    """Print the versions of Apportion, its plan format, and what it runs on.

    [bold]Example[/bold]

      apportion version --json
    """
    record = versions()
    emit(record, as_json, lambda: "\n".join(f"{name:<10}{value or '-'}" for name, value in record.items()))
