"""The client's connections: ended from another thread, left alone by forks, over TLS and proxies, and over a network
that fails."""

from __future__ import annotations

import base64
import gc
import os
import selectors
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path

import pytest
import trustme

from apportion.ir.errors import ConfigError
from apportion.service.client import Client, ClosedError, Pace, UnreachableError
from tests.service import faulty_proxy
from tests.service.small_server import KEY, Handler, Request, SmallServer, bodies, small_server
from tests.support.sparse import sparse

HELD = bodies(12)
FAST = Pace(backoff_s=0.01, backoff_most_s=0.05)


@pytest.fixture
def server() -> Iterator[SmallServer]:
    with small_server(HELD) as running:
        yield running


def until(holds: Callable[[], bool]) -> None:
    """Wait for it, for two minutes."""
    end = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


# ---- closing


def never(_: Request, handler: Handler) -> bool:
    """An answer that does not come, until the client leaves."""
    handler.rfile.read(1)
    return handler.cut()


def half(request: Request, handler: Handler, **headers: str) -> bool:
    """The head of what was asked for, and 4 bytes of its 100."""
    kind = request.headers["accept"]
    handler.start_answer(200, {"Content-Type": kind, "Content-Length": "100", **headers})
    handler.wfile.write(b"half")
    return never(request, handler)


def closing_half(request: Request, handler: Handler) -> bool:
    return half(request, handler, Connection="close")


WAITING: dict[str, Callable[[Client], object]] = {
    "plan": lambda client: client.plan(1, 0, 0),
    "submit": lambda client: client.submit(1, 0, []),
    "stream": lambda client: next(client.stream(1, 0)),
}


@pytest.mark.parametrize("call", WAITING.values(), ids=WAITING)
@pytest.mark.parametrize("fault", [never, half, closing_half, None])
def test_close_ends_what_other_threads_wait_for(
    server: SmallServer, call: Callable[[Client], object], fault: Callable[[Request, Handler], bool] | None
) -> None:
    server.publish(0)
    server.faults.append(
        fault or (lambda _, handler: handler.problem(503, "x", "busy", Retry_After="20") or True)
    )
    client = Client(server.job_url, KEY)
    with ThreadPoolExecutor(1) as thread:
        under_way = thread.submit(call, client)
        until(lambda: len(server.requests) == 1)
        since = time.monotonic()
        client.close()
        with pytest.raises(ClosedError):
            under_way.result(120)
    assert time.monotonic() - since < 18  # it was told to wait for 20
    until(lambda: not server.connections)


def test_leaving_a_stream_frees_its_socket(server: SmallServer) -> None:
    server.publish(1)
    before = len(os.listdir("/proc/self/fd"))
    with Client(server.job_url, KEY) as client:
        for _ in range(3):
            with closing(client.stream(1, 0)) as plans:
                assert next(plans)[0] == 0
                assert server.connections
            until(lambda: not server.connections)
    until(lambda: len(os.listdir("/proc/self/fd")) == before)


def test_a_client_that_is_dropped_leaves_nothing_open(server: SmallServer) -> None:
    client = Client(server.job_url, KEY)
    client.plan(1, 0, 0)
    plans = client.stream(1, 0)
    next(plans)
    del client, plans
    gc.collect()
    until(lambda: not server.connections)


