"""Attacks without a token, which the server must survive: memory below 512 MB, `/healthz` within half a second."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from apportion.service.http.serve import serving
from benchmarks.serving.common import TOKEN, Request, Watch, connect, job, run_in_threads

MOST_MB, MOST_S = 512.0, 0.5
GET = b"GET /healthz HTTP/1.1\r\nHost: a\r\n"
MIB = 1 << 20


@dataclass(frozen=True)
class Attack:
    """An attack. run: called in each of `count` threads with the server's URL and `seconds`. open: whether the server
    has no token, so that the attack reaches the parsing of bodies."""

    run: Callable[[str, float], None]
    count: int = 4
    seconds: float = 8.0
    open: bool = False


def flood(
    first: bytes, chunk: bytes, url: str, seconds: float, most: int = 100 * MIB, pause_s: float = 0.0
) -> None:
    """Sends `first`, then `chunk` repeatedly, without reading."""
    deadline, sent_bytes = time.monotonic() + seconds, 0
    with suppress(OSError), connect(url) as line:
        line.settimeout(2.0)
        line.sendall(first)
        while time.monotonic() < deadline and sent_bytes < most:
            line.sendall(chunk)
            sent_bytes += len(chunk)
            time.sleep(pause_s)


def hold_connections(url: str, seconds: float) -> None:
    """Opens many connections that send nothing."""
    lines = list[socket.socket]()
    with suppress(OSError):
        lines += [connect(url) for _ in range(175)]
    time.sleep(seconds)
    for line in lines:
        line.close()


def guess_tokens(url: str, seconds: float) -> None:
    """Sends wrong tokens, one per connection, since the server closes the connection after each."""
    for number in range(8000):
        with suppress(OSError), connect(url) as line:
            line.sendall(b"GET /v1/plans HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer %032d\r\n\r\n" % number)
            assert b" 401 " in line.recv(4096)


def post(body: bytes, url: str, seconds: float) -> None:
    """Sends a body that is expensive to parse, repeatedly."""
    head = (
        b"POST /v1/plan HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    )
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError), connect(url) as line:
            line.sendall(head % len(body) + body)
            assert line.recv(4096)


def streams(url: str, seconds: float) -> None:
    """Opens streams for keys that are never submitted; against a server with a token, this needs the token."""
    query = "&".join(f"key={Request(job(), number).key.hex()}" for number in range(8))
    request = f"GET /v1/ranks/0/stream?wait_s=1&{query} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError):
            lines = [connect(url) for _ in range(64)]
            for line in lines:
                line.sendall(request)
            for line in lines:
                while line.recv(1 << 16):
                    pass
                line.close()


def _request(batches: Any) -> bytes:
    return json.dumps({"job": job().to_data(), "batches": batches}).encode()


def _deep_mask(depth: int) -> Any:
    mask: Any = {"causal": {}}
    for _ in range(depth):
        mask = {"documents": [[8], mask]}
    return mask


ATTACKS = {
    "trailers": Attack(partial(flood, GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: a\r\n" * 10000)),
    "headers": Attack(partial(flood, GET, b"X: a\r\n" * 10000)),
    "long-header": Attack(partial(flood, GET + b"X: ", b"a" * 65536)),
    "long-url": Attack(partial(flood, b"GET /", b"a" * 65536)),
    "pipelining": Attack(partial(flood, b"", (GET + b"\r\n") * 1000)),
    "chunks": Attack(
        partial(
            flood,
            b"PUT /v1/plans/a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"1\r\na\r\n" * 9999,
        )
    ),
    "unread-body": Attack(partial(flood, GET + b"Content-Length: 4000000\r\n\r\n", b"a" * 65536)),
    "dripped-head": Attack(partial(flood, GET, b"X: a\r\n", pause_s=0.05), count=64),
    "dripped-body": Attack(
        partial(
            flood,
            b"POST /v1/plan HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n",
            b"[" * 100,
            pause_s=0.05,
        ),
        count=64,
        open=True,
    ),
    "mute": Attack(hold_connections),
    "tokens": Attack(guess_tokens, seconds=0.0),
    "numbers": Attack(partial(post, _request([{"lengths": [1] * 1_300_000}])), open=True),
    "empty-lists": Attack(partial(post, _request([[]] * 1_000_000)), open=True),
    "nested-masks": Attack(partial(post, _request([{"lengths": [100], "mask": _deep_mask(200)}])), open=True),
    "deep": Attack(partial(post, b"[" * 4_000_000), open=True),
    "streams": Attack(streams, open=True),
}


def run(name: str) -> dict[str, Any]:
    """Runs one attack on a new server. Raises AssertionError if a promise is broken."""
    attack = ATTACKS[name]
    with serving(None, options=["--workers", "1"], token=None if attack.open else TOKEN) as server:
        watch = Watch(server.url, server.pid)
        with watch.running():
            run_in_threads(lambda: attack.run(server.url, attack.seconds), attack.count)
            time.sleep(0.5)
        figures = {"memory_mb": round(watch.memory_mb, 1), "health_s": round(watch.health_s, 3)}
        assert watch.memory_mb < MOST_MB, figures
        assert watch.health_s < MOST_S, figures
        return figures


def cases() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yields (name, function) for each attack."""
    return ((f"attack-{name}", partial(run, name)) for name in ATTACKS)
