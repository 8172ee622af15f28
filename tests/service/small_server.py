"""Socket servers with scripted answers, HTTP or not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class SmallServer:
    """A running server. requests: the first bytes received of each request, its headers and perhaps its body."""

    url: str
    requests: list[bytes] = field(default_factory=list)


Talk = Callable[[socket.socket, bytes], None]  # answers a request; the connection is closed after it


def answer(body: bytes = b"{}", status: str = "200 OK", *headers: str) -> bytes:
    """A complete HTTP answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


@contextmanager
def small_server(talk: Talk, host: str = "127.0.0.1") -> Iterator[SmallServer]:
    """Runs a server until the block ends."""
    with socket.create_server((host, 0)) as listening:
        server = SmallServer(f"http://{host}:{listening.getsockname()[1]}")
        connections: list[socket.socket] = []

        def serve(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                head = connection.recv(1 << 16)
                server.requests.append(head)
                talk(connection, head)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    connections.append(listening.accept()[0])
                    threading.Thread(target=serve, args=[connections[-1]], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield server
        listening.shutdown(socket.SHUT_RDWR)
        for connection in connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
