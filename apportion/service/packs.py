"""Packs: what is stored of one planned iteration, immutable and named by its content address.

    magic · version · form · ranks · key · id      80 bytes, little endian
    size u64 · digest 32                           of each body
    digest 32                                      of all the above
    bodies                                         one after another, to the end

The bodies are those that the ranks get, or one compact assignment that is lowered on read. The digest covers what is
before it, and with the bodies' digests all of the pack, so that one rank's body can be read and checked without the
others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from struct import Struct
from typing import Literal, Protocol, get_args

from apportion.ir.errors import ConfigError, DecodeError, VersionError
from apportion.ir.fields import choice, integer
from apportion.ir.hashing import SIZE, digest
from apportion.ir.isa import MAX_RANKS

Form = Literal["slices", "assignment"]

MAGIC = b"APPACK\r\n"  # a transfer as text changes it
VERSION = 1
#: bodies of at most so many bytes together are stored as they are, so that reading them needs no planner
COMPACT_ABOVE = 64 << 10
#: how many times smaller an assignment must be to be worth lowering on read
COMPACT_GAIN = 4

_FORMS: tuple[Form, ...] = get_args(Form)
_PREFIX = Struct("<8sHBxI32s32s")
_ROW = Struct("<Q32s")
_FIRST = 8192  # bytes read at once: head and table of up to 200 ranks

Read = Callable[[int, int], bytes]  # (offset, size) -> at most `size` bytes from there


class Bodies(Protocol):
    """A planned iteration as workers give it. id: 32 bytes; bodies: of all ranks, in order; assignment: the compact
    form, None where there is none."""

    @property
    def id(self) -> bytes: ...
    @property
    def bodies(self) -> Sequence[bytes]: ...
    @property
    def assignment(self) -> bytes | None: ...


@dataclass(frozen=True)
class Part:
    """One body of a pack: a rank's, or the assignment of all. id: 32 bytes, of the iteration plan."""

    form: Form
    id: bytes
    data: bytes


@dataclass(frozen=True)
class Pack:
    """One planned iteration. key: 32 bytes, what was asked; id: 32 bytes, of the plan. bodies: the encoded
    `IterationSlice` of each rank, or the one assignment. Raises ConfigError."""

    key: bytes
    id: bytes
    form: Form
    ranks: int
    bodies: tuple[bytes, ...]

    def __post_init__(self) -> None:
        check_key("pack.key", self.key)
        check_key("pack.id", self.id)
        choice("pack.form", self.form, _FORMS)
        integer("pack.ranks", self.ranks, 1, MAX_RANKS)
        if len(self.bodies) != (bodies := _count(self.form, self.ranks)):
            rule = f"must be {bodies} for the {self.form} of {self.ranks} ranks"
            raise ConfigError("pack.bodies", len(self.bodies), rule, "give one a rank, or one assignment")

    def encode(self) -> bytes:
        """The pack as bytes: a function of its fields alone."""
        prefix = _PREFIX.pack(MAGIC, VERSION, _FORMS.index(self.form), self.ranks, self.key, self.id)
        head = b"".join([prefix, *(_ROW.pack(len(body), digest(body)) for body in self.bodies)])
        return b"".join([head, digest(head), *self.bodies])

    @staticmethod
    def decode(data: bytes) -> Pack:
        """The pack in `data`. Raises DecodeError where a byte was changed, lost or added, VersionError."""
        head = read_head(_within(data))
        if len(data) != head.end:
            raise DecodeError(f"pack: {len(data)} bytes, its head says {head.end}: it was cut or added to")
        bodies = tuple(head.read(_within(data), i) for i in range(len(head.sizes)))
        return Pack(head.key, head.id, head.form, head.ranks, bodies)


