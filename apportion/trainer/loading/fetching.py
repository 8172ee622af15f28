"""Prefetching: threads that submit and fetch plans ahead of the trainer, or torch's data-loader processes, which fetch
plans and read samples.

submitting  … n+7        at most `lookahead` iterations ahead of the trainer
fetching    … n+1        at most `DEPTH` that the trainer has not taken
the trainer     n        `take`

process k of n           iterations k, k + n, k + 2n, …: plan, rows ──► in order ──► the trainer
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from functools import partial
from threading import Condition, Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from apportion.backends.torch.handle import PlanHandle
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.errors import ApportionError, ExecutionError
from apportion.service.problems import UnknownPlanError
from apportion.trainer.loading.iterations import BatchBuilder, Draw, Iteration, Iterations
from apportion.trainer.loading.rows import Dataset, Form, Rows, rows_of
from apportion.trainer.loading.sources import Source

DEPTH = 2
POLL_S = 2.0
RETRY_WAIT_S = 0.5
NO_ANSWER = ["its source has not answered yet"]  # the reason for a missing plan before the first attempt ends
CLOSE_WAIT_S = 10.0  # a thread that takes longer is in the trainer's sampler, which cannot be interrupted


class PlanTimeoutError(ApportionError, TimeoutError):
    """No plan arrived within the loader's `timeout_s`; the message contains the source's last error."""


class Fetched(NamedTuple):
    """A rank's share of an iteration. For each microbatch, if already built: its rows, and the handle of its plan,
    ready to run."""

    piece: IterationSlice
    rows: tuple[Rows, ...] | None = None
    handles: tuple[PlanHandle, ...] | None = None


#: prepares a fetched plan for the trainer
Prepare = Callable[[IterationSlice], Fetched]


class Lookahead:
    """Threads that work ahead of the trainer, iteration by iteration, on their own source: `submit` requests plans,
    `fetch` fetches those that the trainer will `take`. They end with `close`, whatever they wait for, or when the
    interpreter exits: an iterator that is still referenced does not keep the process alive. rank, timeout_s: the
    loader's; prepare: prepares a fetched plan for the trainer. current: the iteration that the trainer requests; over:
    whether it will request no more; late: the latest reason for a missing plan."""

    def __init__(
        self, source: Source, iterations: Iterations, rank: int, timeout_s: float, prepare: Prepare
    ) -> None:
        self._source, self._iterations, self._rank, self._timeout_s = source, iterations, rank, timeout_s
        self._prepare, self._fetched = prepare, dict[int, Fetched]()
        self._changed, self.current, self._over = Condition(), iterations.start, False
        self._late = deque(NO_ANSWER, 1)
        self._is_late = False  # the trainer timed out, and no plan has arrived since
        self._failed: tuple[int, Exception] | None = None
        self._threads = list[Thread]()
        atexit.register(self.close)

    def run(self, each: Callable[[Iteration], None], depth: int) -> None:
        """Calls `each` in a thread, iteration by iteration, at most `depth` ahead of the trainer."""
        thread = Thread(target=self._run, args=(each, depth), name="apportion-plans", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, each: Callable[[Iteration], None], depth: int) -> None:
        number = self._iterations.start
        try:
            while self._wait_for(number - depth + 1):
                iteration = self._iterations.at(number)
                if iteration is None:
                    return
                number = iteration.number
                each(iteration)
                number += 1
        except Exception as error:
            with self._changed:  # raised when the trainer requests this iteration
                if self._failed is None or number < self._failed[0]:
                    self._failed = number, error
                self._changed.notify_all()

    def _wait_for(self, number: int) -> bool:
        """Waits until the trainer requests this iteration; False if the pass is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or number <= self.current)
            return not self._over

    def submit(self, iteration: Iteration) -> None:
        """Retries until the source accepts the request, or the trainer no longer needs it."""
        while self.needs(iteration.number):
            try:
                self._source.submit(iteration.key, iteration.request, max(0, iteration.number - self.current))
                break
            except TimeoutError as error:
                self._late.append(str(error))

    def fetch(self, iteration: Iteration) -> None:
        """Fetches the rank's plan, unless the trainer no longer needs it."""
        number = iteration.number
        is_needed, next_keys = partial(self.needs, number), partial(self._iterations.keys_after, number)
        piece = fetch(self._source, iteration, self._rank, self._timeout_s, is_needed, self._late, next_keys)
        fetched = None if piece is None else self._prepare(piece)
        with self._changed:
            self._is_late &= fetched is None
            if fetched is not None:
                self._fetched[number] = fetched
            self._fetched = {i: taken for i, taken in self._fetched.items() if i >= self.current}
            self._changed.notify_all()

    def take(self, number: int) -> Fetched:
        """Returns the trainer's next plan. Raises TimeoutError after the loader's timeout, and errors of the threads.
        After one timeout it waits only briefly for later iterations, until the thread has received a plan again."""
        patience_s = min(RETRY_WAIT_S, self._timeout_s / 4) if self._is_late else self._timeout_s
        with self._changed:
            self._changed.wait_for(lambda: number in self._fetched or self.failed(number), patience_s)
            error, fetched = self.failed(number), self._fetched.pop(number, None)
            self._is_late |= fetched is None
        if error is not None:
            raise error
        if fetched is None:
            raise TimeoutError(self._late[-1])
        return fetched

    def needs(self, number: int) -> bool:
        """True if the trainer may still request this iteration."""
        with self._changed:
            return not self._over and number >= self.current

    def reach(self, number: int) -> None:
        """Records that the trainer now requests this iteration."""
        with self._changed:
            self.current = number
            self._changed.notify_all()

    def failed(self, number: int) -> Exception | None:
        """The error that keeps the trainer from this iteration, or None."""
        with self._changed:
            return self._failed[1] if self._failed is not None and self._failed[0] <= number else None

    def close(self) -> None:
        """Ends the threads; idempotent."""
        atexit.unregister(self.close)
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._source.close()
        for thread in self._threads:
            thread.join(CLOSE_WAIT_S)


