"""Keys in files that only their owner can read, and where clients of the same user find the key of a server.

    DIR/admin.key                          made once, mode 0600; DIR has mode 0700
    /tmp/apportion-UID/ADDRESS-PORT.key    the same while the server lives: it holds a lock on the file, so that a key
                                           is never sent to whoever listens on the port of a server that died

`APPORTION_RUNTIME_DIR` names another folder than /tmp/apportion-UID, for servers and clients alike.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from socket import socket
from urllib.parse import urlsplit

from apportion.ir.errors import ConfigError

ADMIN_KEY = "admin.key"
RUNTIME = "APPORTION_RUNTIME_DIR"

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OWN = (
    "index.sqlite",
    "packs",
    "lock",
    "reserve",
    ADMIN_KEY,
    "audit.log",
)  # beginnings of names in a store's folder
_MOST_BYTES = 4096  # of a key file
_PATIENCE_S = 1.0  # for a client that looks whether the server lives

log = logging.getLogger(__name__)


def private_folder(folder: Path) -> None:
    """Make a folder that nobody else can open; one that is there, and is a store's or empty, is closed to others.

    Raises ConfigError where it belongs to somebody else or holds other things."""
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if not found.st_mode & _OTHERS:
            return
        foreign = [name for name in os.listdir(folder) if not name.startswith(_OWN)]
        if foreign:
            rule = f"others can open it, and it holds more than a store ({sorted(foreign)[0]})"
            raise ConfigError("--dir", str(folder), rule, f"name a folder of its own, or: chmod 700 {folder}")
        folder.chmod(0o700)
        log.warning("others could open %s: it has mode 0700 now", folder)
    except PermissionError:
        rule = f"others can open it, and it is not of this user ({os.geteuid()})"
        raise ConfigError("--dir", str(folder), rule, "name a folder of this user") from None
    except OSError as error:
        raise ConfigError(
            "--dir", str(folder), f"is no folder ({error.strerror})", "name another one"
        ) from None


def read_secret(path: Path) -> str:
    """What a file of a key or password holds, without white space around it. Raises ConfigError, also where others
    can read it: those beyond owner and group, and the group of a file of this user."""
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(_MOST_BYTES + 1).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        told = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(
            str(path), "(hidden)", f"cannot be read: {told}", "name a file with a key"
        ) from None
    closed = _OTHERS if found.st_uid == os.geteuid() else stat.S_IRWXO
    if found.st_mode & closed and stat.S_ISREG(found.st_mode):
        rule = f"others can read this file (mode {stat.S_IMODE(found.st_mode):04o})"
        raise ConfigError(str(path), "(hidden)", rule, f"take another key, and: chmod 600 {path}")
    if not text or len(text) > _MOST_BYTES:
        raise ConfigError(
            str(path), "(hidden)", "must hold one key", "write 16 or more characters, no spaces"
        )
    return text


def own_key(folder: Path) -> str:
    """The key in a private folder, made where there is none. Raises ConfigError."""
    path = folder / ADMIN_KEY
    if path.exists():
        return read_secret(path)
    with suppress(FileExistsError):
        part = path.with_name(f"{ADMIN_KEY}.{os.getpid()}")
        file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, f"{secrets.token_urlsafe(32)}\n".encode())
            os.fsync(file)
            os.link(part, path)  # whole, or not at all
        finally:
            os.close(file)
            part.unlink()
    return read_secret(path)


# ---------------------------------------------------------------------------------------------- where clients look


class Shown:
    """A server's key where clients of the same user find it, until `close`."""

    def __init__(self, address: str, port: int, key: str) -> None:
        self._path, self._key = _runtime() / _name(address, port), key
        self._file: int | None = None
        self.refresh()

    def refresh(self) -> None:
        """Keeps it from those who tidy /tmp, and writes it anew where they were quicker. Says so where it cannot."""
        try:
            if self._file is not None and self._path.exists():
                os.utime(self._file)
                os.utime(self._path.parent)
                return
            self.close()
            self._file = self._written()
        except OSError as error:
            log.warning("clients do not find the admin key by themselves: %s: %s", self._path, error)

    def rekey(self, key: str) -> None:
        """From now on another one."""
        self._key = key
        try:
            if self._file is not None:
                os.pwrite(self._file, key.encode(), 0)
                os.ftruncate(self._file, len(key))
        except OSError as error:
            log.warning("clients do not find the new admin key by themselves: %s: %s", self._path, error)

    def _written(self) -> int:
        with suppress(FileExistsError):
            self._path.parent.mkdir(0o700)
        if not _is_private(self._path.parent):
            raise PermissionError(
                f"{self._path.parent} is not of this user alone, {RUNTIME} names another one"
            )
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _lock(file)
            os.ftruncate(file, 0)
            os.pwrite(file, self._key.encode(), 0)
        except BaseException:
            os.close(file)
            raise
        return file

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                self._path.unlink()
            os.close(file)


@contextmanager
def shown(listener: socket, key: str | None) -> Iterator[Shown | None]:
    """The key, if there is one, where clients of whoever listens there find it, while the block lasts."""
    address, port = listener.getsockname()[:2]
    found = None if key is None else Shown(address, port, key)
    try:
        yield found
    finally:
        if found is not None:
            found.close()


def key_of_server(host: str, port: int) -> tuple[str, str] | None:
    """(address, admin key) of a server of this user that lives at a loopback address or `localhost`, None where none
    is found."""
    names = ("127.0.0.1", "::1") if host == "localhost" else (host,)
    for name in names:
        with suppress(ValueError, OSError):
            if ip_address(name).is_loopback and _is_private(_runtime()):
                for bound in (name, "0.0.0.0", "::"):
                    if (key := _read(_runtime() / _name(bound, port))) is not None:
                        return name, key
    return None


def admin_key_of(url: str) -> str | None:
    """That a server of this user at a loopback URL has made."""
    where = urlsplit(url)
    found = key_of_server(where.hostname or "", where.port or 0)
    return None if found is None else found[1]


def _read(path: Path) -> str | None:
    """The key, where a server that lives has it there."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(file)
        if found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # the server lives
            return os.pread(file, _MOST_BYTES, 0).decode("ascii") or None
        return None
    finally:
        os.close(file)


def _lock(file: int) -> None:
    """Raises BlockingIOError where another server has it."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


def _runtime() -> Path:
    return Path(os.environ.get(RUNTIME) or f"/tmp/apportion-{os.geteuid()}")


def _is_private(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS


def _name(address: str, port: int) -> str:
    return f"{address}-{port}.key"