def test_any_thread_may_call(server: SmallServer) -> None:
    def work(number: int) -> list[bytes]:
        if number % 2:
            with closing(client.stream(1, number // 2 % 2, window=3)) as plans:
                return [piece.encode() for _, piece in islice(plans, len(HELD))]
        return [client.plan(1, i, number // 2 % 2).encode() for i in range(len(HELD))]

    with Client(server.job_url, KEY) as client, ThreadPoolExecutor(12) as threads:
        for number, found in enumerate(threads.map(work, range(12))):
            assert found == [ranks[number // 2 % 2] for ranks in HELD]


# ---- forks

FORKED = """
import os, sys
from itertools import islice
from apportion.service.client import Client

url, key = sys.argv[1:]
client = Client(url, key, timeout_s=60)
plans = client.stream(1, 0, window=64)
found = [next(plans)[0] for _ in range(3)]
client.plan(1, 0, 1)  # leaves an idle connection too
child = os.fork()
found += [iteration for iteration, _ in islice(plans, 9)]  # both go on with what they have
for _ in range(50):
    client.plan(1, 0, 1)
if child == 0:
    plans.close()
    client.close()
    os._exit(0 if found == list(range(12)) else 9)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
plans.close()
client.plan(1, 0, 1)  # of the child's end the parent's connections know nothing
client.close()
sys.exit(status or (0 if found == list(range(12)) else 8))
"""


def test_a_forked_process_leaves_its_parents_connections_alone(server: SmallServer) -> None:
    server.publish(3)
    command = [sys.executable, "-W", "error", "-c", FORKED, server.job_url, KEY]
    with subprocess.Popen(command) as process:
        until(lambda: len({request.port for request in server.requests}) == 3)  # the child has its own
        server.publish(12)
        assert process.wait(60) == 0
    assert len({request.port for request in server.requests}) == 4


# ---- TLS and proxies


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.pem, and server.pem for 127.0.0.1 with its key."""
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    return folder


@pytest.fixture
def secure(certificates: Path) -> Iterator[SmallServer]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem")
    with small_server(HELD, tls=context) as running:
        yield running


def gets_all(client: Client) -> None:
    client.begin("run-1")
    assert client.plan(1, 0, 1).encode() == HELD[0][1]
    with closing(client.stream(1, 0, window=5)) as plans:
        assert [piece.encode() for _, piece in islice(plans, 12)] == [ranks[0] for ranks in HELD]


def test_tls_with_its_own_certificates(secure: SmallServer, certificates: Path) -> None:
    with Client(secure.job_url, KEY, ca=certificates / "ca.pem") as client:
        gets_all(client)


def test_tls_is_ended_from_another_thread_too(secure: SmallServer, certificates: Path) -> None:
    secure.publish(0)
    client = Client(secure.job_url, KEY, ca=certificates / "ca.pem")
    with ThreadPoolExecutor(1) as thread:
        under_way = thread.submit(next, client.stream(1, 0))
        until(lambda: len(secure.requests) == 1)
        client.close()
        with pytest.raises(ClosedError):
            under_way.result(120)


def test_an_unknown_certificate_is_refused_at_once(secure: SmallServer) -> None:
    since = time.monotonic()
    with (
        Client(secure.job_url, KEY, timeout_s=60) as client,
        pytest.raises(UnreachableError, match=r"certificate verify failed.*pass ca="),
    ):
        client.begin("run-1")
    assert time.monotonic() - since < 50
    assert secure.requests == []


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_certificates_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "ca.pem").write_text(content)
    with pytest.raises(ConfigError, match=r"ca = .*cannot be read as certificates"):
        Client("https://127.0.0.1:1/v1/jobs/a", KEY, ca=tmp_path / "ca.pem")


class ForwardProxy:
    """An HTTP proxy for one target; `seen` are the heads of the requests."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target, self.seen = target, list[bytes]()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.threads: list[threading.Thread] = []

    def run(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            self.threads.append(threading.Thread(target=self.serve, args=(near,)))
            self.threads[-1].start()

    def serve(self, near: socket.socket) -> None:
        with near, socket.create_connection(self.target) as far:
            head = near.recv(1 << 16)
            self.seen.append(head)
            if head.startswith(b"CONNECT"):
                near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                far.sendall(head)
            with suppress(OSError):
                pump(near, far)


def pump(near: socket.socket, far: socket.socket) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(near, selectors.EVENT_READ, far)
        selector.register(far, selectors.EVENT_READ, near)
        while True:
            for key, _ in selector.select():
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                if not data:
                    return
                key.data.sendall(data)


@contextmanager
def forward_proxy(server: SmallServer, kind: type[ForwardProxy] = ForwardProxy) -> Iterator[ForwardProxy]:
    proxy = kind(("127.0.0.1", server.server_address[1]))
    thread = threading.Thread(target=proxy.run)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        proxy.listener.close()
        for each in proxy.threads:
            each.join()


def test_through_a_proxy(server: SmallServer) -> None:
    def absolute(request: Request, handler: Handler) -> bool:
        handler.problem(400, "x", request.path) if not handler.path.startswith("http://") else None
        return not handler.path.startswith("http://")

    server.faults.append(absolute)
    with forward_proxy(server) as proxy:
        with Client(server.job_url, KEY, proxy=f"http://me:pw@127.0.0.1:{proxy.port}") as client:
            gets_all(client)
        login = base64.b64encode(b"me:pw")
        assert all(head.startswith((b"GET http://", b"POST http://")) for head in proxy.seen)
        assert all(b"Basic " + login in head for head in proxy.seen)


class ClosingProxy(ForwardProxy):
    """One that ends the connection after each answer, and says so, as many do."""

    def serve(self, near: socket.socket) -> None:
        with near, socket.create_connection(self.target) as far:
            self.seen.append(near.recv(1 << 16))
            far.sendall(self.seen[-1].replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += far.recv(1 << 16)
            near.sendall(answer.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            with suppress(OSError):  # the client leaves its stream
                while rest := far.recv(1 << 16):
                    near.sendall(rest)


def test_through_a_proxy_that_ends_connections(server: SmallServer) -> None:
    with forward_proxy(server, ClosingProxy) as proxy:
        with Client(server.job_url, KEY, proxy=f"http://127.0.0.1:{proxy.port}") as client:
            gets_all(client)
        assert len(proxy.seen) == len(proxy.threads)


@pytest.mark.parametrize("proxy", ["socks5://me:pw@host", "http://", "host:1"])
def test_proxies_are_checked_and_not_shown(proxy: str) -> None:
    with pytest.raises(ConfigError, match="proxy = ") as caught:
        Client("http://host/v1/jobs/a", proxy=proxy)
    assert "pw" not in str(caught.value)


def test_a_proxy_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as place:
        proxy = f"http://me:pw@127.0.0.1:{place.getsockname()[1]}"
    with (
        Client("http://host/v1/jobs/a", KEY, proxy=proxy, timeout_s=0.2, pace=FAST) as client,
        pytest.raises(UnreachableError, match="Connection refused") as caught,
    ):
        client.begin("run-1")
    assert "pw" not in "".join(traceback.format_exception(caught.value))


def test_tls_through_a_proxy(secure: SmallServer, certificates: Path) -> None:
    with forward_proxy(secure) as proxy:
        url, ca = f"http://127.0.0.1:{proxy.port}", certificates / "ca.pem"
        with Client(secure.job_url, KEY, ca=ca, proxy=url) as client:
            gets_all(client)
        assert all(head.startswith(b"CONNECT 127.0.0.1:") for head in proxy.seen)
        assert KEY.encode() not in b"".join(proxy.seen)


# ---- a network that fails


@pytest.mark.parametrize("seed", sparse(range(3), 3))
def test_a_faulty_network_delivers_everything_once_and_in_order(seed: int) -> None:
    faulty_proxy.case(seed)
