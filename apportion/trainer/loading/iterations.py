"""Iterations of a pass over the data: the samples of each, the batches to plan, and the position of the pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from reprlib import Repr
from threading import Condition
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job, encode_request
from apportion.ir.bytes.origin import difference
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.fields import integer, integers
from apportion.ir.isa import VERSION
from apportion.ir.request.batch import Batch
from apportion.ir.request.sampling import Masks, Sampling, batches_of

if TYPE_CHECKING:
    from apportion.planner.iteration.ticks import TickTable

STATE = 2  # version of the state format
_SHORT = Repr()
_SHORT.maxlist = 64  # maximum number of samples per microbatch in an error


@dataclass(frozen=True)
class Iteration:
    """One iteration of a job. samples: int64 arrays, the sample numbers of each microbatch. batches: the batches to
    plan, one per microbatch, or a single one if the recipe packs. repeats: see `Repeated`."""

    job: Job
    number: int
    samples: tuple[Ints, ...]
    batches: tuple[Batch, ...]
    repeats: bool = False

    @cached_property
    def key(self) -> bytes:
        """The key of the plan request, 32 bytes."""
        return self.job.request_key(self.batches)

    @property
    def request(self) -> bytes:
        """The encoded plan request."""
        return encode_request(self.job, self.batches)

    def parts(self, indexes: Sequence[Ints]) -> Iterator[tuple[Batch, Ints]]:
        """Yields (batch, the sample of each sequence) per microbatch. indexes: each one's samples in the iteration."""
        samples = np.concatenate(self.samples)
        if len(self.batches) == len(indexes) > 1:
            yield from zip(self.batches, (samples[indices] for indices in indexes), strict=True)
            return
        for indices in indexes:
            yield self.batches[0].take(indices), samples[indices]

    def describe(self) -> str:
        """Describes samples and their lengths by microbatch, for the error that ranks raise if these differ."""
        lengths = np.concatenate([batch.lengths for batch in self.batches])
        ends = np.cumsum([len(samples) for samples in self.samples])
        groups = zip(self.samples, np.split(lengths, ends[:-1]), strict=True)
        texts = (map(_SHORT.repr, (numbers.tolist(), tokens.tolist())) for numbers, tokens in groups)
        parts = (f"{numbers} of {tokens} tokens" for numbers, tokens in texts)
        return f"{len(self.samples)} microbatches, samples {', '.join(parts)}"

    def check(self, piece: IterationSlice) -> None:
        """Raises ExecutionError if the plan is for other batches: different lengths, masks, positions, labels or homes,
        or a different cluster, model or policy. A plan of a newer format is not checked."""
        sequences = sum(len(samples) for samples in self.samples)
        indexes = np.sort(np.concatenate(piece.indexes))
        if not np.array_equal(indexes, np.arange(sequences)):
            raise self._mismatch(f"it has {len(indexes)} sequences, {sequences} were requested")
        for number, (slice_, (batch, _)) in enumerate(
            zip(piece.slices, self.parts(piece.indexes), strict=True)
        ):
            expected = self.job.request_digest(batch, sequences, slice_.token_cap)
            if slice_.header.version <= VERSION and slice_.request_digest != expected:
                fields = "(lengths, masks, positions, labels or homes), cluster, model or policy"
                raise self._mismatch(f"microbatch {number} belongs to another batch {fields}")

    def _mismatch(self, reason: str) -> ExecutionError:
        message = f"iteration {self.number}: the plan is not the one that this rank requested: {reason}"
        remedy = f"delete the source's plan with the key {self.key.hex()[:16]}, and plan again"
        return ExecutionError(f"{message}; {remedy}")


