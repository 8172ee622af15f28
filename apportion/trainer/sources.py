"""Where plans come from: a service, a folder made before training, or a process beside this one.

    Source ── job       what all iterations have in common
           ├─ shared    whether what one rank submits is planned for all
           └─ begin ──► Feed of one rank in one pass: submit, plan, close

A Source is plain data, and may be copied to other processes; a Feed holds connections and processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Protocol, Self

from apportion.ir.arrays import Ints
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job, encode_request
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.isa import SENT_GRADIENTS
from apportion.ir.loops.jit import compiling
from apportion.ir.masks.spec import Mask
from apportion.ir.plan.plain import MODEL_FACTS
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.ir.request.sampling import Masks, Sampling
from apportion.ir.request.sequences import DEFAULT_KIND
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.client import Client, ServiceProblem, UnreachableError
from apportion.service.offline import Offline, open_offline
from apportion.service.protocol import TRAIN
from apportion.service.workers import DeadlineError, Done, Planner, Task

LOG = logging.getLogger(__name__)
FIRST_S = 10.0  # for a first plan, after which it is said what may take so long
COMPILING_S = 1200.0  # of a first plan at most; 250 s were seen on two busy cores
DEADLINE_S = 3600.0  # the trainer's time-out, which does not count compiling, ends a wait sooner
CALL_S = 10.0  # for an answer to anything but a plan; whoever asked looks then whether it is still of use
ONE_BY_ONE, MOST_ONE_BY_ONE = 8, 512  # iterations, after a stream from which none came in time


class Feed(Protocol):
    """One rank's plans of one pass. One thread submits and another asks; any may stop them."""

    @property
    def compiled_s(self) -> float:
        """Seconds up to now that went into compiling loops, here and where this feed alone has its plans made: a wait
        that nobody's look-ahead can shorten. Differences of two readings are meant, of which those below 0 are none:
        until the first plan says what was compiled in a process beside this one, all of its time counts."""

    def knows(self, iteration: int) -> bool:
        """Whether the iteration was submitted, by any rank of a shared source. Raises TimeoutError where nobody
        answers."""

    def submit(self, iteration: int, batches: Sequence[Batch]) -> None:
        """Has the iteration planned, once however often it is submitted. Raises TimeoutError where nobody answers."""

    def plan(self, iteration: int, batches: Sequence[Batch], timeout_s: float) -> IterationSlice:
        """The rank's slice. Raises TimeoutError where it is not there after `timeout_s` seconds."""

    def stop(self) -> None:
        """Ends what other threads wait for here."""

    def close(self) -> None:
        """Frees everything, when no other thread is here any more."""


class Source(Protocol):
    """Who plans a job."""

    @property
    def job(self) -> Job: ...

    @property
    def shared(self) -> bool:
        """Whether what one rank submits is planned for all ranks."""

    def sampling(self, lengths: Ints, seed: int | None, shuffle: bool | None) -> Sampling:
        """The order of the samples where nobody gives another; None is the source's own. Raises ConfigError where there
        are no plans for it."""

    def begin(self, run: str, rank: int, stream: str = TRAIN) -> Feed:
        """A pass; equal runs of a stream share their plans, and a new one ends the stream's pass before."""


def open_source(source: str | Path | Source, key: str | None, ca: str | Path | None, told: Told) -> Source:
    """The source of that name: "local", a URL, or a folder. key, ca: as `ServiceSource`; told: what the trainer says of
    the job, for a local source all of it. Raises ConfigError where it is another job's, and what connecting or reading
    raises."""
    if source == "local":
        return LocalSource(told.job())
    if not isinstance(source, str | Path):
        found: Source = source
    elif str(source).startswith(("http://", "https://")):
        found = ServiceSource.open(str(source), key, ca)
    else:
        found = FolderSource.open(source)
    told.check(found.job)
    return found


