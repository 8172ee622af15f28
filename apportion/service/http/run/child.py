"""A server as a child process, for demos and tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from apportion.ir.errors import ApportionError
from apportion.service.private import admin_key_of
from apportion.service.tied import tied

_GRACE_S = 5.0  # beyond its own drain


class ServerStartError(ApportionError, RuntimeError):
    """The server ended before it listened; the message is what it said."""


@dataclass(frozen=True)
class Serving:
    """A server that listens. process: its own to wait for or to signal."""

    url: str
    pid: int
    process: subprocess.Popen[bytes]

    @property
    def admin_key(self) -> str | None:
        """That the server has made, for clients that go through a proxy; others find it by themselves."""
        return admin_key_of(self.url)


class _Said(msgspec.Struct):
    url: str = ""
    pid: int = 0
    error: dict[str, str] | None = None


@contextmanager
def serving(
    folder: Path | str,
    *,
    port: int = 0,
    workers: int | str = 1,
    options: Sequence[str] = (),
    log: Path | None = None,
    drain_s: float = 10.0,
) -> Iterator[Serving]:
    """`apportion serve` on loopback, until the block ends: SIGTERM then, SIGKILL if it has not ended after `drain_s`.
    It also ends with this process, however that ends, and where it is still starting.

    port: 0 for a free one. options: further ones of the command. log: file that its log is added to. Raises
    ServerStartError."""
    command = tied(signal.SIGTERM, "-m", "apportion", "serve", "--json", "--dir", str(folder))
    command += ["--port", str(port), "--workers", str(workers), "--parent", str(os.getpid()), *options]
    with open(log or "/dev/null", "ab") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors)
    try:
        yield _announced(process)
    finally:
        _end(process, drain_s + _GRACE_S)


def _announced(process: subprocess.Popen[bytes]) -> Serving:
    """Waits for the one line that it prints."""
    assert process.stdout is not None  # for mypy: it is a pipe
    line = process.stdout.readline()
    said = msgspec.json.decode(line, type=_Said) if line else _Said(error={"message": "it ended at once"})
    if said.error is not None:
        raise ServerStartError(f"no server: {said.error['message']}")
    return Serving(said.url, said.pid, process)


def _end(process: subprocess.Popen[bytes], wait_s: float) -> None:
    process.terminate()
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    finally:
        if process.stdout is not None:
            process.stdout.close()
