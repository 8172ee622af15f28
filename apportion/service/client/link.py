"""The connections of one process to one server, and the little that urllib3 does not do: another thread may end them
at once, and a forked process leaves its parent's alone.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from socket import SHUT_RDWR, socket
from typing import Any
from weakref import WeakSet

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, SSLError

from apportion.ir.errors import ConfigError
from apportion.service.client.errors import BadAnswerError, ClientError, ClosedError, UnreachableError
from apportion.service.client.waits import TransientError

_CHUNK = 1 << 16
_CONNECTIONS = 64  # kept for the next call; more are opened where more threads ask


@dataclass(frozen=True)
class Peer:
    """Where a server is and how to get there. url: scheme, host and port; tls: None for plain http; proxy: a url."""

    url: str
    tls: ssl.SSLContext | None
    proxy: str | None


def trust(url: str, ca: str | Path | None, cert: str | Path | None = None) -> ssl.SSLContext | None:
    """What an https server's certificate is checked against: the file of certificates `ca`, or the system's; and the
    client's own, a PEM file with its key. Raises ConfigError."""
    if not url.startswith("https:"):
        return None
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            "ca", str(ca), f"cannot be read as certificates ({error})", "name a PEM file"
        ) from None
    try:
        if cert is not None:
            context.load_cert_chain(str(cert))
    except (OSError, ssl.SSLError) as error:
        rule = f"cannot be read as a certificate and its key ({error})"
        raise ConfigError("cert", str(cert), rule, "name a PEM file that has both") from None
    return context


