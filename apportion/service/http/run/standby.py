"""A server that waits for another one's store: it answers that it lives, and that it is not ready."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from contextlib import suppress
from pathlib import Path

from apportion.service.errors import StoreBusyError, StoreError, StoreGoneError
from apportion.service.http.api.problems import encode, headers_of, problem_of
from apportion.service.http.connection import MAX_HEAD
from apportion.service.http.logs import log
from apportion.service.store import Store, open_store

_EVERY_S = 0.5  # between attempts to open the store
_HEAD_S = 5.0  # that a client may take over its request
_ALIVE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 15\r\nconnection: close\r\n\r\n"
)


async def opened(
    place: Path | str, password: str | None, listener: socket.socket, tls: ssl.SSLContext | None
) -> Store:
    """The store, as soon as no other process has it; until then /healthz is 200 and all else 503. Raises StoreError
    where it cannot be opened for another reason."""
    with listener.dup() as own:
        server = await asyncio.start_server(_answer, sock=own, limit=MAX_HEAD, ssl=tls)
        try:
            return await _once_free(place, password)
        finally:
            server.close()


async def _once_free(place: Path | str, password: str | None) -> Store:
    told = False
    while True:
        try:
            store = await asyncio.to_thread(open_store, place, password=password)
        except StoreBusyError as error:
            if not told:
                log("standing by", reason=str(error))
            told = True
        except StoreError as error:
            if not told:
                raise
            log("standing by, the store does not answer", logging.WARNING, reason=str(error))
        else:
            if told:
                log("taking over")
            return store
        await asyncio.sleep(_EVERY_S)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
        async with asyncio.timeout(_HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(_said(head.split(b" ", 2)[1:2] == [b"/healthz"]))
            await writer.drain()
    writer.close()


def _said(alive: bool) -> bytes:
    if alive:
        return _ALIVE + b'{"status":"ok"}'
    detail = "another server has the store, this one stands by: ask that one"
    problem = problem_of(StoreGoneError(detail, retry_after=1.0))
    body = encode(problem)
    lines = [b"%b: %b" % pair for pair in (*headers_of(problem, body), (b"connection", b"close"))]
    return b"\r\n".join([b"HTTP/1.1 503 Service Unavailable", *dict.fromkeys(lines), b"", body])
