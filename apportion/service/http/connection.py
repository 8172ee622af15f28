"""Connections: uvicorn's protocol with bounds on what a client may send and how long it may take, and problems where it
answers itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from apportion.service.http.api.bodies import Patience
from apportion.service.http.api.problems import encode, headers_of, plain
from apportion.service.http.streams import ABORT, RESPOND

MAX_HEAD = 32 << 10
#: connections beyond the most, for questions after the server's health alone
RESERVE = 32
_PROBES = (b"/healthz", b"/readyz")
_PROBE_S = 10.0  # that one of these may stay
_STEP = 16 << 10  # bytes that are read before they are counted
_MOST_PIPELINED = 16  # requests that wait for an answer to the one before: each holds some KB
_LINGER_S = 30.0  # beyond the time of a body: then the client is cut off, whatever it waits for


class Crowd:
    """Connections of a server, those in a TLS handshake among them. most: at a time, of one address half of them."""

    def __init__(self, most: int) -> None:
        self._most, self._all, self._of = most, 0, Counter[str]()

    def enter(self, address: str) -> str:
        """One more. Why it is told no more than the server's health, "" where it is not too many."""
        self._all += 1
        self._of[address] += 1
        if self._all > self._most:
            return f"{self._most} connections are open, this server takes no more"
        if self._of[address] > self._half:
            return f"{self._half} connections from {address} are open, others want some, too"
        return ""

    def is_full(self, address: str) -> bool:
        """Whether one of this address is told nothing at all."""
        return self._all > self._most + RESERVE or self._of[address] > self._half + RESERVE

    def leave(self, address: str) -> None:
        """One less."""
        self._all -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]

    @property
    def _half(self) -> int:
        return max(self._most // 2, 1)


class Connection(HttpToolsProtocol):
    """One client. most_bytes: of a request in all; crowd: of the server that it is one of; arrived: called
    before it enters that."""

    def __init__(
        self,
        *,
        most_bytes: int,
        crowd: Crowd,
        patience: Patience,
        arrived: Callable[[], None] = lambda: None,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self._arrived = arrived
        self._most, self._patience = most_bytes, patience
        self._crowd, self._address, self._refusal = crowd, "", ""
        self._unsent, self._unsent_s = 0, 0.0  # bytes that were not taken yet, and since when so many
        self._in_head, self._in_message = True, False
        self._taken = 0
        self._since_s = self.loop.time()
        self._running: RequestResponseCycle | None = None
        self._extensions: dict[str, Any] = {RESPOND: self.respond}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._extensions[ABORT] = transport.abort
        self._address = self.client[0] if self.client else ""
        self._arrived()
        self._refusal = self._crowd.enter(self._address)
        if self._crowd.is_full(self._address):
            self._refuse(503, self._refusal)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._running is not None:
            self._running.disconnected = True
        self._crowd.leave(self._address)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), _STEP):  # a head that comes in one read is bounded, too
            part = data[start : start + _STEP]
            super().data_received(part)
            if self._in_message:
                self._bound(len(part))
            elif self.timeout_keep_alive_task is None and self._is_idle():
                self._rearm()
            if self.transport.is_closing():
                return

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._in_head = self._in_message = True
        self._taken, self._since_s = 0, self.loop.time()

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.transport.is_closing():
            return
        if len(self.pipeline) >= _MOST_PIPELINED:
            self.transport.abort()
            return
        if self._refusal and self.url.partition(b"?")[0] not in _PROBES:
            self._refuse(503, self._refusal)
            return
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def respond(self, head: bytes, body: bytes) -> bool:
        """Write a whole answer at once: `head` is its status line and headers, each with its end of line. False where
        the answer has to go through `send`, which examines every header of every answer: a fifth of a hot plan's CPU.
        """
        cycle = self.cycle
        busy = self.pipeline or self.flow.write_paused or cycle.response_started or cycle.disconnected
        if busy or not cycle.keep_alive:
            return False
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        defaults = b"".join([b"%b: %b\r\n" % pair for pair in self.server_state.default_headers])
        self.transport.writelines((head, defaults, b"\r\n", body))
        cycle.message_event.set()
        cycle.on_response()
        return True

    def check_time(self, now_s: float) -> None:
        """Cut the client off where its request is not there yet after so long, or an answer was not taken."""
        waited_s = now_s - self._since_s
        head_s, body_s = self._patience.head_s, self._patience.body_s
        if self._in_head and waited_s > head_s:
            self._refuse(408, f"the request was not there after {head_s:g} s")
        elif self._in_message and waited_s > head_s + body_s + _LINGER_S:
            self.transport.abort()
        elif self._refusal and waited_s > _PROBE_S:
            self.transport.close()
        if self._streams():
            self._unsent = 0  # it looks after itself
        elif (unsent := self.transport.get_write_buffer_size()) < self._unsent or not self._unsent:
            self._unsent, self._unsent_s = unsent, now_s
        elif now_s - self._unsent_s > self._patience.write_s:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """A request that is not HTTP."""
        self._refuse(400, "this is not HTTP/1.1 as the server reads it")

    def _bound(self, size: int) -> None:
        self._taken += size
        if self._in_head and self._taken > MAX_HEAD:
            self._refuse(431, f"the request's head has more than {MAX_HEAD} bytes")
        elif self._taken > self._most:
            self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle  # `self.cycle` is the last one, of those that were sent at once
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._unsent = 0  # what came before was taken
        super().on_response_complete()

    def _streams(self) -> bool:
        running = self._running
        return running is not None and bool(running.chunked_encoding) and not running.response_complete

    def _is_idle(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete

    def _rearm(self) -> None:
        """Bytes that begin no request, such as empty lines, must not keep the connection."""
        wait_s = self.timeout_keep_alive
        self.timeout_keep_alive_task = self.loop.call_later(wait_s, self.timeout_keep_alive_handler)

    def _refuse(self, status: int, detail: str) -> None:
        if self.transport.is_closing():
            return
        cycle = self.cycle
        in_body = self._in_message and not self._in_head and not self.pipeline
        if cycle is not None and cycle.scope is self.scope and in_body and not cycle.response_started:
            cycle.disconnected = cycle.response_complete = True  # its own answer is written nowhere
        if cycle is None or cycle.response_complete:
            problem = plain(status, detail)
            body = encode(problem)
            lines = [b"%b: %b" % pair for pair in (*headers_of(problem, body), (b"connection", b"close"))]
            first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}".encode()
            self.transport.write(b"\r\n".join([first, *dict.fromkeys(lines), b"", body]))
        self.transport.close()
