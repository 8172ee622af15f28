"""Two servers over one Redis, behind one address: the leader is killed or stopped again and again, and nothing that was
answered is lost."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import urllib3

from apportion.service.client import Client, Pace, create_job
from tests.service.engines import JOB, batch
from tests.service.load import Figures
from tests.service.stores import RedisServer, free_port, redis_server, until

ADMIN, KEY = "admin-key-of-both-0123456789", "key-of-the-job-0123456789"
MOST_S = 5.0  # until the other one answers
_PACE = Pace(connect_s=0.5, read_s=2.0, wait_s=0.5, backoff_s=0.02, backoff_most_s=0.1)


@dataclass
class Peer:
    """A server that leads or stands by."""

    folder: Path
    redis: RedisServer
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.folder.mkdir(mode=0o700, exist_ok=True)
        key = self.folder / "admin"
        key.touch(0o600)
        key.write_text(ADMIN)
        command = [
            sys.executable,
            "-m",
            "apportion",
            "serve",
            "--standby",
            "--workers",
            "1",
            "--store",
            self.redis.url,
        ]
        command += ["--port", str(self.port), "--dir", str(self.folder), "--admin-key-file", str(key)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, "--parent", str(os.getpid())], stderr=log, stdout=log)

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def ready(self) -> bool:
        return self._is_well("/readyz")

    @property
    def alive(self) -> bool:
        return self._is_well("/healthz")

    def _is_well(self, path: str) -> bool:
        with suppress(urllib3.exceptions.HTTPError):
            url = f"http://127.0.0.1:{self.port}{path}"
            return urllib3.request("GET", url, timeout=1.0, retries=False).status == 200
        return False

    def send(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def ended(self) -> int:
        """Its exit status, once it has ended."""
        if self.process is None:
            raise RuntimeError("it was not started")
        return self.process.wait(60.0)

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


@contextmanager
def address(peers: list[Peer]) -> Iterator[str]:
    """The URL of whichever is ready, as a load balancer would have it: it looks five times a second."""
    leader: list[int] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.wait(0.2):
            leader[:] = [peer.port for peer in peers if peer.ready][:1]

    def pass_on(client: socket.socket) -> None:
        with closing(client), suppress(OSError, IndexError), ExitStack() as stack:
            server = stack.enter_context(closing(socket.create_connection(("127.0.0.1", leader[0]), 1.0)))
            server.settimeout(None)
            back = threading.Thread(target=_copy, args=(server, client), daemon=True)
            back.start()
            _copy(client, server)
            back.join()

    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=pass_on, args=(listener.accept()[0],), daemon=True).start()

    threads = [threading.Thread(target=work, daemon=True) for work in (look, accept)]
    for thread in threads:
        thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stop.set()
        listener.close()
        threads[0].join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def case(seed: int, folder: Path, failures: int = 10, timed: bool = True) -> Figures:
    """So many leaders killed, stopped for longer than their lease, or told to end. timed: it has to be quick, for which
    nothing else may run. Raises AssertionError."""
    rng, took, kinds = random.Random(seed), list[float](), list[str]()
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(folder / "redis"))
        peers = [Peer(folder / f"server{i}", redis) for i in range(2)]
        for peer in peers:
            stack.callback(peer.end)
            peer.start()
        url = stack.enter_context(address(peers))
        client = stack.enter_context(
            create_job(url, "run", JOB, key=KEY, admin_key=ADMIN, timeout_s=60.0, pace=_PACE)
        )
        epoch, ids = client.begin("first"), list[bytes]()
        for kind in (rng.choice(("kill", "stop", "end")) for _ in range(failures)):
            for _ in range(rng.randrange(1, 6)):
                ids.append(_planned(client, epoch, len(ids)))
            leader = next(peer for peer in peers if peer.ready)
            began_s = time.monotonic()
            leader.send({"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM}[kind])
            ids.append(_planned(client, epoch, len(ids)))
            took.append(time.monotonic() - began_s)
            kinds.append(kind)
            _again(leader, kind)
        held = [client.plan(epoch, number, 1, timeout_s=60.0).id for number in range(len(ids))]
        assert held == ids, "a plan changed"
        lost = _wiped(redis, peers, url, epoch)
    figures = {
        "failures": kinds,
        "s": [round(each, 2) for each in took],
        "most_s": round(max(took), 2),
        **lost,
    }
    assert max(took) <= MOST_S or not timed, figures
    return figures


def _planned(client: Client, epoch: int, number: int) -> bytes:
    client.submit(epoch, number, batch(number))
    return client.plan(epoch, number, 0, timeout_s=60.0).id


def _again(leader: Peer, kind: str) -> None:
    """It comes back as the one that stands by. One that was stopped sees that it leads no more, and ends."""
    if kind == "stop":
        leader.send(signal.SIGCONT)
    status = leader.ended()
    assert (status == 0) == (kind == "end"), (kind, status)
    if kind == "stop":
        assert "the store is lost" in leader.log.read_text()
    leader.start()
    until(lambda: leader.alive, 60.0, "the one that stands by")


def _wiped(redis: RedisServer, peers: list[Peer], url: str, epoch: int) -> Figures:
    """A Redis that was emptied: its server ends, the other one begins anew, with epochs that nobody had."""
    import redis as library

    leader = next(peer for peer in peers if peer.ready)
    with library.Redis(port=redis.port) as raw:
        raw.flushall()
    assert leader.ended() not in (0, None)
    assert "the store is lost" in leader.log.read_text()  # wiped, or the other one was quicker
    with create_job(url, "run", JOB, key=KEY, admin_key=ADMIN, timeout_s=60.0, pace=_PACE) as client:
        begun = client.begin("first")
    assert begun > epoch
    return {"epoch_before": epoch, "epoch_after_wipe": begun}
