"""A store in a folder: an SQLite index, and one file for each pack.

    DIR/index.sqlite          records, and the order of the packs (with index.sqlite-wal while it is written)
    DIR/packs/ab/ab….pack     64 hex digits of the key; nothing else names files
    DIR/lock                  who writes

Opening it for writing puts in order what a process that was killed left: files that were being written are removed,
packs that the index does not know yet are added to it.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from typing import Any

from apportion.ir.errors import ConfigError
from apportion.service.errors import StoreError
from apportion.service.packs import Part, check_key, read_body
from apportion.service.store import names
from apportion.service.store.files import (
    PART,
    FolderLock,
    Reserve,
    make_folder,
    sync_folder,
    teaching,
    write_whole,
)
from apportion.service.store.index import (
    INDEX,
    connect,
    is_new,
    make_writable,
    migrate,
    pragma,
    transaction,
    write_index,
)

#: a pack's number: when it was put, milliseconds since 1970, above all others; less than _TIMES in older stores
_ADD_PACK = "INSERT OR IGNORE INTO packs SELECT ?, ?, MAX(COALESCE(MAX(number) + 1, 0), ?) FROM packs"
_TIMES = 10**12
_DROP_PACK = "DELETE FROM packs WHERE key = ?"

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FOLDER = re.compile("[0-9a-f]{2}")
_PACK = re.compile("[0-9a-f]{64}[.]pack")


_LOW = 4 << 20  # bytes that are free: opening the store may need them
_MANY = 64  # deletions after which the index may be smaller
_SLACK, _AT_ONCE = 64, 50_000  # free pages that are kept; given back at a time (200 MB, some 0.3 s)

log = logging.getLogger(__name__)


def _is_full(error: StoreError) -> bool:
    cause = error.__cause__
    code = (getattr(cause, "sqlite_errorcode", None) or 0) & 0xFF
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR) or getattr(cause, "errno", None) in _NO_ROOM


class SqliteStore:
    """`Store` in a folder of one machine. Raises what `open_store` raises."""

    may_be_wiped, lost = False, ""

    def __init__(self, folder: Path, read_only: bool = False) -> None:
        self.folder, self.read_only = folder, read_only
        self._mutex = RLock()
        self._reserve = Reserve(folder / "reserve")
        self._db: sqlite3.Connection | None = None
        if read_only and not (folder / INDEX).is_file():
            rule = f"there is no store: it has no {INDEX}"
            raise ConfigError(
                "store", str(folder), rule, "name the folder of a server, or of apportion precompute"
            )
        with teaching(folder, "open the store"):
            if not read_only:
                make_folder(folder.absolute())
            self._lock = FolderLock(folder, shared=read_only)
            try:
                self._start()
            except BaseException:
                self._stop()
                raise

    def _start(self) -> None:
        index = self.folder / INDEX
        with teaching(index, "open the store"):
            if not self.read_only:
                index.with_name(f"{INDEX}-shm").unlink(missing_ok=True)  # of readers who have left
                if shutil.disk_usage(self.folder).free < _LOW:
                    self._reserve.release()
            self._db = connect(index, self.read_only)
            new = is_new(self._db, index)
            if new and self.read_only:
                raise StoreError(f"{index} is empty: whoever made it was killed; let a server open it first")
            if not self.read_only:
                make_writable(self._db, new)
                migrate(self._db, index)
                sync_folder(self.folder)
                self._tidy()
                self._shrink()

    def _path(self, key: bytes) -> Path:
        return pack_path(self.folder, check_key("key", key))

    # ------------------------------------------------------------------------------------------ records

    def records(self, prefix: str = "", damaged: list[str] | None = None) -> Iterator[tuple[str, bytes]]:
        return names.records(self._records, prefix, damaged)

    def _records(self, first: bytes, last: bytes) -> list[names.Record]:
        sql = "SELECT key, value FROM records WHERE key >= ? AND key < ? ORDER BY key LIMIT ?"
        return self._read(sql, (first, last, names.PAGE))

    def commit(self, puts: Mapping[str, bytes], drops: Collection[str] = ()) -> None:
        written, dropped = names.changes(puts, drops)
        with self._writing("commit records") as db:
            db.executemany("DELETE FROM records WHERE key = ?", ((key,) for key in dropped))
            db.executemany("INSERT OR REPLACE INTO records VALUES (?, ?)", written)
        if len(dropped) >= _MANY:
            with self._mutex:
                self._shrink()

    def make_room(self) -> None:
        self._reserve.release()

    def keep_room(self) -> None:
        self._reserve.fill()

    def _shrink(self) -> None:
        """Gives free pages back, a bounded number of them; what cannot be done now is done later."""
        with suppress(sqlite3.Error):
            db = self._connection()
            free, pages = pragma(db, "freelist_count"), pragma(db, "page_count")
            if free > _SLACK and free > pages // 4:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                db.executescript(f"PRAGMA incremental_vacuum({min(free - _SLACK, _AT_ONCE)})")  # to its end
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    # ------------------------------------------------------------------------------------------ packs

    def put_pack(self, key: bytes, data: bytes) -> None:
        path = self._path(key)
        with teaching(path, "store a pack"):
            self._check_writable()
            if not (self._knows(key) and path.exists()):
                write_whole(path, data)
                self._index("store a pack", _ADD_PACK, (key, len(data), _now_ms()))

    def read_pack(self, key: bytes) -> bytes | None:
        self._connection()
        with teaching(path := self._path(key), "read a pack"), suppress(FileNotFoundError):
            return path.read_bytes()
        return None

    def read_body(self, key: bytes, rank: int) -> Part | None:
        self._connection()
        with teaching(path := self._path(key), "read a pack"), suppress(FileNotFoundError):
            return read_body(path, key, rank)
        return None

    def has_pack(self, key: bytes) -> bool:
        self._connection()
        with teaching(path := self._path(key), "look for a pack"):
            return path.exists()

    def drop_pack(self, key: bytes) -> None:
        path = self._path(key)
        with teaching(path, "drop a pack"):
            self._check_writable()
            path.unlink(missing_ok=True)  # first: a full disk has no room to write the index before
        try:
            self._index("drop a pack", _DROP_PACK, (key,))
        except StoreError as error:
            if not _is_full(error):  # else the next opening finds that the file is gone
                raise

    def packs(self) -> Iterator[tuple[bytes, int]]:
        sql = "SELECT number, key, bytes FROM packs WHERE (number, key) > (?, ?) ORDER BY number, key LIMIT ?"
        found = self._read(sql, (-1, b"", names.PAGE))
        while found:
            yield from ((key, size) for _, key, size in found)
            found = self._read(sql, (*found[-1][:2], names.PAGE))

    def packs_before(self, time_s: float) -> list[bytes]:
        sql = "SELECT key FROM packs WHERE number >= ? AND number < ?"
        return [key for (key,) in self._read(sql, (_TIMES, int(time_s * 1e3)))]

    def record_bytes(self) -> int:
        (pages,), (size,), (free,) = (
            self._read(f"PRAGMA {name}", ())[0] for name in ("page_count", "page_size", "freelist_count")
        )
        return int((pages - free) * size)

    def _knows(self, key: bytes) -> bool:
        return bool(self._read("SELECT 1 FROM packs WHERE key = ?", (key,)))

    # ------------------------------------------------------------------------------------------ the whole

    def close(self) -> None:
        with self._mutex:
            self._stop()

    def finish(self) -> None:
        """As the function `finish`, and close."""
        index, part = self.folder / INDEX, self.folder / (INDEX + PART)
        with self._mutex, teaching(index, "finish the store"):
            try:
                self._check_writable()
                write_index(part, self.records(), sorted(self.packs()))
                self._disconnect()
                os.replace(part, index)
                sync_folder(self.folder)
            finally:
                self._stop()

    def compact(self) -> tuple[int, int]:
        """Writes the index anew, without what was dropped; its bytes before and after. Raises StoreError, also where
        there is no room for a second one."""
        index = self.folder / INDEX
        with self._mutex, teaching(index, "compact the store"):
            self._check_writable()
            db = self._connection()
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            before = index.stat().st_size
            db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return before, index.stat().st_size

    def damage(self) -> str | None:
        """What SQLite finds wrong with the index, None where nothing is."""
        found = str(self._read("PRAGMA quick_check(1)", ())[0][0])
        return None if found == "ok" else found

    def _tidy(self) -> None:
        (self.folder / (INDEX + PART)).unlink(missing_ok=True)
        there: set[bytes] = set()
        for inner, name in _entries(self.folder / "packs"):
            if name.endswith(PART):
                (inner / name).unlink(missing_ok=True)
            elif _is_pack(inner, name):
                there.add(bytes.fromhex(name[:64]))
        known = {key for (key,) in self._read("SELECT key FROM packs", ())}
        if there != known:
            self._adopt(sorted(there - known), known - there)

    def _adopt(self, new: list[bytes], lost: set[bytes]) -> None:
        files = ((key, pack_path(self.folder, key).stat()) for key in new)
        sizes = [(key, found.st_size, int(found.st_mtime * 1e3)) for key, found in files]
        with self._writing("open the store") as db:
            db.executemany(_DROP_PACK, ((key,) for key in lost))
            db.executemany(_ADD_PACK, sizes)

    # ------------------------------------------------------------------------------------------ the database

    def _read(self, sql: str, values: Sequence[Any]) -> list[Any]:
        with teaching(self.folder / INDEX, "read the index"), self._mutex:
            return self._connection().execute(sql, values).fetchall()

    def _index(self, task: str, sql: str, values: Sequence[Any]) -> None:
        """Tell the index of a pack. A power cut may undo it: the next opening looks at the files."""
        with self._writing(task, flush="NORMAL") as db:
            db.execute(sql, values)

    @contextmanager
    def _writing(self, task: str, flush: str = "FULL") -> Iterator[sqlite3.Connection]:
        """One transaction, which survives a power cut when this returns (FULL), or a kill alone (NORMAL)."""
        with teaching(self.folder / INDEX, task), self._mutex:
            self._check_writable()
            self._connection().execute(f"PRAGMA synchronous = {flush}")
            with transaction(self._connection()) as db:
                yield db

    def _check_writable(self) -> None:
        self._connection()
        if self.read_only:
            raise StoreError(f"{self.folder} was opened for reading only")

    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"the store in {self.folder} is closed")
        return self._db

    def _disconnect(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()  # the last connection moves the log into the database and removes it

    def _stop(self) -> None:
        self._disconnect()
        self._lock.release()


def _now_ms() -> int:
    return int(time.time() * 1e3)


def pack_path(folder: Path, key: bytes) -> Path:
    """Where the store in a folder keeps a pack."""
    name = key.hex()
    return folder / "packs" / name[:2] / f"{name}.pack"


def finish(folder: Path) -> None:
    """Make a folder's bytes a function of its contents: its index is written anew, sorted, in one transaction (equal
    bytes need one version of SQLite). The packs' order is that of their keys then. Raises what `open_store` raises."""
    SqliteStore(folder).finish()


def pack_keys(folder: Path) -> Iterator[bytes]:
    """The keys of the packs that lie in a store's folder."""
    for inner, name in _entries(folder / "packs"):
        if _is_pack(inner, name):
            yield bytes.fromhex(name[:64])


def _is_pack(inner: Path, name: str) -> bool:
    return _PACK.fullmatch(name) is not None and name.startswith(inner.name)


def _entries(packs: Path) -> Iterator[tuple[Path, str]]:
    """(folder, name) of what lies in the folders of packs."""
    for inner in sorted(packs.iterdir()) if packs.is_dir() else ():
        if _FOLDER.fullmatch(inner.name) and inner.is_dir():
            yield from ((inner, name) for name in os.listdir(inner))
