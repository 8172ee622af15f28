"""What the server writes about itself, one line an event: for people, or as JSON for machines.

2026-03-01T12:00:00.123Z INFO    request method=PUT path=/v1/jobs/run1/... status=201 ms=3.1 request_id=5f0c...
{"time":"2026-03-01T12:00:00.123Z","level":"INFO","event":"request","method":"PUT",...}
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from queue import Empty, Full, Queue
from typing import Literal, TextIO

import msgspec

Fact = str | int | float | bool | None
Format = Literal["text", "json"]

_LOG = logging.getLogger("apportion.service")
_MOST_LINES = 10_000  # that wait to be written
_MOST_CHARS = 1000  # of a fact: clients choose paths
_MOST_TRACE = 16_000  # characters
_FLUSH_S = 1.0
_QUIET = ("uvicorn.error", "asyncio")  # whoever connects can make them warn
_ID = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.")


def log(event: str, level: int = logging.INFO, *, error: BaseException | None = None, **facts: Fact) -> None:
    """One event and its facts; of an error also where it came from."""
    if _LOG.isEnabledFor(level):
        _LOG.log(level, event, extra={"facts": facts}, exc_info=error)


@contextmanager
def logging_to(stream: TextIO, form: Format) -> Iterator[None]:
    """While this lasts, what this process logs goes to `stream`, too. Who logs never waits for whoever reads. Levels
    stay as they are then: the package's is INFO."""
    handler = _Beside(*_write_to(stream))
    handler.setFormatter(_Lines() if form == "text" else _Objects())
    logging.getLogger("apportion").setLevel(logging.INFO)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)
    with _added(logging.getLogger(), handler):
        yield


@contextmanager
def copying(event: str, write: Callable[[str], object], end: Callable[[], object]) -> Iterator[None]:
    """While this lasts, what is logged under this name goes to `write` as well, as JSON; `end` comes after the last."""
    handler = _Beside(write, end)
    handler.setFormatter(_Objects())
    handler.addFilter(lambda record: record.getMessage() == event)
    with _added(_LOG, handler):
        yield


@contextmanager
def _added(logger: logging.Logger, handler: logging.Handler) -> Iterator[None]:
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


class _Beside(logging.Handler):
    """Writes lines in a thread of its own; those that find no room are counted, and the count is written later. end:
    called after the last, when it is closed."""

    def __init__(self, write: Callable[[str], object], end: Callable[[], object]) -> None:
        super().__init__()
        self._write, self._end, self._lost = write, end, 0
        self._ended = False
        self._lines: Queue[str | threading.Event | None] = Queue(_MOST_LINES)
        threading.Thread(target=self._run, name="apportion-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except Full:
            self._lost += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until what came before is written: `_FLUSH_S` seconds for room and as many for the writing at most."""
        if self._ended:  # `logging` does so again at the end of the process
            return
        written = threading.Event()
        try:
            self._lines.put(written, timeout=_FLUSH_S)
        except Full:
            return
        written.wait(_FLUSH_S)

    def close(self) -> None:
        """Write what is there, as `flush` does, and nothing more."""
        self.flush()
        if self._ended:
            return
        self._ended = True
        super().close()
        while True:  # where nobody reads, the end takes the place of a line
            with suppress(Full):
                self._lines.put_nowait(None)
                return
            with suppress(Empty):
                self._lines.get_nowait()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
                continue
            self._put(line)
            if self._lost and self._lines.empty():
                lost, self._lost = self._lost, 0
                told = {"msg": "lines lost", "levelno": logging.WARNING, "levelname": "WARNING"}
                self._put(self.format(logging.makeLogRecord({**told, "facts": {"lines": lost}})))
        self._end()

    def _put(self, line: str) -> None:
        try:
            self._write(f"{line}\n")
        except (OSError, ValueError):  # nobody will ever read it; a stream in memory was closed
            self._lost += 1


def _write_to(stream: TextIO) -> tuple[Callable[[str], object], Callable[[], object]]:
    """Writes and ends. Past the stream's own buffer, whose lock would be held at the end of the process where nobody
    reads; on a descriptor of its own, as a socket may get the number of a stream that was closed."""
    try:
        descriptor = os.dup(stream.fileno())
    except OSError:  # in memory
        return stream.write, lambda: None

    def write(line: str) -> None:
        data = line.encode()
        while data:
            data = data[os.write(descriptor, data) :]

    return write, lambda: os.close(descriptor)


def request_id(given: bytes | None) -> str:
    """The client's own, if it is 1 to 64 letters, digits, `-`, `_` or `.`; else 16 random hex digits."""
    text = "" if given is None else given[:65].decode("latin-1")
    return text if 0 < len(text) <= 64 and _ID.issuperset(text) else secrets.token_hex(8)


def _facts(record: logging.LogRecord) -> dict[str, Fact]:
    found: dict[str, Fact] = getattr(record, "facts", {})
    return {name: _bounded(fact) for name, fact in found.items() if fact is not None}


def _bounded(fact: Fact) -> Fact:
    if isinstance(fact, str) and len(fact) > _MOST_CHARS:
        return f"{fact[:_MOST_CHARS]}... ({len(fact)} characters)"
    return fact


def _time(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


class _Objects(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = {"time": _time(record), "level": record.levelname, "event": record.getMessage()}
        trace = {"trace": _trace(self, record)} if record.exc_info else {}
        return msgspec.json.encode({**head, **_facts(record), **trace}).decode()


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_shown(fact)}" for name, fact in _facts(record).items())
        trace = "\n" + _trace(self, record) if record.exc_info else ""
        return f"{_time(record)} {record.levelname:<7} {record.getMessage()}{facts}{trace}"


def _trace(form: logging.Formatter, record: logging.LogRecord) -> str:
    return form.formatException(record.exc_info)[-_MOST_TRACE:] if record.exc_info else ""


def _shown(fact: Fact) -> str:
    """What a client chose must not end the line, nor pass for another fact."""
    text = f"{fact:.6g}" if isinstance(fact, float) else str(fact)
    safe = text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if safe else msgspec.json.encode(text).decode()
