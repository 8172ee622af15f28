"""One rank's share of an iteration plan: its slice of every microbatch, with the hash proof.

    IterationSlice ── slices     one per microbatch, in execution order
                   ├─ indexes    which sequences of the iteration's batch each microbatch has
                   ├─ deferred   sequences left to a later iteration
                   └─ id         of the iteration plan, computed from all of these

If microbatches hold consecutive sequences and none is deferred, only the number of sequences per
microbatch is encoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes import wire
from apportion.ir.bytes.sections import check_stored_id
from apportion.ir.bytes.sequences import MAX_MICROBATCHES, consecutive, iteration_id, pack, unpack
from apportion.ir.bytes.slices import Slice
from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.isa import VERSION

FORMAT = "apportion.iteration.slice"
# Limit of implicit indexes: a few bytes must not make decoding allocate more than a few megabytes.
MOST_IMPLIED = 2**20

_PerMicrobatch = msgspec.Meta(max_length=MAX_MICROBATCHES)
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _IterationSliceWire(wire.Version):
    """Wire form: `slices` are encoded slices; `indexes` has a column for each, or none if sequences are consecutive."""

    slices: Annotated[list[bytes], _PerMicrobatch]
    counts: Annotated[list[_Count], _PerMicrobatch]
    indexes: Annotated[list[bytes], _PerMicrobatch]
    deferred: bytes
    id: bytes


@dataclass(frozen=True, eq=False)
class IterationSlice:
    """One rank's share of an iteration plan. slices: one per microbatch; indexes: int64 arrays, the indexes of each
    microbatch's sequences in the iteration's batch; deferred: int64, ascending. Raises ConfigError if slices are of
    different ranks."""

    id: bytes
    slices: tuple[Slice, ...]
    indexes: tuple[Ints, ...]
    deferred: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        if not 1 <= len(self.slices) <= MAX_MICROBATCHES or len(self.slices) != len(self.indexes):
            rule = f"must be 1 to {MAX_MICROBATCHES}, with as many arrays of indexes ({len(self.indexes)})"
            raise ConfigError("iteration.slices", len(self.slices), rule, "give one per microbatch")
        if len({(item.rank, item.ranks) for item in self.slices}) > 1:
            ranks = [item.rank for item in self.slices]
            raise ConfigError("iteration.slices", ranks, "must be of one rank", "give one rank's slices")

    def __repr__(self) -> str:
        summary = (
            f"rank {self.rank} of {self.ranks}, {len(self.slices)} microbatch{'es' * (len(self.slices) > 1)}"
        )
        return f"<IterationSlice: {summary}, plan {self.id.hex()[:12]}>"

    @property
    def rank(self) -> int:
        return self.slices[0].rank

    @property
    def ranks(self) -> int:
        return self.slices[0].ranks

    def encode(self) -> bytes:
        """Encodes the slice: the bytes depend only on its contents."""
        return encode_slice([item.encode() for item in self.slices], self.indexes, self.deferred, self.id)

    @staticmethod
    def decode(data: bytes) -> IterationSlice:
        """Decodes a slice and checks its id against its bytes. Raises DecodeError (VersionError for an unknown major
        version). Allocates a small multiple of `len(data)`, and 8 bytes for each sequence of the iteration."""
        envelope = wire.read_envelope(data, _IterationSliceWire, "iteration slice", FORMAT)
        slices = tuple(Slice.decode(item) for item in envelope.slices)
        indexes, deferred = _read_indexes(envelope), unpack(envelope.deferred)
        actual_id = iteration_id([item.id for item in slices], indexes, deferred)
        check_stored_id(envelope.id, actual_id, "iteration slice")
        try:
            return IterationSlice(envelope.id, slices, indexes, deferred)
        except ConfigError as error:
            raise DecodeError(f"iteration slice: {error}") from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IterationSlice) and (self.id, self.rank) == (other.id, other.rank)

    def __hash__(self) -> int:
        return hash((self.id, self.rank))


def encode_slice(slices: list[bytes], indexes: tuple[Ints, ...], deferred: Ints, id_: bytes) -> bytes:
    """Encodes a rank's share from its encoded slices."""
    columns = [] if _are_consecutive(indexes, deferred) else [pack(array) for array in indexes]
    counts = [len(array) for array in indexes]
    envelope = _IterationSliceWire(FORMAT, VERSION, slices, counts, columns, pack(deferred), id_)
    return wire.encode_struct(envelope)


def _read_indexes(envelope: _IterationSliceWire) -> tuple[Ints, ...]:
    if len(envelope.counts) != len(envelope.slices) or len(envelope.indexes) not in (0, len(envelope.slices)):
        raise DecodeError(
            f"iteration slice: {len(envelope.slices)} slices, but {len(envelope.counts)} counts and "
            f"{len(envelope.indexes)} columns of indexes"
        )
    if not envelope.indexes:
        return _consecutive(envelope)
    indexes = tuple(unpack(column) for column in envelope.indexes)
    if [len(array) for array in indexes] != envelope.counts:
        raise DecodeError("iteration slice: its counts do not match the lengths of its columns")
    if not wire.is_newer(envelope.version) and _are_consecutive(indexes, unpack(envelope.deferred)):
        raise DecodeError("iteration slice: consecutive indexes must be left out")
    return indexes


def _consecutive(envelope: _IterationSliceWire) -> tuple[Ints, ...]:
    sequences = sum(envelope.counts)
    if envelope.deferred or sequences > MOST_IMPLIED:
        raise DecodeError(f"iteration slice: {sequences} sequences without indexes; at most {MOST_IMPLIED}")
    return consecutive(envelope.counts)


def _are_consecutive(indexes: tuple[Ints, ...], deferred: Ints) -> bool:
    """True if sequences are consecutive and none is deferred, so that counts are enough."""
    all_indexes = np.concatenate(indexes)
    is_small = len(all_indexes) <= MOST_IMPLIED and not len(deferred)
    return is_small and np.array_equal(all_indexes, np.arange(len(all_indexes)))
