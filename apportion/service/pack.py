"""Packs: a pack is the plan of one request as an immutable file, from which single slices can be read and checked.

    magic 8 · size of the head u32 · head (msgpack) · digest of the head 32 · request · slice of rank 0, 1, …

The head has the key, the plan's id and report, and the size and digest of every body. Bodies are zstd frames. With the
same release, equal requests give equal bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any

import msgspec

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.transport import compress, decompress
from apportion.ir.bytes.wire import encode_section, encode_struct, unpack
from apportion.ir.errors import DecodeError
from apportion.ir.fields import integer
from apportion.ir.hashing import SIZE, digest
from apportion.ir.isa import MAX_RANKS

MAGIC = b"APPLAN1\n"
MAX_HEAD = 8 << 20
MAX_BODY = 256 << 20  # bytes of a body, decompressed
_FIRST = 64 << 10  # bytes of the first read: enough for the head of some 1,500 ranks
_SIZE = struct.Struct("<8sI")

Read = Callable[[int, int], bytes]  # (offset, size) -> at most `size` bytes from there
Digest = Annotated[bytes, msgspec.Meta(min_length=SIZE, max_length=SIZE)]


class Head(msgspec.Struct, frozen=True):
    """The head of a pack. key: the request's; id: the plan's; 32 bytes each; report: msgpack; sizes, digests: those of
    the compressed request and of each rank's compressed slice."""

    key: Digest
    id: Digest
    report: bytes
    sizes: Annotated[
        list[Annotated[int, msgspec.Meta(ge=0, le=MAX_BODY)]], msgspec.Meta(max_length=MAX_RANKS + 1)
    ]
    digests: Annotated[list[Digest], msgspec.Meta(max_length=MAX_RANKS + 1)]


_decode_head = msgspec.msgpack.Decoder(Head).decode
_decode_report = msgspec.msgpack.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, eq=False)
class Pack:
    """A checked pack, from `encode` or `decode`. start: offset of the first body; data: the whole file."""

    head: Head
    start: int
    data: bytes

    @property
    def key(self) -> bytes:
        return self.head.key

    @property
    def ranks(self) -> int:
        return len(self.head.sizes) - 1

    @cached_property
    def report(self) -> dict[str, Any]:
        """The plan's report as plain data (`IterationPlan.report`)."""
        report: dict[str, Any] = unpack(_decode_report, self.head.report, "report of a pack")
        return report

    @cached_property
    def _offsets(self) -> list[int]:
        return list(accumulate(self.head.sizes, initial=self.start))

    @property
    def request(self) -> bytes:
        """The encoded request (`ir.bytes.job`). Raises DecodeError."""
        return decompress(self.data[self.start : self.start + self.head.sizes[0]], MAX_BODY)

    def slice(self, rank: int) -> bytes:
        """The rank's slice, compressed. Raises ConfigError for an unknown rank."""
        section = integer("rank", rank, 0, self.ranks - 1) + 1
        return self.data[self._offsets[section] : self._offsets[section + 1]]

    def digest(self, rank: int) -> bytes:
        """The digest of the rank's compressed slice."""
        return self.head.digests[rank + 1]

    @staticmethod
    def encode(key: bytes, id: bytes, report: Any, request: bytes, slices: Sequence[bytes]) -> Pack:
        """Compresses the encoded request and the encoded `IterationSlice` of each rank."""
        bodies = [compress(body) for body in (request, *slices)]
        head = Head(key, id, encode_section(report), [*map(len, bodies)], [*map(digest, bodies)])
        first = encode_struct(head)
        data = b"".join([_SIZE.pack(MAGIC, len(first)), first, digest(first), *bodies])
        return Pack(head, _SIZE.size + len(first) + SIZE, data)

    @staticmethod
    def decode(data: bytes, key: bytes | None = None) -> Pack:
        """Decodes a pack and checks every byte. Raises DecodeError, also for a pack of another key."""
        head, start = read_head(lambda offset, size: data[offset : offset + size], key)
        pack = Pack(head, start, data)
        if pack._offsets[-1] != len(data):
            raise DecodeError(
                f"pack: has {len(data)} bytes, its head declares {pack._offsets[-1]}: it was truncated or extended"
            )
        for begin, size, expected_digest in zip(pack._offsets, head.sizes, head.digests, strict=False):
            if digest(data[begin : begin + size]) != expected_digest:
                raise DecodeError("pack: a body differs from its digest: it was damaged")
        return pack


def read_head(read: Read, key: bytes | None = None) -> tuple[Head, int]:
    """Reads the head; returns it and the offset of the bodies. Raises DecodeError, also for another key's pack."""
    data = read(0, _FIRST)
    if len(data) < _SIZE.size or data[:8] != MAGIC:
        raise DecodeError(f"not a pack: begins with {data[:8]!r}, expected {MAGIC!r}")
    size = _SIZE.unpack_from(data)[1]
    start = _SIZE.size + size + SIZE
    if size > MAX_HEAD:
        raise DecodeError(f"pack: the head has {size} bytes, the limit is {MAX_HEAD}")
    if start > len(data) == _FIRST:
        data += read(_FIRST, start - _FIRST)
    first = data[_SIZE.size : _SIZE.size + size]
    if digest(first) != data[_SIZE.size + size : start]:
        raise DecodeError("pack: its head differs from its digest: it was truncated or damaged")
    head: Head = unpack(_decode_head, first, "head of a pack")
    if not 2 <= len(head.sizes) == len(head.digests):
        raise DecodeError(f"pack: the head has {len(head.sizes)} sizes and {len(head.digests)} digests")
    if key is not None and head.key != key:
        raise DecodeError(
            f"pack: it belongs to key {head.key.hex()[:16]}, not to {key.hex()[:16]}: it was renamed"
        )
    return head, start


def read_slice(read: Read, key: bytes, rank: int) -> IterationSlice:
    """Reads only the head and one rank's slice of a pack. Raises ConfigError for an unknown rank, DecodeError."""
    head, start = read_head(read, key)
    section = integer("rank", rank, 0, len(head.sizes) - 2) + 1
    body = read(start + sum(head.sizes[:section]), head.sizes[section])
    if digest(body) != head.digests[section]:
        raise DecodeError(f"pack: the slice of rank {rank} differs from its digest: it was damaged")
    return IterationSlice.decode(decompress(body, MAX_BODY))
