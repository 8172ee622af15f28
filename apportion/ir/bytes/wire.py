"""The msgpack structures of plans and slices, and their decoding from untrusted bytes.

Raises only DecodeError (or VersionError), for any bytes; checks sizes before it builds objects; the
typed decoders stop at the first value of a wrong type. `schemas/FORMAT.md` describes the layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from apportion.ir.errors import DecodeError, VersionError
from apportion.ir.isa import VERSION

#: largest encoded size of each section, in bytes: bounds the memory of decoding untyped data
MAX_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "header": 4 << 20,
        "request": 64 << 20,
        "layouts": 1 << 20,
        "moves": 1 << 20,
        "report": 4 << 20,
        "part": 64 << 20,
    }
)

# limit on a list's entries, far above any real plan's, so that a small input cannot take much memory
_Few = msgspec.Meta(max_length=256)


class Version(msgspec.Struct):
    """The fields that every version of the format has."""

    format: str
    version: tuple[int, int]


V = TypeVar("V", bound=Version)


class PlanWire(Version):
    """Wire form of a plan; each bytes field is a msgpack value of its own."""

    header: bytes
    request: bytes
    layouts: bytes
    moves: bytes
    report: bytes
    parts: list[bytes]
    id: bytes


class SliceWire(Version):
    """Wire form of a slice: one rank's part with its proof. token_cap: of the request, for readers that compute the
    request's digest from the batch; with a checksum, since the id does not cover it."""

    rank: int
    ranks: int
    header: bytes
    layouts: bytes
    moves: bytes
    part: bytes
    digests: Annotated[list[bytes], _Few]  # digests of request and report
    path: Annotated[list[bytes], _Few]
    token_cap: bytes
    id: bytes


def _scalar(value: Any) -> Any:
    """Converts the numpy scalars and mappings that planners put into reports to plain scalars and dicts."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a plan cannot hold a {type(value).__name__}")


# Sections sort their keys, so that dict order does not affect the bytes. The structures above have a fixed order.
encode_section = msgspec.msgpack.Encoder(order="deterministic", enc_hook=_scalar).encode
_encoder = msgspec.msgpack.Encoder()
encode_struct = _encoder.encode
_decode_version = msgspec.msgpack.Decoder(Version).decode


@cache
def _decoder(kind: type[Version]) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind).decode


def is_newer(version: tuple[int, int]) -> bool:
    """True for a later minor version, whose unknown fields are ignored."""
    return version[1] > VERSION[1]


def unpack(decoder: Any, data: bytes, label: str) -> Any:
    """Decodes `data` with `decoder`. Raises DecodeError."""
    try:
        return decoder(data)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, MemoryError, OverflowError) as error:
        raise DecodeError(f"{label}: {error}") from None


def check_canonical(size: int, value: msgspec.Struct, label: str) -> None:
    """Refuses bytes that are not in canonical form: `value` must encode to `size` bytes."""
    _encoder.encode_into(value, buffer := bytearray(size))
    if len(buffer) != size:
        raise DecodeError(f"{label}: repeated or unknown keys, or values not in their shortest form")


def read_envelope(
    data: bytes, kind: type[V], name: str, magic: str, check: Callable[[int, V, str], None] = check_canonical
) -> V:
    """Decodes the outermost map after checking its format and version. check: called with size, value and name, but not
    for a later minor version. Raises DecodeError, VersionError."""
    head: Version = unpack(_decode_version, data, f"not an Apportion {name}")
    if head.format != magic:
        raise DecodeError(f"not an Apportion {name}: format is {head.format[:40]!r}, expected {magic!r}")
    major, minor = head.version
    if major != VERSION[0]:
        raise VersionError(
            f"{name} of format version {major}.{minor}; this release reads {VERSION[0]}.x: "
            "use a release that reads it, or plan again"
        )
    if minor < 0:
        raise DecodeError(f"{name}: version {major}.{minor}")
    envelope: V = unpack(_decoder(kind), data, name)
    if not is_newer(envelope.version):
        check(len(data), envelope, name)
    return envelope


def read_section(
    decoder: Any,
    data: bytes,
    label: str,
    version: tuple[int, int],
    plain: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Decodes a section of plain data. Raises DecodeError, also for bytes that are not in canonical form.

    plain: converts the decoder's result to plain data.
    """
    check_size(data, label)
    value = unpack(decoder, data, label)
    if not is_newer(version) and unpack(lambda _: encode_section(plain(value)), data, label) != data:
        raise DecodeError(
            f"{label}: unknown, missing, repeated or unsorted keys, or values not in their shortest form"
        )
    return value


def check_size(data: bytes, label: str) -> None:
    if len(data) > MAX_BYTES[label]:
        raise DecodeError(f"{label}: {len(data)} bytes; the limit is {MAX_BYTES[label]}")


def check_canonical_plan(size: int, plan: PlanWire, label: str) -> None:
    """Like `check_canonical`, but without re-encoding the parts, which are most of the plan."""
    sizes = [len(part) for part in plan.parts]
    heads = sum(2 if n < 1 << 8 else 3 if n < 1 << 16 else 5 for n in sizes)
    # bytes of the array's header beyond the single byte of an empty array
    array = 0 if len(sizes) < 16 else 2 if len(sizes) < 1 << 16 else 4
    check_canonical(size - sum(sizes) - heads - array, msgspec.structs.replace(plan, parts=[]), label)


def check_plain(value: Any, label: str) -> None:
    """Refuses NaN, infinities and values that JSON cannot hold, at any depth. Raises DecodeError."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for key in item:
                if not isinstance(key, str):
                    raise DecodeError(f"{label}: keys must be strings")
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, float) and not math.isfinite(item):
            raise DecodeError(f"{label}: {item} is not a finite number")
        elif not (item is None or isinstance(item, bool | int | float | str)):
            raise DecodeError(f"{label}: cannot hold a {type(item).__name__}")
