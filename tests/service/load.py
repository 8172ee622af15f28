"""Load on a real server: many streams, hot plans, clients that never read, more work than it can do, long runs.

Each case takes a seed and returns figures; it raises where a promise does not hold. `test_load` runs them small.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import urllib3
from numpy.typing import NDArray

from apportion import bench
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job
from apportion.ir.errors import ApportionError
from apportion.ir.request.batch import Batch
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.ir.request.workload import lognormal_lengths
from apportion.planner.iteration.jobs import plan_job
from apportion.planner.recipe.recipes import find_recipe, with_block
from apportion.service import protocol
from apportion.service.client import Client, create_job
from apportion.service.frames import FrameReader, Kind
from apportion.service.http.run.child import serving

KEY = "load-test-key-0123456789"
Figures = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """An epoch of a job on a server."""

    url: str
    pid: int
    name: str
    client: Client
    epoch: int
    job: Job

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 80)

    def path(self, below: str) -> str:
        return protocol.job_path(self.name) + below

    def state(self, iteration: int) -> Mapping[str, Any]:
        url = self.url + self.path(protocol.iteration_path(self.epoch, iteration))
        found: Mapping[str, Any] = urllib3.request("GET", url, headers=_auth()).json()
        return found


def _auth() -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}"}


def job_of(ranks: int, tokens_per_rank: int, block: int | str = 2048) -> Job:
    recipe = with_block(find_recipe("fcp"), block)
    return Job(bench.cluster_of(ranks), Model(layers=32), Policy(recipe), tokens_per_rank)


def batch_of(job: Job, seed: int) -> Batch:
    return Batch.from_lengths(lognormal_lengths(seed, job.tokens))


@contextmanager
def running(job: Job, *, workers: int = 2, lookahead: int = 64, options: Sequence[str] = ()) -> Iterator[Run]:
    """A server of its own with a job and an epoch."""
    folder = Path(tempfile.mkdtemp(prefix="apportion-load-"))
    try:
        with (
            serving(folder, workers=workers, options=options) as server,
            create_job(server.url, "load", job, key=KEY, lookahead=lookahead) as client,
        ):
            yield Run(server.url, server.pid, "load", client, client.begin("run-0"), job)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def submit_all(run: Run, iterations: int, seed: int, batch: Callable[[Job, int], Batch] = batch_of) -> None:
    for i in range(iterations):
        run.client.submit(run.epoch, i, [batch(run.job, seed * 100_003 + i)])


# ---- what a process takes


def cpu_s(pid: int) -> float:
    """User and system time of a process, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


# ---- clients that only receive


@dataclass
class Receipts:
    """Of one client: iterations in the order in which they came, and when (unix seconds)."""

    rank: int
    iterations: list[int]
    at: list[float]
    bytes: int = 0


async def receive(
    address: tuple[str, int], path: str, rank: int, stop: int, opened: Callable[[], None]
) -> Receipts:
    """Reads a rank's stream from iteration 0 to `stop`, window after window, every frame checked."""
    got = Receipts(rank, [], [])
    while len(got.iterations) < stop:
        reader, writer = await asyncio.open_connection(*address)
        try:
            target = f"{path}?from={len(got.iterations)}&window={stop}"
            await _ask(reader, writer, target, address)
            opened()
            await _window(reader, got, stop)
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
    return got


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str, address: tuple[str, int]
) -> None:
    head = f"GET {target} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in answer.split(b"\r\n", 1)[0]:
        raise RuntimeError(f"the stream was refused: {answer!r}")


async def _window(reader: asyncio.StreamReader, got: Receipts, stop: int) -> None:
    frames = FrameReader()
    while len(got.iterations) < stop:
        size = int(await reader.readline(), 16)
        if not size:
            frames.close()
            return
        chunk = await reader.readexactly(size)
        await reader.readexactly(2)
        now = time.time()
        for frame in frames.feed(chunk):
            if frame.kind == Kind.PLAN:
                got.iterations.append(frame.iteration)
                got.at.append(now)
                got.bytes += len(frame.body)
            elif frame.kind == Kind.PROBLEM:
                raise RuntimeError(f"a problem: {frame.body!r}")


