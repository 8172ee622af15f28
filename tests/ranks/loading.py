"""Data and sources for tests of the loader; importable by the pool's workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job
from apportion.ir.errors import ConfigError
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.iteration.jobs import plan_job
from apportion.planner.recipe.recipes import find_recipe
from apportion.trainer.loading.batch import PlannedBatch
from apportion.trainer.loading.sources.local import LocalSource

LENGTHS = [40, 9, 33, 1, 25, 60, 12]
MODEL = Model(2, 1, 8, dtype="fp32")


class Recorded:
    """A dataset that remembers what was read; sample i is first + 100 i, first + 100 i + 1, …"""

    first = 0

    def __init__(self, lengths: list[int] = LENGTHS) -> None:
        self.lengths, self.read = lengths, []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[Any]:
        self.read.append(index)
        return np.arange(self.lengths[index]) + 100 * index + self.first


def job(
    ranks: int = 1,
    tokens: int = 64,
    microbatches: int = 1,
    recipe: str | dict[str, dict[str, dict[Any, Any]] | str] = "fcp",
    seed: int = 0,
) -> Job:
    """A job whose microbatches hold `tokens` tokens on all ranks together."""
    policy = Policy(find_recipe(recipe), seed=seed)
    return Job(Cluster(1, ranks), MODEL, policy, tokens // ranks, microbatches)


@dataclass(frozen=True)
class HereSource(LocalSource):
    """Plans in the thread that asks. late: iterations that never come; broken: those that are refused; submitted: those
    that were submitted; other: of a job and its batches, those that are planned in their place."""

    late: frozenset[int] = frozenset()
    broken: frozenset[int] = frozenset()
    submitted: list[int] = field(default_factory=list)
    other: Callable[..., Any] | None = None

    def begin(self, run: str, rank: int, stream: str = "train") -> HereFeed:
        return HereFeed(self, rank, threading.Event())


@dataclass(frozen=True)
class HereFeed:
    source: HereSource
    rank: int
    stopped: threading.Event
    compiled_s = 0.0

    def knows(self, iteration: int) -> Any:
        return iteration in self.source.submitted

    def submit(self, iteration: int, batches: tuple[Batch, ...]) -> None:
        self.source.submitted.append(iteration)

    def plan(self, iteration: int, batches: tuple[Batch, ...], timeout_s: float) -> IterationSlice | None:
        if iteration in self.source.late:
            self.stopped.wait(timeout_s)
            raise TimeoutError(f"iteration {iteration} is late")
        if iteration in self.source.broken:
            raise ConfigError("batches", iteration, "are refused", "change them")
        asked = self.source.job, batches
        planned, batches = asked if self.source.other is None else self.source.other(*asked)
        return plan_job(planned, batches).plan.slice_for(self.rank)

    def stop(self) -> None:
        self.stopped.set()

    def close(self) -> None:
        self.stopped.set()


def seen(batch: PlannedBatch) -> tuple[bytes | int | list[int], ...]:
    """What a microbatch is, as plain data."""
    arrays = (batch.tokens.numpy(), batch.labels.numpy(), batch.position_ids.numpy())
    numbers = (batch.iteration, batch.microbatch, batch.is_last, batch.valid_tokens)
    return (*numbers, batch.handle.id, *(array.tolist() for array in arrays))
