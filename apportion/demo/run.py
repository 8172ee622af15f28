"""Runs the demo: four processes train with plans that a server streams, one trains without plans; compares losses.

documents ─┬► torchrun: 4 gloo processes, each with a PlannedLoader ──► losses ┐
           │          │ requests           ▲ slices, ahead of time             │
           │          ▼                    │                                   ├─► compare
           │        apportion serve, a child process on loopback               │
           ├► the same model in this process, plain attention ────────► losses ┤
           └► each step planned again here and verified ──────────────► ids ───┘
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import apportion as ap
from apportion.demo import train, workload
from apportion.ir.errors import ExecutionError
from apportion.service.http.serve import serving

TOLERANCE = 1e-4
RECIPES = (workload.RECIPE, "contiguous", "ring")
FIGURES = ("compute_imbalance", "token_imbalance", "moved_mb", "slots")


def run(file: Path | None, steps: int, as_json: bool) -> int:
    """Runs the demo and prints its record; returns 0 if losses and plans agree. Raises ConfigError, ExecutionError."""
    data = workload.documents(steps, file)
    work: dict[str, Iterator[Any]] = {
        f"train on {workload.RANKS} processes, planned": _train_on_ranks(steps, file),
        "train in one process, plain": train.train_plain(data),
        "plan again here, and verify": map(_plan_locally, data),
    }
    with Progress(console=Console(stderr=True)) as progress:
        results = [list(progress.track(job, steps, description=f"{name:<34}")) for name, job in work.items()]
    record = compare(*results)
    print(json.dumps(record)) if as_json else _show(record)
    return 0 if record["ok"] else 1


def _train_on_ranks(steps: int, file: Path | None) -> Iterator[dict[str, Any]]:
    """Yields rank 0's record of each step; server and processes run until the last step."""
    with tempfile.TemporaryDirectory() as folder:
        token, log = secrets.token_hex(), Path(folder) / "log"
        with serving(Path(folder) / "plans", token=token, log=log) as server, open(log, "ab") as errors:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workload.RANKS}"]
            training = ["-m", train.__name__, server.url, str(steps), *([str(file)] if file else [])]
            environment = os.environ | {"APPORTION_TOKEN": token, "OMP_NUM_THREADS": "1"}
            environment |= {"APPORTION_DEMO": str(os.getpid())}
            command = [sys.executable, *torchrun, *training]
            with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors) as ranks:
                try:
                    assert ranks.stdout is not None
                    yield from (json.loads(line) for line in ranks.stdout if line.startswith(b"{"))
                    if ranks.wait():
                        raise ExecutionError(f"the training failed:\n{log.read_text()[-4000:]}")
                finally:
                    ranks.terminate()


def _plan_locally(step: list[workload.Document]) -> tuple[str, list[list[float]]]:
    """The id of a step's verified plan, and the FIGURES of each recipe's plan."""
    plans = [
        ap.plan(workload.batch_of(step), workload.CLUSTER, workload.MODEL, recipe, workload.SEED)
        for recipe in RECIPES
    ]
    reports = [plan.report for plan in plans]
    imbalances = [[report["imbalance"][name] for name in ("compute", "tokens")] for report in reports]
    moved = [[report["bytes"]["total"] / 1e6, report["slots"]] for report in reports]
    return plans[0].id.hex(), np.hstack([imbalances, moved]).tolist()


def compare(
    trained: list[dict[str, Any]], plain: list[float], local: list[tuple[str, list[list[float]]]]
) -> dict[str, Any]:
    """The record of the demo; `ok` decides the exit code. For each step, trained: rank 0's record; plain: the loss
    without plans; local: the result of `_plan_locally`."""
    losses = [record["loss"] for record in trained]
    difference = max(abs(a - b) for a, b in zip(losses, plain, strict=True))
    failures = [] if difference <= TOLERANCE else [f"losses differ by {difference:.1e}"]
    for step, (rank_0, (plan, _)) in enumerate(zip(trained, local, strict=True)):
        if rank_0["plan"] != plan:
            failures.append(f"step {step}: the ranks ran plan {rank_0['plan'][:12]}, not {plan[:12]}")
    medians = np.median([figures for _, figures in local], axis=0).tolist()
    rows = {
        recipe: dict(zip(FIGURES, row, strict=True)) for recipe, row in zip(RECIPES, medians, strict=True)
    }
    record = {
        "ok": not failures,
        "failures": failures,
        "ranks": workload.RANKS,
        "tokens": workload.TOKENS,
        "recipes": rows,
    }
    record |= {"losses": {"planned": losses, "plain": plain}, "largest_difference": difference}
    return record | {name: trained[-1][name] for name in ("tokens_per_s", "waited_s")}


def _show(record: dict[str, Any]) -> None:
    titles = (name.replace("_", " ") for name in ("recipe", *FIGURES))
    console, table = Console(), Table(*titles, title="the same batches, median of all steps")
    for recipe, figures in record["recipes"].items():
        compute, tokens, moved, slots = figures.values()
        table.add_row(recipe, f"{compute:.1%}", f"{tokens:.1%}", f"{moved:.1f}", f"{slots:.0f}")
    console.print(table)
    pairs = list(zip(record["losses"]["planned"], record["losses"]["plain"], strict=True))
    for step in sorted({0, len(pairs) // 2, len(pairs) - 1}):
        console.print(f"step {step}: loss {pairs[step][0]:.6f} planned, {pairs[step][1]:.6f} plain")
    for failure in record["failures"]:
        console.print(f"[red]failed:[/red] {failure}")
    console.print(
        f"{'ok' if record['ok'] else 'not ok'}: largest loss difference {record['largest_difference']:.1e} "
        f"(allowed {TOLERANCE:.0e}); {len(pairs)} steps of {workload.TOKENS:,} tokens on {workload.RANKS} processes, "
        f"{record['tokens_per_s']:,.0f} tokens/s; ranks waited {1e3 * record['waited_s']:.0f} ms for plans in total"
    )
