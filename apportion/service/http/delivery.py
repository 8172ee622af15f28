"""Delivers slices: the slice of one key, or the slices of many keys in one response.

    GET /v1/plans/{key}/ranks/{rank}?wait_s=                 the slice
    GET /v1/ranks/{rank}/stream?key=...&key=...&wait_s=      frames, in the order of the keys

A frame is `kind u8 · length u32, little endian · payload`, see `frames`. Plain ASGI, since ranks call this most often.
"""

from __future__ import annotations

import asyncio
import re
from urllib.parse import parse_qs

import msgspec
from starlette.types import Receive, Scope, Send

from apportion.ir.bytes.transport import decompress
from apportion.ir.errors import ConfigError
from apportion.service.engine import Engine
from apportion.service.frames import ALIVE, PROBLEM_FRAME, SLICE, frame
from apportion.service.http.guard import answer, encode_problem, problem_data
from apportion.service.pack import MAX_BODY, Pack
from apportion.service.problems import ServiceError

MAX_WAIT_S, MAX_KEYS = 60.0, 256
ALIVE_S = 2.0
_KEY = re.compile("[0-9a-f]{64}")
MEDIA = b"application/vnd.apportion.slice"
STREAM = b"application/vnd.apportion.stream"
_FIXED = ((b"cache-control", b"public, max-age=31536000, immutable"), (b"vary", b"accept-encoding"))


class Delivery:
    """The ASGI application for both paths."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._metrics = engine, engine.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path_params"]
        try:
            query = parse_qs(scope["query_string"].decode("latin-1"))
            wait_s, rank = _parse_wait(query), _parse_rank(path["rank"])
            if "key" in path:
                await self._send_one(scope, send, key_of(path["key"]), rank, wait_s)
            else:
                await self._stream_slices(send, [key_of(text) for text in _parse_keys(query)], rank, wait_s)
        except ServiceError as problem:
            self._metrics.problems.labels(problem.type).inc()
            await answer(send, *encode_problem(problem))

    async def _send_one(self, scope: Scope, send: Send, key: bytes, rank: int, wait_s: float) -> None:
        self._engine.record_use(key)
        pack = self._engine.cached(key) or await self._engine.pack(key, wait_s)
        if pack is None:
            await answer(send, 202, b"application/json", b'{"state":"planning"}', ((b"retry-after", b"1"),))
            return
        body, headers, status = _slice(pack, rank), dict(scope["headers"]), 200
        coding = headers.get(b"accept-encoding", b"")
        etag = b'"' + pack.digest(rank).hex().encode() + (b'-z"' if b"zstd" in coding else b'"')
        extra: tuple[tuple[bytes, bytes], ...] = (*_FIXED, (b"etag", etag))
        if b"zstd" in coding:
            extra = (*extra, (b"content-encoding", b"zstd"))
        if headers.get(b"if-none-match") == etag:
            body, status = b"", 304
        elif b"zstd" not in coding:
            body = decompress(body, MAX_BODY)
        self._count(body)
        await answer(send, status, MEDIA, body, extra)

    async def _stream_slices(self, send: Send, keys: list[bytes], rank: int, wait_s: float) -> None:
        """Streams slices; starts the response immediately, so that clients see that the server is alive."""
        with self._metrics.streams.track_inprogress():
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", STREAM)]})
            for key in keys:
                data = await self._frame_of(send, key, rank, wait_s)
                if not data:
                    break
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _frame_of(self, send: Send, key: bytes, rank: int, wait_s: float) -> bytes:
        """The frame of a key; empty if its slice is not ready in time."""
        self._engine.record_use(key)
        try:
            pack = self._engine.cached(key)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + wait_s
            while pack is None:
                left_s = deadline - loop.time()
                pack = await self._engine.pack(key, max(0.0, min(ALIVE_S, left_s)))
                if pack is None:
                    if left_s <= ALIVE_S:
                        return b""
                    await send({"type": "http.response.body", "body": frame(ALIVE, b""), "more_body": True})
            body = _slice(pack, rank)
            self._count(body)
            return frame(SLICE, body)
        except ServiceError as problem:
            self._metrics.problems.labels(problem.type).inc()
            return frame(PROBLEM_FRAME, msgspec.json.encode(problem_data(problem)))

    def _count(self, body: bytes) -> None:
        self._metrics.deliveries.inc()
        self._metrics.delivered.inc(len(body))


def _slice(pack: Pack, rank: int) -> bytes:
    try:
        return pack.slice(rank)
    except ConfigError as error:
        raise ServiceError("not-found", str(error), field="rank") from None


def key_of(text: str) -> bytes:
    """Parses a key of 64 hex digits. Raises ServiceError."""
    if not _KEY.fullmatch(text):
        raise ServiceError("invalid", "a key must be 64 lower-case hex digits", field="key")
    return bytes.fromhex(text)


def _parse_rank(text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or len(text) > 6:
        raise ServiceError("invalid", "a rank must be an integer of at least 0", field="rank")
    return int(text)


def _parse_keys(query: dict[str, list[str]]) -> list[str]:
    keys = query.get("key", [])
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ServiceError("invalid", f"a stream must have 1 to {MAX_KEYS} keys", field="key")
    return keys


def _parse_wait(query: dict[str, list[str]]) -> float:
    text = query.get("wait_s", ["0"])[-1]
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = -1.0
    if not 0.0 <= wait_s <= MAX_WAIT_S:
        raise ServiceError("invalid", f"wait_s must be a number from 0 to {MAX_WAIT_S:g}", field="wait_s")
    return wait_s
