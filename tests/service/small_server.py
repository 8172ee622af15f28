"""A small server of protocol v1 for the client's tests: real sockets, plans made beforehand, and a script of what goes
wrong.

A fault is asked before every answer; where it returns True it has answered (or ended the connection) itself.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from apportion.ir.bytes.iteration import IterationPlan
from apportion.ir.bytes.job import Job
from apportion.ir.hashing import digest
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.api import plan
from apportion.planner.recipe.recipes import find_recipe
from apportion.service import protocol
from apportion.service.frames import Kind, encode_frame, encode_head

KEY = "secret-key-of-the-job-0123456789"
CLUSTER, MODEL = Cluster(1, 2), Model(q_heads=2, kv_heads=2, head_dim=16, layers=1)
Bodies = Sequence[Sequence[bytes]]  # [iteration][rank]


@cache
def job() -> Job:
    return Job(CLUSTER, MODEL, Policy(find_recipe("fcp")), 256)


def batches(iteration: int) -> list[Batch]:
    return [Batch.from_lengths([40 + iteration, 60, 9])]


@cache
def bodies(iterations: int) -> Bodies:
    """What each rank receives of each iteration; all differ."""
    return [_bodies_of(i) for i in range(iterations)]


@cache
def _bodies_of(iteration: int) -> Sequence[bytes]:
    whole = IterationPlan((plan(batches(iteration)[0], CLUSTER, MODEL),), (np.arange(3),))
    return [whole.slice_for(rank).encode() for rank in range(CLUSTER.ranks)]


@dataclass(frozen=True)
class Request:
    """What came in. port: of the client, so that connections can be told apart; at: when, in seconds."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes
    port: int
    at: float

    @property
    def streams(self) -> bool:
        return self.path.endswith("/stream")


Fault = Callable[[Request, "Handler"], bool]


