"""Plans iterations before training, into a folder that loaders read.

    Sampling ──epoch after epoch──► batches ──workers plan and verify──► packs, then records of them
                                       │
                                       └─ skipped where the folder has the record, or the pack

A pack is there whole or not at all, and its record comes after it, so that a run that was killed anywhere goes on where
it stopped. The finished folder is a function of what was asked alone: neither of how often the run was stopped, nor of
the order in which workers were done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from apportion.ir.arrays import Ints
from apportion.ir.bytes.job import Job, encode_request
from apportion.ir.errors import ApportionError, CapacityError, ConfigError, DecodeError
from apportion.ir.fields import integer
from apportion.ir.hashing import SIZE
from apportion.ir.request.batch import Batch
from apportion.ir.request.sampling import Masks, Sampling, batches_of
from apportion.service import offline
from apportion.service.offline import Facts
from apportion.service.packs import Pack, pack_of
from apportion.service.store import Store, finish, open_store
from apportion.service.workers import DeadlineError, Done, Planner, PoisonedError, RefusedError, Task

#: requests at the workers for each of them: one that it plans, and the next ones while results are written
AHEAD = 4
DEADLINE_S = 3600.0  # nobody waits; a plan that takes longer is taken for one that never ends
COMMIT_S = 1.0  # records are committed together; what a kill loses of them is read from the packs again


class IterationError(ApportionError, RuntimeError):
    """An iteration could not be planned; the message names it and says why. All others that were begun are kept."""


@dataclass(frozen=True, eq=False)
class Work:
    """The first `iterations` iterations of a job, over the epochs of its samples from 0 on.

    lengths: tokens of each sample, integers [n]; masks: as `batches_of` takes them; shuffle: with the seed of the
    job's policy. Raises ConfigError, also for a recipe whose plans depend on a clock, and CapacityError for a sample
    longer than a microbatch.
    """

    job: Job
    lengths: ArrayLike
    masks: Masks
    iterations: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        integer("iterations", self.iterations)
        integer("samples", len(np.asarray(self.sampling.lengths)))

    @cached_property
    def sampling(self) -> Sampling:
        job = self.job
        return Sampling(self.lengths, job.tokens, job.microbatches, job.policy.seed, self.shuffle)

    @property
    def facts(self) -> Facts:
        return Facts.of(self.job, self.sampling, self.masks, self.iterations)

    def epochs(self) -> Iterator[tuple[int, list[list[Ints]]]]:
        """(number, its iterations) of each epoch, the last one cut."""
        left, epoch = self.iterations, 0
        while left:
            drawn = self.sampling.epoch(epoch)[:left]
            yield epoch, drawn
            left, epoch = left - len(drawn), epoch + 1

    def batches(self, samples: Sequence[Ints]) -> tuple[Batch, ...]:
        lengths = np.asarray(self.sampling.lengths)
        return batches_of(samples, lengths, self.masks, self.job.packs)


@dataclass(frozen=True)
class Summary:
    """What a folder holds, and what this run did for it.

    iterations: in the folder; planned: by this run; packs: plans in the folder, equal requests once; size: bytes of
    these; seconds: that this run took; ids: 32 bytes, the digest of the iterations' plan ids in their order.
    """

    iterations: int
    planned: int
    packs: int
    size: int
    seconds: float
    ids: bytes


def precompute(
    work: Work, folder: Path, planner: Planner, report: Callable[[int, int], None] = lambda done, new: None
) -> Summary:
    """Plans and verifies what the folder does not have yet.

    report: called with the number of iterations that are there, and of those that this run added; first with 0 of
    these. Raises ConfigError where the folder was made for something else, IterationError for a batch that is refused,
    StoreError.
    """
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    store = open_store(folder)
    try:
        _claim(store, work.facts, folder)
        run = _Run(work, store, planner, report)
        run()
    finally:
        store.close()
    finish(folder)
    return _summary(folder, run.planned, began)


def _claim(store: Store, facts: Facts, folder: Path) -> None:
    """Write down what the folder is for. Raises ConfigError where it is for something else."""
    held = offline.read_facts(store)
    if held is not None:
        held.check(facts, folder)
        if facts.iterations < held.iterations:
            rule = f"{folder} is for the first {held.iterations} iterations already"
            raise ConfigError("iterations", facts.iterations, rule, "ask for as many or more")
    elif next(store.records(), None) is not None:
        raise ConfigError("out", str(folder), "it is the store of a server", "name another folder")
    store.commit({offline.FACTS: facts.encode()})


@dataclass
class _AskedPlan:
    """A request at the workers, and the iterations that wait for it."""

    key: bytes
    names: list[str]


@dataclass
class _Run:
    work: Work
    store: Store
    planner: Planner
    report: Callable[[int, int], None]
    planned: int = 0
    _there: int = 0
    _new: int = 0
    _asked: dict[Future[Done], _AskedPlan] = field(default_factory=dict)
    _by_key: dict[bytes, _AskedPlan] = field(default_factory=dict)
    _records: dict[str, bytes] = field(default_factory=dict)
    _refused: dict[str, Exception] = field(default_factory=dict)
    _committed: float = field(default_factory=time.monotonic)

    def __call__(self) -> None:
        self._there = sum(self.store.has_pack(key) for _, key, _ in offline.places(self.store))
        self.report(self._there, 0)
        try:
            for name, samples in self._missing():
                if self._refused:
                    break
                self._begin(name, samples)
                self._settle(AHEAD * max(1, self.planner.size))
            self._settle(0)
        finally:  # also when interrupted: what is done already is kept
            for future in [future for future in self._asked if future.done()]:
                self._take(future)
            self._commit()
        for name, error in sorted(self._refused.items()):
            raise IterationError(f"{offline.title(name)}: {error}") from error

    def _missing(self) -> Iterator[tuple[str, list[Ints]]]:
        """(name, samples) of the iterations without a record, or whose plan is gone."""
        for epoch, drawn in self.work.epochs():
            records = offline.places(self.store, epoch)
            held = {name for name, key, _ in records if self.store.has_pack(key)}
            for iteration, samples in enumerate(drawn):
                name = offline.place(epoch, iteration)
                if name not in held:
                    yield name, samples

    def _begin(self, name: str, samples: Sequence[Ints]) -> None:
        """Have the iteration planned, unless an equal one is or was."""
        try:
            batches = self.work.batches(samples)
        except (ConfigError, CapacityError) as error:
            self._refused[name] = error
            return
        key = self.work.job.request_key(batches)
        if key in self._by_key:
            self._by_key[key].names.append(name)
        elif (plan := self._held(key)) is not None:
            self._record([name], key, plan)
        else:
            self._by_key[key] = asked = _AskedPlan(key, [name])
            task = Task("plan", encode_request(self.work.job, batches), verify=True)
            self._asked[self.planner.submit(task, DEADLINE_S)] = asked

    def _held(self, key: bytes) -> bytes | None:
        """The id of the plan that has this key, None where it is to be made; a damaged one is made again."""
        data = self.store.read_pack(key)
        if data is None:
            return None
        with suppress(DecodeError):
            pack = Pack.decode(data)
            if pack.key == key:
                return pack.id
        self.store.drop_pack(key)
        return None

    def _settle(self, most: int) -> None:
        """Wait until at most so many requests are at the workers, and take what they have done."""
        while len(self._asked) > most:
            for future in wait(self._asked, return_when=FIRST_COMPLETED).done:
                self._take(future)

    def _take(self, future: Future[Done]) -> None:
        asked = self._asked.pop(future)
        del self._by_key[asked.key]
        try:
            done = future.result()
        except (RefusedError, PoisonedError, DeadlineError) as error:
            self._refused[asked.names[0]] = error
            return
        self.store.put_pack(asked.key, pack_of(done, asked.key).encode())
        self.planned += 1
        self._record(asked.names, asked.key, done.id)

    def _record(self, names: Sequence[str], key: bytes, plan: bytes) -> None:
        self._records |= dict.fromkeys(names, key + plan)
        self._new += len(names)
        if time.monotonic() - self._committed > COMMIT_S:
            self._commit()
        self.report(self._there + self._new, self._new)

    def _commit(self) -> None:
        if self._records:
            self.store.commit(self._records)
        self._records, self._committed = {}, time.monotonic()


def _summary(folder: Path, planned: int, began: float) -> Summary:
    store = open_store(folder, read_only=True)
    try:
        ids, iterations = blake2b(digest_size=SIZE), 0
        for _, _, plan in offline.places(store):
            ids.update(plan)
            iterations += 1
        sizes = [size for _, size in store.packs()]
    finally:
        store.close()
    return Summary(iterations, planned, len(sizes), sum(sizes), time.monotonic() - began, ids.digest())
