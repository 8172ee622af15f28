"""Plans that a process beside this one makes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from threading import Lock
from typing import ClassVar

from apportion.ir.arrays import Ints
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job, encode_request
from apportion.ir.errors import ExecutionError
from apportion.ir.loops.jit import compiling
from apportion.ir.request.batch import Batch
from apportion.ir.request.sampling import Sampling
from apportion.service.protocol import TRAIN
from apportion.service.workers import DeadlineError, Done, Planner, Task
from apportion.trainer.loading.sources.source import sampling_of

LOG = logging.getLogger(__name__)
FIRST_S = 10.0  # for a first plan, after which it is said what may take so long
COMPILING_S = 1200.0  # of a first plan at most; 250 s were seen on two busy cores
DEADLINE_S = 3600.0  # the trainer's time-out, which does not count compiling, ends a wait sooner


@dataclass(frozen=True)
class LocalSource:
    """A process beside this one plans; each rank has its own, and all come to the same plans."""

    job: Job
    shared = False

    def sampling(self, lengths: Ints, seed: int | None, shuffle: bool | None) -> Sampling:
        return sampling_of(self.job, lengths, seed, shuffle)

    def begin(self, run: str, rank: int, stream: str = TRAIN) -> LocalFeed:
        return LocalFeed(self.job, rank)


class LocalFeed:
    """compiled_s: until the first plan of its job in this process comes and says it, all time counts as compiling."""

    _seen: ClassVar[set[bytes]] = set()  # digests of jobs

    def __init__(self, job: Job, rank: int) -> None:
        self._job, self._rank, self._lock = job, rank, Lock()
        self._planner, self._planned = Planner(workers=1), dict[int, Future[Done]]()
        self._begun_s = time.monotonic()
        # seconds compiled there; None: nobody has said how many
        self._there_s = 0.0 if job.digest in LocalFeed._seen else None
        self._told = False

    @property
    def compiled_s(self) -> float:
        there_s = self._there_s
        if there_s is None:
            there_s = min(time.monotonic() - self._begun_s, COMPILING_S)
        return compiling.seconds + there_s

    def knows(self, iteration: int) -> bool:
        with self._lock:
            return iteration in self._planned

    def submit(self, iteration: int, batches: Sequence[Batch]) -> None:
        self._future(iteration, batches)

    def plan(self, iteration: int, batches: Sequence[Batch], timeout_s: float) -> IterationSlice:
        future = self._future(iteration, batches)
        if not wait([future], timeout_s).done:
            self._tell()
            raise TimeoutError("it is still being planned")
        try:
            done = future.result()
            self._there_s = done.compiled_s
            LocalFeed._seen.add(self._job.digest)
        except DeadlineError as error:  # a TimeoutError, but waiting longer does not help
            raise ExecutionError(f"iteration {iteration}: {error}") from error
        with self._lock:
            for number in [held for held in self._planned if held <= iteration]:
                del self._planned[number]
        return IterationSlice.decode(done.bodies[self._rank])

    def stop(self) -> None:
        self._planner.close()

    def close(self) -> None:
        self._planner.close()

    def _tell(self) -> None:
        """Once, where the first plan takes long."""
        elapsed_s = time.monotonic() - self._begun_s
        if self._there_s is None and elapsed_s > FIRST_S and not self._told:
            self._told = True
            LOG.warning(
                "the first plan is not there after %.0f s: where the planner's loops are not compiled yet, once for "
                "each installation, it takes minutes; `apportion warmup` does it beforehand",
                elapsed_s,
            )

    def _future(self, iteration: int, batches: Sequence[Batch]) -> Future[Done]:
        with self._lock:
            if iteration not in self._planned:
                task = Task("plan", encode_request(self._job, batches), verify=True)
                self._planned[iteration] = self._planner.submit(task, DEADLINE_S)
            return self._planned[iteration]
