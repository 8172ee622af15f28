"""Connections by TLS: they count from the moment they are there, not only once they have said who they are."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from functools import partial

from apportion.service.http.connection import Crowd

Make = Callable[..., asyncio.Protocol]

_HANDSHAKE_S = 10.0
_AGAIN_S = 0.1  # after no connection could be taken: no descriptor is left, say


class Door:
    """Takes connections until it is closed. crowd: of the server."""

    def __init__(self, context: ssl.SSLContext, crowd: Crowd) -> None:
        self._context, self._crowd = context, crowd
        self._tasks = set[asyncio.Task[None]]()

    def open(self, listeners: Sequence[socket.socket], make: Make) -> None:
        """Take connections from these on; `make` makes the protocol of one, which calls `arrived` when its handshake is
        done, before it enters the crowd by itself."""
        for listener in listeners:
            listener.setblocking(False)
            self._spawn(self._take(listener, make))

    async def close(self) -> None:
        """Take no more; handshakes under way are cut off."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _take(self, listener: socket.socket, make: Make) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                taken, place = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(_AGAIN_S)
                continue
            address = str(place[0])
            self._crowd.enter(address)
            self._spawn(self._welcome(taken, address, make))

    async def _welcome(self, taken: socket.socket, address: str, make: Make) -> None:
        here = [address]

        def leave() -> None:
            while here:
                self._crowd.leave(here.pop())

        try:
            if self._crowd.is_full(address):
                taken.close()
                return
            await asyncio.get_running_loop().connect_accepted_socket(
                partial(make, arrived=leave), taken, ssl=self._context, ssl_handshake_timeout=_HANDSHAKE_S
            )
        except OSError:  # no handshake: an ssl.SSLError and a TimeoutError are some, too
            taken.close()
        finally:
            leave()