@dataclass(frozen=True)
class BatchBuilder:
    """Converts an iteration's samples to batches. lengths: int64 [n] of all samples; masks: one for all, or one each;
    table: a pipeline's, whose ticks are planned instead of microbatches; kinds: see `tick_batch`."""

    job: Job
    lengths: Ints
    masks: Masks
    table: TickTable | None = None
    kinds: Sequence[str] | None = None

    def of(self, number: int, drawn: Any) -> Iteration:
        """The iteration for a sampler's item: a list of microbatches of sample numbers, or one flat list. Raises
        ConfigError, CapacityError."""
        samples = self.samples(number, drawn)
        batches = batches_of(samples, self.lengths, self.masks, self.job.packs)
        for batch in batches:
            batch.check_order()
        if self.table is not None:
            from apportion.planner.iteration.ticks import ticks_of

            samples, batches = ticks_of(self.table, samples, batches, self.job.ranks, self.kinds)
        self.job.check(batches)
        return Iteration(self.job, number, samples, batches, isinstance(drawn, Repeated))

    def microbatches(self, number: int, drawn: Any) -> int:
        """The number of microbatches of an iteration. Raises ConfigError."""
        samples = self.samples(number, drawn)
        if self.table is not None:
            return self.table.ticks
        return min(self.job.microbatches, sum(map(len, samples))) if self.job.packs else len(samples)

    def samples(self, number: int, drawn: Any) -> tuple[Ints, ...]:
        """The sample numbers of each microbatch, int64 arrays. Raises ConfigError."""
        name = f"sampler[{number}]"
        if not hasattr(drawn, "__len__"):
            rule = "must be a list of sample numbers or of microbatches"
            raise ConfigError(name, drawn, rule, "give lists, as torch's BatchSampler yields them")
        if not len(drawn):
            raise ConfigError(name, drawn, "must have samples", "omit empty iterations")
        flat = np.ndim(drawn[0]) == 0
        groups = {name: drawn} if flat else {f"{name}[{i}]": group for i, group in enumerate(drawn)}
        return tuple(self._checked(label, group) for label, group in groups.items())

    def _checked(self, name: str, group: Any) -> Ints:
        array = group if isinstance(group, list | tuple | range) else np.asarray(group)
        if not len(array):
            raise ConfigError(name, group, "must have samples", "omit empty microbatches")
        return integers(name, array, 0, len(self.lengths) - 1)


class Repeated(list[Ints]):
    """Microbatches of another group, which this group runs too, without labels, so that all groups run equally many."""


@dataclass(frozen=True)
class Draw:
    """The samples of a pass, iteration by iteration: in the order of `sampling`, or of the trainer's own sampler.
    group, groups: takes every `groups`-th iteration of the order, starting at `group`; in each round all groups get the
    same number of microbatches, and an incomplete last round is dropped, or completed if `completes`. least: iterations
    with fewer microbatches are dropped. Raises ConfigError if nothing remains."""

    sampling: Sampling | None
    sampler: Iterable[Any] | None
    epoch: int
    group: int = 0
    groups: int = 1
    least: int = 0
    completes: bool = False

    def __iter__(self) -> Iterator[Any]:
        if self.sampling is not None:
            return iter(self._group_share(self.sampling.epoch(self.epoch)))
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        return (drawn for drawn in self.sampler or () if _microbatches(drawn) >= self.least)

    @property
    def dropped(self) -> int:
        """The number of the epoch's iterations that no group runs, apart from short ones."""
        epoch = [] if self.sampling is None else self.sampling.epoch(self.epoch)
        return max(0, len(epoch) - len(self.share(epoch)) * self.groups)

    def share(self, epoch: Sequence[Sequence[Ints]]) -> list[Sequence[Ints]]:
        """The group's iterations."""
        rounds = (epoch[first : first + self.groups] for first in range(0, len(epoch), self.groups))
        alike = [[*part] for round_ in rounds for _, part in groupby(round_, len)]
        if self.completes:
            alike = [part + [Repeated(part[0])] * (self.groups - len(part)) for part in alike]
        return [part[self.group] for part in alike if len(part) == self.groups]

    def _group_share(self, epoch: Sequence[Sequence[Ints]]) -> list[Sequence[Ints]]:
        share = self.share(epoch)
        iterations = [iteration for iteration in share if len(iteration) >= self.least]
        if epoch and not iterations:
            name, value = ("drop_last", True) if share else ("replicas", f"{self.groups} groups")
            rule = f"leaves no iteration of the epoch's {len(epoch)} for {self.groups} groups of ranks"
            remedy = "give more samples, or fewer microbatches per iteration"
            raise ConfigError(name, value, rule, remedy)
        return iterations