class Handler(BaseHTTPRequestHandler):
    """Answers one connection's requests, one after another."""

    protocol_version = "HTTP/1.1"
    wbufsize = 0
    disable_nagle_algorithm = True
    server: SmallServer

    def setup(self) -> None:
        if self.server.tls is not None:
            self.request.settimeout(10)
            self.request = self.server.tls.wrap_socket(self.request, server_side=True)
            self.request.settimeout(None)
        self.server.connections.add(self.request)
        super().setup()

    def finish(self) -> None:
        self.server.connections.discard(self.request)
        super().finish()
        if self.server.tls is not None:
            self.request.close()  # the server closes the one that was wrapped

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        size = int(self.headers.get("Content-Length", 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        query = dict(parse_qsl(url.query))
        body, port = self.rfile.read(size), self.client_address[1]
        request = Request(self.command, url.path, query, headers, body, port, time.monotonic())
        self.server.requests.append(request)
        if self.server.faults and self.server.faults[0](request, self):
            self.server.faults.popleft()
        elif request.headers.get("authorization") != f"Bearer {KEY}":
            self.problem(401, "auth", "not a key of this server")
        else:
            self.server.answer(request, self)

    do_PUT = do_POST = do_DELETE = do_GET

    def reply(self, status: int, body: bytes = b"", kind: str = protocol.JSON, **headers: str) -> None:
        self.start_answer(status, {"Content-Type": kind, "Content-Length": str(len(body)), **headers})
        self.wfile.write(body)

    def start_answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def problem(self, status: int, slug: str, detail: str, field: str | None = None, **headers: str) -> None:
        data = {"type": f"urn:apportion:problem:{slug}", "title": "x", "status": status, "detail": detail}
        self.reply(status, json.dumps(data | {"field": field}).encode(), protocol.PROBLEM, **headers)

    def start_stream(self) -> None:
        kind, heartbeat_s = protocol.FRAMES, str(self.server.heartbeat_s)
        fields = {"Content-Type": kind, "Transfer-Encoding": "chunked", protocol.HEARTBEAT: heartbeat_s}
        self.start_answer(200, fields)

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def reset(self) -> bool:
        """End the connection with RST."""
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return self.cut()

    def cut(self) -> bool:
        """End the connection."""
        self.close_connection = True
        with suppress(OSError):
            socket.socket.shutdown(self.request, socket.SHUT_RDWR)
        return True


class SmallServer(ThreadingHTTPServer):
    """bodies: of every iteration; the first `ready` are planned."""

    daemon_threads = False
    request_queue_size = 128

    def __init__(
        self,
        held: Bodies,
        ready: int | None = None,
        heartbeat_s: float = 0.2,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies, self.ready = held, len(held) if ready is None else ready
        self.heartbeat_s, self.tls = heartbeat_s, tls
        self.faults: deque[Fault] = deque()
        self.requests: list[Request] = []
        self.connections: set[socket.socket] = set()
        self.published = threading.Condition()
        self.stopped = False
        self.submitted: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://127.0.0.1:{self.server_address[1]}"

    @property
    def job_url(self) -> str:
        return f"{self.url}/v1/jobs/run1"

    def handle_error(self, *_: Any) -> None:
        pass  # clients of these tests leave in the middle

    def publish(self, ready: int) -> None:
        with self.published:
            self.ready = ready
            self.published.notify_all()

    def wait(self, iteration: int, wait_s: float) -> bool:
        """Whether it is planned within that time."""
        with self.published:
            self.published.wait_for(lambda: self.stopped or iteration < self.ready, wait_s)
            return iteration < self.ready

    def answer(self, request: Request, handler: Handler) -> None:
        parts = request.path.split("/")[4:]
        match parts:
            case []:
                handler.reply(200, json.dumps({"name": "run1", "job": job().to_data(), "new": 1}).encode())
            case ["epochs"]:
                handler.reply(201, json.dumps({"epoch": 1, "stream": "train", "run": "r"}).encode())
            case ["epochs", _, "iterations", _]:
                self._iteration(request, handler)
            case ["epochs", _, "iterations", i, "ranks", r, "plan"]:
                self._plan(request, handler, int(i), int(r))
            case ["epochs", _, "ranks", r, "stream"]:
                self._stream(request, handler, int(r))
            case _:
                handler.problem(404, "not-found", f"nothing at {request.path}")

    def _iteration(self, request: Request, handler: Handler) -> None:
        held = self.submitted.get(request.path)
        if request.method == "GET" and held is None:
            handler.problem(404, "not-found", "the iteration was not submitted")
        elif held is not None and request.method == "PUT" and held != request.body:
            handler.problem(409, "conflict", "another batch was submitted before", "batches")
        else:
            self.submitted.setdefault(request.path, request.body)
            handler.reply(201 if held is None else 200, b'{"state": "queued"}')

    def _plan(self, request: Request, handler: Handler, iteration: int, rank: int) -> None:
        if not self.wait(iteration, float(request.query.get("wait_s", 0))):
            handler.reply(202, Retry_After="0")
            return
        body = self.bodies[iteration][rank]
        handler.reply(200, body, protocol.PLAN_VERSION, ETag=protocol.etag(digest(body)))

    def _stream(self, request: Request, handler: Handler, rank: int) -> None:
        start, window = int(request.query["from"]), int(request.query["window"])
        handler.start_stream()
        following = start
        while following < start + window and not self.stopped:
            if self.wait(following, self.heartbeat_s):
                body = self.bodies[following][rank]
                handler.chunk(encode_head(Kind.PLAN, following, len(body), digest(body)) + body)
                following += 1
            else:
                handler.chunk(encode_frame(Kind.HEARTBEAT, following))
        handler.chunk(encode_frame(Kind.END, following))
        handler.end_stream()

    def stop(self) -> None:
        self.shutdown()
        with self.published:
            self.stopped = True
            self.published.notify_all()
        for sock in list(self.connections):
            with suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        self.server_close()


@contextmanager
def small_server(
    held: Bodies, ready: int | None = None, heartbeat_s: float = 0.2, tls: ssl.SSLContext | None = None
) -> Iterator[SmallServer]:
    server = SmallServer(held, ready, heartbeat_s, tls)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
