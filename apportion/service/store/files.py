"""Files that are there whole or not at all, and the lock of the process that may write them.

A file is written under another name, flushed to the disk and renamed; then its folder is flushed, so that what has
returned survives a power cut too.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from apportion.service.errors import StoreBusyError, StoreError

PART = ".part"  # ends the names of files that are being written

_RESERVE = 4 << 20  # bytes: deletes some 100,000 records
_number = itertools.count()
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def teaching(path: Path, task: str) -> Iterator[None]:
    """Turns errors of the system and of SQLite into StoreErrors that name the path and a remedy."""
    try:
        yield
    except OSError as error:
        place = Path(error.filename) if isinstance(error.filename, str) else path
        raise StoreError(
            f"cannot {task}: {place}: {error.strerror or error}; {_remedy(error, path)}"
        ) from error
    except (
        sqlite3.Error,
        UnicodeDecodeError,
    ) as error:  # SQLite quotes a damaged schema, which need not be UTF-8
        raise StoreError(f"cannot {task}: {path}: {error}; {_database_remedy(error, path)}") from error


def _remedy(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{_free(path)}; make room, or keep fewer plans"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"this process runs as user {os.geteuid()}: let it write there, or choose another folder"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    return "look after the disk or the folder, then do it again"


def _database_remedy(error: sqlite3.Error | UnicodeDecodeError, path: Path) -> str:
    code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
    code = sqlite3.SQLITE_CORRUPT if isinstance(error, UnicodeDecodeError) else code
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return f"{_free(path)}; make room, then do it again"
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return (
            "it is damaged or no database: move it away, its packs are found again when the store is opened"
        )
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return f"this process runs as user {os.geteuid()}: let it write to {path.parent}"
    return "let no other program hold it, then do it again"


def _free(path: Path) -> str:
    with suppress(OSError):
        place = next(folder for folder in (path, *path.parents) if folder.exists())
        return f"{shutil.disk_usage(place).free >> 20} MiB are free"
    return "nobody knows how much is free"


# ---------------------------------------------------------------------------------------------- writing


def write_whole(path: Path, data: bytes) -> None:
    """Write a file and make it last, or leave nothing. Raises OSError."""
    make_folder(path.parent)
    part = path.with_name(f"{path.name}.{next(_number)}{PART}")
    try:
        _write(part, data)
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder that lasts, and those above it that are missing. Raises OSError."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last. Raises OSError."""
    sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def sync(path: Path, flags: int = os.O_RDONLY) -> None:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
    finally:
        os.close(file)


# ---------------------------------------------------------------------------------------------- a reserve


class Reserve:
    """A file that is given up when the disk is full, so that what makes room again can be written. It is a part of
    what is free when it is made, some MiB at most."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def release(self) -> bool:
        """Whether there was something to give up."""
        with suppress(OSError):
            held = self._path.stat().st_size > 0
            os.truncate(self._path, 0)
            return held
        return False

    def fill(self) -> None:
        """Takes its bytes where the disk has many more."""
        with suppress(OSError):
            if self._path.exists() and self._path.stat().st_size:
                return
            size = min(_RESERVE, shutil.disk_usage(self._path.parent).free // 16)
            file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, max(size, 1))
            finally:
                os.close(file)


# ---------------------------------------------------------------------------------------------- one writer


class FolderLock:
    """The right to write a folder, or to read it while nobody writes: `flock` on DIR/lock, whose text says who writes.

    The system lets go of it when the process ends, however it ends. Raises StoreError where another process has it,
    OSError.
    """

    def __init__(self, folder: Path, shared: bool) -> None:
        self._shared = shared
        self._file = _open_lock(folder / "lock", shared)
        if self._file is not None:
            try:
                self._take(self._file, folder)
            except BaseException:
                os.close(self._file)
                raise

    def _take(self, file: int, folder: Path) -> None:
        if not _lock(file, fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX):
            readers = not self._shared and _lock(file, fcntl.LOCK_SH)
            raise StoreBusyError(f"{folder} is in use: {_READERS if readers else _writer(file)}")
        if not self._shared:
            os.ftruncate(file, 0)
            with suppress(OSError):  # a full disk: the lock holds all the same
                os.pwrite(file, holder().encode(), 0)

    def release(self) -> None:
        """Let others have it; does nothing the second time."""
        file, self._file = self._file, None
        if file is not None:
            if not self._shared:
                os.ftruncate(file, 0)
            os.close(file)


_READERS = "processes read it (loaders, or a check); let them end, or name another folder"


def _writer(file: int) -> str:
    text = os.pread(file, 500, 0).decode(errors="replace") or "another process"
    return f"{text} writes it; stop that process, or name another folder"


def _lock(file: int, kind: int) -> bool:
    """Whether the lock could be had. Readers of file systems without locks go without."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if kind != fcntl.LOCK_SH or error.errno not in _WITHOUT_LOCKS:
            raise
    return True


def _open_lock(path: Path, shared: bool) -> int | None:
    """None where there is no lock file to read: the folder was copied without it, and nobody writes copies."""
    if not shared:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def holder() -> str:
    """This process, for those that it keeps out."""
    now = datetime.now(UTC).isoformat(" ", "seconds")
    return f"process {os.getpid()} on {socket.gethostname()} (since {now})"
