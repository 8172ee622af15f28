"""Measures planning: milliseconds, balance, bytes and sizes of plans, as machine-readable rows.

Planning is timed from the parsed batch to the encoded bytes of all ranks, forward and backward; verification is timed
separately. A warm-up run comes first, so that imports and cold caches are not counted.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ApportionError, ConfigError
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Recipe
from apportion.ir.request.sampling import MaskSpec
from apportion.ir.request.workload import LONGEST, Workload, lognormal_lengths, sample
from apportion.ir.verify import verify
from apportion.planner import api

if TYPE_CHECKING:
    from apportion.ir.request.hardware import Hardware

RANKS_PER_NODE = 8


def ranks_per_node(ranks: int) -> int:
    """The largest divisor of `ranks` up to 8."""
    return max(d for d in range(1, RANKS_PER_NODE + 1) if ranks % d == 0)


def cluster_of(ranks: int, per_node: int | None = None, hardware: Hardware | None = None) -> Cluster:
    """A cluster of `ranks` ranks, `per_node` per node (None: `ranks_per_node`), with the links of the hardware (None:
    the documented default links)."""
    per_node = per_node or ranks_per_node(ranks)
    if hardware is None:
        return Cluster(nodes=ranks // per_node, ranks_per_node=per_node)
    return hardware.cluster(ranks // per_node, per_node)


@dataclass(frozen=True)
class Times:
    """Milliseconds of repeated runs."""

    total: tuple[float, ...]
    steps: dict[str, float] = field(default_factory=dict)  # median per step

    def summary(self) -> dict[str, Any]:
        """p50 and p95, and the steps if there are any."""
        p50, p95 = np.percentile(self.total, (50, 95))
        record: dict[str, Any] = {"p50": round(float(p50), 3), "p95": round(float(p95), 3)}
        return record | ({"steps": {k: round(v, 3) for k, v in self.steps.items()}} if self.steps else {})


@dataclass(frozen=True)
class BenchJob:
    """Input of one row: a plan's request and the number of cores."""

    batch: Batch
    cluster: Cluster
    model: Model
    recipe: Recipe | str
    seed: int = 0
    hardware: Hardware | None = None
    threads: int = 1


@dataclass(frozen=True)
class Row:
    """One plan with its measurements; `record` is its JSON form."""

    plan: Plan
    planning: Times
    verifying: Times

    def record(self) -> dict[str, Any]:
        """The row: names, nesting and units are documented in docs/benchmarks.md."""
        report = self.plan.report
        return {
            "recipe": report["recipe"],
            "ranks": report["ranks"],
            "tokens": report["tokens"],
            "block_tokens": report["block_tokens"],
            "heaviest_piece_over_mean": report["heaviest_piece_over_mean"],
            "imbalance_bound": report["imbalance_bound"],
            "planning_ms": self.planning.summary(),
            "verify_ms": self.verifying.summary(),
            **{
                key: report[key]
                for key in ("imbalance", "bytes", "bounds", "slots", "max_degree", "rounds", "plan_bytes")
            },
        }


def warm_up(recipe: Recipe | str) -> None:
    """Plans and verifies two short documents, which imports everything needed."""
    batch = Batch.from_lengths([300, 200], mask=masks.causal())
    with suppress(ApportionError):  # a recipe that cannot serve these may still serve the job
        verify(timed_plan(BenchJob(batch, cluster_of(2), Model(), recipe))[0])


def measure(job: BenchJob, repeats: int = 1) -> Row:
    """Plans and verifies `job` `repeats` times. Raises the errors of planning and verification."""
    planning, verifying = [], []
    for _ in range(repeats):
        plan, total, steps = timed_plan(job)
        planning.append((total, steps))
        verifying.append(timed_verify(plan, job.threads))
    medians = {step: float(np.median([steps[step] for _, steps in planning])) for step in planning[0][1]}
    return Row(plan, Times(tuple(total for total, _ in planning), medians), Times(tuple(verifying)))


def plan_unverified(job: BenchJob, timings: dict[str, float] | None = None) -> Plan:
    """Plans a job without verification; stores milliseconds of each step in `timings`. Raises the errors of
    planning."""
    return api.plan(
        job.batch,
        job.cluster,
        job.model,
        recipe=job.recipe,
        seed=job.seed,
        verify=False,
        timings=timings,
        hardware=job.hardware,
        threads=job.threads,
    )


