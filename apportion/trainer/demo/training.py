"""The demo's two trainings: on four processes whose plans a service streams to them, and in this process without."""

from __future__ import annotations

import secrets
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import urllib3
from rich.progress import Progress
from torch import Tensor

from apportion.ir.errors import ExecutionError
from apportion.ir.request.batch import Batch
from apportion.service.client import create_job
from apportion.service.http.run.child import serving
from apportion.service.private import admin_key_of
from apportion.service.tied import tied
from apportion.trainer.demo import process
from apportion.trainer.demo.workload import RANKS, StepDocuments, documents, job
from apportion.trainer.step.loss import IGNORED, normalised_loss
from apportion.trainer.step.plain import plain_attention

STALLED_S = 120
STOPPING_S = 5


@dataclass(frozen=True)
class Ran:
    """What the processes did in one step. plans: the id of each one's plan; waited_ms: of each, for plans, in all."""

    loss: float
    plans: tuple[bytes, ...]
    waited_ms: tuple[float, ...]


@dataclass(frozen=True)
class Service:
    """What the service did. delivered: slices of plans that processes got; planning_ms: mean of an iteration, verifying
    included; waited_ms: the longest that a process waited for all of its plans."""

    delivered: int
    planning_ms: float
    waited_ms: float


def train_planned(steps: Sequence[StepDocuments], progress: Progress) -> tuple[list[Ran], Service]:
    """What each step came to, each process holding its rows only; plans come from a service that runs as long."""
    with (
        tempfile.TemporaryDirectory() as name,
        _processes() as pipes,
        serving(Path(name) / "service") as server,  # starts while the processes do
    ):
        key = secrets.token_urlsafe(32)
        create_job(server.url, "demo", job(), key=key).close()
        documents(steps).save(Path(name))
        begin = process.Begin(name, f"{server.url}/v1/jobs/demo", key)
        for pipe in pipes:
            pipe.send_bytes(msgspec.msgpack.encode(begin))
        title = f"train on {RANKS} processes, planned"
        ran = watched(progress, title, len(steps), (_ran(_answers(pipes)) for _ in steps))
        delivered = sum(len(own.plans) for own in ran)
        return ran, Service(delivered, _planning_ms(server.url), max(ran[-1].waited_ms))


def _ran(told: list[process.StepResult]) -> Ran:
    return Ran(told[0].loss, tuple(own.plan for own in told), tuple(own.waited_ms for own in told))


def _planning_ms(url: str) -> float:
    """The mean time that the service's workers took for an iteration."""
    headers = {"authorization": f"Bearer {admin_key_of(url)}"}
    text = urllib3.request("GET", f"{url}/metrics", headers=headers).data.decode()
    figures = dict(line.split(" ") for line in text.splitlines() if not line.startswith("#"))
    name = "apportion_planning_seconds"
    return 1e3 * float(figures[f"{name}_sum"]) / float(figures[f"{name}_count"])


@contextmanager
def _processes() -> Iterator[list[Connection]]:
    """A pipe to each process; they are gone when the `with` is left, at once where it is left by an error."""
    pipes: list[Connection] = []
    workers: list[subprocess.Popen[bytes]] = []
    patience_s = 0.0
    try:
        for rank in range(RANKS):
            ours, theirs = Pipe()
            pipes.append(ours)
            with theirs:
                workers.append(_process(theirs.fileno(), rank))
        yield pipes
        patience_s = STOPPING_S
    finally:
        for worker in workers:
            with suppress(subprocess.TimeoutExpired):
                worker.wait(patience_s)
            worker.kill()
            worker.wait()
        for pipe in pipes:
            pipe.close()


def _process(pipe: int, rank: int) -> subprocess.Popen[bytes]:
    arguments = (str(number) for number in (pipe, rank, RANKS))
    command = tied(signal.SIGKILL, "-m", process.__name__, *arguments)
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(pipe,))


def _answers(pipes: list[Connection]) -> list[process.StepResult]:
    """What every process told of one step; the first failure wins."""
    told: dict[int, process.StepResult] = {}
    while len(told) < len(pipes):
        ready = wait([pipe for rank, pipe in enumerate(pipes) if rank not in told], STALLED_S)
        if not ready:
            raise ExecutionError(f"demo processes {sorted(set(range(len(pipes))) - set(told))} do not answer")
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                told[rank] = _answer(rank, pipe)
    return [told[rank] for rank in range(len(pipes))]


def _answer(rank: int, pipe: Connection) -> process.StepResult:
    try:
        told = msgspec.msgpack.decode(pipe.recv_bytes(), type=process.StepResult | process.Failure)
    except EOFError:
        raise ExecutionError(f"demo process {rank} died") from None
    if isinstance(told, process.Failure):
        raise ExecutionError(f"demo process {rank} failed:\n{told.text}")
    return told


def train_plain(steps: Sequence[StepDocuments]) -> Iterator[float]:
    """The loss of each step, all tokens in one process."""
    model, optimizer = process.trainer()
    for step in steps:
        ids = torch.from_numpy(step.text.astype(np.int64))
        target = torch.from_numpy(step.batch.labels())
        labels = torch.where(target >= 0, ids[target.clamp(min=0)], IGNORED)
        positions = torch.from_numpy(step.batch.positions())

        def attention(q: Tensor, k: Tensor, v: Tensor, kind: str, batch: Batch = step.batch) -> Tensor:
            return plain_attention(q, k, v, batch, kind)

        optimizer.zero_grad()
        loss = normalised_loss(model(ids, positions, attention), labels, step.valid_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        yield loss.item()


def watched(progress: Progress, title: str, total: int, work: Iterator[Any]) -> list[Any]:
    return list(progress.track(work, total, description=f"{title:<34}"))
