"""The data seam: each rank's tokens, position ids and labels of a planned microbatch.

    sampler ──samples of an iteration──► Batch ──source: submit, plan──► slice of this rank ──► PlannedBatch
                                                     dataset ──only the samples that the rank holds──┘

Whoever plans, the loader does the same: a service, a folder of plans made before, or a process beside this one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sized
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from apportion.backends.torch.engines import ENGINES
from apportion.backends.torch.handle import PlanHandle, agree
from apportion.backends.torch.transport import Communicator
from apportion.ir.bands import MAX_TOKENS
from apportion.ir.cluster import Cluster
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.fields import choice, integer, integers, name, number
from apportion.ir.iteration_slice import IterationSlice
from apportion.ir.job import Job
from apportion.ir.model import Model
from apportion.ir.policy import Recipe
from apportion.ir.sampling import Masks
from apportion.planner.recipes import is_deterministic
from apportion.service.client import PlanTimeoutError
from apportion.trainer.agreement import Agreement
from apportion.trainer.ahead import DEPTH, Fetched, Fetching, Progress, Threads, Waits, submit
from apportion.trainer.processes import PREFETCHED, Collecting, Share
from apportion.trainer.rows import Dataset, Ints, rows_of
from apportion.trainer.sources import Source, Told, open_source
from apportion.trainer.wanted import Asked, Draw, Iterations, Wanted

MAX_RUN = 48  # characters: the service takes 64, and passes are numbered behind them


class Sampler(Protocol):
    """The iterations of a pass: of each a list of microbatches of sample numbers, or a flat list of sample numbers
    (one microbatch, or a recipe that packs). The same on all ranks. May have `set_epoch(epoch)`."""

    def __iter__(self) -> Iterator[Any]: ...


@dataclass(frozen=True)
class PlannedBatch:
    """One rank's share of one microbatch; rows are in the plan's home layout."""

    tokens: Tensor  # [rows] int64 token ids
    position_ids: Tensor  # [rows] int64
    labels: Tensor  # [rows] int64, IGNORED where there is nothing to predict
    handle: PlanHandle
    iteration: int
    microbatch: int
    is_last: bool  # of its iteration: step the optimizer after it
    valid_tokens: int  # labels of all ranks and all microbatches of the iteration


class PlannedLoader:
    """Iterates over a dataset in planned microbatches; every rank makes one with equal arguments.

        for batch in ap.PlannedLoader(dataset, source="http://127.0.0.1:8321/v1/jobs/run1", rank=rank, key=key):

    dataset: map-style, with `lengths`, the tokens of each sample, integers [n], and, if it likes, `masks`, one spec for
    all or one a sample (default causal); `lengths` and `masks` given here win. A rank reads only samples that it holds
    a part of.

    source: who plans. A URL: the service's job, which needs its `key`, and with https `ca`, a PEM file of certificates,
    where the system's do not do. A folder: plans that `apportion precompute` made. "local": a process beside this one,
    told `cluster`, `model`, `tokens_per_rank` of a microbatch, `microbatches` of an iteration, `recipe` and `seed`; the
    other sources know these, and refuse different ones (but with a service `seed` may be another one: it is of the
    order of the samples alone).

    sampler: see `Sampler`; by default samples fill microbatches in an order drawn from `seed` and the epoch
    (`set_epoch`), or one after another without `shuffle`. run: names this run at the service, so that a restarted run
    gets none of its predecessor's plans; random by default. lookahead: iterations that rank 0 submits before they are
    needed; where it is lost, other ranks submit. workers: torch data-loader processes that fetch plans and read
    samples; 0 is a thread that fetches, and samples are read where they are used.

    engine: what computes attention, see `PlanHandle`. device: where, this process' GPU where it has one, else the CPU:
    programs are loaded there before they are needed.

    on_timeout: where there is no plan after `timeout_s` seconds, "raise" TimeoutError, or "local": in each iteration
    all ranks agree on who has the plan, those that have not plan it themselves, and all compare. `fallbacks` counts
    such iterations, and a warning is logged. waited_s: seconds spent waiting for plans.

    Raises ConfigError; CapacityError for samples that do not fit; ClientError, and what the source raises.
    """

    def __init__(
        self,
        dataset: Dataset,
        cluster: Cluster | None = None,
        model: Model | None = None,
        tokens_per_rank: int | None = None,
        *,
        source: str | Path | Source = "local",
        rank: int | None = None,
        key: str | None = None,
        ca: str | Path | None = None,
        lengths: ArrayLike | None = None,
        masks: Masks = None,
        sampler: Sampler | None = None,
        microbatches: int | None = None,
        recipe: str | Mapping[str, Any] | Recipe | None = None,
        seed: int | None = None,
        shuffle: bool | None = None,
        communicator: Communicator | None = None,
        run: str | None = None,
        on_timeout: str = "raise",
        timeout_s: float = 300.0,
        lookahead: int = 8,
        workers: int = 0,
        engine: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        self._dataset, self._sampler = dataset, sampler
        told = Told(cluster, model, tokens_per_rank, microbatches, recipe, seed)
        self._source = open_source(source, key, ca, told)
        masks = getattr(dataset, "masks", None) if masks is None else masks
        self._asked = Asked(self._source.job, _lengths(dataset, lengths), masks)
        self._sampling = None
        if sampler is None:
            self._sampling = self._source.sampling(self._asked.lengths, seed, shuffle)
        self._communicator = _communicator(self._source.job, communicator, rank)
        self._rank, self._agreement = self._communicator.rank, Agreement(self._communicator)
        self._agrees = _agrees(on_timeout, self._source, self._communicator.ranks)
        self._run = None if run is None else _name(run)
        self._workers = integer("workers", workers, 0)
        self._engine, self._device = choice("engine", engine, ("auto", *ENGINES)), _device(device)
        self._lookahead = max(integer("lookahead", lookahead), PREFETCHED * self._workers + 1)
        self._waits = Waits.of(self._rank, number("timeout_s", timeout_s, above=True))
        self._epoch, self._start, self._passes, self.waited_s = 0, 0, 0, 0.0

    @property
    def fallbacks(self) -> int:
        """Iterations that some rank planned itself."""
        return self._agreement.fallbacks

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Another order, for the next passes over the loader; the next one begins with iteration `start`."""
        self._epoch, self._start = integer("epoch", epoch, 0), integer("start", start, 0)

    def __len__(self) -> int:
        """Microbatches of a pass. Raises TypeError for a sampler without a length, which may be endless."""
        if self._sampler is not None and not isinstance(self._sampler, Sized):
            raise TypeError(f"{type(self._sampler).__name__} has no length, so its loader has none")
        return sum(self._asked.microbatches(number, drawn) for number, drawn in enumerate(self._draw()))

    def __iter__(self) -> Iterator[PlannedBatch]:
        if self._passes and isinstance(self._sampler, Iterator):
            rule = "is an iterator, and an earlier pass has drawn from it, further than it went"
            raise ConfigError("sampler", type(self._sampler).__name__, rule, "give what can be iterated anew")
        start, self._start = self._start, 0
        iterations, progress = Iterations(self._asked, self._draw(), start), Progress(start)
        with ExitStack() as stack:
            supply = self._supply(stack, iterations, progress)
            while (wanted := iterations.at(progress.own)) is not None:
                yield from self._batches(wanted, self._taken(supply, wanted))
                iterations.forget(wanted.number + 1)
                progress.reach(wanted.number + 1)

    def _draw(self) -> Draw:
        return Draw(self._sampling, self._sampler, self._epoch)

    # ---- a pass

    def _supply(self, stack: ExitStack, iterations: Iterations, progress: Progress) -> Fetching | Collecting:
        """What the plans of a pass are taken from, until the stack is closed."""
        run, shared = self._next_run(iterations.start), self._source.shared
        if self._workers:
            collecting = stack.enter_context(closing(self._collecting(run, progress)))
            if shared and self._rank == 0:
                self._submitting(self._threads(stack, run, iterations, progress), progress)
            return collecting
        threads, submits = self._threads(stack, run, iterations, progress), not shared or self._rank == 0
        if submits:
            self._submitting(threads, progress)
        fetching = Fetching(threads.feed, progress, self._waits, submits, self._ready)
        threads.run(fetching.fetch, DEPTH)
        return fetching

    def _threads(self, stack: ExitStack, run: str, iterations: Iterations, progress: Progress) -> Threads:
        return stack.enter_context(Threads(self._source.begin(run, self._rank), iterations, progress))

    def _submitting(self, threads: Threads, progress: Progress) -> None:
        threads.run(lambda wanted: submit(threads.feed, wanted, progress), self._lookahead)

    def _collecting(self, run: str, progress: Progress) -> Collecting:
        pieces = (self._dataset, self._source, self._asked, self._draw(), progress.own, run, self._rank)
        return Collecting(Share(*pieces, self._waits), self._workers, progress)

    def _next_run(self, start: int) -> str:
        """The name of this pass, on all ranks; a collective, so that none begins it before all have left the one
        before, whose plans the service drops. Raises ExecutionError where ranks are in different ones."""
        self._passes += 1
        place = [self._passes, self._epoch, start]
        drawn = int.from_bytes(secrets.token_bytes(7))
        rows = self._communicator.all_gather([*place, drawn])
        if any(row[:3] != place for row in rows):
            told = "; ".join(f"rank {rank}: {row[:3]}" for rank, row in enumerate(rows))
            raise ExecutionError(f"ranks begin different passes (pass, epoch, first iteration): {told}")
        self._run = self._run or f"{rows[0][3]:014x}"
        return f"{self._run}-{self._passes}"

    def _taken(self, supply: Fetching | Collecting, wanted: Wanted) -> Fetched:
        begin = time.monotonic()
        take = partial(supply.take, wanted.number)
        try:
            if not self._agrees:
                return take()
            return self._agreement.take(wanted.number, take, partial(self._planned_here, wanted))
        except TimeoutError as error:
            told = (self._passes, wanted.number, self._rank, self._waits.timeout_s, str(error))
            raise PlanTimeoutError(*told) from error
        finally:
            self.waited_s += time.monotonic() - begin

    def _planned_here(self, wanted: Wanted) -> Fetched:
        from apportion.planner.jobs import plan_job

        return Fetched(plan_job(self._source.job, wanted.batches).plan.slice_for(self._rank))

    def _ready(self, piece: IterationSlice) -> Fetched:
        """For the thread that fetches: programs are loaded on the device before the trainer asks for them."""
        return Fetched(piece, None, self._handles(piece))

    def _handles(self, piece: IterationSlice) -> tuple[PlanHandle, ...]:
        handles = (PlanHandle(one, self._communicator, self._engine) for one in piece.slices)
        return tuple(handle.prepare(self._device) for handle in handles)

    def _batches(self, wanted: Wanted, fetched: Fetched) -> Iterator[PlannedBatch]:
        pieces, valid = fetched.piece.slices, wanted.valid_tokens
        read = fetched.rows
        if read is None:
            read = rows_of(self._dataset, wanted, fetched.piece)
        handles = fetched.handles or self._handles(fetched.piece)
        agree(handles)
        for place, (handle, (tokens, labels)) in enumerate(zip(handles, read, strict=True)):
            last = place == len(pieces) - 1
            yield PlannedBatch(tokens, handle.position_ids, labels, handle, wanted.number, place, last, valid)


