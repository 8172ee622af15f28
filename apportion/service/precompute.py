"""Plans iterations before training and stores them in a folder that loaders and servers read.

    Sampling ──epoch after epoch──► batches ──► key ──► in the folder: done
                                                  └──► a worker plans and verifies it ──► a pack in the folder

Packs are written atomically, so a run that was killed resumes where it stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from apportion.ir.arrays import Ints
from apportion.ir.bytes.job import Job, encode_request
from apportion.ir.bytes.origin import difference, origin
from apportion.ir.errors import ApportionError, CapacityError, ConfigError
from apportion.ir.fields import integer
from apportion.ir.request.batch import Batch
from apportion.ir.request.sampling import Masks, Sampling, batches_of
from apportion.planner.iteration.ticks import TickTable, tick_job, ticks_of
from apportion.service.pack import Pack
from apportion.service.store.folder import Folder, write_whole
from apportion.service.workers import Completion, Refusal, WorkerDiedError, plan_pack

ORIGIN = "precompute.json"  # the `ir.bytes.origin` of a folder's plans, and their number of iterations
AHEAD = 4  # outstanding requests per worker: the current one, and the next ones while packs are written
DEATHS = 3  # worker deaths after which a request is refused


class IterationError(ApportionError, RuntimeError):
    """An iteration could not be planned; the message names it and the reason. Finished iterations are kept."""


class IterationPlace(NamedTuple):
    """Epoch and iteration, both counted from 0."""

    epoch: int
    iteration: int

    def __str__(self) -> str:
        return f"iteration {self.iteration} of epoch {self.epoch}"


@dataclass(frozen=True, eq=False)
class Work:
    """The first `iterations` iterations of a job, over the epochs of its samples from epoch 0.

    lengths: tokens of each sample, integers [n]; masks: as in `batches_of`; shuffle: by the seed of the job's policy.
    table: ticks of a pipeline, planned instead of its microbatches; the loader needs it as `ticks`. kinds: as
    in the loader. Raises ConfigError, and CapacityError for a sample longer than a microbatch.
    """

    job: Job
    lengths: ArrayLike
    masks: Masks
    iterations: int
    shuffle: bool = True
    table: TickTable | None = None
    kinds: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.table is not None:
            object.__setattr__(self, "job", tick_job(self.job, self.table, self.kinds))
        integer("iterations", self.iterations)
        integer("samples", len(np.asarray(self.sampling.lengths)))

    @cached_property
    def sampling(self) -> Sampling:
        job, table = self.job, self.table
        order = job.policy.seed, self.shuffle
        if table is None:
            return Sampling(self.lengths, job.tokens, job.microbatches, *order)
        return Sampling(self.lengths, job.tokens // table.stages, table.microbatches, *order)

    @property
    def origin(self) -> dict[str, Any]:
        return origin(self.job, self.lengths, self.masks, self.sampling)

    def places(self) -> Iterator[tuple[IterationPlace, list[Ints]]]:
        """Yields every iteration, with the sample numbers of each of its microbatches."""
        remaining, epoch = self.iterations, 0
        while remaining:
            iterations = self.sampling.epoch(epoch)
            if self.table is not None:  # a pipeline runs only complete iterations
                iterations = [parts for parts in iterations if len(parts) == self.table.microbatches]
            if not iterations:
                rule = "is more than the samples can fill"
                raise ConfigError("ticks.microbatches", self.sampling.microbatches, rule, "give more samples")
            iterations = iterations[:remaining]
            for iteration, samples in enumerate(iterations):
                yield IterationPlace(epoch, iteration), samples
            remaining, epoch = remaining - len(iterations), epoch + 1

    def batches(self, samples: Sequence[Ints]) -> tuple[Batch, ...]:
        batches = batches_of(samples, np.asarray(self.sampling.lengths), self.masks, self.job.packs)
        if self.table is None:
            return batches
        return ticks_of(self.table, samples, batches, self.job.ranks, self.kinds)[1]


@dataclass(frozen=True)
class Summary:
    """Result of a run. iterations: those that have plans; planned: those planned by this run; packs: files in the
    folder, one per distinct request; size: bytes of the packs; seconds: duration of this run."""

    iterations: int
    planned: int
    packs: int
    size: int
    seconds: float


Report = Callable[[int, int], None]  # (iterations with plans, iterations planned by this run)


def precompute(
    work: Work, folder: Path, executor: Executor, workers: int, report: Report = lambda done, planned: None
) -> Summary:
    """Plans and verifies the iterations that the folder lacks. Raises ConfigError if the folder was made for
    different work, IterationError for a refused batch, StoreError."""
    start = time.monotonic()
    _claim(folder, work)
    store = Folder(folder)
    run = _Run(work, store, executor, workers, report)
    run()
    sizes = [file.size for file in store.files()]
    return Summary(run.done, run.planned, len(sizes), sum(sizes), time.monotonic() - start)


def read_origin(folder: Path) -> dict[str, Any]:
    """Reads the origin of a folder's plans and their number of iterations; empty for the store of a server. Raises
    ConfigError."""
    path = folder / ORIGIN
    if not path.is_file():
        return {}
    try:
        record: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return {**record, "iterations": integer("iterations", record.get("iterations"))}
    except (msgspec.DecodeError, ConfigError) as error:
        rule = f"is not a file that precompute wrote ({error})"
        raise ConfigError(str(path), "...", rule, "delete it: the plans are kept") from None


def _claim(folder: Path, work: Work) -> None:
    """Records the origin of the plans. Raises ConfigError if the folder has plans of another origin."""
    path, current, iterations = folder / ORIGIN, work.origin, work.iterations
    if existing := read_origin(folder):
        recorded = existing.pop("iterations")
        mismatch, has_plans = difference(existing, current), any(folder.rglob("*.plan"))
        iterations = iterations if mismatch else max(iterations, recorded)
        if mismatch is not None and (has_plans or existing.keys() != current.keys()):
            name, old_value, new_value = mismatch
            rule = f"the plans in {folder} were made with {old_value!r}"
            raise ConfigError(name, new_value, rule, "use the same value, or another folder")
    write_whole(path, json.dumps(current | {"iterations": iterations}, indent=1).encode())


@dataclass
class _PendingRequest:
    """An outstanding request, and the iterations that wait for it."""

    key: bytes
    request: bytes
    places: list[IterationPlace]
    deaths: int = 0


@dataclass
class _Run:
    work: Work
    store: Folder
    executor: Executor
    workers: int
    report: Report
    done: int = 0
    planned: int = 0
    _pending: dict[Future[Completion | Refusal], _PendingRequest] = field(default_factory=dict)
    _by_key: dict[bytes, _PendingRequest] = field(default_factory=dict)
    _refused: dict[IterationPlace, object] = field(default_factory=dict)

    def __call__(self) -> None:
        self.report(0, 0)
        try:
            for place, samples in self.work.places():
                if self._refused:
                    break
                self._begin(place, samples)
                self._settle(AHEAD * self.workers)
            self._settle(0)
        finally:  # also when interrupted: finished plans are kept
            for future in [future for future in self._pending if future.done() and not future.cancelled()]:
                self._collect(future)
        for place, reason in sorted(self._refused.items()):
            raise IterationError(f"{place}: {reason}")

    def _begin(self, place: IterationPlace, samples: Sequence[Ints]) -> None:
        """Submits the iteration for planning, unless an equal request is already planned or in progress."""
        try:
            batches = self.work.batches(samples)
            self.work.job.check(batches)
        except (ConfigError, CapacityError) as error:
            self._refused[place] = error
            return
        key = self.work.job.request_key(batches)
        if key in self._by_key:
            self._by_key[key].places.append(place)
        elif self.store.get(key) is not None:  # whole: damaged packs are planned again
            self._add(1, 0)
        else:
            self._by_key[key] = entry = _PendingRequest(key, encode_request(self.work.job, batches), [place])
            self._submit(entry)

    def _submit(self, pending: _PendingRequest) -> None:
        self._pending[self.executor.submit(plan_pack, pending.request)] = pending

    def _settle(self, limit: int) -> None:
        """Waits until at most `limit` requests are outstanding, and takes the results."""
        while len(self._pending) > limit:
            for future in wait(self._pending, return_when=FIRST_COMPLETED).done:
                self._collect(future)

    def _collect(self, future: Future[Completion | Refusal]) -> None:
        pending = self._pending.pop(future)
        try:
            outcome = future.result()
        except (WorkerDiedError, TimeoutError) as error:
            pending.deaths += 1
            if isinstance(error, WorkerDiedError) and pending.deaths < DEATHS:
                self._submit(pending)
                return
            outcome = Refusal("quarantined", str(error))
        del self._by_key[pending.key]
        if isinstance(outcome, Refusal):
            self._refused[pending.places[0]] = outcome.detail
            return
        self.store.put(Pack.decode(outcome.data, pending.key))
        self._add(len(pending.places), len(pending.places))

    def _add(self, stored: int, planned: int) -> None:
        self.done, self.planned = self.done + stored, self.planned + planned
        self.report(self.done, self.planned)
