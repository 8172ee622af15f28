"""A store in a folder: ROOT/RELEASE/AB/KEY.plan, written atomically.

A pack is written under a temporary name, flushed and renamed, so readers never see a partial pack, and several
processes may share the folder. If the folder exceeds its size, the least recently used packs are evicted.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from logging import getLogger
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.version import __version__
from apportion.service.pack import Pack, Read, read_slice
from apportion.service.store.protocol import Store, StoreError

SUFFIX, PART = ".plan", ".part"
STALE_S = 3600.0  # age from which an unfinished part file is taken to belong to a dead process
REFRESH_S = 600.0  # minimum interval between updates of a pack's time of use
MAX_PACK = 4 << 30
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # never waits for a pipe
EVICT_TO = 0.9  # share of the limit down to which packs are evicted
_number = count()
LOG = getLogger(__name__)
T = TypeVar("T")


class File(NamedTuple):
    """A pack's file. used: time of the last write or read, seconds since 1970."""

    path: str
    size: int
    used: float


@dataclass
class Folder:
    """Store in a folder. root: created if missing. max_bytes, max_age_s: None for no limit. repairs: True to log and
    remove damaged packs, which are planned again; False to raise StoreError."""

    root: Path
    max_bytes: int | None = None
    max_age_s: float | None = None
    repairs: bool = True
    _total_bytes: int | None = field(default=None, init=False)  # bytes; None: not counted yet
    _counted: float = field(default=0.0, init=False)
    _failed: str | None = field(default=None, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    @property
    def _release(self) -> Path:
        return self.root / __version__

    def path(self, key: bytes) -> Path:
        """The path of a key's file, which may not exist."""
        name = key.hex()
        return self._release / name[:2] / f"{name}{SUFFIX}"

    def get(self, key: bytes) -> Pack | None:
        return self._read(key, lambda read: Pack.decode(read(0, MAX_PACK), key))

    def slice(self, key: bytes, rank: int) -> IterationSlice | None:
        return self._read(key, lambda read: read_slice(read, key, rank))

    def put(self, pack: Pack) -> None:
        path = self.path(pack.key)
        try:
            write_whole(path, pack.data)
            self._evict(len(pack.data))
            self._failed = None
        except OSError as error:
            self._failed = (
                f"{error.filename or path}: {error.strerror or error} ({_free_space_text(self.root)})"
            )
            raise StoreError(
                f"cannot store a plan: {self._failed}; free space, or use another folder"
            ) from error

    def problem(self) -> str | None:
        return self._failed

    def close(self) -> None:
        """Does nothing: no file stays open."""

    def files(self) -> Iterator[File]:
        """Every pack of this release, unordered."""
        for subfolder in _entries(self._release):
            for entry in _entries(subfolder.path):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(SUFFIX) and stat.S_ISREG(status.st_mode):
                        yield File(entry.path, status.st_size, status.st_mtime)
                    elif entry.name.endswith(PART) and time.time() - status.st_mtime > STALE_S:
                        os.unlink(entry.path)

    def prune(self, max_bytes: int | None = None, max_age_s: float | None = None) -> tuple[int, int]:
        """Evicts packs above an age, then the least recently used ones above a total size; returns (packs, bytes)
        evicted."""
        files = sorted(self.files(), key=lambda file: file.used)
        total, evicted, freed = sum(file.size for file in files), 0, 0
        oldest = -1.0 if max_age_s is None else time.time() - max_age_s
        for file in files:
            if file.used >= oldest and (max_bytes is None or total - freed <= max_bytes):
                break
            with suppress(FileNotFoundError):
                os.unlink(file.path)
            evicted, freed = evicted + 1, freed + file.size
        self._total_bytes, self._counted = total - freed, time.monotonic()
        return evicted, freed

    def _evict(self, added: int) -> None:
        """Evicts after a pack was added; recounts the folder from time to time, because other processes may write."""
        if self.max_bytes is None and self.max_age_s is None:
            return
        with self._lock:
            if self._total_bytes is not None:
                self._total_bytes += added
            stale = self._total_bytes is None or time.monotonic() - self._counted > STALE_S
            if stale or (self.max_bytes is not None and (self._total_bytes or 0) > self.max_bytes):
                limit = None if self.max_bytes is None else int(self.max_bytes * EVICT_TO)
                self.prune(None if stale and not self._is_full() else limit, self.max_age_s)

    def _is_full(self) -> bool:
        return self.max_bytes is not None and sum(file.size for file in self.files()) > self.max_bytes

    def _read(self, key: bytes, use: Callable[[Read], T]) -> T | None:
        """Applies `use` to a key's file; None if the file is missing, or damaged and removed. Raises StoreError."""
        path = self.path(key)
        try:
            file = os.open(path, _READ)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
        try:
            _refresh(file)
            return use(partial(_pread, file))
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
        except DecodeError as error:
            if not self.repairs:
                remedy = "run apportion precompute again, which replaces damaged plans"
                raise StoreError(f"cannot read {path}: {error}; {remedy}") from error
            LOG.warning("%s: %s; it is planned again", path, error)
            with suppress(OSError):
                os.unlink(path)
            return None
        finally:
            os.close(file)


def _pread(file: int, offset: int, size: int) -> bytes:
    """Reads `size` bytes, or fewer at the end of the file."""
    pieces: list[bytes] = []
    while size > 0 and (piece := os.pread(file, min(size, 1 << 30), offset)):
        pieces.append(piece)
        offset, size = offset + len(piece), size - len(piece)
    return b"".join(pieces)


def _refresh(file: int) -> None:
    """Updates a file's time of use. Raises DecodeError if it is not a regular file."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise DecodeError("pack: not a regular file")
    if time.time() - status.st_mtime > REFRESH_S:
        with suppress(OSError):  # owned by another user, or read-only
            os.utime(file)


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file atomically and durably. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}-{next(_number)}{PART}")
    try:
        with open(part, "xb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _free_space_text(path: Path) -> str:
    with suppress(OSError):
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        return f"{shutil.disk_usage(existing).free >> 20} MiB are free"
    return "free space unknown"


def open_store(target: str | Path, max_bytes: int | None = None, max_age_s: float | None = None) -> Store:
    """Opens a folder, or redis://HOST:PORT/N or rediss://. Raises ConfigError, StoreError, MissingDependencyError."""
    if not str(target):
        raise ConfigError("store", target, "must be a folder or the URL of a Redis", "give one of these")
    if str(target).startswith(("redis://", "rediss://", "unix://")):
        from apportion.service.store.redis import RedisStore

        return RedisStore(str(target), max_age_s)
    return Folder(Path(target), max_bytes, max_age_s)