def timed_plan(job: BenchJob) -> tuple[Plan, float, dict[str, float]]:
    """(plan, milliseconds to its encoded bytes, milliseconds of each step), without verification."""
    steps: dict[str, float] = {}
    job = _with_new_batch(job)
    start = perf_counter()
    plan = plan_unverified(job, steps)
    planned_at = perf_counter()
    plan.encode()
    end = perf_counter()
    return plan, (end - start) * 1e3, steps | {"bytes": (end - planned_at) * 1e3}


def _with_new_batch(job: BenchJob) -> BenchJob:
    """Copies the job with a new batch, whose lowered bands are not cached yet."""
    return replace(job, batch=Batch.from_data(job.batch.to_data()))


class _Counter(dict[str, float]):
    """Counts calls of Python and C functions per step, in place of a plan's `timings`."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = self._before = 0

    def on_event(self, frame: Any, event: str, argument: Any) -> None:
        """Callback of `sys.setprofile`."""
        self._calls += event in ("call", "c_call")

    def __setitem__(self, step: str, milliseconds: float) -> None:
        super().__setitem__(step, self.get(step, 0) + self._calls - self._before)
        self._before = self._calls


def count_calls(job: BenchJob) -> dict[str, int]:
    """Counts function calls in each step of planning and, as `verify`, in verification: fixed overhead, independent of
    ranks, since loops of the core make no calls. Warm up first, or imports count. Raises the errors of planning and
    verification."""
    job = replace(_with_new_batch(job), threads=1)  # calls of other threads would not be counted
    counter, before, collects = _Counter(), sys.getprofile(), gc.isenabled()
    gc.disable()  # garbage collection may call other functions
    sys.setprofile(counter.on_event)
    try:
        plan = plan_unverified(job, counter)
        plan.encode()
        counter["bytes"] = 0
        verify(plan)
        counter["verify"] = 0
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return {step: int(calls) for step, calls in counter.items()}


def timed_verify(plan: Plan, threads: int = 1) -> float:
    """Milliseconds of verification. Raises VerifyError."""
    start = perf_counter()
    verify(plan, threads)
    return (perf_counter() - start) * 1e3


@dataclass(frozen=True)
class Source:
    """Source of batches: a workload, or else log-normal documents. mask: for plain documents, None: causal.
    longest: maximum tokens of a document, None: as many as the batch; overlong: how longer documents are handled."""

    workload: Workload | None = None
    mask: MaskSpec | None = None
    longest: int | None = None
    overlong: str = "drop"

    def __post_init__(self) -> None:
        if self.mask is not None and self.workload is not None and any(self.workload.masks):
            raise ConfigError(
                "mask", self.mask, "the samples of this workload have their own masks", "leave it out"
            )

    def batch(self, tokens: int, seed: int) -> tuple[Batch, int]:
        """A batch of `tokens` tokens, and the number of samples that were too large."""
        longest = tokens if self.longest is None else min(self.longest, tokens)
        if self.workload is None:
            lengths = lognormal_lengths(seed, tokens, longest=min(longest, LONGEST))
            return Batch.from_lengths(lengths, mask=self.mask), 0
        batch, skipped = sample(self.workload, tokens, longest, seed, self.overlong)
        return batch if self.mask is None else Batch.from_lengths(batch.lengths, mask=self.mask), skipped


@dataclass(frozen=True)
class Grid:
    """Rows to measure: every rank count with every seed."""

    ranks: Sequence[int]
    seeds: Sequence[int]
    tokens_per_rank: int
    repeats: int
    threads: int = 1

    def rows(self, source: Source, model: Model, recipe: Recipe | str) -> Iterator[dict[str, Any]]:
        """Yields one record per rank count and seed, as it is measured."""
        for ranks in self.ranks:
            for seed in self.seeds:
                batch, skipped = source.batch(ranks * self.tokens_per_rank, seed)
                job = BenchJob(batch, cluster_of(ranks), model, recipe, seed, threads=self.threads)
                measure(job)  # warms caches for the counted runs
                row = measure(job, self.repeats)
                of_run = {"seed": seed, "repeats": self.repeats, "skipped_samples": skipped}
                of_run |= {"threads": self.threads}
                yield row.record() | {"calls": count_calls(job)} | of_run
