"""Who created, deleted and rekeyed what, and who was refused: when, and from where. One JSON object a line.

{"time":"2026-03-01T12:00:00.123Z","level":"INFO","event":"audit","action":"delete","job":"run1","who":"admin",...}
"""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from starlette.types import Scope

from apportion.ir.errors import ConfigError
from apportion.service.http.logs import Fact, copying, log

#: of a request's scope: whose key it has ("admin", "submit:ID", "read:ID"), and of what job it is
WHO, JOB = "apportion.who", "apportion.job"
NAME = "audit.log"

_ACTIONS = {
    ("POST", "/v1/jobs"): "create",
    ("DELETE", "/v1/jobs/{job}"): "delete",
    ("POST", "/v1/jobs/{job}/keys"): "add-key",
    ("DELETE", "/v1/jobs/{job}/keys/{key}"): "revoke-key",
}
_REFUSED = (401, 403)
_FILE_BYTES, _FILES = 8 << 20, 3
_PAUSE_S = 10.0  # between lines of refusals of one client: guesses must not push out what else there is
_CLIENTS = 1024  # whose refusals are counted at a time


class Audit:
    """Lines for the audit log: `auditing_in` says where that is."""

    def __init__(self) -> None:
        # address -> last line, refusals since
        self._refused: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def request(self, scope: Scope, route: str, status: int) -> None:
        """A request to the control plane that was answered."""
        self.refused(scope, status)
        action = _ACTIONS.get((scope["method"], route))
        if action is not None and status < 300:
            found = scope.get("path_params", {})
            _write(action, scope, job=scope.get(JOB), who=scope.get(WHO), key=found.get("key"), status=status)

    def refused(self, scope: Scope, status: int) -> None:
        """Any request, with the status of its answer; of those of one address in a row the first and a count."""
        if status not in _REFUSED:
            return
        address, now_s = (client(scope) or "").rpartition(":")[0], time.monotonic()
        before_s, count = self._refused.pop(address, (0.0, 0))
        if before_s and now_s - before_s < _PAUSE_S:
            self._refused[address] = before_s, count + 1
            return
        self._refused[address] = now_s, 0
        while len(self._refused) > _CLIENTS:
            self._refused.popitem(last=False)
        _write(
            "refused", scope, method=scope["method"], path=scope["path"], status=status, before=count or None
        )


def client(scope: Scope) -> str | None:
    """Address and port of whoever asked, or of the proxy before it."""
    return "{}:{}".format(*scope["client"]) if scope.get("client") else None


def _write(action: str, scope: Scope, **facts: Fact) -> None:
    log("audit", logging.INFO, error=None, action=action, client=client(scope), **facts)


class _File:
    """A file that nobody else reads, and those before it. A full disk stops nothing: lines are lost and counted."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, _opened(path)

    def write(self, line: str) -> None:
        if os.fstat(self._file).st_size > _FILE_BYTES:
            for number in range(_FILES - 1, 0, -1):
                with suppress(FileNotFoundError):
                    newer = f".{number - 1}" if number > 1 else ""
                    os.replace(f"{self._path}{newer}", f"{self._path}.{number}")
            before, self._file = self._file, _opened(self._path)
            os.close(before)
        os.write(self._file, line.encode())

    def close(self) -> None:
        os.close(self._file)


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


@contextmanager
def auditing_in(folder: Path) -> Iterator[None]:
    """While this lasts, what is audited goes to a file in a private folder, too; three of some MiB are kept. Raises
    ConfigError."""
    try:
        file = _File(folder / NAME)
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise ConfigError("--dir", str(folder / NAME), rule, "let this user write it") from None
    with copying("audit", file.write, file.close):
        yield
