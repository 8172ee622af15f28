"""A copy of the store, while the server works: an answer that is made as it is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from apportion.service.engine import Engine
from apportion.service.errors import OverloadError
from apportion.service.http.api.bodies import until_gone
from apportion.service.http.logs import log
from apportion.service.http.streams import StalledError, cut_off, put
from apportion.service.protocol import TAR
from apportion.service.store.archive import archive

_STALL_S = 30.0  # a client that takes nothing for so long is dropped


class Exports:
    """One copy at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._open = False

    def begin(self) -> Export:
        """Raises OverloadError while another one is being made."""
        if self._open:
            raise OverloadError(
                "another copy of the store is being made: ask again when it is there", retry_after=10.0
            )
        return Export(self)

    async def run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ends without an end, for the client to see, where the store fails."""
        self._open = True
        gone = asyncio.create_task(until_gone(receive))
        try:
            store, records = self._engine.backup()
            chunks = archive(store, records.items())
            headers = [(b"content-type", TAR.encode()), (b"cache-control", b"no-store")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while (chunk := await self._engine.in_store(_next, chunks)) and not gone.done():
                await put(send, chunk, _STALL_S)
            if not gone.done():
                await put(send, b"", _STALL_S, more=False)
        except StalledError:
            log("copy of the store dropped, its client takes nothing")
            await cut_off(scope, gone)
        except Exception:
            await cut_off(scope, gone)
            raise
        finally:
            self._open = False
            gone.cancel()


class Export(Response):
    """The answer to one client."""

    def __init__(self, exports: Exports) -> None:
        super().__init__(media_type=TAR)
        self._exports = exports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._exports.run(scope, receive, send)


def _next(chunks: Iterator[bytes]) -> bytes:
    return next(chunks, b"")