def fetch(
    source: Source,
    iteration: Iteration,
    rank: int,
    timeout_s: float,
    is_needed: Callable[[], bool],
    late: deque[str],
    next_keys: Callable[[], Sequence[bytes]] = tuple,
) -> IterationSlice | None:
    """Fetches the rank's plan of an iteration, and submits it if unknown; None if it is not ready when `is_needed`
    returns False, with the reason in `late`. timeout_s: the loader's; a single fetch takes at most a tenth of it."""
    while is_needed():
        try:
            try:
                return source.fetch(iteration.key, rank, min(POLL_S, timeout_s / 10), next_keys())
            except UnknownPlanError:
                source.submit(iteration.key, iteration.request, 0)
        except TimeoutError as error:
            late.append(str(error))
    return None


# ---- in torch's data-loader processes

PREFETCHED = 2  # iterations that each process prepares ahead


class Parcel(NamedTuple):
    """One iteration from a process. data: the encoded slice, uint8, empty if there was no plan in time. rows:
    see `Fetched`. reason: why there is no plan. drawn: the iteration's samples, as `Iteration.describe` names them."""

    data: Tensor
    rows: tuple[Rows, ...]
    reason: str
    drawn: str


@dataclass(frozen=True, eq=False)
class Share(IterableDataset[Parcel]):
    """A rank's share of a pass, as a dataset with a copy in every process."""

    dataset: Dataset
    source: Source
    builder: BatchBuilder
    draw: Draw
    start: int
    rank: int
    form: Form
    timeout_s: float

    def __iter__(self) -> Iterator[Parcel]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        iterations = Iterations(self.builder, self.draw, self.start)
        with closing(copy(self.source)) as source:
            number = self.start + first
            while (iteration := iterations.at(number)) is not None:
                iterations.forget(number)
                late, until_s = deque(NO_ANSWER, 1), time.monotonic() + self.timeout_s
                is_needed = partial(_is_before, until_s)
                piece = fetch(source, iteration, self.rank, self.timeout_s, is_needed, late)
                data, rows = torch.empty(0, dtype=torch.uint8), tuple[Rows, ...]()
                if piece is not None:
                    data = torch.frombuffer(bytearray(piece.encode()), dtype=torch.uint8)
                    begins = iteration.number == self.start
                    rows = tuple(rows_of(self.dataset, iteration, piece, self.form, begins))
                yield Parcel(data, rows, late[-1], iteration.describe())
                number += step


class WorkerPrefetcher:
    """Fetches iterations in data-loader worker processes and returns them in order."""

    def __init__(self, share: Share, processes: int, ahead: Lookahead, iterations: Iterations) -> None:
        options: Any = {"batch_size": None, "collate_fn": _identity, "prefetch_factor": PREFETCHED}
        self._ahead, self._iterations = ahead, iterations
        self._parcels: Any = iter(DataLoader(share, num_workers=processes, **options))

    def take(self, number: int) -> Fetched:
        """Returns the trainer's next iteration. Raises TimeoutError if its process had no plan in time, ExecutionError
        if its sampler drew other samples there, and errors of the processes."""
        if self._parcels is None:
            raise ExecutionError("the pass is over")
        parcel = next(self._parcels)
        if (error := self._ahead.failed(number)) is not None:
            raise error
        iteration = self._iterations.at(number)
        if iteration is not None and parcel.drawn != (drawn := iteration.describe()):
            message = f"iteration {number}: a data-loader process draws {parcel.drawn}; its rank {drawn}"
            remedy = "pass a sampler that draws from its own generator, seeded in every iteration over it"
            raise ExecutionError(f"{message}. Remedy: {remedy}, or workers=0")
        if not len(parcel.data):
            raise TimeoutError(parcel.reason)
        # labels arrive from a worker process with a raised version counter, so they would count as changed
        rows = tuple(part._replace(labels=part.labels.clone()) for part in parcel.rows)
        return Fetched(IterationSlice.decode(parcel.data.numpy().tobytes()), rows)

    def close(self) -> None:
        """Ends the processes."""
        parcels, self._parcels = self._parcels, None
        if parcels is not None:  # torch waits for the last reference, which an error's traceback may hold
            parcels._shutdown_workers()


def _is_before(until_s: float) -> bool:
    return time.monotonic() < until_s


def _identity(parcel: Any) -> Any:
    return parcel


Supply = Lookahead | WorkerPrefetcher
