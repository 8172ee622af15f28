"""Sources of plans: planning servers, a folder of precomputed plans, or a local process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.origin import difference
from apportion.ir.bytes.transport import decompress
from apportion.ir.errors import ConfigError
from apportion.ir.version import __version__
from apportion.service.client import Client
from apportion.service.pack import Pack
from apportion.service.precompute import read_origin
from apportion.service.problems import ServiceError, UnknownPlanError, UnreachableError
from apportion.service.store import Folder
from apportion.service.workers import Completion, ProcessExecutor, Refusal, plan_pack

CALL_S = 10.0  # timeout of calls other than fetches, after which callers check if they still need the answer


@dataclass(eq=False)
class Source(ABC):
    """Source of plans. Plain data: every pass, and every data-loader process, has its own copy, built from the fields
    of the class, and closes it. One thread submits and another fetches; any thread may close it. shared: whether one
    rank's request is planned for all."""

    shared: ClassVar[bool] = True

    @abstractmethod
    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        """Submits a request for planning; idempotent. key: the `Job.request_key`; ahead: iterations before it is
        needed. Raises TimeoutError if there is no answer."""

    @abstractmethod
    def fetch(self, key: bytes, rank: int, wait_s: float, then: Sequence[bytes] = ()) -> IterationSlice:
        """Fetches a rank's slice. then: keys of the next iterations, as far as known. Raises TimeoutError if it is not
        ready after `wait_s`, UnknownPlanError if it was not submitted."""

    @abstractmethod
    def close(self) -> None:
        """Ends waiting calls and frees resources; idempotent."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, entry.name) for entry in fields(self) if entry.init)


@dataclass(eq=False)
class LocalSource(Source):
    """Plans in a local process; each rank has its own, and all compute the same plans."""

    shared = False
    _planner: ProcessExecutor | None = field(default=None, init=False)
    _futures: dict[bytes, Future[Completion | Refusal]] = field(default_factory=dict, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)
    _is_closed: bool = field(default=False, init=False)

    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        with self._lock:
            if self._is_closed or key in self._futures:
                return
            if self._planner is None:
                self._planner = ProcessExecutor(1)
            self._futures[key] = self._planner.submit(plan_pack, request)

    def fetch(self, key: bytes, rank: int, wait_s: float, then: Sequence[bytes] = ()) -> IterationSlice:
        """Fetches like `Source`. Raises ServiceError if the request cannot be planned, WorkerDiedError."""
        future = self._futures.get(key)
        if future is None:
            raise UnknownPlanError(key)
        if not wait([future], wait_s).done:
            raise TimeoutError("it is still being planned")
        result = future.result()
        if isinstance(result, Refusal):
            raise ServiceError(result.type, result.detail, field=result.field)
        del self._futures[key]
        return IterationSlice.decode(decompress(Pack.decode(result.data, key).slice(rank)))

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._planner is not None:
                self._planner.shutdown(cancel_futures=True)


@dataclass(eq=False)
class FolderSource(Source):
    """Precomputed plans, found by the key of the request, so samples may come in any order. origin: what
    requests were made from (`ir.bytes.origin`), to explain a missing plan. Raises ConfigError if the folder
    does not exist."""

    folder: str
    origin: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not Path(self.folder).is_dir():
            rule, remedy = "is not a folder", "name one from apportion precompute, or the URL of a server"
            raise ConfigError("source", self.folder, rule, remedy)
        self._store = Folder(Path(self.folder), repairs=False)

    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        """Does nothing: all plans exist."""

    def fetch(self, key: bytes, rank: int, wait_s: float, then: Sequence[bytes] = ()) -> IterationSlice:
        """Fetches like `Source`. Raises ConfigError for a missing plan, naming the field that differs; StoreError."""
        piece = self._store.slice(key, rank)
        if piece is None:
            raise self._missing_plan_error(key)
        return piece

    def close(self) -> None:
        self._store.close()

    def _missing_plan_error(self, key: bytes) -> ConfigError:
        made_with = read_origin(Path(self.folder))
        facts = {
            name: value for name, value in self.origin.items() if value is not None and name in made_with
        }
        releases = [entry.name for entry in Path(self.folder).iterdir() if entry.is_dir()]
        if releases and __version__ not in releases:
            name, existing, current = "release", ", ".join(releases), __version__
        elif mismatch := difference({name: made_with[name] for name in facts}, facts):
            name, existing, current = mismatch
        else:
            limit = f", which has the first {made_with['iterations']} iterations" if made_with else ""
            rule = f"it is not among the plans in {self.folder}{limit}"
            remedy = "precompute more iterations, or pass the same samples"
            return ConfigError("source", f"the plan {key.hex()[:16]}", rule, remedy)
        rule = f"the plans in {self.folder} were made with {existing!r}"
        return ConfigError(name, current, rule, "pass the same value, or precompute into another folder")


@dataclass(eq=False)
class ServiceSource(Source):
    """Planning servers. urls: equivalent servers, http(s)://HOST:PORT; token, ca: as in `Client`; timeout_s: longest
    wait for a plan; job: digest with which load balancers send all ranks to the same server. Slices of consecutive
    iterations come over a stream. Raises ConfigError."""

    urls: tuple[str, ...]
    token: str | None = field(default=None, repr=False)
    ca: str | None = None
    timeout_s: float = 300.0
    job: bytes = b""

    def __post_init__(self) -> None:
        call_s = min(CALL_S, self.timeout_s / 3)
        self._client = Client(self.urls, self.token, ca=self.ca, timeout_s=call_s, job=self.job)
        self._stream: Iterator[IterationSlice] | None = None
        self._pending = deque[bytes]()  # keys outstanding in the stream

    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        with _transient_as_timeout():
            self._client.submit(key, request, ahead)

    def fetch(self, key: bytes, rank: int, wait_s: float, then: Sequence[bytes] = ()) -> IterationSlice:
        with _transient_as_timeout():
            if self._stream is not None and self._pending and self._pending[0] == key:
                try:
                    return self._next()
                except (TimeoutError, UnknownPlanError):  # the plan may be ready by now, or submitted again
                    return self._client.fetch(key, rank, wait_s)
            self._pending = deque([key, *then])
            self._stream = self._client.stream(list(self._pending), rank, wait_s)
            return self._next()

    def _next(self) -> IterationSlice:
        assert self._stream is not None
        try:
            piece = next(self._stream)
        except BaseException:
            self._stream = None
            raise
        self._pending.popleft()
        return piece

    def close(self) -> None:
        self._stream = None
        self._client.close()


@contextmanager
def _transient_as_timeout() -> Iterator[None]:
    """Converts errors of a service that is down or too busy, and may recover, to TimeoutError."""
    try:
        yield
    except UnreachableError as error:
        raise TimeoutError(str(error)) from error
    except ServiceError as error:
        if not error.is_transient:
            raise
        raise TimeoutError(str(error)) from error


def open_source(
    source: str | Path | Sequence[str] | Source,
    token: str | None,
    ca: str | Path | None,
    timeout_s: float,
    origin: Mapping[str, Any],
    job: bytes,
) -> Source:
    """Opens a source by name: "local", a URL or several, or a folder. token, ca, timeout_s, job: see `ServiceSource`;
    origin: see `FolderSource`. Raises ConfigError."""
    urls = (source,) if isinstance(source, str) else source
    if isinstance(urls, list | tuple) and urls and all(_is_url(url) for url in urls):
        return ServiceSource(tuple(urls), token, None if ca is None else str(ca), timeout_s, job)
    for name, value in (("token", token), ("ca", ca)):
        if value is not None:
            rule = "is for a planning service, and the source is not one"
            raise ConfigError(name, "...", rule, "leave it out, or pass the URL of a server as source")
    if source == "local":
        return LocalSource()
    if isinstance(source, str | Path):
        return FolderSource(str(source), origin)
    if not isinstance(source, Source):
        remedy = 'write "local" to plan in a local process'
        raise ConfigError("source", source, "must be a URL, a folder or a source of plans", remedy)
    return source


def _is_url(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(("http://", "https://"))
