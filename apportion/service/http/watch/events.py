"""The state of the server once a second, as server-sent events (WHATWG HTML, 9.2)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from apportion.service.errors import OverloadError
from apportion.service.http.api.bodies import until_gone
from apportion.service.http.streams import StalledError, cut_off, put

EVENTS = "text/event-stream"
#: pages that are open at a time
MOST = 16
_EVERY_S = 1.0
_STALL_S = 10.0  # a page that takes nothing for so long is dropped
_HEADERS = [
    (b"content-type", EVENTS.encode()),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Watchers:
    """All pages that are open. state: makes the JSON that they get, once a second for all of them."""

    def __init__(self, state: Callable[[], bytes], is_over: Callable[[], bool]) -> None:
        self._state, self._is_over = state, is_over
        self._open = 0
        self._made: tuple[float, bytes] = (-_EVERY_S, b"")

    def admit(self) -> Events:
        """One page more. Raises OverloadError where there are too many."""
        if self._open >= MOST:
            raise OverloadError(f"{MOST} pages watch this server, it has no more", retry_after=5.0)
        return Events(self)

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send states until the page is closed or the server stops."""
        self._open += 1
        gone = asyncio.create_task(until_gone(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            while not gone.done() and not self._is_over():
                await put(send, b"data: %b\n\n" % self._now(), _STALL_S)
                await asyncio.wait({gone}, timeout=_EVERY_S)
            if not gone.done():
                await put(send, b"event: end\ndata: {}\n\n", _STALL_S, more=False)
        except StalledError:
            await cut_off(scope, gone)
        finally:
            gone.cancel()
            self._open -= 1

    def _now(self) -> bytes:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._made[0] >= _EVERY_S / 2:
            self._made = now_s, self._state()
        return self._made[1]


class Events(Response):
    """The answer to one page."""

    def __init__(self, watchers: Watchers) -> None:
        super().__init__(media_type=EVENTS)
        self._watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._watchers.run(scope, receive, send)
