"""Folders of plans that were made before training: what they hold, and reading one rank's share.

    DIR/index.sqlite    records:  offline                      Facts: the job and how its samples are drawn
                                  iteration/EPOCH/ITERATION    the pack's key and the id of its plan, 64 bytes
    DIR/packs/          one pack for each request that differs from the others, named by its content address

A reader that knows the samples finds the plan by content (`Job.request_key`), any other by epoch and iteration.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Self

import msgspec
import numpy as np

from apportion.ir.bytes import wire
from apportion.ir.bytes.iteration import IterationPlan
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job
from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer
from apportion.ir.hashing import digest
from apportion.ir.isa import VERSION
from apportion.ir.masks.spec import Mask
from apportion.ir.masks.specs import causal, to_data
from apportion.ir.request.sampling import Masks, MaskSpec, Sampling
from apportion.ir.request.sequences import DEFAULT_KIND
from apportion.ir.version import __version__
from apportion.service.store import Store, open_store

FORMAT = "apportion.offline"
FACTS = "offline"
_ITERATIONS = "iteration/"
_LOWERED = 2  # compact plans kept as they were lowered: one that is read and the one after it

_Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _FactsWire(wire.Version):
    release: str
    job: bytes
    seed: _Count
    shuffle: bool
    samples: _Count
    lengths: _Digest
    masks: _Digest
    iterations: _Count


_decode_data = msgspec.msgpack.Decoder(dict[str, Any]).decode


@dataclass(frozen=True)
class Facts:
    """What the plans of a folder were made from.

    seed, shuffle: of the sampling; samples: how many; lengths, masks: 32 bytes, digests of their lengths and masks;
    iterations: how many were asked for, counted over the epochs from 0; release: of the planner.
    """

    job: Job
    seed: int
    shuffle: bool
    samples: int
    lengths: bytes
    masks: bytes
    iterations: int
    release: str = __version__

    @staticmethod
    def of(job: Job, sampling: Sampling, masks: Masks, iterations: int) -> Facts:
        """The facts of a job whose iterations `sampling` draws. masks: as `ir.sampling.batches_of` takes them."""
        lengths = np.asarray(sampling.lengths).astype("<i8")
        held = digest(lengths.tobytes()), _masks_digest(masks)
        return Facts(job, sampling.seed, sampling.shuffle, len(lengths), *held, iterations)

    def encode(self) -> bytes:
        """Equal facts give equal bytes."""
        job = wire.encode_section(self.job.to_data())
        drawn = (self.seed, self.shuffle, self.samples, self.lengths, self.masks, self.iterations)
        return wire.encode_struct(_FactsWire(FORMAT, VERSION, self.release, job, *drawn))

    @staticmethod
    def decode(data: bytes) -> Facts:
        """The facts in `data`. Raises DecodeError, VersionError, and ConfigError for a job of another release."""
        found = wire.read_envelope(data, _FactsWire, "folder of plans", FORMAT)
        job = Job.from_data(wire.read_section(_decode_data, found.job, "request", found.version))
        drawn = (found.seed, found.shuffle, found.samples, found.lengths, found.masks, found.iterations)
        return Facts(job, *drawn, found.release)

    def check(self, other: Facts, folder: Path, sampled: bool = True) -> None:
        """Raises ConfigError, which names the first field in which `other` asks for other plans than these. sampled:
        also where it draws samples in another way."""
        found = _difference("", self._compared(sampled), other._compared(sampled))
        if found is not None:
            name, held, asked = found
            rule = f"the plans in {folder} were made with {_shown(held)}"
            raise ConfigError(name, _shown(asked), rule, "give the same, or precompute into another folder")

    def _compared(self, sampled: bool) -> dict[str, Any]:
        job = self.job.to_data()
        job["hardware"] = None if self.job.hardware is None else self.job.hardware.digest()
        drawn = {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": self.samples,
            "lengths": f"digest {self.lengths.hex()}",
            "masks": f"digest {self.masks.hex()}",
        }
        return {"release": self.release, **(drawn if sampled else {}), **job}


def _masks_digest(masks: Masks) -> bytes:
    """32 bytes, equal for masks that make equal batches."""
    specs = [masks] if masks is None or isinstance(masks, Mask | Mapping) else masks
    held = [_mask_data(spec) for spec in specs]
    return digest(wire.encode_section(held[:1] if all(data == held[0] for data in held) else held))


def _mask_data(spec: MaskSpec | None) -> dict[str, Any]:
    by_kind = spec if isinstance(spec, Mapping) else {DEFAULT_KIND: causal() if spec is None else spec}
    return {kind: to_data(mask) for kind, mask in by_kind.items()}


def _difference(name: str, held: Any, asked: Any) -> tuple[str, Any, Any] | None:
    """(name, held, asked) of the first place in which two values of plain data differ."""
    if not (isinstance(held, Mapping) and isinstance(asked, Mapping)):
        return None if held == asked else (name, held, asked)
    for key in [*held, *(key for key in asked if key not in held)]:
        found = _difference(f"{name}.{key}".lstrip("."), held.get(key), asked.get(key))
        if found is not None:
            return found
    return None


def _shown(value: Any) -> Any:
    return "nothing" if value is None else value


# ---------------------------------------------------------------------------------------------- records


def place(epoch: int, iteration: int) -> str:
    """The name of an iteration's record."""
    return f"{_ITERATIONS}{epoch:08d}/{iteration:010d}"


def title(name: str) -> str:
    """An iteration's record, as errors call it."""
    _, epoch, iteration = name.split("/")
    return f"iteration {int(iteration)} of epoch {int(epoch)}"


