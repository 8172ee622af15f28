"""Keys and values as stores take them, each record with a checksum of both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.hashing import digest

MAX_KEY = 1024  # bytes of UTF-8
PAGE = 256  # records or packs read at once

#: before a checksum; no msgpack begins with it: so records of older stores, which have none, are known
_SEAL = b"\xc1"
_SUM = 8  # bytes

Record = tuple[bytes, bytes]


def encoded(key: str) -> bytes:
    """A record's key as stored: UTF-8, whose order is that of code points. Raises ConfigError."""
    try:
        data = key.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise ConfigError("key", key, "is not text", "leave out lone surrogates") from None
    if not 0 < len(data) <= MAX_KEY:
        raise ConfigError("key", key, f"must have 1 to {MAX_KEY} bytes", "write a shorter key")
    return data


def changes(puts: Mapping[str, bytes], drops: Collection[str]) -> tuple[list[Record], list[bytes]]:
    """What a commit writes and drops. Raises ConfigError before anything is written."""
    for key, value in puts.items():
        if not isinstance(value, bytes):
            raise ConfigError(f"puts[{key!r}]", value, "must be bytes", "encode it")
    return [sealed(key, value) for key, value in puts.items()], [
        encoded(key) for key in drops if key not in puts
    ]


def sealed(key: str, value: bytes) -> Record:
    """A record as stored. Raises ConfigError."""
    name = encoded(key)
    return name, _SEAL + _sum(name, value) + value


def _sum(name: bytes, value: bytes) -> bytes:
    return digest(len(name).to_bytes(2, "big") + name + value)[:_SUM]


def opened(name: bytes, data: bytes) -> tuple[str, bytes]:
    """(key, value) of a record as stored. Raises DecodeError where it is not what was put."""
    key, value = _text(name), data
    if data[:1] == _SEAL:  # those of older stores have none
        told, value = data[1 : 1 + _SUM], data[1 + _SUM :]
        if told != _sum(name, value):
            raise _damaged(key)
    if key.encode() != name:
        raise _damaged(key)
    return key, value


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _damaged(key: str) -> DecodeError:
    return DecodeError(f"store: the record of {key!r} is damaged: it is not what was written")


def span(prefix: str) -> tuple[bytes, bytes]:
    """[first, last) of the keys that begin with `prefix`."""
    first = encoded(prefix) if prefix else b""
    return first, first[:-1] + bytes([first[-1] + 1]) if first else b"\xff"  # no byte of UTF-8 is above 0xf4


def records(
    page: Callable[[bytes, bytes], list[Record]], prefix: str, damaged: list[str] | None
) -> Iterator[tuple[str, bytes]]:
    """The records that begin with `prefix`, by pages: page(first, last) -> at most PAGE records in [first, last)."""
    first, last = span(prefix)
    while found := page(first, last):
        for name, data in found:
            try:
                record = opened(name, data)
            except DecodeError:
                if damaged is None:
                    raise
                damaged.append(_text(name))
            else:
                yield record
        if len(found) < PAGE:
            return
        first = found[-1][0] + b"\0"  # the next possible key
