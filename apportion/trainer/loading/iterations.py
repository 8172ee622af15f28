"""What a pass over the data asks for: of each iteration the samples, and the batches that are planned; where it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
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

STATE = 2  # version of a state
_SHORT = Repr()
_SHORT.maxlist = 64  # samples of a microbatch that an error names


@dataclass(frozen=True)
class Wanted:
    """One iteration of a job. samples: int64 arrays, the sample numbers of each microbatch. batches: what is asked of
    the planner, one a microbatch, or a single one where the recipe packs."""

    job: Job
    number: int
    samples: tuple[Ints, ...]
    batches: tuple[Batch, ...]

    @cached_property
    def key(self) -> bytes:
        """32 bytes, of the request for its plan."""
        return self.job.request_key(self.batches)

    @property
    def request(self) -> bytes:
        """For its plan, encoded."""
        return encode_request(self.job, self.batches)

    def parts(self, indexes: Sequence[Ints]) -> Iterator[tuple[Batch, Ints]]:
        """(batch, sample of each sequence) of each microbatch of a plan with these indexes."""
        samples = np.concatenate(self.samples)
        if len(self.batches) == len(indexes) > 1:
            yield from zip(self.batches, (samples[own] for own in indexes), strict=True)
            return
        for own in indexes:
            yield self.batches[0].take(own), samples[own]

    def describe(self) -> str:
        """Samples and their lengths, microbatch by microbatch, as the error of ranks that hold others says it."""
        lengths = np.concatenate([batch.lengths for batch in self.batches])
        ends = np.cumsum([len(samples) for samples in self.samples])
        groups = zip(self.samples, np.split(lengths, ends[:-1]), strict=True)
        listed = (map(_SHORT.repr, (own.tolist(), tokens.tolist())) for own, tokens in groups)
        parts = (f"{own} of {tokens} tokens" for own, tokens in listed)
        return f"{len(self.samples)} microbatches, samples {', '.join(parts)}"

    def check(self, piece: IterationSlice) -> None:
        """Raises ExecutionError where the plan is not of these batches: other lengths, masks, positions, labels or
        homes, another cluster, model or policy. A plan of a newer format is not looked at."""
        sequences = sum(len(samples) for samples in self.samples)
        named = np.sort(np.concatenate(piece.indexes))
        if not np.array_equal(named, np.arange(sequences)):
            raise self._foreign(f"it has {len(named)} sequences, {sequences} were asked for")
        for place, (own, (batch, _)) in enumerate(zip(piece.slices, self.parts(piece.indexes), strict=True)):
            wanted = self.job.request_digest(batch, sequences, own.token_cap)
            if own.header.version <= VERSION and own.request_digest != wanted:
                what = "(lengths, masks, positions, labels or homes), cluster, model or policy"
                raise self._foreign(f"microbatch {place} is of another batch {what}")

    def _foreign(self, how: str) -> ExecutionError:
        what = f"iteration {self.number}: the plan is not the one that this rank asked for: {how}"
        remedy = f"delete what the source keeps of the key {self.key.hex()[:16]}, and plan again"
        return ExecutionError(f"{what}; {remedy}")


@dataclass(frozen=True)
class Asked:
    """How an iteration's samples become batches. lengths: int64 [n] of all samples; masks: one for all, or of each;
    table: of a pipeline, whose ticks are planned in the microbatches' place; kinds: as in `tick_batch`."""

    job: Job
    lengths: Ints
    masks: Masks
    table: TickTable | None = None
    kinds: Sequence[str] | None = None

    def of(self, number: int, drawn: Any) -> Wanted:
        """The iteration of what a sampler gave: a list of microbatches of sample numbers, or one flat list. Raises
        ConfigError, CapacityError."""
        samples = self.samples(number, drawn)
        batches = batches_of(samples, self.lengths, self.masks, self.job.packs)
        if self.table is not None:
            from apportion.planner.iteration.ticks import ticks_of

            samples, batches = ticks_of(self.table, samples, batches, self.job.ranks, self.kinds)
        self.job.check(batches)
        return Wanted(self.job, number, samples, batches)

    def microbatches(self, number: int, drawn: Any) -> int:
        """How many an iteration has. Raises ConfigError."""
        samples = self.samples(number, drawn)
        if self.table is not None:
            return self.table.ticks
        return min(self.job.microbatches, sum(map(len, samples))) if self.job.packs else len(samples)

    def samples(self, number: int, drawn: Any) -> tuple[Ints, ...]:
        """int64 arrays, one a microbatch. Raises ConfigError."""
        name = f"sampler[{number}]"
        if not hasattr(drawn, "__len__"):
            rule = "must be a list, of sample numbers or of microbatches"
            raise ConfigError(name, drawn, rule, "give lists, as torch's BatchSampler makes them")
        if not len(drawn):
            raise ConfigError(name, drawn, "must have samples", "leave empty iterations out")
        flat = np.ndim(drawn[0]) == 0
        groups = {name: drawn} if flat else {f"{name}[{i}]": group for i, group in enumerate(drawn)}
        return tuple(self._checked(where, group) for where, group in groups.items())

    def _checked(self, name: str, group: Any) -> Ints:
        listed = group if isinstance(group, list | tuple | range) else np.asarray(group)
        if not len(listed):
            raise ConfigError(name, group, "must have samples", "leave empty microbatches out")
        return integers(name, listed, 0, len(self.lengths) - 1)


