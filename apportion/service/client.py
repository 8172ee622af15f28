"""Client of planning servers: every call ends within its timeout, whatever the server does.

    caller's thread ── Client ── httpx.AsyncClient, on one event loop per process, in a separate thread
                                   ├── server 1      preferred while it answers
                                   └── server 2, …

A call is retried on transient failures, on one server after the other. The event loop's timeouts bound the whole call:
name lookup, connecting, headers, body and pauses. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Generator, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import aclosing
from functools import cache, partial
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple, TypeVar

import httpx
import msgspec

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job, encode_request
from apportion.ir.bytes.transport import decompress
from apportion.ir.errors import ConfigError, DecodeError
from apportion.ir.fields import integer, number
from apportion.ir.request.batch import Batch
from apportion.ir.version import __version__
from apportion.service.event_loop import event_loop
from apportion.service.frames import ALIVE, HEAD, PROBLEM_FRAME
from apportion.service.pack import MAX_BODY
from apportion.service.problems import (
    BadAnswerError,
    NotReadyError,
    ServiceError,
    UnknownPlanError,
    UnreachableError,
)

JSON, PLAN, PAGE = "application/json", "application/vnd.apportion.plan", "text/html"
CONNECT_S, MAX_HOLD_S = 3.0, 60.0  # limits on connecting, and on a server's wait before it answers
SILENCE_S = 6.0  # longest silence of a stream: three ALIVE intervals
SLACK_S = 0.3  # grace period after a call's timeout, for an answer at the last moment
PAUSE_S, MAX_PAUSE_S = 0.1, 2.0  # longest pause before the second attempt, and before any attempt
MAX_PROBLEM, MAX_STREAM_KEYS = 64 << 10, 32  # bytes of a problem; keys in one request, 2.2 kB of URL
T = TypeVar("T")


class _Request(NamedTuple):
    """A request of the client. path: has {wait_s:.3f} if the server may wait before it answers, for at most `hold_s`;
    key: the plan's; long: True if an attempt may take all the remaining time, as the answer takes long to compute."""

    method: str
    path: str
    key: bytes = b""
    accept: str = "*/*"
    body: bytes | None = None
    hold_s: float = 0.0
    long: bool = False