@dataclass(frozen=True)
class Told:
    """What a trainer says of its job; None where it leaves that to the source."""

    cluster: Cluster | None = None
    model: Model | None = None
    tokens_per_rank: int | None = None
    microbatches: int | None = None
    recipe: str | Mapping[str, Any] | Recipe | None = None
    seed: int | None = None

    def job(self) -> Job:
        """The job of a local source. Raises ConfigError where something is missing."""
        for name in ("cluster", "model", "tokens_per_rank"):
            if getattr(self, name) is None:
                rule = 'source="local" plans here, and needs it'
                raise ConfigError(name, None, rule, "give it, or name a service or a folder as source")
        policy = Policy(self._recipe() or find_recipe("fcp"), seed=self.seed or 0)
        count = 1 if self.microbatches is None else self.microbatches
        return Job(self.cluster, self.model, policy, self.tokens_per_rank, count)  # type: ignore[arg-type]

    def check(self, job: Job) -> None:
        """Raises ConfigError where the source's job differs from what was told."""
        recipe = self._recipe()
        told = (self.cluster, self.tokens_per_rank, self.microbatches, recipe and recipe.to_data())
        held = (job.cluster, job.tokens_per_rank, job.microbatches, job.policy.recipe.to_data())
        names = ("cluster", "tokens_per_rank", "microbatches", "recipe")
        for name, own, other in zip(names, told, held, strict=True):
            if own is not None and own != other:
                rule = f"the source's job has {other!r}"
                raise ConfigError(name, own, rule, "leave it out: the job says it")
        if self.model is not None:
            check_model(self.model, job.model)

    def _recipe(self) -> Recipe | None:
        return None if self.recipe is None else find_recipe(self.recipe)


def check_model(own: Model, planned: Model) -> None:
    """Raises ConfigError where attention of the trainer's model is not what the job plans. Hidden and FFN sizes and
    numbers of layers only price plans, and may differ. How gradients travel is the job's to say, where the trainer asks
    for nothing."""
    for name in MODEL_FACTS:
        if name != "sent_gradients" or own.sent_gradients != SENT_GRADIENTS[0]:
            _same(name, getattr(own, name), getattr(planned, name))
    if isinstance(own.layers, Mapping) and isinstance(planned.layers, Mapping):
        _same("layers", sorted(own.layers), sorted(planned.layers))


def _same(name: str, own: object, planned: object) -> None:
    if own != planned:
        rule = f"the trainer's model has {own!r}, the job's {planned!r}"
        remedy = "change the trainer's model, or make a job of it"
        raise ConfigError(f"model.{name}", own, rule, remedy)


def check_kinds(job: Job, masks: Masks) -> None:
    """Raises ConfigError where masks are not of the attention kinds that the job's model has layers of.

    masks: as batches take them; where there is one a sample the first is looked at, since all must have its kinds."""
    layers = job.model.layers
    if not isinstance(layers, Mapping):
        return
    first = masks if masks is None or isinstance(masks, Mask | Mapping) else next(iter(masks), None)
    kinds = sorted(first) if isinstance(first, Mapping) else [DEFAULT_KIND]
    if kinds != sorted(layers):
        rule = f"the masks are of the attention kinds {kinds}, the job's model has layers of {sorted(layers)}"
        raise ConfigError("masks", kinds, rule, "give a mask of each kind, masks={kind: mask, …}")


def _sampling(job: Job, lengths: Ints, seed: int | None, shuffle: bool | None) -> Sampling:
    seed = job.policy.seed if seed is None else seed
    return Sampling(lengths, job.tokens, job.microbatches, seed, shuffle is not False)


# ---------------------------------------------------------------------------------------------- this machine


@dataclass(frozen=True)
class LocalSource:
    """A process beside this one plans; each rank has its own, and all come to the same plans."""

    job: Job
    shared = False

    def sampling(self, lengths: Ints, seed: int | None, shuffle: bool | None) -> Sampling:
        return _sampling(self.job, lengths, seed, shuffle)

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


# ---------------------------------------------------------------------------------------------- a folder


@dataclass(frozen=True)
class FolderSource:
    """Plans that `apportion precompute` made; found by what is asked, so the order of the samples is free."""

    folder: Path
    job: Job
    seed: int
    shuffle: bool
    shared = True

    @staticmethod
    def open(folder: str | Path) -> FolderSource:
        """Raises as `open_offline`, and ConfigError where another release made the plans."""
        with open_offline(folder) as offline:
            offline.check(offline.job, None)
            return FolderSource(Path(folder), offline.job, offline.facts.seed, offline.facts.shuffle)

    def sampling(self, lengths: Ints, seed: int | None, shuffle: bool | None) -> Sampling:
        seed, shuffle = self.seed if seed is None else seed, self.shuffle if shuffle is None else shuffle
        found = Sampling(lengths, self.job.tokens, self.job.microbatches, seed, shuffle)
        with open_offline(self.folder) as offline:
            offline.check(self.job, found)
        return found

    def begin(self, run: str, rank: int, stream: str = TRAIN) -> FolderFeed:
        return FolderFeed(open_offline(self.folder), rank)