def places(store: Store, epoch: int | None = None) -> Iterator[tuple[str, bytes, bytes]]:
    """(name, key of the pack, id of the plan) of the iterations that are there, in order; of one epoch or of all."""
    prefix = _ITERATIONS if epoch is None else f"{_ITERATIONS}{epoch:08d}/"
    for name, value in store.records(prefix):
        yield name, value[:32], value[32:]


def read_facts(store: Store) -> Facts | None:
    """What a store's plans were made from, None where nothing was precomputed into it. Raises as `Facts.decode`."""
    found = next((value for name, value in store.records(FACTS) if name == FACTS), None)
    return None if found is None else Facts.decode(found)


@dataclass(frozen=True)
class Held:
    """How much of what was asked is there. lost: names of iterations whose plan is gone."""

    asked: int
    there: int
    lost: tuple[str, ...]

    @property
    def complete(self) -> bool:
        return self.there == self.asked and not self.lost


def held_in(folder: Path) -> Held | None:
    """How much there is of what `apportion precompute` was asked for, None in the store of a server. Raises as
    `open_offline`."""
    with closing(open_store(folder, read_only=True)) as store:
        facts = read_facts(store)
        if facts is None:
            return None
        lost, there = [], 0
        for name, key, _ in places(store):
            there += 1
            if not store.has_pack(key):
                lost.append(title(name))
        return Held(facts.iterations, there, tuple(lost))


# ---------------------------------------------------------------------------------------------- reading


def open_offline(folder: str | Path) -> Offline:
    """Opens a folder that `apportion precompute` made, for reading. Raises ConfigError where it is none, VersionError
    where a release with another format made it, and StoreError."""
    folder = Path(folder)
    if not (folder / "index.sqlite").is_file():
        rule = "there is no index.sqlite: it is not a folder of plans"
        raise ConfigError("source", str(folder), rule, "name the folder given to apportion precompute --out")
    store = open_store(folder, read_only=True)
    try:
        return Offline(folder, store, _facts_in(folder, store))
    except BaseException:
        store.close()
        raise


def _facts_in(folder: Path, store: Store) -> Facts:
    facts = read_facts(store)
    if facts is None:
        rule = "it is the store of a server, not plans for a known order of samples"
        raise ConfigError("source", str(folder), rule, "name the folder given to apportion precompute --out")
    return facts


@dataclass
class Offline:
    """A folder of plans, open for reading; `close` it, or use it in a `with`. Any thread may read; open it anew in a
    process that was forked."""

    folder: Path
    store: Store
    facts: Facts
    _lowered: OrderedDict[bytes, IterationPlan] = field(default_factory=OrderedDict, repr=False)
    _lock: Lock = field(default_factory=Lock, repr=False)

    @property
    def job(self) -> Job:
        return self.facts.job

    def check(self, job: Job, sampling: Sampling | None) -> None:
        """Raises ConfigError, which names the first field in which the plans were made for another job or another order
        of samples. sampling: None where the samples are drawn in another way; then content alone decides."""
        held = self.facts
        drawn = sampling or Sampling(np.ones(1, np.int64), job.tokens)
        asked = replace(Facts.of(job, drawn, None, held.iterations), masks=held.masks)
        held.check(asked, self.folder, sampled=sampling is not None)

    def key(self, epoch: int, iteration: int) -> bytes:
        """32 bytes, the content address of an iteration's plan; epochs and iterations count from 0. Raises ConfigError
        where it is not there."""
        name = place(integer("epoch", epoch, 0), integer("iteration", iteration, 0))
        found = next((value for held, value in self.store.records(name) if held == name), None)
        if found is None:
            raise self._missing(f"iteration {iteration} of epoch {epoch}")
        return found[:32]

    def slice(self, key: bytes, rank: int) -> IterationSlice:
        """The rank's share of the plan that has this content address. Raises ConfigError where it is not there or has
        no such rank, DecodeError where it is damaged."""
        integer("rank", rank, 0, self.job.ranks - 1)
        with self._lock:
            plan = self._lowered.get(key)
            return plan.slice_for(rank) if plan is not None else self._read(key, rank)

    def iteration(self, key: bytes) -> IterationPlan:
        """The plans of all ranks. Raises ConfigError where they are not there or are kept rank by rank, DecodeError."""
        part = self.store.read_body(key, 0)
        if part is None:
            raise self._missing(f"the plan {key.hex()[:16]} of this batch")
        if part.form != "assignment":
            rule = (
                "its plans are kept rank by rank, and no rank's share has the request that a whole plan needs"
            )
            raise ConfigError("source", str(self.folder), rule, "plan the batch with apportion plan")
        return self._lower(key, part.data)

    def close(self) -> None:
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _read(self, key: bytes, rank: int) -> IterationSlice:
        part = self.store.read_body(key, rank)
        if part is None:
            raise self._missing(f"the plan {key.hex()[:16]} of this batch")
        if part.form == "assignment":
            return self._lower(key, part.data).slice_for(rank)
        return IterationSlice.decode(part.data)

    def _lower(self, key: bytes, assignment: bytes) -> IterationPlan:
        from apportion.planner.iteration.jobs import lower_job

        plan = self._lowered[key] = lower_job(assignment)
        while len(self._lowered) > _LOWERED:
            self._lowered.popitem(last=False)
        return plan

    def _missing(self, what: str) -> ConfigError:
        last = max((name for name, _, _ in places(self.store)), default=None)
        held = "none is" if last is None else f"those up to {title(last)} are"
        rule = f"it is not among the first {self.facts.iterations} iterations of its samples, of which {held} there"
        remedy = "ask as many of precompute with --iterations, or give the samples and masks that it had"
        return ConfigError("source", f"{self.folder}: {what}", rule, remedy)