def _microbatches(drawn: Any) -> int:
    """The number of microbatches of a sampler's item; a flat list of sample numbers is one."""
    return len(drawn) if hasattr(drawn, "__len__") and len(drawn) and np.ndim(drawn[0]) else 1


@dataclass
class Iterations:
    """The iterations of a pass from `start` on, drawn on first request by the requesting thread.

    Iterations before the trainer's own are dropped, so that a sampler may be endless. An iteration that was drawn is
    returned at once, even while another thread waits for the sampler, which may itself wait for the trainer.
    """

    builder: BatchBuilder
    drawn: Iterable[Any]
    start: int = 0

    def __post_init__(self) -> None:
        self._first = self.start
        self._rest = enumerate(islice(self.drawn, self.start, None), self.start)
        self._kept = dict[int, Iteration]()
        self._changed, self._drawing, self._over = Condition(), False, False
        self._failed: Exception | None = None

    def at(self, number: int) -> Iteration | None:
        """The iteration with that number, or the first one kept if that is later; None after the last. Raises the
        sampler's errors, ConfigError, CapacityError, each time it is called."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._find(number) or not self._drawing)
                iteration = self._find(number)
                if iteration is not None or self._over:
                    return iteration
                if self._failed is not None:
                    raise self._failed
                self._drawing = True
            self._draw()

    def keys_after(self, number: int) -> list[bytes]:
        """The keys of later iterations that are already drawn."""
        with self._changed:
            later = [iteration for index, iteration in sorted(self._kept.items()) if index > number]
        return [iteration.key for iteration in later]

    def _find(self, number: int) -> Iteration | None:
        return self._kept.get(max(number, self._first))

    def _draw(self) -> None:
        """Draws the next iteration, or records the end or the error."""
        iteration: Iteration | None = None
        try:
            iteration = next((self.builder.of(*item) for item in self._rest), None)
        except Exception as error:
            self._failed = error
        finally:
            with self._changed:
                if iteration is not None:
                    self._kept[iteration.number] = iteration
                self._over = iteration is None and self._failed is None
                self._drawing = False
                self._changed.notify_all()

    def forget(self, before: int) -> None:
        """Drops the iterations before this one."""
        with self._changed:
            self._first = max(self._first, before)
            for number in [index for index in self._kept if index < before]:
                del self._kept[number]


class Place(NamedTuple):
    """The next microbatch, by epoch, iteration and number in the iteration."""

    epoch: int = 0
    iteration: int = 0
    microbatch: int = 0

    def state(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The state that `of` reads, JSON-like data. facts: values that must be equal when a pass resumes."""
        values = deepcopy({**facts})  # torch's distributed checkpoints load in place into a state's values
        return {"version": STATE, **self._asdict(), **values}

    @staticmethod
    def of(state: Mapping[str, Any], facts: Mapping[str, Any]) -> Place:
        """The place of the loader that saved this state. Raises ConfigError if its samples, job or order differ, naming
        the difference."""
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != STATE or not all(name in state for name in Place._fields):
            rule = "is not the state of a loader of this release"
            raise ConfigError("state", version, rule, "pass what `state_dict()` returned")
        mismatch = difference({name: state.get(name) for name in facts}, facts)
        if mismatch is not None:
            name, saved, current = mismatch
            rule = f"the state was saved with a different {name.removeprefix('job.')}: this loader has {current!r}"
            remedy = "give the loader the same value, or start a new pass without the state"
            raise ConfigError(f"state.{name}", saved, rule, remedy)
        return Place(*(integer(f"state.{name}", state[name], 0) for name in Place._fields))
