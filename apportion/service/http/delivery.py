"""What ranks read, as plain ASGI: one plan, or a stream of them.

    peek ── there ───► 200 or 304                       no task, no timer, nothing logged
         └─ not yet ─► fetch, up to wait_s ──► 200, 304 or 202

A stream holds a cursor and no queue: the next body is taken when the client has taken the one before.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from time import monotonic
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, known, number
from apportion.ir.isa import VERSION
from apportion.service.engine import Body, Engine
from apportion.service.errors import GoneError, NotAcceptableError, NotFoundError, OverloadError
from apportion.service.http.api.bodies import ClientGoneError, until_gone
from apportion.service.http.api.models import MAX_EPOCH, MAX_ITERATION, MAX_RANK, MAX_WINDOW, NAME, Waiting
from apportion.service.http.api.problems import MethodError
from apportion.service.http.auth import Keys, given
from apportion.service.http.metrics import Traffic
from apportion.service.http.streams import RESPOND, Stream, StreamPlace
from apportion.service.limits import Limits
from apportion.service.protocol import FRAMES, JSON, PLAN, PLAN_VERSION, WINDOW

MAX_WAIT_S = 3600

_EPOCH = r"/v1/jobs/([A-Za-z0-9_-][A-Za-z0-9_.-]{0,63})/epochs/([0-9]{1,8})"
_PLAN = re.compile(_EPOCH + r"/iterations/([0-9]{1,15})/ranks/([0-9]{1,5})/plan")
_STREAM = re.compile(_EPOCH + r"/ranks/([0-9]{1,5})/stream")
_LIKE_PLAN = re.compile(r"/v1/jobs/([^/]+)/epochs/([^/]+)/iterations/([^/]+)/ranks/([^/]+)/plan")
_LIKE_STREAM = re.compile(r"/v1/jobs/([^/]+)/epochs/([^/]+)/ranks/([^/]+)/stream")
_NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")

_PLAN_HEADERS = [(b"content-type", PLAN_VERSION.encode()), (b"cache-control", b"private, no-cache")]
_PLAN_HEAD = b"HTTP/1.1 200 OK\r\n%bcontent-length: %%d\r\netag: %%b\r\n" % b"".join(
    b"%b: %b\r\n" % pair for pair in _PLAN_HEADERS
)
_NOTHING: Mapping[str, Any] = {}
_WAIT_HEADERS = [(b"content-type", JSON.encode()), (b"cache-control", b"no-store")]
_PLAIN_ACCEPTS = (None, b"*/*", PLAN_VERSION.encode())

App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(slots=True)
class AskedHeaders:
    """The headers that matter here, as they were sent. known: If-None-Match."""

    authorization: bytes | None = None
    accept: bytes | None = None
    known: bytes | None = None


class Delivery:
    """Two routes in front of the control plane."""

    def __init__(self, engine: Engine, keys: Keys, limits: Limits, traffic: Traffic) -> None:
        self._engine, self._keys, self._limits, self._traffic = engine, keys, limits, traffic

    def find(self, path: str) -> App | None:
        """What answers a path, None where the control plane does. Raises ConfigError for a number or name in it that
        cannot be."""
        if found := _PLAN.fullmatch(path):
            return partial(self._plan, found)
        if found := _STREAM.fullmatch(path):
            return partial(self._stream, found)
        if found := _LIKE_PLAN.fullmatch(path) or _LIKE_STREAM.fullmatch(path):
            check_path(*found.groups())
        return None

    @staticmethod
    def is_plan(path: str) -> bool:
        """Whether a plan is asked for there, be it with numbers that cannot be."""
        return _LIKE_PLAN.fullmatch(path) is not None

    # ---- one plan

    async def _plan(self, found: re.Match[str], scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            raise MethodError(scope["method"], "GET, HEAD")
        job, epoch, iteration, rank = found[1], int(found[2]), int(found[3]), int(found[4])
        asked, begin_s = self._admit(job, scope, PLAN), monotonic()
        wait_s = min(_wait_s(scope["query_string"]), self._limits.wait_s)
        takes = scope["method"] == "GET"
        body = self._engine.peek(job, epoch, iteration, rank, takes)
        if body is None:
            fetching = self._engine.fetch(job, epoch, iteration, rank, wait_s, takes)
            body = await (_while_there(receive, fetching) if wait_s else fetching)
        if body is None:
            await self._not_yet(iteration, wait_s > 0, send)
        else:
            await self._answer(body, asked.known, scope, send)
        self._traffic.plan_s.observe(monotonic() - begin_s)

    def _admit(self, job: str, scope: Scope, kind: str) -> AskedHeaders:
        """The headers, once key and format were found right. Raises AuthError, NotAcceptableError."""
        asked = _asked(scope["headers"])
        sent = given(asked.authorization)
        self._keys.check_job(self._engine.keys(job), sent)
        if asked.accept not in _PLAIN_ACCEPTS:
            _check_accept(asked.accept or b"", kind)
        return asked

    async def _answer(self, body: Body, known: bytes | None, scope: Scope, send: Send) -> None:
        etag = b'"%b"' % body.etag.encode()
        if known is not None and _is_known(known, etag):
            self._traffic.plans[304] += 1
            await _respond(send, 304, [(b"etag", etag), *_PLAN_HEADERS[1:]], b"")
            return
        self._traffic.plans[200] += 1
        data = b"" if scope["method"] == "HEAD" else body.data
        self._traffic.plan_bytes += len(data)
        write = scope.get("extensions", _NOTHING).get(RESPOND)
        if write is None or not write(_PLAN_HEAD % (len(body.data), etag), data):
            headers = [*_PLAN_HEADERS, (b"content-length", b"%d" % len(body.data)), (b"etag", etag)]
            await _respond(send, 200, headers, data)

    async def _not_yet(self, iteration: int, waited: bool, send: Send) -> None:
        """Who has waited for it may ask again at once, unless the server goes."""
        self._traffic.plans[202] += 1
        data = msgspec.json.encode(Waiting(iteration))
        again = b"0" if waited and not self._engine.draining else b"1"
        headers = [*_WAIT_HEADERS, (b"retry-after", again), (b"content-length", b"%d" % len(data))]
        await _respond(send, 202, headers, data)

    # ---- a stream

    async def _stream(self, found: re.Match[str], scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "GET":
            raise MethodError(scope["method"], "GET")
        place = StreamPlace(found[1], int(found[2]), int(found[3]))
        self._admit(place.job, scope, FRAMES)
        start, window = _span(scope["query_string"])
        self._check_stream(place, start)
        stream = Stream(self._engine, self._limits, self._traffic, place)
        await stream.run(start, window, scope, receive, send)

    def _check_stream(self, place: StreamPlace, start: int) -> None:
        """While there still is a status to tell it by."""
        ranks = self._engine.job(place.job).spec.ranks
        epoch = self._engine.epoch_state(place.job, place.epoch)
        if place.rank >= ranks:
            raise NotFoundError(
                f"job {place.job} has no rank {place.rank}, it has {ranks} from 0 on", field="rank"
            )
        if start < epoch.floor:
            raise GoneError(
                f"iteration {start} is no longer kept, those from {epoch.floor} on are", field="from"
            )
        if self._traffic.streams >= self._limits.streams:
            most = self._limits.streams
            raise OverloadError(f"{most} streams are open, this server has no more", retry_after=2.0)


async def _while_there(receive: Receive, work: Coroutine[Any, Any, Body | None]) -> Body | None:
    """What `work` returns. Raises ClientGoneError when nobody waits for it any more, and ends it."""
    gone, working = asyncio.create_task(until_gone(receive)), asyncio.create_task(work)
    try:
        await asyncio.wait((gone, working), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def _respond(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _asked(headers: list[tuple[bytes, bytes]]) -> AskedHeaders:
    asked = AskedHeaders()
    for name, value in headers:
        if name == b"authorization":
            asked.authorization = value
        elif name == b"accept":
            asked.accept = value if asked.accept is None else asked.accept + b"," + value
        elif name == b"if-none-match":
            asked.known = value if asked.known is None else asked.known + b"," + value
    return asked


def _is_known(known: bytes, etag: bytes) -> bool:
    """RFC 9110, 13.1.2: weak comparison, any of a list."""
    return known == etag or any(tag.strip().removeprefix(b"W/") in (etag, b"*") for tag in known.split(b","))


@lru_cache(maxsize=64)
def _check_accept(accept: bytes, kind: str) -> None:
    """Raises NotAcceptableError where the header names the format in other major versions only."""
    ranges = [_media_range(part) for part in accept.decode("latin-1").lower().split(",")]
    taken = [(name, version) for name, version, weight in ranges if weight > 0]
    named = [version for name, version in taken if name == kind]
    anything = any(name in ("*/*", "application/*") for name, _ in taken)
    if named and not anything and not {"", str(VERSION[0])} & set(named):
        raise NotAcceptableError(
            f"the client reads version {', '.join(named)} of the format, this server writes {VERSION[0]}: "
            "install one release on both sides",
            field="Accept",
        )


def _media_range(text: str) -> tuple[str, str, float]:
    """(type, version or "", weight)."""
    name, *parameters = (part.strip() for part in text.split(";"))
    held = dict(part.split("=", 1) for part in parameters if "=" in part)
    try:
        weight = float(held.get("q", "1"))
    except ValueError:
        weight = 1.0
    return name, held.get("version", "").strip('" '), weight


# ---------------------------------------------------------------------------------------------- what the URL says


def check_path(job: str, epoch: str, *numbers: str) -> None:
    """Raises ConfigError for the first part that cannot be one."""
    if not re.fullmatch(NAME, job):
        rule = "must be 1 to 64 letters, digits, '_', '-' or '.', and not begin with '.'"
        raise ConfigError("job", job, rule, "write the name that the job was created with")
    path_number("epoch", epoch, 1, MAX_EPOCH)
    limits = (("iteration", MAX_ITERATION), ("rank", MAX_RANK))
    for (field, high), text in zip(limits[-len(numbers) :], numbers, strict=True):
        path_number(field, text, 0, high)


def path_number(field: str, text: str, low: int, high: int) -> int:
    """A number of a path or query: decimal digits. Raises ConfigError."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ConfigError(field, text, f"must be a whole number in [{low}, {high}]", "write decimal digits")
    return integer(field, int(text), low, high)


@lru_cache(maxsize=256)
def _wait_s(query: bytes) -> float:
    text = _query(query, "wait_s").get("wait_s", "0")
    if not _NUMBER.fullmatch(text):
        raise ConfigError("wait_s", text, "must be a number of seconds", "write wait_s=30")
    wait_s = number("wait_s", float(text))
    if wait_s > MAX_WAIT_S:
        raise ConfigError("wait_s", wait_s, f"must be at most {MAX_WAIT_S}", "ask again after that")
    return wait_s


@lru_cache(maxsize=256)
def _span(query: bytes) -> tuple[int, int]:
    """(first iteration, most plan frames)."""
    found = _query(query, "from", "window")
    start = path_number("from", found.get("from", "0"), 0, MAX_ITERATION)
    return start, path_number("window", found.get("window", str(WINDOW)), 1, MAX_WINDOW)


def _query(query: bytes, *allowed: str) -> dict[str, str]:
    """The parameters, each at most once. Raises ConfigError."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    found = dict(pairs)
    known("query", found, allowed)
    if len(pairs) != len(found):
        raise ConfigError("query", query.decode("latin-1"), "says a parameter twice", "say it once")
    return found
