"""What one rank receives of an iteration's plan: its slice of every microbatch, and the proof of what they belong to.

    IterationSlice ── slices     one per microbatch, in the order in which they run
                   ├─ indexes    which sequences of the iteration's batch each microbatch has
                   ├─ deferred   those that wait for a later iteration
                   └─ id         of the iteration plan: follows from all of these

Where microbatches hold the sequences one after another, nothing deferred, the bytes say only how many each has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes import wire
from apportion.ir.bytes.sections import check_stored_id
from apportion.ir.bytes.sequences import MAX_MICROBATCHES, consecutive, iteration_id, packed, unpacked
from apportion.ir.bytes.slices import Slice
from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.isa import VERSION

FORMAT = "apportion.iteration.slice"
# Indexes of more sequences are written out: a few bytes must not make decoding allocate more than a few megabytes.
MOST_IMPLIED = 2**20

_Some = msgspec.Meta(max_length=MAX_MICROBATCHES)
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _IterationSliceWire(wire.Version):
    """Each of `slices` is an encoded slice; `indexes` has columns, or none where sequences follow one another."""

    slices: Annotated[list[bytes], _Some]
    counts: Annotated[list[_Count], _Some]
    indexes: Annotated[list[bytes], _Some]
    deferred: bytes
    id: bytes


@dataclass(frozen=True, eq=False)
class IterationSlice:
    """One rank's share of an iteration plan. slices: one a microbatch; indexes: int64 arrays, the places of each
    microbatch's sequences in the iteration's batch; deferred: int64, rising. Raises ConfigError where the slices are
    not of one rank."""

    id: bytes
    slices: tuple[Slice, ...]
    indexes: tuple[Ints, ...]
    deferred: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        if not 1 <= len(self.slices) <= MAX_MICROBATCHES or len(self.slices) != len(self.indexes):
            rule = f"must be 1 to {MAX_MICROBATCHES}, with as many arrays of indexes ({len(self.indexes)})"
            raise ConfigError("iteration.slices", len(self.slices), rule, "give one a microbatch")
        if len({(piece.rank, piece.ranks) for piece in self.slices}) > 1:
            held = [piece.rank for piece in self.slices]
            raise ConfigError("iteration.slices", held, "must be of one rank", "give one rank's slices")

    def __repr__(self) -> str:
        held = (
            f"rank {self.rank} of {self.ranks}, {len(self.slices)} microbatch{'es' * (len(self.slices) > 1)}"
        )
        return f"<IterationSlice: {held}, plan {self.id.hex()[:12]}>"

    @property
    def rank(self) -> int:
        return self.slices[0].rank

    @property
    def ranks(self) -> int:
        return self.slices[0].ranks

    def encode(self) -> bytes:
        """The slice as bytes: a function of what it holds alone."""
        return encode_slice([piece.encode() for piece in self.slices], self.indexes, self.deferred, self.id)

    @staticmethod
    def decode(data: bytes) -> IterationSlice:
        """The slice in `data`; its id follows from its bytes. Raises DecodeError (VersionError for an unknown major
        version). Allocates a small multiple of `len(data)`, and 8 bytes for each sequence of the iteration."""
        found = wire.read_envelope(data, _IterationSliceWire, "iteration slice", FORMAT)
        slices = tuple(Slice.decode(piece) for piece in found.slices)
        indexes, deferred = _read_indexes(found), unpacked(found.deferred)
        real = iteration_id([piece.id for piece in slices], indexes, deferred)
        check_stored_id(found.id, real, "iteration slice")
        try:
            return IterationSlice(found.id, slices, indexes, deferred)
        except ConfigError as error:
            raise DecodeError(f"iteration slice: {error}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IterationSlice) and (self.id, self.rank) == (other.id, other.rank)

    def __hash__(self) -> int:
        return hash((self.id, self.rank))


def encode_slice(slices: list[bytes], indexes: tuple[Ints, ...], deferred: Ints, id_: bytes) -> bytes:
    """What a rank receives, as bytes, from its encoded slices."""
    columns = [] if _follow(indexes, deferred) else [packed(own) for own in indexes]
    counts = [len(own) for own in indexes]
    found = _IterationSliceWire(FORMAT, VERSION, slices, counts, columns, packed(deferred), id_)
    return wire.encode_struct(found)


def _read_indexes(found: _IterationSliceWire) -> tuple[Ints, ...]:
    if len(found.counts) != len(found.slices) or len(found.indexes) not in (0, len(found.slices)):
        raise DecodeError(
            f"iteration slice: {len(found.slices)} slices, but {len(found.counts)} counts and "
            f"{len(found.indexes)} columns of indexes"
        )
    if not found.indexes:
        return _consecutive(found)
    indexes = tuple(unpacked(column) for column in found.indexes)
    if [len(own) for own in indexes] != found.counts:
        raise DecodeError("iteration slice: its counts are not the lengths of its columns")
    if not wire.newer(found.version) and _follow(indexes, unpacked(found.deferred)):
        raise DecodeError("iteration slice: indexes that follow one another are written out")
    return indexes


def _consecutive(found: _IterationSliceWire) -> tuple[Ints, ...]:
    sequences = sum(found.counts)
    if found.deferred or sequences > MOST_IMPLIED:
        raise DecodeError(f"iteration slice: {sequences} sequences without indexes, at most {MOST_IMPLIED}")
    return consecutive(found.counts)


def _follow(indexes: tuple[Ints, ...], deferred: Ints) -> bool:
    """Whether counts say it all."""
    together = np.concatenate(indexes)
    few = len(together) <= MOST_IMPLIED and not len(deferred)
    return few and np.array_equal(together, np.arange(len(together)))
