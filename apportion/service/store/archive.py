"""A store as one file: to keep a copy, or to move to another store.

    a tar (POSIX) of   apportion.json        of which kind, release and version it is
                       records/00000000 …    msgpack: [[key, value with its checksum], …]
                       packs/HEX             each as it was put
                       end.json              how many there were

`live` is that of a server at work: its jobs, the last epoch of each, and plans, but no epoch that goes on. What was
submitted after the copy would be missing, so runs begin anew, above all epochs that the server may have begun since.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from apportion.ir.errors import ConfigError, DecodeError, VersionError
from apportion.ir.version import __version__
from apportion.service.packs import Pack
from apportion.service.store import Store, names

VERSION = 1
_HEAD, _END = "apportion.json", "end.json"
_MEMBER = re.compile(r"records/[0-9]{8}|packs/[0-9a-f]{64}")
_MOST_HEAD, _MOST_RECORDS, _MOST_PACK = 1 << 16, 1 << 30, 4 << 30  # bytes of a member
_BLOCK = 512

Progress = Callable[[int], None]


class _ArchiveHead(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    release: str
    live: bool


class _End(msgspec.Struct, forbid_unknown_fields=True):
    records: int
    packs: int


@dataclass(frozen=True)
class ArchiveContents:
    """What an archive holds."""

    records: int
    packs: int
    live: bool


# ---------------------------------------------------------------------------------------------- writing


def archive(store: Store, records: Iterable[tuple[str, bytes]] | None = None) -> Iterator[bytes]:
    """The bytes of the archive, a pack at most at a time. records: of a server at work; None: those of the store, which
    nobody writes. Packs that go meanwhile are left out. Raises StoreError, DecodeError for a damaged record."""
    live = records is not None
    yield _member(_HEAD, msgspec.json.encode(_ArchiveHead("apportion.store", VERSION, __version__, live)))
    kept, packs, pages = iter(store.records() if records is None else records), 0, 0
    count = 0
    while page := [names.sealed(key, value) for key, value in islice(kept, names.PAGE)]:
        yield _member(f"records/{pages:08d}", msgspec.msgpack.encode(page))
        pages, count = pages + 1, count + len(page)
    for key, _ in store.packs():
        data = store.read_pack(key)
        if data is not None:
            yield _member(f"packs/{key.hex()}", data)
            packs += 1
    yield _member(_END, msgspec.json.encode(_End(count, packs))) + bytes(2 * _BLOCK)


def _member(name: str, data: bytes) -> bytes:
    head = tarfile.TarInfo(name)
    head.size = len(data)
    return head.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % _BLOCK)


# ---------------------------------------------------------------------------------------------- reading


def unpack(path: Path, store: Store, progress: Progress = lambda done: None) -> ArchiveContents:
    """Puts all that an archive holds into a store, after all of it was found whole. progress: called with members read,
    which come twice. Raises DecodeError, VersionError, ConfigError for a job that the store has, StoreError, OSError.
    """
    held = {key.split("/")[1] for key, _ in store.records("job/")}
    found = _pass(path, lambda records: _check_new(records, held), lambda key, data: None, progress)
    return _pass(path, lambda records: store.commit(dict(records)), store.put_pack, progress, found)


def _check_new(records: list[tuple[str, bytes]], held: set[str]) -> None:
    for key, _ in records:
        kind, _, rest = key.partition("/")
        name = rest.split("/")[0]
        if name in held and kind in ("job", "epoch", "iteration"):
            raise ConfigError(
                "store", name, "is a job that the store has", "delete it there, or take another store"
            )


def _pass(
    path: Path,
    records: Callable[[list[tuple[str, bytes]]], None],
    pack: Callable[[bytes, bytes], None],
    progress: Progress,
    again: ArchiveContents | None = None,
) -> ArchiveContents:
    """Reads the archive from begin to end. again: what it held before."""
    head, told, counts = None, None, {"records": 0, "packs": 0}
    try:
        with path.open("rb") as file:
            for done, (name, data) in enumerate(_members(file)):
                progress(done)
                if head is None:
                    head = _head(name, data)
                elif told is not None:
                    raise DecodeError(f"archive: {name!r} is behind its end")
                elif name == _END:
                    told = msgspec.json.decode(data, type=_End)
                elif name.startswith("records/"):
                    page = _records(data)
                    records(page)
                    counts["records"] += len(page)
                else:
                    key = bytes.fromhex(name.removeprefix("packs/"))
                    if Pack.decode(data).key != key:
                        raise DecodeError(f"archive: {name} is the pack of another key")
                    pack(key, data)
                    counts["packs"] += 1
    except (tarfile.TarError, msgspec.DecodeError, UnicodeDecodeError, EOFError) as error:
        raise DecodeError(f"archive: {error}: it was cut or damaged") from None
    if head is None or told is None or counts != msgspec.structs.asdict(told):
        raise DecodeError(f"archive: {path} ends too soon: it was cut")
    found = ArchiveContents(counts["records"], counts["packs"], head.live)
    if again not in (None, found):
        raise DecodeError(f"archive: {path} was changed while it was read")
    return found


def _members(file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """(name, bytes), in order. Nothing is written anywhere. Raises DecodeError, tarfile.TarError."""
    with tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            name = member.name
            is_head = name in (_HEAD, _END)
            if not member.isreg() or not (is_head or _MEMBER.fullmatch(name)):
                raise DecodeError(f"archive: {name[:80]!r} is no part of one")
            most = _MOST_HEAD if is_head else _MOST_PACK if name.startswith("packs/") else _MOST_RECORDS
            if member.size > most:
                raise DecodeError(f"archive: {name} has {member.size} bytes, at most {most}")
            stream = tar.extractfile(member)
            data = b"" if stream is None else stream.read()
            if len(data) != member.size:
                raise DecodeError(f"archive: {name} was cut")
            yield name, data
            cast(Any, tar).members.clear()  # which would be kept of all


def _head(name: str, data: bytes) -> _ArchiveHead:
    if name != _HEAD:
        raise DecodeError(f"archive: begins with {name!r}, expected {_HEAD}: it is no archive of a store")
    head = msgspec.json.decode(data, type=_ArchiveHead)
    if head.format != "apportion.store":
        raise DecodeError(f"archive: its format is {head.format[:40]!r}")
    if head.version != VERSION:
        raise VersionError(
            f"archive of format version {head.version}, this release reads {VERSION}: use the release that wrote it"
        )
    return head


def _records(data: bytes) -> list[tuple[str, bytes]]:
    page = msgspec.msgpack.decode(data, type=list[names.Record])
    return [names.opened(name, value) for name, value in page]