def _lengths(dataset: Dataset, lengths: ArrayLike | None) -> Ints:
    found = getattr(dataset, "lengths", None) if lengths is None else lengths
    if found is None:
        rule = "planning needs the length of each sample before it is read"
        raise ConfigError("lengths", None, rule, "give lengths, or a dataset that has them as `lengths`")
    listed = found if isinstance(found, list | tuple | range) else np.asarray(found)
    checked = integers("lengths", listed, 1, MAX_TOKENS)
    held = len(dataset) if isinstance(dataset, Sized) else "an unknown number of"
    if held != len(checked):
        rule = f"there must be one for each sample, and the dataset has {held} samples"
        raise ConfigError("lengths", f"{len(checked)} lengths", rule, "give the length of each sample")
    return checked


def _communicator(job: Job, given: Communicator | None, rank: int | None) -> Communicator:
    found = Communicator.shared() if given is None else given
    if found.ranks != job.ranks:
        rule = f"the job plans for {job.ranks} ranks, and this process is one of {found.ranks}"
        remedy = "initialise torch.distributed with as many, or make another job"
        raise ConfigError("cluster", f"{job.ranks} ranks", rule, remedy)
    if rank not in (None, found.rank):
        rule = f"this process is rank {found.rank} of its group"
        raise ConfigError("rank", rank, rule, "leave it out, or give the communicator of the right group")
    return found


def _device(given: torch.device | str | None) -> torch.device:
    """Where attention runs: this process' GPU where it has one. With its number: threads have a current one of their
    own."""
    device = torch.device(given or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _name(run: str) -> str:
    if len(name("run", run)) > MAX_RUN:
        raise ConfigError("run", run, f"must have at most {MAX_RUN} characters", "write a shorter name")
    return run


def _agrees(on_timeout: str, source: Source, ranks: int) -> bool:
    """Whether ranks plan themselves what does not come. Raises ConfigError where they could come to different plans."""
    agrees = choice("on_timeout", on_timeout, ("raise", "local")) == "local"
    several = agrees or (ranks > 1 and not source.shared)
    if several and not is_deterministic(source.job.policy.recipe):
        rule = "a clock ends this recipe's search: two ranks would come to different plans"
        remedy = "let a service plan, with on_timeout='raise', or take its time limit out of the recipe"
        raise ConfigError("on_timeout" if agrees else "source", "local", rule, remedy)
    return agrees
