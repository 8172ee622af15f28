"""Plans of planning servers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.service.client import Client
from apportion.service.problems import ServiceError, UnknownPlanError, UnreachableError
from apportion.trainer.loading.sources.source import Source

CALL_S = 10.0  # for an answer to anything but a plan; whoever asked looks then whether it is still of use


@dataclass(eq=False)
class ServiceSource(Source):
    """urls: of equal servers, http(s)://HOST:PORT; token, ca: as `Client`; timeout_s: that somebody waits for a plan;
    job: digest, by which load balancers send all ranks to one server. Slices of iterations in a row come over a stream.
    Raises ConfigError."""

    urls: tuple[str, ...]
    token: str | None = field(default=None, repr=False)
    ca: str | None = None
    timeout_s: float = 300.0
    job: bytes = b""

    def __post_init__(self) -> None:
        call_s = min(CALL_S, self.timeout_s / 3)
        self._client = Client(self.urls, self.token, ca=self.ca, timeout_s=call_s, job=self.job)
        self._stream: Iterator[IterationSlice] | None = None
        self._coming = deque[bytes]()  # keys of what the stream still has to bring

    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        with _patience():
            self._client.submit(key, request, ahead)

    def fetch(self, key: bytes, rank: int, wait_s: float, then: Sequence[bytes] = ()) -> IterationSlice:
        with _patience():
            if self._stream is not None and self._coming and self._coming[0] == key:
                try:
                    return self._next()
                except (TimeoutError, UnknownPlanError):  # of the time when it was opened
                    return self._client.fetch(key, rank, wait_s)
            self._coming = deque([key, *then])
            self._stream = self._client.stream(list(self._coming), rank, wait_s)
            return self._next()

    def _next(self) -> IterationSlice:
        assert self._stream is not None
        try:
            found = next(self._stream)
        except BaseException:
            self._stream = None
            raise
        self._coming.popleft()
        return found

    def close(self) -> None:
        self._stream = None
        self._client.close()


@contextmanager
def _patience() -> Iterator[None]:
    """A service that does not answer, or is too busy, may do so later: TimeoutError."""
    try:
        yield
    except UnreachableError as error:
        raise TimeoutError(str(error)) from error
    except ServiceError as error:
        if not error.transient:
            raise
        raise TimeoutError(str(error)) from error
