"""Datasets and sources for tests of the loader, which the pool's workers can import."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion import Cluster, ConfigError, Model, PlannedBatch, Policy
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job, decode_request
from apportion.planner.iteration.jobs import plan_job
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.problems import UnknownPlanError
from apportion.trainer.loading.sources import Source

LENGTHS = [40, 9, 33, 1, 25, 60, 12]
MODEL = Model(2, 1, 8, dtype="fp32")


class Recorded:
    """A dataset that records which samples are read; sample i is first + 100 i, first + 100 i + 1, …"""

    first = 0

    def __init__(self, lengths: list[int] = LENGTHS) -> None:
        self.lengths, self.read = lengths, []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[Any]:
        self.read.append(index)
        return np.arange(self.lengths[index]) + 100 * index + self.first


def job(ranks: int = 1, tokens: int = 64, microbatches: int = 1, recipe: Any = "fcp", seed: int = 0) -> Job:
    """A job whose microbatches hold `tokens` tokens over all ranks."""
    policy = Policy(find_recipe(recipe), seed=seed)
    return Job(Cluster(1, ranks), MODEL, policy, tokens // ranks, microbatches)


@dataclass(eq=False)
class HereSource(Source):
    """A source that plans in the calling thread. late, broken: numbers of requests, in order of submission, that never
    arrive or are refused; submitted: keys with their look-ahead; other: function from (job, batches) to the (job,
    batches) to plan instead."""

    shared = False
    late: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()
    submitted: list[tuple[bytes, int]] = field(default_factory=list)
    other: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self._asked = dict[bytes, tuple[int, bytes]]()
        self._over, self._lock = threading.Event(), threading.Lock()

    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        with self._lock:
            self._asked.setdefault(key, (len(self._asked), request))
        self.submitted.append((key, ahead))

    def fetch(self, key: bytes, rank: int, wait_s: float, then: Sequence[bytes] = ()) -> IterationSlice:
        if key not in self._asked:
            raise UnknownPlanError(key)
        number, request = self._asked[key]
        if number in self.late:
            self._over.wait(wait_s)
            raise TimeoutError(f"iteration {number} is late")
        if number in self.broken:
            raise ConfigError("batches", number, "are refused", "change them")
        asked = decode_request(request)
        return plan_job(*(asked if self.other is None else self.other(*asked))).slice_for(rank)

    def close(self) -> None:
        self._over.set()


def planning(job: Job, source: Any = None, **options: Any) -> dict[str, Any]:
    """Arguments of a loader for a job; by default it plans in the calling thread."""
    return {"model": job.model, **planning_of(job, source), **options}


def planning_of(job: Job, source: Any = None, **options: Any) -> dict[str, Any]:
    """The arguments of `planning` without the model."""
    return {
        "cluster": job.cluster,
        "tokens_per_rank": job.tokens_per_rank,
        "microbatches": job.microbatches,
        "recipe": job.policy,
        "hardware": job.hardware,
        "source": HereSource() if source is None else source,
        **options,
    }


def seen(batch: PlannedBatch) -> tuple[bytes | int | list[int], ...]:
    """The content of a microbatch as plain data."""
    arrays = (batch.tokens.numpy(), batch.labels.numpy(), batch.position_ids.numpy())
    numbers = (batch.iteration, batch.microbatch, batch.is_last, batch.valid_tokens)
    return (*numbers, batch.handle.id, *(array.tolist() for array in arrays))
