"""Plans of a planning service: streamed, or one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, Self

from apportion.ir.arrays import Ints
from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job
from apportion.ir.loops.jit import compiling
from apportion.ir.request.batch import Batch
from apportion.ir.request.sampling import Sampling
from apportion.service.client import Client, ServiceProblem, UnreachableError
from apportion.service.protocol import TRAIN
from apportion.trainer.loading.sources.source import sampling_of

_READS_ONLY = 403  # a key that only reads: such a rank takes over from nobody
CALL_S = 10.0  # for an answer to anything but a plan; whoever asked looks then whether it is still of use
ONE_BY_ONE, MOST_ONE_BY_ONE = 8, 512  # iterations, after a stream from which none came in time


@dataclass(frozen=True)
class ServiceSource:
    """The planning service. url: of the job, http(s)://HOST:PORT/v1/jobs/NAME; key: of the job; ca: a PEM file of
    certificates, by default the system's; cert: one with the client's own and its key, where the server asks for it."""

    url: str
    key: str | None = field(repr=False)
    job: Job
    ca: str | Path | None = None
    cert: str | Path | None = None
    shared = True

    @classmethod
    def open(
        cls, url: str, key: str | None, ca: str | Path | None = None, cert: str | Path | None = None
    ) -> Self:
        """Raises ClientError where the service does not answer or has no such job."""
        with Client(url, key, ca=ca, cert=cert) as client:
            return cls(url, key, client.job(), ca, cert)

    def sampling(self, lengths: Ints, seed: int | None, shuffle: bool | None) -> Sampling:
        return sampling_of(self.job, lengths, seed, shuffle)

    def begin(self, run: str, rank: int, stream: str = TRAIN) -> ServiceFeed:
        return ServiceFeed(self, run, rank, stream)


class ServiceFeed:
    """Iterations in a row come over a stream, others one by one; also for a while after a stream that gave nothing in
    time, since what stands between may hold streams back."""

    def __init__(self, source: ServiceSource, run: str, rank: int, stream: str) -> None:
        self._client = Client(source.url, source.key, timeout_s=CALL_S, ca=source.ca, cert=source.cert)
        self._run, self._stream_name, self._rank = run, stream, rank
        self._epoch, self._lock = 0, Lock()
        self._stream: Any = None
        self._next = -1  # the iteration that would be next in a row
        self._single, self._singles = 0, ONE_BY_ONE  # still to come one by one; after the next such stream

    @property
    def compiled_s(self) -> float:
        return compiling.seconds

    def knows(self, iteration: int) -> bool:
        with _patience():
            return self._client.knows(self._begun(), iteration)

    def submit(self, iteration: int, batches: Sequence[Batch]) -> None:
        try:
            with _patience():
                self._client.submit(self._begun(), iteration, batches)
        except ServiceProblem as problem:
            if problem.status != _READS_ONLY or self._rank == 0:
                raise

    def plan(self, iteration: int, batches: Sequence[Batch], timeout_s: float) -> IterationSlice:
        with _patience():
            epoch = self._begun()
            if iteration == self._next and not self._single:
                found = self._streamed(epoch, iteration, timeout_s)
            else:
                self._hang_up()
                found = self._client.plan(epoch, iteration, self._rank, timeout_s)
                self._single = max(0, self._single - 1)
        self._next = iteration + 1
        return found

    def stop(self) -> None:
        self._client.close()

    def close(self) -> None:
        self._hang_up()
        self._client.close()

    def _begun(self) -> int:
        with self._lock:
            if not self._epoch:
                self._epoch = self._client.begin(self._run, self._stream_name)
            return self._epoch

    def _streamed(self, epoch: int, iteration: int, timeout_s: float) -> IterationSlice:
        if self._stream is None:
            self._stream = self._client.stream(epoch, self._rank, iteration, patience_s=timeout_s)
        try:
            piece: IterationSlice = next(self._stream)[1]
        except BaseException:
            self._hang_up()
            self._single, self._singles = self._singles, min(2 * self._singles, MOST_ONE_BY_ONE)
            raise
        self._singles = ONE_BY_ONE
        return piece

    def _hang_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


@contextmanager
def _patience() -> Iterator[None]:
    """A service that does not answer, or is too busy, may do so later: TimeoutError."""
    try:
        yield
    except UnreachableError as error:
        raise TimeoutError(str(error)) from error
    except ServiceProblem as error:
        if not error.transient:
            raise
        raise TimeoutError(str(error)) from error
