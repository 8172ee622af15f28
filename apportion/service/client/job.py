"""A training run's calls to the service."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from pathlib import Path

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.job import Job
from apportion.ir.errors import ConfigError
from apportion.ir.fields import integer, name
from apportion.ir.request.batch import Batch
from apportion.service import protocol
from apportion.service.client import answers, arguments
from apportion.service.client.answers import Received
from apportion.service.client.caller import Caller
from apportion.service.client.errors import BadAnswerError, PlanTimeoutError, ServiceProblem
from apportion.service.client.stream import Stream
from apportion.service.client.waits import Pace

PACE = Pace()
_REPORT_S = 120.0  # it waits for its turn, too
_PATH = re.compile(r"((?:/[^/]+)*)/v1/jobs/([^/]+)")


class Client:
    """One job of a service.

    url: of the job, "https://host:port/v1/jobs/NAME"; key: the job's, sent as a bearer token: use https beyond one
    machine; timeout_s: of a call, all its attempts together; ca: a PEM file of certificates that the server's is
    checked against, by default the system's; cert: a PEM file with the client's own certificate and its key, where the
    server asks for one; proxy: the url of an HTTP proxy (environment variables are not read).

    Any thread may call any method at any time; a stream's iterator belongs to one thread at a time. `close` ends what
    other threads wait for. In a forked process (a data loader's worker) a client opens connections of its own.
    Raises ConfigError, and from every method ClientError: ServiceProblem where the server refuses, UnreachableError
    where nothing answers in time, BadAnswerError, ClosedError.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        timeout_s: float = 30.0,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        proxy: str | None = None,
        pace: Pace = PACE,
    ) -> None:
        server, path = arguments.split("url", url)
        job = _PATH.fullmatch(path)
        if job is None:
            raise ConfigError(
                "url", server + path, "is not of a job", "write http(s)://HOST:PORT/v1/jobs/NAME"
            )
        name("url", job[2])
        self.url = server + path
        self.key = key
        peer, headers = arguments.peer(server, ca, proxy, cert), arguments.authorization("key", key)
        self._caller = Caller(peer, path, headers, arguments.seconds("timeout_s", timeout_s), pace)
        self._received = Received()

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def job(self) -> Job:
        """What was asked for when the job was created."""
        try:
            return Job.from_data(self._caller.get("", answers.JobData).job)
        except ConfigError as error:
            raise BadAnswerError(f"{self.url}: not a job: {error}") from error

    def summary(self) -> protocol.JobSummary:
        """Its name, ranks and epochs."""
        return self._caller.get("", protocol.JobSummary)

    def report(self, epoch: int, iteration: int) -> bytes:
        """A page about the plans of an iteration, HTML that opens offline; the server takes up to a minute for it."""
        path = protocol.report_path(integer("epoch", epoch), integer("iteration", iteration, 0))
        return self._caller.page(path, _REPORT_S)

    def begin(self, run: str, stream: str = protocol.TRAIN) -> int:
        """The number, 1, 2, ..., of the epoch that `run` has begun. Equal runs of a stream have equal numbers, so every
        rank may ask; plans of the stream's earlier epochs are gone, those of other streams are not."""
        data = {"run": name("run", run), "stream": name("stream", stream)}
        return self._caller.send("POST", protocol.EPOCHS, data, answers.EpochData).epoch

    def epoch_state(self, epoch: int) -> protocol.EpochState:
        """How far an epoch is."""
        return self._caller.get(protocol.epoch_path(integer("epoch", epoch)), protocol.EpochState)

    def submit(self, epoch: int, iteration: int, batches: Sequence[Batch]) -> None:
        """Have an iteration planned. Every rank may submit the same batches; other ones are refused."""
        data = {"batches": [batch.to_data() for batch in batches]}
        self._caller.send("PUT", _iteration_path(epoch, iteration), data, answers.Empty)

    def knows(self, epoch: int, iteration: int) -> bool:
        """Whether the iteration was submitted."""
        try:
            self._caller.get(_iteration_path(epoch, iteration), answers.Empty)
        except ServiceProblem as problem:
            if problem.status == 404:
                return False
            raise
        return True

    def plan(self, epoch: int, iteration: int, rank: int, timeout_s: float | None = None) -> IterationSlice:
        """One rank's slice of an iteration's plan; waits for it, and for its batches to be submitted. Bytes, id and
        rank are checked. Raises PlanTimeoutError after `timeout_s`, by default the client's."""
        path = protocol.plan_path(*arguments.place(epoch, iteration, rank))
        timeout_s = self._caller.timeout_s if timeout_s is None else arguments.seconds("timeout_s", timeout_s)
        waits = self._caller.waits(
            timeout_s, lambda failure: PlanTimeoutError(epoch, iteration, rank, timeout_s, str(failure))
        )
        return self._received.decode(self._caller.plan(path, waits), epoch, iteration, rank)

    def stream(
        self, epoch: int, rank: int, start: int = 0, window: int = protocol.WINDOW, patience_s: float = 60.0
    ) -> Generator[tuple[int, IterationSlice], None, None]:
        """(iteration, the rank's slice) from iteration `start` on, in order, each once, without end: close the iterator
        to leave. window: plans that the server may send ahead of what was read. Resumes by itself, and asks for plans
        one by one while streams keep failing. Raises PlanTimeoutError where the next one takes `patience_s`."""
        epoch, start, rank = arguments.place(epoch, start, rank)
        integer("window", window)
        patience_s = arguments.seconds("patience_s", patience_s)
        return Stream(self._caller, self._received, epoch, rank, start, window, patience_s).plans()

    def close(self) -> None:
        """Free the sockets. Calls that are under way in other threads end with ClosedError; again is no error."""
        self._caller.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _iteration_path(epoch: int, iteration: int) -> str:
    return protocol.iteration_path(*arguments.place(epoch, iteration, 0)[:2])