@dataclass(frozen=True)
class Head:
    """What a pack has before its bodies. sizes: bytes of each body; digests: 32 bytes each."""

    key: bytes
    id: bytes
    form: Form
    ranks: int
    sizes: tuple[int, ...]
    digests: tuple[bytes, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each body begins, and where the last ends."""
        return tuple(accumulate(self.sizes, initial=_head_size(len(self.sizes))))

    @property
    def end(self) -> int:
        return _head_size(len(self.sizes)) + sum(self.sizes)

    def read(self, read: Read, body: int) -> bytes:
        """A body. Raises DecodeError where it is not what its digest says."""
        start, stop = tuple(pairwise(self.offsets))[body]
        data = read(start, stop - start)
        if digest(data) != self.digests[body]:
            raise DecodeError(f"pack: body {body} differs from its digest: it was changed or damaged")
        return data

    def part(self, read: Read, rank: int) -> Part:
        """The rank's body, or the assignment. Raises ConfigError where there is no such rank, DecodeError."""
        integer("rank", rank, 0, self.ranks - 1)
        return Part(self.form, self.id, self.read(read, rank if self.form == "slices" else 0))


def pack_of(done: Bodies, key: bytes) -> Pack:
    """The pack of a planned iteration, in the form that suits its size: the assignment where the bodies take more than
    64 KiB and more than 4 times as much. key: 32 bytes, of the request."""
    ranks, size = len(done.bodies), sum(map(len, done.bodies))
    compact = done.assignment
    if compact is not None and size > max(COMPACT_ABOVE, COMPACT_GAIN * len(compact)):
        return Pack(key, done.id, "assignment", ranks, (compact,))
    return Pack(key, done.id, "slices", ranks, tuple(done.bodies))


def etag(body: bytes) -> str:
    """The strong ETag of a body, without quotes: 64 hex digits, of its BLAKE2b-256."""
    return digest(body).hex()


def check_key(field: str, key: bytes) -> bytes:
    """`key` if it is 32 bytes. Raises ConfigError."""
    if not isinstance(key, bytes) or len(key) != SIZE:
        raise ConfigError(field, key, f"must be {SIZE} bytes", "give a digest")
    return key


def read_head(read: Read) -> Head:
    """The head of the pack that `read` reads from. Raises DecodeError, VersionError."""
    data = read(0, _FIRST)
    form, ranks, key, id = _read_prefix(data)
    size = _head_size(_count(form, ranks))
    if size > len(data) == _FIRST:
        data += read(_FIRST, size - _FIRST)
    if len(data) < size or digest(data[: size - SIZE]) != data[size - SIZE : size]:
        raise DecodeError("pack: its head differs from its digest: it was cut, changed or damaged")
    rows = _ROW.iter_unpack(data[_PREFIX.size : size - SIZE])
    sizes, digests = zip(*rows, strict=True)
    return Head(key, id, form, ranks, sizes, digests)


def _read_prefix(data: bytes) -> tuple[Form, int, bytes, bytes]:
    if len(data) < _PREFIX.size:
        raise DecodeError(f"not a pack: {len(data)} bytes, its head alone has {_PREFIX.size}")
    magic, version, form, ranks, key, id = _PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise DecodeError(f"not a pack: begins with {magic!r}, expected {MAGIC!r}")
    if version != VERSION:
        raise VersionError(
            f"pack of format version {version}, this release reads {VERSION}: "
            "use a release that reads it, or plan again"
        )
    if form >= len(_FORMS) or not 1 <= ranks <= MAX_RANKS:
        raise DecodeError(f"pack: form {form} of {ranks} ranks, expected 0 or 1, and 1 to {MAX_RANKS}")
    return _FORMS[form], ranks, key, id


def read_body(path: Path, key: bytes, rank: int) -> Part:
    """One rank's body of a pack file, or its assignment; reads nothing else. Raises ConfigError where it has no such
    rank, DecodeError where it is not the pack of that key, OSError."""
    with path.open("rb", buffering=0) as file:
        return part_at(lambda offset, size: _pread(file.fileno(), offset, size), key, rank)


def part_at(read: Read, key: bytes, rank: int) -> Part:
    """As `read_body`, from wherever `read` reads."""
    head = read_head(read)
    if head.key != key:
        raise DecodeError(f"pack: it is the pack of {head.key.hex()}, not of {key.hex()}: it was renamed")
    return head.part(read, rank)


def _pread(file: int, offset: int, size: int) -> bytes:
    pieces: list[bytes] = []
    size = min(size, os.fstat(file).st_size - offset)  # a damaged head may say anything
    while size > 0 and (piece := os.pread(file, size, offset)):
        pieces.append(piece)
        offset, size = offset + len(piece), size - len(piece)
    return b"".join(pieces)


def _within(data: bytes) -> Read:
    return lambda offset, size: data[offset : offset + size]


def _count(form: Form, ranks: int) -> int:
    return ranks if form == "slices" else 1


def _head_size(bodies: int) -> int:
    return _PREFIX.size + _ROW.size * bodies + SIZE