def _receiving(address: tuple[str, int], places: Sequence[tuple[str, int]], stop: int, results: Any) -> None:
    """A process with many clients on one loop: says so when all streams are open, and at the end what came."""
    still = set(range(len(places)))

    def opened(client: int) -> None:
        if client in still:
            still.remove(client)
            if not still:
                results.send_bytes(b"open")

    async def all_of_them() -> list[Receipts]:
        clients = (
            receive(address, path, rank, stop, partial(opened, client))
            for client, (path, rank) in enumerate(places)
        )
        return await asyncio.gather(*clients)

    with results:
        results.send_bytes(json.dumps([vars(got) for got in asyncio.run(all_of_them())]).encode())


@contextmanager
def receivers(
    run: Run, clients: int, stop: int, processes: int = 1
) -> Iterator[Callable[[], list[Receipts]]]:
    """Clients of a job, rank after rank: see `receiving`."""
    with receiving(
        run.address, [stream_of(run, client % run.job.ranks) for client in range(clients)], stop, processes
    ) as found:
        yield found


def stream_of(run: Run, rank: int) -> tuple[str, int]:
    """(path, rank) of a stream."""
    return run.path(f"/epochs/{run.epoch}/ranks/{rank}/stream"), rank


@contextmanager
def receiving(
    address: tuple[str, int], places: Sequence[tuple[str, int]], stop: int, processes: int = 1
) -> Iterator[Callable[[], list[Receipts]]]:
    """Clients in processes of their own, once all have a stream; what is given waits for their receipts."""
    context = multiprocessing.get_context("spawn")
    pipes, children = [], []
    for i in range(processes):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(
            target=_receiving, args=(address, places[i::processes], stop, theirs), daemon=True
        )
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)

    def collect() -> list[Receipts]:
        return [Receipts(**got) for pipe in pipes for got in json.loads(pipe.recv_bytes())]

    try:
        for pipe in pipes:
            pipe.recv_bytes()
        yield collect
    finally:
        for pipe, child in zip(pipes, children, strict=True):
            pipe.close()
            child.terminate()
            child.join()
            child.close()


# ---- cases


def streams(
    seed: int, clients: int = 256, iterations: int = 200, tokens_per_rank: int = 32768, ranks: int = 256
) -> Figures:
    """Every client gets every iteration once, in order; how long after it could have been served."""
    with running(job_of(ranks, tokens_per_rank), lookahead=iterations) as run:
        with receivers(run, clients, iterations, processes=2) as collect:
            submit_all(run, iterations, seed)
            receipts = collect()
        ready = np.array([run.state(i)["ready_at"] for i in range(iterations)])
        cpu = cpu_s(run.pid)
    order = list(range(iterations))
    wrong = [got.rank for got in receipts if got.iterations != order]
    if wrong or len(receipts) != clients:
        raise AssertionError(f"{len(receipts)} clients of {clients}; wrong order or number on {wrong[:8]}")
    late = np.concatenate([(np.array(got.at) - ready) * 1e3 for got in receipts])
    p50, p99, most = np.percentile(late, [50, 99, 100])
    return {
        "clients": clients,
        "frames": len(late),
        "mean_frame_bytes": round(sum(got.bytes for got in receipts) / len(late)),
        "p50_ms": round(float(p50), 2),
        "p99_ms": round(float(p99), 2),
        "max_ms": round(float(most), 2),
        "server_cpu_us_per_frame": round(cpu / len(late) * 1e6, 1),
    }