@dataclass(frozen=True)
class FolderFeed:
    offline: Offline
    rank: int

    @property
    def compiled_s(self) -> float:
        return compiling.seconds

    def knows(self, iteration: int) -> bool:
        return True

    def submit(self, iteration: int, batches: Sequence[Batch]) -> None:
        """Nothing to do: all was planned before."""

    def plan(self, iteration: int, batches: Sequence[Batch], timeout_s: float) -> IterationSlice:
        return self.offline.slice(self.offline.job.request_key(batches), self.rank)

    def stop(self) -> None:
        """Reading does not wait for others."""

    def close(self) -> None:
        self.offline.close()


# ---------------------------------------------------------------------------------------------- a service


@dataclass(frozen=True)
class ServiceSource:
    """The planning service. url: of the job, http(s)://HOST:PORT/v1/jobs/NAME; key: of the job; ca: a PEM file of
    certificates, by default the system's."""

    url: str
    key: str | None = field(repr=False)
    job: Job
    ca: str | Path | None = None
    shared = True

    @classmethod
    def open(cls, url: str, key: str | None, ca: str | Path | None = None) -> Self:
        """Raises ClientError where the service does not answer or has no such job."""
        with Client(url, key, ca=ca) as client:
            return cls(url, key, client.job(), ca)

    def sampling(self, lengths: Ints, seed: int | None, shuffle: bool | None) -> Sampling:
        return _sampling(self.job, lengths, seed, shuffle)

    def begin(self, run: str, rank: int, stream: str = TRAIN) -> ServiceFeed:
        return ServiceFeed(self, run, rank, stream)


class ServiceFeed:
    """Iterations in a row come over a stream, others one by one; also for a while after a stream that gave nothing in
    time, since what stands between may hold streams back."""

    def __init__(self, source: ServiceSource, run: str, rank: int, stream: str) -> None:
        self._client = Client(source.url, source.key, timeout_s=CALL_S, ca=source.ca)
        self._run, self._stream_name, self._rank = run, stream, rank
        self._epoch, self._lock = 0, Lock()
        self._stream: Any = None
        self._next = -1  # the iteration that would be next in a row
        self._single, self._singles = 0, ONE_BY_ONE  # still to come one by one; after the next such stream

    @property
    def compiled_s(self) -> float:
        return compiling.seconds

    def knows(self, iteration: int) -> bool:
        with _patience():
            return self._client.knows(self._begun(), iteration)

    def submit(self, iteration: int, batches: Sequence[Batch]) -> None:
        with _patience():
            self._client.submit(self._begun(), iteration, batches)

    def plan(self, iteration: int, batches: Sequence[Batch], timeout_s: float) -> IterationSlice:
        with _patience():
            epoch = self._begun()
            if iteration == self._next and not self._single:
                found = self._streamed(epoch, iteration, timeout_s)
            else:
                self._hang_up()
                found = self._client.plan(epoch, iteration, self._rank, timeout_s)
                self._single = max(0, self._single - 1)
        self._next = iteration + 1
        return found

    def stop(self) -> None:
        self._client.close()

    def close(self) -> None:
        self._hang_up()
        self._client.close()

    def _begun(self) -> int:
        with self._lock:
            if not self._epoch:
                self._epoch = self._client.begin(self._run, self._stream_name)
            return self._epoch

    def _streamed(self, epoch: int, iteration: int, timeout_s: float) -> IterationSlice:
        if self._stream is None:
            self._stream = self._client.stream(epoch, self._rank, iteration, patience_s=timeout_s)
        try:
            piece: IterationSlice = next(self._stream)[1]
        except BaseException:
            self._hang_up()
            self._single, self._singles = self._singles, min(2 * self._singles, MOST_ONE_BY_ONE)
            raise
        self._singles = ONE_BY_ONE
        return piece

    def _hang_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


@contextmanager
def _patience() -> Iterator[None]:
    """A service that does not answer, or is too busy, may do so later: TimeoutError."""
    try:
        yield
    except UnreachableError as error:
        raise TimeoutError(str(error)) from error
    except ServiceProblem as error:
        if not error.transient:
            raise
        raise TimeoutError(str(error)) from error
