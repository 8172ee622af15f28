"""What the demo found: losses, whether the plans that ran are right, and what they cost beside simple layouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import VerifyError
from apportion.ir.request.batch import Batch
from apportion.ir.request.model import Model
from apportion.ir.verify import verify
from apportion.planner.iteration.jobs import plan_job
from apportion.trainer.demo.baselines import Costs, contiguous, zigzag_ring
from apportion.trainer.demo.training import Service
from apportion.trainer.demo.workload import RANKS, TOKENS, StepDocuments, job

TOLERANCE = 1e-4
WIDTH = 110  # of the tables where there is no terminal


@dataclass(frozen=True)
class PlannedStep:
    """A step's plan, made here."""

    plan: Plan
    planning_ms: float


@dataclass(frozen=True)
class Outcome:
    """What the demo found; `ok` decides the exit code."""

    planned: list[float]
    plain: list[float]
    costs: dict[str, dict[str, float]]
    service: Service
    broken: list[str]
    seconds: float

    @property
    def difference(self) -> float:
        return max(abs(a - b) for a, b in zip(self.planned, self.plain, strict=True))

    @property
    def failures(self) -> list[str]:
        differ = f"losses differ by {self.difference:.1e}, allowed is {TOLERANCE:.0e}"
        return [*self.broken, *([] if self.difference <= TOLERANCE else [differ])]

    @property
    def ok(self) -> bool:
        return not self.failures


def plan_here(steps: Sequence[StepDocuments]) -> Iterator[PlannedStep]:
    for step in steps:
        begin = time.perf_counter()
        made = plan_job(job(), [step.batch], verify=False)
        yield PlannedStep(made.plan.plans[0], (time.perf_counter() - begin) * 1e3)


def costs_of(steps: Sequence[StepDocuments], planned: Sequence[PlannedStep]) -> dict[str, dict[str, float]]:
    return {
        "planned (fcp)": _median([_planned_costs(own) for own in planned]),
        "contiguous": _median([_baseline_costs(contiguous, step) for step in steps]),
        "zig-zag ring": _median([_baseline_costs(zigzag_ring, step) for step in steps]),
    }


def broken(index: int, plan: Plan, ran: tuple[bytes, ...]) -> Iterator[str]:
    """What is wrong with the plan of a step, and with those that the processes ran."""
    try:
        verify(plan)
    except VerifyError as error:
        yield f"step {index}: {error}"
    if set(ran) != {plan.id}:
        yield f"step {index}: the processes ran {sorted(one.hex()[:12] for one in set(ran))}, not {plan.id.hex()[:12]}"
    spans = plan.layout("attention").spans
    holders = np.unique(spans.rank_of_row()[spans["sequence"] == 0])
    if len(holders) != RANKS:
        yield f"step {index}: the long document is on ranks {holders.tolist()} only"


def _planned_costs(planned: PlannedStep) -> dict[str, float]:
    report = planned.plan.report
    imbalance = report["imbalance"]
    costs = Costs(imbalance["compute"], imbalance["tokens"], report["bytes"]["total"], report["slots"])
    largest = report["plan_bytes"]["largest_rank"]
    return asdict(costs) | {"plan_bytes_of_largest_rank": largest, "planning_ms": planned.planning_ms}


def _baseline_costs(baseline: Callable[[Batch, int, Model], Costs], step: StepDocuments) -> dict[str, float]:
    return asdict(baseline(step.batch, RANKS, job().model))


def _median(rows: list[dict[str, float]]) -> dict[str, float]:
    """Over the steps, so that the first call's compilation does not count as planning."""
    return {name: float(np.median([row[name] for row in rows])) for name in rows[0]}


def record(outcome: Outcome) -> dict[str, Any]:
    return {
        "ok": outcome.ok,
        "failures": outcome.failures,
        "steps": len(outcome.planned),
        "ranks": RANKS,
        "tokens": TOKENS,
        "losses": {"planned": outcome.planned, "plain": outcome.plain},
        "largest_difference": outcome.difference,
        "tolerance": TOLERANCE,
        "layouts": outcome.costs,
        "service": asdict(outcome.service),
        "seconds": outcome.seconds,
    }


def show(outcome: Outcome) -> None:
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(_loss_table(outcome), _cost_table(outcome))
    for failure in outcome.failures:
        console.print(f"[red]failed:[/red] {failure}")
    service = outcome.service
    console.print(
        f"service: {service.delivered} plans delivered, {service.planning_ms:.1f} ms to plan and verify a step, "
        f"{service.waited_ms:.0f} ms waited for them in all by the process that waited longest"
    )
    verdict = "[green]ok[/green]" if outcome.ok else "[red]not ok[/red]"
    console.print(
        f"{verdict}: largest difference of losses {outcome.difference:.1e} (allowed {TOLERANCE:.0e}), "
        f"{len(outcome.planned)} steps of {TOKENS:,} tokens on {RANKS} processes, {outcome.seconds:.0f} s"
    )


def _loss_table(outcome: Outcome) -> Table:
    table = Table(title="loss", title_justify="left")
    for name in ("step", "planned, 4 processes", "plain, 1 process", "difference"):
        table.add_column(name, justify="right")
    last = len(outcome.planned) - 1
    for index, (a, b) in enumerate(zip(outcome.planned, outcome.plain, strict=True)):
        if index % 5 == 0 or index == last:
            table.add_row(str(index), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    return table


def _cost_table(outcome: Outcome) -> Table:
    table = Table(title="the same batches, median of all steps", title_justify="left")
    table.add_column("", no_wrap=True, min_width=12)  # the names stay whole in 80 columns
    for name in ("compute imbalance", "token imbalance", "bytes moved", "slots", "plan size", "planning"):
        table.add_column(name, justify="right")
    for name, costs in outcome.costs.items():
        table.add_row(
            name,
            f"{100 * costs['compute_imbalance']:.1f} %",
            f"{100 * costs['token_imbalance']:.1f} %",
            f"{costs['bytes_moved'] / 1e6:.2f} MB",
            f"{costs['slots']:.0f}",
            f"{costs['plan_bytes_of_largest_rank'] / 1e3:.1f} KB" if "planning_ms" in costs else "-",
            f"{costs['planning_ms']:.1f} ms" if "planning_ms" in costs else "-",
        )
    return table
