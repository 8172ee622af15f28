"""The server's end of a socket to one of its processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import cast

from apportion.ir.errors import DecodeError
from apportion.service.workers.errors import LineLostError
from apportion.service.workers.tasks import HEAD, MAX_REPLY, TOLD, size_of


class Line(asyncio.BufferedProtocol):
    """One frame goes out, one frame comes in. lost: called once, when the other end has hung up or was dropped. told:
    called with what a frame says that begins with `TOLD`, which the other end sends unasked."""

    told: Callable[[bytes], None] | None = None

    def __init__(self, sock: socket.socket, name: str, lost: Callable[[Line], None]) -> None:
        self._socket, self.name, self._lost = sock, name, lost
        self._transport: asyncio.Transport | None = None
        self._reply: asyncio.Future[bytes] | None = None
        self._begin(HEAD.size, is_head=True)

    @staticmethod
    async def over(sock: socket.socket, name: str, lost: Callable[[Line], None]) -> Line:
        """A line over a connected socket, which belongs to the line from now on."""
        line = Line(sock, name, lost)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: line, sock=sock)
        except BaseException:
            sock.close()
            raise
        return line

    @property
    def gone(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def ask(self, data: bytes) -> bytes:
        """The frame that answers. Raises LineLostError. Who stops waiting for it must drop the line."""
        reply = self.expect()
        if self._transport is not None:
            self._transport.write(HEAD.pack(len(data)))
            self._transport.write(data)
        return await reply

    def expect(self) -> asyncio.Future[bytes]:
        """The next frame. Fails with LineLostError."""
        self._reply = asyncio.get_running_loop().create_future()
        if self.gone:
            self._reply.set_exception(self._error())
        return self._reply

    def pass_on(self, other: socket.socket) -> None:
        """Give the process at the other end a socket. Raises OSError."""
        socket.send_fds(self._socket, [b"\0"], [other.fileno()])

    def drop(self) -> None:
        """Hang up: also where a fork of this process still holds the socket."""
        if self._transport is not None and not self.gone:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        if self._filled == len(self._buffer):
            self._whole()

    def _whole(self) -> None:
        if not self._is_head:
            self._deliver(bytes(self._buffer))
            return self._begin(HEAD.size, is_head=True)
        try:
            self._begin(size_of(self._buffer, MAX_REPLY), is_head=False)
        except DecodeError:
            self.drop()

    def _begin(self, size: int, is_head: bool) -> None:
        self._buffer, self._filled, self._is_head = bytearray(size), 0, is_head

    def _deliver(self, data: bytes) -> None:
        if self.told is not None and data.startswith(TOLD):
            self.told(data[len(TOLD) :])
        elif self._reply is not None and not self._reply.done():
            self._reply.set_result(data)
        else:  # nobody asked
            self.drop()

    def connection_lost(self, error: Exception | None) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_exception(self._error())
        self._lost(self)

    def _error(self) -> LineLostError:
        return LineLostError(f"{self.name} has died")
