"""A stream of frames to one rank. `service/frames.py` has their layout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import Receive, Scope, Send

from apportion.ir.isa import VERSION
from apportion.service.engine import Body, Engine
from apportion.service.frames import Kind, encode_frame, encode_head
from apportion.service.http.api.bodies import until_gone
from apportion.service.http.api.problems import encode, is_expected, problem_of
from apportion.service.http.logs import log
from apportion.service.http.metrics import Traffic
from apportion.service.limits import Limits
from apportion.service.protocol import FRAMES, HEARTBEAT

#: in scope["extensions"]: ends the connection at once, whatever is still to be sent
ABORT = "apportion.abort"
#: there too: writes a whole answer, see `Connection.respond`
RESPOND = "apportion.respond"
_ABORTED_S = 1.0

_HEADERS = [
    (b"content-type", f"{FRAMES}; version={VERSION[0]}".encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True)
class StreamPlace:
    """Whose plans."""

    job: str
    epoch: int
    rank: int


class StalledError(Exception):
    """The client takes nothing."""


async def put(send: Send, data: bytes, stall_s: float, more: bool = True) -> None:
    """Waits until the client has taken enough of what was sent before: this is the back-pressure. Raises StalledError
    where it takes nothing for so long."""
    try:
        async with asyncio.timeout(stall_s):
            await send({"type": "http.response.body", "body": data, "more_body": more})
    except TimeoutError:
        raise StalledError from None


async def cut_off(scope: Scope, gone: asyncio.Task[None]) -> None:
    """End a client's connection; gone: done once that has ended."""
    abort: Callable[[], None] | None = scope.get("extensions", {}).get(ABORT)
    if abort is not None:
        abort()
        await asyncio.wait({gone}, timeout=_ABORTED_S)


class Stream:
    """Sends the plans of one rank, one after another; remembers only which is next."""

    def __init__(self, engine: Engine, limits: Limits, traffic: Traffic, place: StreamPlace) -> None:
        self._engine, self._limits, self._traffic, self._place = engine, limits, traffic, place
        self._next = 0

    async def run(self, start: int, window: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Up to `window` plans from iteration `start` on. Ends with an END or PROBLEM frame, or with the client."""
        self._next, self._send = start, send
        self._traffic.streams += 1
        gone = asyncio.create_task(until_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._headers()})
            await self._frames(start + window, gone)
            if not gone.done():
                await self._put(b"", more=False)
        except StalledError:
            await self._abort(scope, gone)
        finally:
            gone.cancel()
            self._traffic.streams -= 1

    def _headers(self) -> list[tuple[bytes, bytes]]:
        return [*_HEADERS, (HEARTBEAT.lower().encode(), b"%g" % self._limits.heartbeat_s)]

    async def _frames(self, end: int, gone: asyncio.Task[None]) -> None:
        try:
            while self._next < end and not self._engine.draining:
                body = await self._body()
                if gone.done():
                    return
                if body is None and self._engine.draining:
                    break
                await self._put(self._frame(body))
                if body is not None:
                    self._next += 1
                    await asyncio.sleep(0)  # plans that are there already must not hold up other streams
        except StalledError:
            raise
        except Exception as error:
            await self._problem(error)
        else:
            await self._put(self._counted(Kind.END, encode_frame(Kind.END, self._next)))

    async def _body(self) -> Body | None:
        """The next body; None after the time of a heartbeat, or when the server stops."""
        place, limits = self._place, self._limits
        return await self._engine.fetch(place.job, place.epoch, self._next, place.rank, limits.heartbeat_s)

    def _frame(self, body: Body | None) -> bytes:
        if body is None:
            return self._counted(Kind.HEARTBEAT, encode_frame(Kind.HEARTBEAT, self._next))
        head = encode_head(Kind.PLAN, self._next, len(body.data), bytes.fromhex(body.etag))
        return self._counted(Kind.PLAN, head + body.data)

    def _counted(self, kind: Kind, frame: bytes) -> bytes:
        self._traffic.frames[kind.name.lower()] += 1
        self._traffic.frame_bytes += len(frame)
        return frame

    async def _problem(self, error: Exception) -> None:
        if not is_expected(error):
            place = self._place
            log(
                "stream failed", logging.ERROR, error=error, job=place.job, epoch=place.epoch, rank=place.rank
            )
        body = encode(problem_of(error))
        await self._put(self._counted(Kind.PROBLEM, encode_frame(Kind.PROBLEM, self._next, body)))

    async def _put(self, data: bytes, more: bool = True) -> None:
        await put(self._send, data, self._limits.stall_s, more)

    async def _abort(self, scope: Scope, gone: asyncio.Task[None]) -> None:
        self._traffic.stalled += 1
        place = self._place
        log("stream dropped, its client takes nothing", job=place.job, rank=place.rank, iteration=self._next)
        await cut_off(scope, gone)
