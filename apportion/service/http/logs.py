"""What the server writes about itself, one line an event: for people, or as JSON for machines.

2026-03-01T12:00:00.123Z INFO    request method=PUT path=/v1/jobs/run1/... status=201 ms=3.1 request_id=5f0c...
{"time":"2026-03-01T12:00:00.123Z","level":"INFO","event":"request","method":"PUT",...}
"""

from __future__ import annotations

import logging
import secrets
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec

Fact = str | int | float | bool | None
Format = Literal["text", "json"]

_LOG = logging.getLogger("apportion.service")
_QUIET = ("uvicorn.error", "asyncio")  # whoever connects can make them warn
_ID = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_.")


def log(event: str, level: int = logging.INFO, *, error: BaseException | None = None, **facts: Fact) -> None:
    """One event and its facts; of an error also where it came from."""
    if _LOG.isEnabledFor(level):
        _LOG.log(level, event, extra={"facts": facts}, exc_info=error)


def configure(form: Format, stream: TextIO) -> None:
    """Send all that this process logs to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Lines() if form == "text" else _Objects())
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


def request_id(given: bytes | None) -> str:
    """The client's own, if it is 1 to 64 letters, digits, `-`, `_` or `.`; else 16 random hex digits."""
    text = "" if given is None else given[:65].decode("latin-1")
    return text if 0 < len(text) <= 64 and _ID.issuperset(text) else secrets.token_hex(8)


def _facts(record: logging.LogRecord) -> dict[str, Fact]:
    found: dict[str, Fact] = getattr(record, "facts", {})
    return {name: fact for name, fact in found.items() if fact is not None}


def _time(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


class _Objects(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        head = {"time": _time(record), "level": record.levelname, "event": record.getMessage()}
        trace = {"trace": self.formatException(record.exc_info)} if record.exc_info else {}
        return msgspec.json.encode({**head, **_facts(record), **trace}).decode()


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={_shown(fact)}" for name, fact in _facts(record).items())
        trace = "\n" + self.formatException(record.exc_info) if record.exc_info else ""
        return f"{_time(record)} {record.levelname:<7} {record.getMessage()}{facts}{trace}"


def _shown(fact: Fact) -> str:
    """What a client chose must not end the line, nor pass for another fact."""
    text = f"{fact:.6g}" if isinstance(fact, float) else str(fact)
    safe = text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if safe else msgspec.json.encode(text).decode()
