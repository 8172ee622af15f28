"""Stores: where records and packs are kept, behind one small interface.

    open_store ──► MemoryStore     this process; gone with it
               ──► SqliteStore     DIR/index.sqlite, DIR/packs/ab/ab….pack; one machine
               ──► RedisStore      as many machines as reach the server

One process at a time writes a store; others are refused with the name of the one that does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Protocol

from apportion.ir.errors import ConfigError
from apportion.service.packs import Part
from apportion.service.store.checks import BadPack, StoreReport, check_store
from apportion.service.store.sqlite import SqliteStore, finish

__all__ = ["BadPack", "SqliteStore", "Store", "StoreReport", "check_store", "finish", "open_store"]


class Store(Protocol):
    """Records (small, changed often, named by texts) and packs (large, immutable, named by 32 bytes).

    Any thread may call any method; all of them block. What a call that returned has written survives that this process
    or the machine dies. All raise StoreError where the backend fails: what a write that raised it has done is unknown,
    and it may be done again. Keys that are no text of 1 to 1024 bytes of UTF-8, or no 32 bytes, raise ConfigError.
    """

    @property
    def may_be_wiped(self) -> bool:
        """Whether others can empty it while it is open."""

    @property
    def lost(self) -> str:
        """Why nothing more may be written: another process has taken it over, or it was wiped. "" while it is ours."""

    def records(self, prefix: str = "", damaged: list[str] | None = None) -> Iterator[tuple[str, bytes]]:
        """(key, value) of the records whose keys begin with `prefix`, sorted by code points. Reads a page at a time:
        what is written meanwhile may or may not be seen. Keys of records that are not what was written go to `damaged`;
        without it they raise DecodeError."""

    def commit(self, puts: Mapping[str, bytes], drops: Collection[str] = ()) -> None:
        """Write and drop records, all or none of them. A key that is in both is written."""

    def put_pack(self, key: bytes, data: bytes) -> None:
        """Store a pack, whole or not at all; nothing is done where it is there."""

    def read_pack(self, key: bytes) -> bytes | None:
        """The pack's bytes as they were put (`Pack.decode` checks them), None where it is not there."""

    def read_body(self, key: bytes, rank: int) -> Part | None:
        """One rank's body of a pack, or its assignment, without reading the others; None where the pack is not there.
        Raises DecodeError where it is damaged, ConfigError where it has no such rank."""

    def has_pack(self, key: bytes) -> bool: ...

    def drop_pack(self, key: bytes) -> None:
        """Remove a pack; nothing is done where it is not there."""

    def packs(self) -> Iterator[tuple[bytes, int]]:
        """(key, bytes) of each pack, in the order in which they were put. Reads a page at a time."""

    def packs_before(self, time_s: float) -> list[bytes]:
        """Keys of the packs that were put before that time, seconds since 1970; not of those of older releases and of
        `finish`, which keep no time."""

    def record_bytes(self) -> int:
        """What the records take, about."""

    def keep_room(self) -> None:
        """Keeps some of the disk in reserve, where there is one and it has room."""

    def make_room(self) -> None:
        """Gives the reserve up, so that records can be dropped where there is no room to write."""

    def close(self) -> None:
        """Let others write. Closing twice does nothing; all other calls raise StoreError then."""


def open_store(place: str | Path, *, read_only: bool = False, password: str | None = None) -> Store:
    """The store of a URL, made where there is none: `memory:`, `sqlite:DIR`, `redis://HOST:PORT/NUMBER` (`rediss://`
    with TLS); or of a folder, as a Path.

    read_only: nothing is made or written, and any number of processes may open it, but none while another writes (but
    for Redis). password: of a Redis, by default that in the environment. Raises ConfigError for another URL or a folder
    without a store to read, StoreError where it cannot be opened, StoreBusyError where another process holds it,
    VersionError where a newer release made it, MissingDependencyError.
    """
    if isinstance(place, Path):
        return SqliteStore(place, read_only)
    scheme, _, rest = place.partition(":")
    if scheme == "sqlite" and rest:
        return SqliteStore(Path(rest), read_only)
    if scheme in ("redis", "rediss") and rest.startswith("//"):
        from apportion.service.store.redis import RedisStore

        return RedisStore(place, read_only, password)
    if place == "memory:":
        from apportion.service.store.memory import MemoryStore

        return MemoryStore()
    rule = "is not the URL of a store"
    raise ConfigError("store", place.split("@")[-1], rule, "write memory:, sqlite:DIR or redis://HOST:PORT/0")