class Client:
    """Client of one or more servers. url: one or several, tried in turn, starting with the one that answered last.
    token: by default the environment variable APPORTION_TOKEN. ca: PEM file of certificates to trust instead of the
    system's. timeout_s: limit of every call, after which it raises `UnreachableError`. job: digest of the job, by which
    load balancers distinguish jobs. Any thread may use the client, also after a fork. Raises ConfigError."""

    def __init__(
        self,
        url: str | Sequence[str],
        token: str | None = None,
        *,
        ca: str | Path | None = None,
        timeout_s: float = 10.0,
        job: bytes = b"",
    ) -> None:
        self.servers = [_server(server) for server in ([url] if isinstance(url, str) else url or [""])]
        self.timeout_s = number("timeout_s", timeout_s, exclusive=True)
        self._token = (os.environ.get("APPORTION_TOKEN", "") if token is None else token).strip()
        if not re.fullmatch(r"[\x21-\x7e]*", self._token):
            raise ConfigError("token", "...", "must be printable ASCII without spaces", "copy it again")
        headers = {"User-Agent": f"apportion/{__version__}", "Accept-Encoding": "zstd"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        if job:
            headers["Apportion-Job"] = job.hex()[:16]
        times = httpx.Timeout(None, connect=CONNECT_S)
        session = partial(httpx.AsyncClient, verify=_tls(ca), headers=headers, timeout=times)
        self._sessions = defaultdict[int, httpx.AsyncClient](session)  # by process, created on its event loop
        self._calls: set[Future[Any]] = set()
        self._closed = False

    def submit(self, key: bytes, request: bytes, ahead: int = 0) -> None:
        """Submits a request for planning; idempotent. key: `Job.request_key`; request: `encode_request`; ahead: the
        number of iterations before it is needed. Raises ServiceError, UnreachableError."""
        path = f"/v1/plans/{key.hex()}?ahead={integer('ahead', ahead, 0)}"
        self._send(_Request("PUT", path, key, JSON, request), self.timeout_s)

    def fetch(self, key: bytes, rank: int, wait_s: float, *, ranks: int | None = None) -> IterationSlice:
        """Fetches a rank's slice of a submitted request's plan, checked to be for that rank (and for `ranks` ranks).
        Ends within the longer of `wait_s` and `timeout_s`: raises NotReadyError if the plan is not ready by `wait_s`.
        Raises UnknownPlanError, ServiceError, UnreachableError."""
        return _decode_slice(self._run(self._slice(key, rank, wait_s), self._limit(wait_s)), key, rank, ranks)

    def stream(
        self, keys: Sequence[bytes], rank: int, wait_s: float, *, ranks: int | None = None
    ) -> Generator[IterationSlice, None, None]:
        """Yields a rank's slices of several plans, in the order of `keys`, from one response that sends each as soon as
        it is ready; raises the errors of `fetch` at the key concerned. Slices missing from the stream are fetched."""
        stream = _SliceStream(self, keys, rank, wait_s)
        try:
            for index, key in enumerate(keys):
                yield _decode_slice(self._run(stream.slice(index), self._limit(wait_s)), key, rank, ranks)
        finally:
            stream.close()

    def plan(self, job: Job, batches: Sequence[Batch], accept: str = JSON, wait_s: float = 600.0) -> bytes:
        """Plans a request and waits for it. accept: `JSON` (key, id, report), `PLAN` (the bytes of a plan file for
        one microbatch, else of an iteration plan) or `PAGE` (HTML). Raises ServiceError, UnreachableError."""
        request = _Request("POST", "/v1/plan", b"", accept, encode_request(job, batches), long=True)
        return self._send(request, self._limit(wait_s))

    def state(self, key: bytes) -> dict[str, Any]:
        """The state of a request on the server, with the report of its plan. Raises UnknownPlanError, ServiceError,
        UnreachableError."""
        body = self._send(_Request("GET", f"/v1/plans/{key.hex()}", key, JSON), self.timeout_s)
        if not (state := _parse_json(body)):
            raise BadAnswerError(f"the answer is not a JSON object: {body[:60]!r}")
        return state

    def page(self, key: bytes, wait_s: float = 60.0) -> bytes:
        """The report page of a plan, HTML. Raises the errors of `state`."""
        request = _Request("GET", f"/v1/plans/{key.hex()}", key, PAGE, long=True)
        return self._send(request, self._limit(wait_s))

    def close(self) -> None:
        """Ends the calls of all threads, with UnreachableError, and the connections; idempotent."""
        self._closed = True
        for call in list(self._calls):
            call.cancel()
        if session := self._sessions.pop(os.getpid(), None):
            wait([asyncio.run_coroutine_threadsafe(session.aclose(), event_loop())], SLACK_S)

    def _limit(self, wait_s: float) -> float:
        return max(wait_s, self.timeout_s) + SLACK_S

    def _send(self, request: _Request, total_s: float) -> bytes:
        return _decompress(self._run(self._complete_answer(request, total_s), total_s)[1])

    def _run(self, work: Coroutine[Any, Any, T], limit_s: float) -> T:
        """Runs `work` on the event loop and returns its result; the thread waits for `limit_s` plus a grace period."""
        call = asyncio.run_coroutine_threadsafe(work, event_loop())
        self._calls.add(call)
        try:
            if self._closed:
                call.cancel()
            elif not wait([call], limit_s + SLACK_S).done:
                raise UnreachableError(f"{self.servers[0]}: no answer in time")
            return call.result()
        except CancelledError:
            raise UnreachableError("the client is closed") from None
        finally:
            call.cancel()
            self._calls.discard(call)

    async def _slice(self, key: bytes, rank: int, wait_s: float, start: float | None = None) -> bytes:
        """Polls for a slice; each request waits for at most half of `timeout_s`, so that a dead server is noticed."""
        now = asyncio.get_running_loop().time
        start = now() if start is None else start
        deadline, end = start + wait_s, start + self._limit(wait_s)
        path = f"/v1/plans/{key.hex()}/ranks/{rank}?wait_s={{wait_s:.3f}}"
        while True:
            sent_at = now()
            request = _Request("GET", path, key, hold_s=max(0.0, deadline - sent_at))
            status, body = await self._complete_answer(request, min(self.timeout_s, end - sent_at))
            if status != 202:
                return body
            if now() >= deadline:
                raise NotReadyError(f"the plan of {key.hex()[:16]} is not ready after {wait_s:g} s")
            if now() - sent_at < PAUSE_S:  # the server did not wait
                await asyncio.sleep(min(deadline - now(), 2 * PAUSE_S))

    async def _complete_answer(self, request: _Request, total_s: float) -> tuple[int, bytes]:
        """Status and body of the answer; raises the last failure if there is no time for another attempt."""
        now = asyncio.get_running_loop().time
        end, tried_until = now() + total_s, now() + min(total_s, self.timeout_s)
        servers, failures = self.servers, 0
        while True:
            index = failures % len(servers)
            attempt_s = (end - now()) / (1 if request.long else len(servers) - index)
            hold_s = min(request.hold_s, attempt_s / 2, MAX_HOLD_S)
            try:
                opening = self._open(request, servers[index], hold_s)
                async with asyncio.timeout(attempt_s), aclosing(await opening) as response:
                    body = await _body(response, MAX_BODY)
                self.servers = servers[index:] + servers[:index]
                return response.status_code, body
            except (httpx.HTTPError, OSError) as error:
                reason = str(error) or "no complete answer in time"
                failure: Exception = UnreachableError(f"{servers[index]}: {reason}")
                if "CERTIFICATE_VERIFY_FAILED" in reason:  # permanent
                    raise failure from None
            except ServiceError as error:
                if not error.is_transient:
                    raise
                failure = error
            failures += 1
            if failures % len(servers) == 0:  # every server has failed once more
                bound = min(MAX_PAUSE_S, PAUSE_S * 2 ** min(failures // len(servers), 10))
                pause_s = SystemRandom().uniform(0, bound)  # independent of a seed that all ranks share
                pause_s += getattr(failure, "retry_after", None) or 0.0
                if now() + pause_s >= tried_until:
                    raise failure
                await asyncio.sleep(pause_s)

    async def _open(self, request: _Request, server: str, hold_s: float) -> httpx.Response:
        """Opens an answer with a status below 300, its body still unread. Raises ServiceError, httpx.HTTPError."""
        headers = {"Accept": f"{request.accept}, application/problem+json"}
        if request.body is not None:
            headers["Content-Type"] = "application/msgpack"
        url, session = server + request.path.format(wait_s=hold_s), self._sessions[os.getpid()]
        call = session.build_request(request.method, url, content=request.body, headers=headers)
        response = await session.send(call, stream=True)
        if response.status_code < 300:
            return response
        async with aclosing(response):
            body = await _body(response, MAX_PROBLEM)
        retry_after = response.headers.get("Retry-After", "")
        raise self._problem(body, request.key, response.status_code, retry_after)

    def _problem(self, body: bytes, key: bytes, status: int = 0, retry_header: str = "") -> ServiceError:
        """The error in an answer, which is problem+json or in a proxy's own format."""
        fields = _parse_json(body) or {"type": "answer", "title": body[:200].decode("ascii", "replace")}
        kind = re.split("[/:#]", str(fields.get("type")))[-1][:64]
        if kind == "unknown-plan":
            return UnknownPlanError(key)
        detail = str(fields.get("detail") or fields.get("title"))[:1000].replace(self._token or "\0", "...")
        field = fields.get("field") and str(fields["field"])[:200]
        retry_after = float(retry_header[:6]) if retry_header.isdecimal() else None
        return ServiceError(kind, detail, field=field, status=status, retry_after=retry_after)


class _SliceStream:
    """The response that streams the slices of `keys` in order, reopened where it ended."""

    def __init__(self, client: Client, keys: Sequence[bytes], rank: int, wait_s: float) -> None:
        self._client, self._keys, self._rank, self._wait_s = client, keys, rank, wait_s
        self._silence_s = min(SILENCE_S, client.timeout_s / 2)
        self._response: httpx.Response | None = None
        self._parts: AsyncIterator[bytes]
        self._process, self._buffer = os.getpid(), bytearray()
        self._left = 0  # slices outstanding in the open response

    async def slice(self, index: int) -> bytes:
        """The slice of `keys[index]`, by a separate request if the stream lacks it."""
        start = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(self._wait_s, self._client.timeout_s / 2)):
                if self._left == 0:
                    await self._open(self._keys[index : index + MAX_STREAM_KEYS])
                kind = ALIVE
                while kind == ALIVE:
                    kind, size = HEAD.unpack(await self._read(HEAD.size))
                    body = await self._read(size)
            self._left -= 1
        except (httpx.HTTPError, ServiceError, OSError, EOFError):
            await self._end()
            return await self._client._slice(self._keys[index], self._rank, self._wait_s, start)
        if kind == PROBLEM_FRAME:
            raise self._client._problem(body, self._keys[index])
        return body

    async def _open(self, keys: Sequence[bytes]) -> None:
        await self._end()
        query = "".join(f"key={key.hex()}&" for key in keys)
        path = f"/v1/ranks/{self._rank}/stream?{query}wait_s={{wait_s:.3f}}"
        server, hold_s = self._client.servers[0], min(self._wait_s, MAX_HOLD_S)
        async with asyncio.timeout(self._silence_s):
            self._response = await self._client._open(_Request("GET", path), server, hold_s)
        self._parts, self._left = self._response.aiter_raw(), len(keys)

    async def _read(self, size: int) -> bytes:
        """Reads `size` bytes. Raises EOFError if the response ends earlier."""
        while len(self._buffer) < size:
            async with asyncio.timeout(self._silence_s):
                part = await anext(self._parts, b"")
            if not part or size > MAX_BODY:
                raise EOFError
            self._buffer += part
        body, self._buffer = bytes(self._buffer[:size]), self._buffer[size:]
        return body

    async def _end(self) -> None:
        response, self._response, self._left, self._buffer = self._response, None, 0, bytearray()
        if response is not None:
            await response.aclose()

    def close(self) -> None:
        """Closes the response without waiting; a forked child leaves its parent's response open."""
        if self._response is not None and self._process == os.getpid():
            asyncio.run_coroutine_threadsafe(self._end(), event_loop())


async def _body(response: httpx.Response, limit: int) -> bytes:
    """The raw body, at most `limit` bytes."""
    parts, size = [], 0
    async for part in response.aiter_raw():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise BadAnswerError(f"the answer has more than {limit} bytes")
    return b"".join(parts)


def _decode_slice(body: bytes, key: bytes, rank: int, ranks: int | None) -> IterationSlice:
    try:
        decoded = IterationSlice.decode(_decompress(body))
    except (DecodeError, ConfigError) as error:
        raise BadAnswerError(f"the plan of {key.hex()[:16]}: {error}") from None
    if decoded.rank != rank or ranks not in (None, decoded.ranks):
        actual = f"rank {decoded.rank} of {decoded.ranks}"
        raise BadAnswerError(f"the plan of {key.hex()[:16]} is for {actual}, not for {rank} of {ranks}")
    return decoded


def _decompress(body: bytes) -> bytes:
    try:
        return decompress(body, MAX_BODY)
    except DecodeError as error:
        raise BadAnswerError(str(error)) from None


def _parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; empty if there is none."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _server(url: str) -> str:
    """The URL without a trailing slash. Raises ConfigError, which omits the URL, since it may hold a password."""
    try:
        parsed = httpx.URL(url)
        valid = re.fullmatch(r"https?://[^/?#@\s]+(/[^?#@\s]*)?", url) and 0 < (parsed.port or 80) < 65536
    except httpx.InvalidURL:
        valid = None
    if not valid:
        rule = "must be http://HOST:PORT or https://HOST:PORT, optionally with a path, without a token"
        raise ConfigError("url", url.rpartition("@")[2], rule, "correct the URL")
    return url.rstrip("/")


@cache
def _tls(ca: str | Path | None) -> ssl.SSLContext:
    """The TLS context, cached so that forked children inherit it: creating one in a child could wait forever for
    a lock of OpenSSL that another thread of the parent held at the fork."""
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except OSError as error:  # includes ssl.SSLError
        rule = f"cannot be read as certificates ({error})"
        raise ConfigError("ca", str(ca), rule, "name a PEM file") from None