@dataclass(frozen=True)
class Draw:
    """The samples of a pass, iteration by iteration: in the order of `sampling`, or of the trainer's own sampler.
    group, groups: of the order every `groups`-th iteration, from number `group` on; in each turn all groups get equally
    many microbatches, and a last turn in which they would not is left out. least: iterations of fewer microbatches are
    left out. Raises ConfigError where that leaves nothing."""

    sampling: Sampling | None
    sampler: Iterable[Any] | None
    epoch: int
    group: int = 0
    groups: int = 1
    least: int = 0

    def __iter__(self) -> Iterator[Any]:
        if self.sampling is not None:
            return iter(self._dealt(self.sampling.epoch(self.epoch)))
        set_epoch = getattr(self.sampler, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch)
        return (drawn for drawn in self.sampler or () if _microbatches(drawn) >= self.least)

    def share(self, epoch: Sequence[Sequence[Ints]]) -> list[Sequence[Ints]]:
        """The group's iterations."""
        turns = zip(*(epoch[group :: self.groups] for group in range(self.groups)), strict=False)
        return [turn[self.group] for turn in turns if len({len(iteration) for iteration in turn}) == 1]

    def _dealt(self, epoch: Sequence[Sequence[Ints]]) -> list[Sequence[Ints]]:
        own = [iteration for iteration in self.share(epoch) if len(iteration) >= self.least]
        if epoch and not own:
            rule = f"leaves nothing of the epoch's {len(epoch)} iterations for {self.groups} groups of ranks"
            remedy = "give more samples, or fewer microbatches an iteration"
            raise ConfigError("drop_last" if self.least else "replicas", self.least > 0, rule, remedy)
        return own


def _microbatches(drawn: Any) -> int:
    """Of an iteration as a sampler gives it; a flat list of sample numbers is one."""
    return len(drawn) if hasattr(drawn, "__len__") and len(drawn) and np.ndim(drawn[0]) else 1


@dataclass
class Iterations:
    """The iterations of a pass from `start` on; drawn when they are first asked for, by whichever thread asks.

    Those before the trainer's own are forgotten, so that a sampler may go on for ever. Whoever asks for one that was
    drawn gets it at once, also while another thread waits for the sampler: what that waits for may be the trainer.
    """

    asked: Asked
    drawn: Iterable[Any]
    start: int = 0

    def __post_init__(self) -> None:
        self._first = self.start
        self._rest = enumerate(islice(self.drawn, self.start, None), self.start)
        self._held = dict[int, Wanted]()
        self._changed, self._drawing, self._over = Condition(), False, False
        self._failed: Exception | None = None

    def at(self, number: int) -> Wanted | None:
        """The iteration of that number, or the first that is not forgotten where it is; None behind the last. Raises
        what the sampler raises, ConfigError, CapacityError; again whenever it is asked."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._found(number) or not self._drawing)
                found = self._found(number)
                if found is not None or self._over:
                    return found
                if self._failed is not None:
                    raise self._failed
                self._drawing = True
            self._draw()

    def keys_after(self, number: int) -> list[bytes]:
        """Of the iterations behind this one that were drawn already."""
        with self._changed:
            coming = [wanted for held, wanted in sorted(self._held.items()) if held > number]
        return [wanted.key for wanted in coming]

    def _found(self, number: int) -> Wanted | None:
        return self._held.get(max(number, self._first))

    def _draw(self) -> None:
        """Draws the next one, or finds that there is none, or why."""
        wanted: Wanted | None = None
        try:
            wanted = next((self.asked.of(*numbered) for numbered in self._rest), None)
        except Exception as error:
            self._failed = error
        finally:
            with self._changed:
                if wanted is not None:
                    self._held[wanted.number] = wanted
                self._over = wanted is None and self._failed is None
                self._drawing = False
                self._changed.notify_all()

    def forget(self, before: int) -> None:
        """Drops the iterations before this one."""
        with self._changed:
            self._first = max(self._first, before)
            for number in [held for held in self._held if held < before]:
                del self._held[number]


class Place(NamedTuple):
    """The microbatch that comes next: of an iteration, and that of an epoch."""

    epoch: int = 0
    iteration: int = 0
    microbatch: int = 0

    def state(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """What `of` reads: JSON-like data. facts: what must be the same where a pass goes on."""
        return {"version": STATE, **self._asdict(), **facts}

    @staticmethod
    def of(state: Mapping[str, Any], facts: Mapping[str, Any]) -> Place:
        """Where the loader was that this state is of. Raises ConfigError where it had other samples, another job or
        another order, by the name of what differs."""
        version = state.get("version") if isinstance(state, Mapping) else None
        if version != STATE or not all(name in state for name in Place._fields):
            rule = "is not the state of a loader of this release"
            raise ConfigError("state", version, rule, "give what `state_dict()` returned")
        found = difference({name: state.get(name) for name in facts}, facts)
        if found is not None:
            name, saved, own = found
            rule = f"the state was saved with another {name.removeprefix('job.')}: this loader has {own!r}"
            remedy = "give the loader what it had then, or leave the state out and begin anew"
            raise ConfigError(f"state.{name}", saved, rule, remedy)
        return Place(*(integer(f"state.{name}", state[name], 0) for name in Place._fields))