def crowd(seed: int, jobs: int = 16, ranks: int = 64, iterations: int = 40, workers: int = 1) -> Figures:
    """Many jobs at once, a stream for each of their ranks: everyone gets everything, and how long it takes."""
    job = job_of(ranks, 8192)
    with ExitStack() as stack:
        first = stack.enter_context(running(job, workers=workers, lookahead=iterations))
        runs = [first]
        for number in range(1, jobs):
            client = stack.enter_context(
                create_job(first.url, f"load{number}", job, key=KEY, lookahead=iterations)
            )
            runs.append(Run(first.url, first.pid, f"load{number}", client, client.begin("run-0"), job))
        places = [stream_of(run, rank) for run in runs for rank in range(ranks)]
        with receiving(first.address, places, iterations, processes=2) as collect:
            began_s = time.monotonic()
            for i in range(iterations):
                for number, run in enumerate(runs):
                    run.client.submit(run.epoch, i, [batch_of(job, (seed * 64 + number) * 100_003 + i)])
            receipts = collect()
            took_s = time.monotonic() - began_s
        ready = np.array([[run.state(i)["ready_at"] for i in range(iterations)] for run in runs])
        cpu, most = cpu_s(first.pid), rss_mib(first.pid)
    order = list(range(iterations))
    if len(receipts) != jobs * ranks or any(got.iterations != order for got in receipts):
        raise AssertionError("a client did not get every plan, in order")
    late = [np.array(got.at) for got in receipts]
    by_place = [places.index(stream) for part in range(2) for stream in places[part::2]]
    beside = np.concatenate(
        [(at - ready[place // ranks]) * 1e3 for at, place in zip(late, by_place, strict=True)]
    )
    p50, p99 = np.percentile(beside, [50, 99])
    return {
        "jobs": jobs,
        "streams": len(receipts),
        "frames": len(beside),
        "frames_per_s": round(len(beside) / took_s),
        "p50_ms": round(float(p50), 1),
        "p99_ms": round(float(p99), 1),
        "server_cpu_us_per_frame": round(cpu / len(beside) * 1e6, 1),
        "server_mib": round(most, 1),
    }


def hot(seed: int, seconds: int = 10, connections: int = 64) -> Figures:
    """GET of one plan of about 16 KB by `wrk`, keep-alive, with bearer key and ETag."""
    if shutil.which("wrk") is None:
        raise RuntimeError("wrk is not installed: apt-get install wrk")
    job = job_of(64, 45056)
    with running(job) as run:
        submit_all(run, 1, seed)
        sizes = [len(run.client.plan(run.epoch, 0, rank).encode()) for rank in range(job.ranks)]
        rank = int(np.argmin(np.abs(np.array(sizes) - 16384)))
        url = run.url + run.path(protocol.plan_path(run.epoch, 0, rank))
        answer = urllib3.request("GET", url, headers=_auth())
        if answer.status != 200 or "ETag" not in answer.headers:
            raise AssertionError(f"{answer.status} {dict(answer.headers)}")
        before = cpu_s(run.pid)
        command = [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{seconds}s",
            "-H",
            f"Authorization: Bearer {KEY}",
            url,
        ]
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds + 60, check=True
        ).stdout
        used = cpu_s(run.pid) - before
    if "Non-2xx" in said or "Socket errors" in said:
        raise AssertionError(said)
    requests = int(re.search(r"(\d+) requests in", said)[1])
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", said)[1])
    return {
        "body_bytes": sizes[rank],
        "connections": connections,
        "requests_per_s": round(rate),
        "server_cpu_us_per_request": round(used / requests * 1e6, 1),
    }


def never_reading(seed: int, silent: int = 50, reading: int = 8, iterations: int = 100) -> Figures:
    """Clients that open a stream and never read: the server's memory beside that of a run without them, and what others
    notice."""
    without, quick = _beside(seed, 0, reading, iterations)
    beside, late = _beside(seed, silent, reading, iterations)
    return {
        "silent": silent,
        "grown_mib": round(beside - without, 1),
        "others_p99_ms": round(float(np.percentile(late, 99)), 2),
        "others_p99_ms_without": round(float(np.percentile(quick, 99)), 2),
    }


def _beside(seed: int, silent: int, reading: int, iterations: int) -> tuple[float, NDArray[np.float64]]:
    """(MiB of the server, how late frames were in ms) of clients that read beside clients that do not."""
    with running(job_of(64, 32768), lookahead=iterations) as run, ExitStack() as stack:
        for i in range(silent):
            stack.enter_context(closing(_silent(run, i % run.job.ranks)))
        with receivers(run, reading, iterations) as collect:
            submit_all(run, iterations, seed)
            receipts = collect()
        ready = np.array([run.state(i)["ready_at"] for i in range(iterations)])
        taken = rss_mib(run.pid)
    wrong = [got.rank for got in receipts if got.iterations != list(range(iterations))]
    if wrong:
        raise AssertionError(f"plans were lost or repeated: ranks {wrong}")
    return taken, np.concatenate([(np.array(got.at) - ready) * 1e3 for got in receipts])


def _silent(run: Run, rank: int) -> socket.socket:
    held = socket.create_connection(run.address)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    path = run.path(protocol.stream_path(run.epoch, rank))
    held.sendall(
        f"GET {path}?from=0&window=100000 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    )
    return held


def overload(seed: int, seconds: float = 20.0, jobs: int = 12) -> Figures:
    """Many more submits than the workers can plan, of many jobs: each is answered at once, and afterwards all is well
    soon."""
    job = job_of(64, 32768)
    with running(job, workers=1, lookahead=256) as run:
        clients = [create_job(run.url, f"load-{i}", job, key=KEY, lookahead=256) for i in range(jobs)]
        for client in clients:
            with client:
                client.begin("run-0")
        pushers = [Pusher(run, f"load-{i}", seed + i) for i in range(jobs)]
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=pusher.push, args=(end,)) for pusher in pushers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        planned = planned_total(run)
        recovered = _recovery(run, seed)
    answers = Counter[int]()
    for pusher in pushers:
        answers.update(pusher.answers)
    odd = {status: count for status, count in answers.items() if status not in (200, 201, 429, 503)}
    if odd:
        raise AssertionError(f"answers {odd}")
    return {
        "submits": answers.total(),
        "planned_meanwhile": planned,
        "answers": {str(status): count for status, count in sorted(answers.items())},
        "slowest_refusal_ms": round(max(pusher.slowest_s for pusher in pushers) * 1e3, 1),
        "recovery_s": round(recovered, 2),
    }


class Pusher:
    """Submits iterations to one job as fast as answers come."""

    def __init__(self, run: Run, name: str, seed: int) -> None:
        self.answers, self.slowest_s = Counter[int](), 0.0
        self._url = f"{run.url}{protocol.job_path(name)}"
        rng = np.random.default_rng(seed)
        self._lengths = [int(length) for length in rng.integers(1000, 14000, 200)]

    def push(self, end: float) -> None:
        headers = _auth() | {"Content-Type": "application/json"}
        with urllib3.PoolManager() as pool:
            for i in itertools.count():
                if time.monotonic() > end:
                    return
                batch = {"lengths": [1 + i % 977, *self._lengths]}
                url = self._url + protocol.iteration_path(1, i)
                data = json.dumps({"batches": [batch]}).encode()
                began = time.monotonic()
                answer = pool.request("PUT", url, body=data, headers=headers, retries=False)
                self._note(answer, time.monotonic() - began)

    def _note(self, answer: urllib3.BaseHTTPResponse, took_s: float) -> None:
        self.answers[answer.status] += 1
        if answer.status in (429, 503):
            self.slowest_s = max(self.slowest_s, took_s)
            if "Retry-After" not in answer.headers:
                raise AssertionError("a refusal without Retry-After")


def planned_total(run: Run) -> int:
    text = urllib3.request("GET", f"{run.url}/metrics", headers=_auth()).data.decode()
    found = re.search(r"^apportion_plans_total(?:{[^}]*})? ([\d.e+]+)", text, re.MULTILINE)
    return int(float(found[1])) if found else -1


def _recovery(run: Run, seed: int) -> float:
    """Seconds until a job that nobody pressed has a plan."""
    began = time.monotonic()
    run.client.submit(run.epoch, 0, [batch_of(run.job, seed)])
    run.client.plan(run.epoch, 0, 0, timeout_s=60)
    return time.monotonic() - began


def long_run(seed: int, iterations: int = 10_000, keep_every: int = 500) -> Figures:
    """Iteration after iteration as a trainer does it: memory and descriptors of the server stay what they were."""
    job = job_of(2, 512, 128)
    with running(job, workers=1, lookahead=8) as run:
        ahead, samples = 0, []
        began = time.monotonic()
        for i, (number, piece) in enumerate(_read(run, iterations)):
            if number != i or not isinstance(piece, IterationSlice):
                raise AssertionError(f"iteration {number} came as number {i}")
            while ahead < min(i + 8, iterations):
                run.client.submit(run.epoch, ahead, [Batch.from_lengths([400, 1 + ahead % 600])])
                ahead += 1
            if i % keep_every == keep_every - 1:
                samples.append((rss_mib(run.pid), descriptors(run.pid)))
        took = time.monotonic() - began
    settled = samples[len(samples) // 3 :]
    return {
        "iterations": iterations,
        "per_s": round(iterations / took, 1),
        "rss_mib": [round(settled[0][0], 1), round(settled[-1][0], 1)],
        "descriptors": [settled[0][1], settled[-1][1]],
    }


def _read(run: Run, iterations: int) -> Iterator[tuple[int, IterationSlice]]:
    for i in range(8):
        with suppress(ApportionError):
            run.client.submit(run.epoch, i, [Batch.from_lengths([400, 1 + i % 600])])
    found = run.client.stream(run.epoch, 0)
    for _ in range(iterations):
        yield next(found)


def server_kills(seed: int, kills: int = 5, iterations: int = 40) -> Figures:
    """SIGKILL of a whole server, again and again, while two ranks read and submit: both get every plan, the same as an
    undisturbed planner makes, and each new server is ready soon."""
    job, rng = job_of(2, 512, 128), np.random.default_rng(seed)
    folder = Path(tempfile.mkdtemp(prefix="apportion-kills-"))
    port, ready = _free_port(), []
    batches = [[Batch.from_lengths([400, 1 + i])] for i in range(iterations)]
    got: list[list[tuple[int, bytes]]] = [[], []]
    readers: list[threading.Thread] = []
    try:
        for life in range(kills + 1):
            began = time.monotonic()
            with serving(folder, port=port) as server:
                ready.append(time.monotonic() - began)
                if not readers:
                    readers = _two_ranks(server.url, job, batches, got)
                if life < kills:
                    time.sleep(float(rng.uniform(0.01, 1.0)))
                    os.kill(server.pid, signal.SIGKILL)
                else:
                    for reader in readers:
                        reader.join(120)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for rank, held in enumerate(got):
        expected = [
            (i, plan_job(job, batch, verify=False).plan.slice_for(rank).encode())
            for i, batch in enumerate(batches)
        ]
        if held != expected:
            raise AssertionError(f"rank {rank} got {[number for number, _ in held]}")
    return {"kills": kills, "iterations": iterations, "ready_s": [round(float(max(ready[1:])), 2)]}


def _two_ranks(
    url: str, job: Job, batches: Sequence[Sequence[Batch]], got: Sequence[list[tuple[int, bytes]]]
) -> list[threading.Thread]:
    """Two clients that read every plan, each of them submitting ahead of itself."""

    def read(rank: int) -> None:
        with create_job(url, "kills", job, key=KEY, timeout_s=60) as client:
            epoch = client.begin("run-0")
            with closing(client.stream(epoch, rank, patience_s=60)) as plans:
                for i, batch in enumerate(batches):
                    client.submit(epoch, i, batch)
                    number, piece = next(plans)
                    got[rank].append((number, piece.encode()))

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    return threads


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def drain(seed: int, iterations: int = 60) -> Figures:
    """SIGTERM while much is queued: how long until the server has ended; the next one has everything."""
    job = job_of(64, 16384)
    folder = Path(tempfile.mkdtemp(prefix="apportion-drain-"))
    batches = [batch_of(job, seed * 100_003 + i) for i in range(iterations)]
    try:
        with serving(folder, workers=2) as server:
            with create_job(server.url, "drain", job, key=KEY, lookahead=iterations) as client:
                epoch = client.begin("run-0")
                for i, batch in enumerate(batches):
                    client.submit(epoch, i, [batch])
            began = time.monotonic()
            server.process.terminate()
            code = server.process.wait(60)
            took = time.monotonic() - began
        with (
            serving(folder, workers=2) as server,
            create_job(server.url, "drain", job, key=KEY, lookahead=iterations) as client,
        ):
            for i in range(iterations):
                client.plan(epoch, i, i % job.ranks, timeout_s=120)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"exit": code, "drain_s": round(took, 2), "iterations": iterations}
