"""Bodies of requests: read up to a limit, in bounded time, then parsed into what they must be."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope

from apportion.ir.errors import ConfigError
from apportion.service.errors import LimitError, OverloadError, ServiceError, TooLargeError
from apportion.service.http.api.problems import MediaTypeError, SlowBodyError
from apportion.service.protocol import JSON

T = TypeVar("T")
R = TypeVar("R")

_LINGER_S = 1.0
_MAX_CONTAINERS = 1 << 17
_MAX_KEYS = 1 << 18
_MAX_ITEMS = 1 << 21
_LARGE = 256 << 10


@dataclass(frozen=True)
class Patience:
    """Seconds that a client may take to send a request's line and headers, and its whole body; and to take anything of
    an answer."""

    head_s: float = 10.0
    body_s: float = 30.0  # 16 MiB at 4.5 Mbit/s
    write_s: float = 30.0


class Room:
    """What bodies under way take, of all clients together: at most `most` bytes."""

    def __init__(self, most: int) -> None:
        self._most, self.held = most, 0
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def turn(self, size: int) -> AsyncIterator[None]:
        """For the parsing of a body: of large ones one at a time, as they become thirty times as large in it."""
        async with self._turn if size > _LARGE else nullcontext():
            yield

    @contextmanager
    def part(self) -> Iterator[Callable[[int], None]]:
        """For one body: to be called with the size of whatever came. It raises OverloadError beyond all room."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.held + size > self._most:  # of what is refused no more is kept than came before
                detail = (
                    f"requests of {self._most} bytes are being received, this server has no room for more"
                )
                raise OverloadError(detail, retry_after=1.0)
            mine, self.held = mine + size, self.held + size

        try:
            yield take
        finally:
            self.held -= mine


class ClientGoneError(Exception):
    """Nobody waits for the answer."""


async def read(
    scope: Scope, receive: Receive, most: int, timeout_s: float, take: Callable[[int], None]
) -> bytes:
    """The body. take: see `Room.part`. Raises TooLargeError beyond `most` bytes, whatever the headers say,
    OverloadError, SlowBodyError, MediaTypeError."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    _check_type(headers)
    _check_length(headers.get(b"content-length"), most)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(receive, most, take)
    except TimeoutError:
        raise SlowBodyError(f"the body was not there after {timeout_s:g} s") from None
    except ServiceError:
        await _linger(receive, most)
        raise


def _check_type(headers: dict[bytes, bytes]) -> None:
    # Browsers ask before they send this type to another site, so no page can make a job on the server of its reader.
    named = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if named != JSON.encode():
        raise MediaTypeError(f"Content-Type is {named.decode('latin-1')!r}, expected {JSON}")
    coding = headers.get(b"content-encoding", b"identity").lower()
    if coding != b"identity":
        raise MediaTypeError(f"Content-Encoding is {coding.decode('latin-1')!r}, send the JSON as it is")


def _check_length(told: bytes | None, most: int) -> None:
    if told is not None and told.isdigit() and (size := int(told[:20])) > most:
        raise _too_large(size, most)


def _too_large(size: int, most: int) -> TooLargeError:
    return TooLargeError(
        f"the body has {size} bytes or more, this server takes {most}: send fewer sequences at once"
    )


async def until_gone(receive: Receive) -> None:
    """Returns when the client has ended the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read(receive: Receive, most: int, take: Callable[[int], None]) -> bytes:
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > most:
            raise _too_large(size, most)
        take(len(part))
        parts.append(part)
    return b"".join(parts)


async def _linger(receive: Receive, most: int) -> None:
    """Take the rest for a moment: who is still sending when the connection ends may lose the answer."""
    try:
        async with asyncio.timeout(_LINGER_S):
            while most > 0:
                message = await receive()
                most -= len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def parse(data: bytes, kind: type[T], then: Callable[[T], R]) -> R:
    """What `then` makes of the body as `kind`; in a thread, as a short one may say much. Raises ConfigError, which
    names the field, and what `then` raises."""
    return await asyncio.to_thread(lambda: then(_parse(data, kind)))


def _parse(data: bytes, kind: type[T]) -> T:
    _check_size(data)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at `$")
        raise ConfigError(_field(rule, place), _value(data, place), rule, "see /docs for the form") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("body", _start(data), f"is not JSON: {error}", "send one JSON object") from None


def _check_size(data: bytes) -> None:
    """Bounds how long parsing holds up everybody else, as it lets no other thread run: 5 million empty lists in 16 MiB
    took seconds and 500 MB."""
    for what, found, most in (
        ("lists and objects", data.count(b"[") + data.count(b"{"), _MAX_CONTAINERS),
        ("keys", data.count(b":"), _MAX_KEYS),
        ("items", data.count(b","), _MAX_ITEMS),
    ):
        if found > most:
            raise LimitError(
                f"the body has {found} {what}, this server reads {most}: write a batch as {{lengths, mask}}, without "
                "an object for each sequence",
                field="body",
            )


def _field(rule: str, place: str) -> str:
    """The field that msgspec's message is about: `$.a[0]` -> `a[0]`, a missing or unknown one by its name."""
    where = place.removesuffix("`").lstrip(".")
    if "required field" in rule or "unknown field" in rule:
        where = ".".join(filter(None, [where, rule.rpartition("field `")[2].rstrip("`")]))
    return where or "body"


def _value(data: bytes, place: str) -> Any:
    """What the body has at msgspec's `.a[0]`; "..." where that does not say it all."""
    if not place:
        return "the body"
    if place.endswith(".key`"):
        return "(hidden)"
    try:
        found = msgspec.json.decode(data)
        for name, index in re.findall(r"\.([^.\[\]`]+)|\[([0-9]+)\]", place):
            found = found[name] if name else found[int(index)]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return "..."
    return "..." if "[...]" in place or isinstance(found, dict | list) else found


def _start(data: bytes) -> str:
    return data[:64].decode("utf-8", "replace")
