"""The index of a store in a folder: an SQLite database, its schema and its versions."""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from apportion.ir.errors import VersionError
from apportion.service.errors import StoreError
from apportion.service.store import names
from apportion.service.store.files import sync

#: 1: releases before this one, whose index never shrinks; 2: it has free pages that can be given back
VERSION = 2
INDEX = "index.sqlite"

_APPLICATION = 0x41505354  # "APST": what `file` and SQLite know our databases by
_SCHEMA = (
    "PRAGMA auto_vacuum = INCREMENTAL",
    "CREATE TABLE records (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE packs (key BLOB PRIMARY KEY, bytes INTEGER NOT NULL, number INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE INDEX packs_by_number ON packs (number, key)",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {VERSION}",
)

log = logging.getLogger(__name__)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield db
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def connect(index: Path, read_only: bool) -> sqlite3.Connection:
    uri = index.absolute().as_uri()
    if read_only:  # without a log nothing can change below us: no locks, no files beside it, read-only disks
        log = index.with_name(index.name + "-wal")
        uri += "?mode=ro" if log.exists() and log.stat().st_size else "?immutable=1"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    if (
        not read_only
    ):  # FolderLock keeps others out: no shared memory is needed, for which a full disk has no room
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
    return db


def is_new(db: sqlite3.Connection, index: Path) -> bool:
    """Whether nothing is in it yet. Raises VersionError, StoreError where something else is."""
    application, version = pragma(db, "application_id"), pragma(db, "user_version")
    if application == _APPLICATION and 1 <= version <= VERSION:
        return False
    if application == _APPLICATION:
        raise VersionError(
            f"{index} is a store of format version {version}, this release reads {VERSION}: "
            "use a newer release, or name another folder"
        )
    if application or db.execute("SELECT 1 FROM sqlite_schema").fetchone():
        raise StoreError(f"{index} is another program's database: name another folder")
    return True


def make_writable(db: sqlite3.Connection, new: bool) -> None:
    if new:
        db.execute(_SCHEMA[0])  # once there is a page it is too late
    db.execute("PRAGMA journal_mode = WAL")
    if new:
        _create(db)


def _create(db: sqlite3.Connection) -> None:
    """Raises sqlite3.Error. The first statement has to come before any transaction."""
    first, *rest = _SCHEMA
    db.execute(first)
    with transaction(db):
        for statement in rest:
            db.execute(statement)


def migrate(db: sqlite3.Connection, index: Path) -> None:
    """From version 1: the index is written anew, once. A disk without room for that leaves it as it is."""
    if pragma(db, "user_version") == VERSION:
        return
    if shutil.disk_usage(index.parent).free < 3 * index.stat().st_size:
        log.warning("%s stays in format version 1, and does not shrink: its disk has too little room", index)
        return
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")
    db.execute("VACUUM")
    db.execute(f"PRAGMA user_version = {VERSION}")
    log.warning("%s was in format version 1, it is in %d now", index, VERSION)


def write_index(path: Path, records: Iterator[tuple[str, bytes]], packs: list[tuple[bytes, int]]) -> None:
    """A new index, a function of what is in it alone."""
    path.unlink(missing_ok=True)
    db = sqlite3.connect(path, isolation_level=None)
    try:
        db.execute("PRAGMA journal_mode = OFF")
        _create(db)
        with transaction(db):
            db.executemany(
                "INSERT INTO records VALUES (?, ?)", (names.sealed(key, value) for key, value in records)
            )
            db.executemany("INSERT INTO packs VALUES (?, ?, 0)", packs)
    finally:
        db.close()
    sync(path)


def pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])
