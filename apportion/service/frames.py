"""The frames of a stream of plans: a header that can be checked before anything is allocated, then the body.

    offset  size
         0     4  magic    "APF1"
         4     1  kind     1 plan, 2 heartbeat, 3 end, 4 problem
         5     3  zero
         8     8  iteration: of a plan or problem; of a heartbeat or end the one that comes next
        16     4  size     of the body, in bytes; 0 in heartbeats and ends
        20    32  digest   of the body, BLAKE2b-256; in hex the ETag of the plan
        52     4  crc32    of the 52 bytes before it
        56        body     a plan: an encoded IterationSlice; a problem: problem+json

All numbers are little endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from zlib import crc32

from apportion.ir.errors import DecodeError
from apportion.ir.hashing import digest

MAGIC = b"APF1"
MAX_BODY = 64 << 20
HEAD = 56

_FIELDS = struct.Struct("<4sB3sQI32s")
_CRC = struct.Struct("<I")
_ZERO = bytes(3)


class Kind(IntEnum):
    """What a frame says."""

    PLAN = 1
    HEARTBEAT = 2
    END = 3
    PROBLEM = 4


_EMPTY = (Kind.HEARTBEAT, Kind.END)


class FrameError(DecodeError):
    """Bytes that are not a stream of frames, or one that was cut or changed."""


@dataclass(frozen=True)
class Frame:
    """One whole frame; `digest` (32 bytes) is that of `body`."""

    kind: Kind
    iteration: int
    body: bytes
    digest: bytes


@dataclass(frozen=True)
class _Head:
    kind: Kind
    iteration: int
    size: int
    digest: bytes


def encode_head(kind: Kind, iteration: int, size: int, body_digest: bytes) -> bytes:
    """The 56 bytes before a body of `size` bytes whose BLAKE2b-256 is already known."""
    fields = _FIELDS.pack(MAGIC, kind, _ZERO, iteration, size, body_digest)
    return fields + _CRC.pack(crc32(fields))


def encode_frame(kind: Kind, iteration: int, body: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return encode_head(kind, iteration, len(body), digest(body)) + body


class FrameReader:
    """Takes bytes as they come and gives whole, checked frames. Holds no more than one frame beyond what it was fed;
    a size is believed only once the header's checksum fits and it is at most `max_body`."""

    def __init__(self, max_body: int = MAX_BODY) -> None:
        self._max_body = max_body
        self._held = bytearray()
        self._head: _Head | None = None
        self._error: FrameError | None = None

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes. Raises FrameError, at the call after that which gave the frames before
        the fault; from then on always."""
        if self._error is not None:
            raise self._error
        self._held += data
        frames: list[Frame] = []
        try:
            while (frame := self._next()) is not None:
                frames.append(frame)
        except FrameError as error:
            self._error = error
            self._held.clear()
            if not frames:
                raise
        return frames

    def close(self) -> None:
        """The bytes are at an end. Raises FrameError where they end within a frame."""
        if self._error is not None:
            raise self._error
        if self._head is not None:
            size, iteration = self._head.size, self._head.iteration
            raise FrameError(
                f"frame of iteration {iteration}: cut after {len(self._held)} of {size} bytes of its body"
            )
        if self._held:
            raise FrameError(f"frame: cut after {len(self._held)} of {HEAD} bytes of its header")

    def _next(self) -> Frame | None:
        if self._head is None and len(self._held) >= HEAD:
            self._head = _read_head(self._take(HEAD), self._max_body)
        head = self._head
        if head is None or len(self._held) < head.size:
            return None
        body = self._take(head.size)
        if digest(body) != head.digest:
            raise FrameError(f"frame of iteration {head.iteration}: its body was changed on the way")
        self._head = None
        return Frame(head.kind, head.iteration, body, head.digest)

    def _take(self, size: int) -> bytes:
        with memoryview(self._held) as view:
            taken = bytes(view[:size])
        del self._held[:size]
        return taken


def _read_head(data: bytes, max_body: int) -> _Head:
    magic, kind, zero, iteration, size, body_digest = _FIELDS.unpack_from(data)
    if magic != MAGIC:
        raise FrameError(f"frame: begins with {magic!r}, expected {MAGIC!r}")
    if _CRC.unpack_from(data, _FIELDS.size)[0] != crc32(data[: _FIELDS.size]):
        raise FrameError("frame: its header was changed on the way, the checksum differs")
    if zero != _ZERO or kind not in iter(Kind):
        raise FrameError(
            f"frame: kind {kind} with {zero.hex()} behind it, this release reads 1 to 4 and zeros"
        )
    if size > max_body or (size and kind in _EMPTY):
        most = 0 if kind in _EMPTY else max_body
        raise FrameError(f"frame of iteration {iteration}: a body of {size} bytes, at most {most} are read")
    return _Head(Kind(kind), iteration, size, body_digest)