class Sockets:
    """The open sockets, so that any thread can end what the others wait for."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self._lock = threading.Lock()
        self._open: WeakSet[socket] = WeakSet()

    def add(self, sock: socket) -> None:
        """Raises ClosedError, having closed `sock`, where it comes too late."""
        with self._lock:
            self._open.add(sock)
        if self.closed.is_set():
            sock.close()
            raise ClosedError("the client was closed while it connected")

    def end(self) -> None:
        """Whoever reads from one of them wakes up."""
        self.closed.set()
        with self._lock:
            found = list(self._open)
        for sock in found:
            end(sock)

    def forsake(self) -> None:
        """Close a parent process's sockets in its child, without a word to the other side. Takes no lock: a thread that
        is not in this process may hold it."""
        for sock in list(self._open):
            with suppress(OSError):
                os.close(sock.detach())


def end(sock: socket) -> None:
    """End a connection in both directions, also where another thread reads from it or a forked process has it open."""
    with suppress(OSError):
        socket.shutdown(sock, SHUT_RDWR)  # of the class: that of an SSLSocket forgets that it is encrypted


class _Connection(HTTPConnection):
    """Tells `sockets` what it opens."""

    def __init__(self, *args: Any, sockets: Sockets, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self._sockets = sockets
        self.opened: socket | None = None  # stays when an answer takes the socket over

    def connect(self) -> None:
        super().connect()
        self.opened = self.sock
        self._sockets.add(self.sock)


class _SecureConnection(_Connection, HTTPSConnection):
    """The same over TLS."""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    headers: urllib3.HTTPHeaderDict
    body: bytes


class Opened:
    """An answer whose body is still to be read."""

    def __init__(self, link: Link, response: urllib3.BaseHTTPResponse) -> None:
        self._link, self._response = link, response
        self.status, self.headers = response.status, response.headers
        connection = response.connection
        self._sock = connection.opened if isinstance(connection, _Connection) else None

    def read(self, wait_s: float) -> bytes:
        """What comes within `wait_s` seconds; b"" at the end. Raises TransientError, ClosedError."""
        if not self._link.own:  # what is read here is missing in the parent
            raise TransientError(UnreachableError("the process was forked"))
        with self._link.failures():
            if (
                self._sock is not None and self._sock.fileno() >= 0
            ):  # with the end of an answer the last one is closed
                self._sock.settimeout(max(wait_s, 1e-3))
            return self._response.read1(_CHUNK, decode_content=False)

    def body(self, most: int, read_s: float, left: Callable[[], float]) -> bytes:
        """All of it; given up after `read_s` seconds without a byte, and where none are `left`. Raises TransientError,
        ClosedError, BadAnswerError above `most` bytes."""
        parts, size = [], 0
        while part := self.read(min(read_s, left())):
            parts.append(part)
            size += len(part)
            if size > most:
                raise BadAnswerError(f"an answer of more than {most} bytes")
            if not left():
                raise TransientError(
                    UnreachableError(f"an answer was not whole in time, only {size} bytes of it")
                )
        return b"".join(parts)

    def close(self) -> None:
        """Give the connection back where the answer was read to its end, end it otherwise."""
        if not self._response.closed and self._sock is not None and self._link.own:
            end(self._sock)
        self._response.close() if not self._response.closed else self._response.release_conn()


class Link:
    """One process's connections. Safe for threads."""

    def __init__(self, peer: Peer) -> None:
        self._peer, self._pid = peer, os.getpid()
        self.sockets = Sockets()
        self._manager = _manager(peer)
        self._pool = self._manager.connection_from_url(peer.url)
        self._pool.ConnectionCls = _SecureConnection if self._pool.scheme == "https" else _Connection
        self._pool.conn_kw["sockets"] = self.sockets

    @property
    def own(self) -> bool:
        """Whether this is the process that made it."""
        return self._pid == os.getpid()

    def open(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None, timeout: urllib3.Timeout
    ) -> Opened:
        """The head of an answer. Raises TransientError, ClosedError, UnreachableError where trying again is useless."""
        with self.failures():
            response = self._manager.urlopen(
                method,
                self._peer.url + path,
                body=body,
                headers=headers,
                timeout=timeout,
                redirect=False,
                retries=False,
                preload_content=False,
            )
        opened = Opened(self, response)
        if not _has_end(opened):
            opened.close()
            raise TransientError(UnreachableError(f"{self._peer.url}: the head of an answer was cut"))
        return opened

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Errors of the transport as errors of the client."""
        try:
            yield
        except (HTTPError, HTTPException, OSError) as error:
            if self.sockets.closed.is_set():
                raise ClosedError("the client was closed while it waited for an answer") from None
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> ClientError | TransientError:
        failure = UnreachableError(f"{self._peer.url}: {_reason(error)}")
        failure.__cause__ = error
        if _in_the_clear(error):
            return UnreachableError(
                f"{self._peer.url}: the server answers without TLS; write http:// in the url"
            )
        if _untrusted(error):
            return UnreachableError(
                f"{self._peer.url}: {_reason(error)}; pass ca=, the certificates that it is to be checked against"
            )
        return TransientError(failure)

    def close(self) -> None:
        """End all that is under way, also in other threads, and free the sockets; in a forked process its copies."""
        if self.own:
            self.sockets.end()
            self._pool.close()  # and stays the manager's: a new one would open connections that nobody ends
        else:
            self.sockets.forsake()


def _manager(peer: Peer) -> urllib3.PoolManager:
    tls: dict[str, Any] = {} if peer.tls is None else {"ssl_context": peer.tls}
    if peer.proxy is None:
        return urllib3.PoolManager(maxsize=_CONNECTIONS, **tls)
    address = urllib3.util.parse_url(peer.proxy)
    headers = urllib3.util.make_headers(proxy_basic_auth=address.auth) if address.auth else None
    plain = address._replace(auth=None).url
    return urllib3.ProxyManager(plain, proxy_headers=headers, maxsize=_CONNECTIONS, **tls)


def _has_end(opened: Opened) -> bool:
    """Whether the head says where the body ends. http.client takes a head that was cut for a whole one."""
    chunked = opened.headers.get("Transfer-Encoding", "").lower() == "chunked"
    return chunked or opened.status in (204, 304) or opened.headers.get("Content-Length", "").isdigit()


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        inner = [arg for arg in found.args if isinstance(arg, BaseException)]
        found = found.__cause__ or (inner[0] if inner else None)


def was_sent(failure: TransientError) -> bool:
    """Whether the server may have got the request."""
    return not any(
        isinstance(cause, NewConnectionError | ConnectTimeoutError) for cause in _causes(failure.error)
    )


def _untrusted(error: Exception) -> bool:
    return isinstance(error, SSLError | OSError) and any(
        isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error)
    )


def _in_the_clear(error: Exception) -> bool:
    reasons = {cause.reason for cause in _causes(error) if isinstance(cause, ssl.SSLError)}
    return bool(reasons & {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"})


def _reason(error: Exception) -> str:
    """The innermost cause that the system has a word for, or the error's own words."""
    causes = [cause for cause in _causes(error) if isinstance(cause, OSError)]
    words = [cause.strerror for cause in causes if isinstance(cause.strerror, str)]
    if not words and any(isinstance(cause, TimeoutError) for cause in causes):
        return "not a byte came in time"
    return words[-1] if words else f"{type(error).__name__}: {error}"
