"""Where plans come from: planning servers, a folder made before training, or a process beside this one."""

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
from apportion.ir.bytes.transport import expanded
from apportion.ir.errors import ConfigError
from apportion.ir.version import __version__
from apportion.service.client import Client
from apportion.service.pack import Pack
from apportion.service.precompute import made_for
from apportion.service.problems import ServiceError, UnknownPlanError, UnreachableError
from apportion.service.store import open_store
from apportion.service.workers import Done, ProcessExecutor, Refusal, plan_pack

CALL_S = 10.0  # for an answer to anything but a plan; whoever asked looks then whether it is still of use


@dataclass(eq=False)
class Source(ABC):
    """Plain data: every pass, and every data-loader process, has a copy of its own, made of the fields of the class,
    and closes it. One thread submits and another fetches; any may close. shared: whether what one rank submits is
    planned for all."""

    shared: ClassVar[bool] = True

    @abstractmethod
    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        """Has a request planned, once however often it is submitted. key: of the request, `Job.request_key`; ahead:
        iterations before it is needed. Raises TimeoutError where nobody answers."""

    @abstractmethod
    def fetch(self, key: bytes, rank: int, wait_s: float, then: Sequence[bytes] = ()) -> IterationSlice:
        """A rank's slice. then: keys of the iterations to come, as far as they are known. Raises TimeoutError where it
        is not there after `wait_s`, UnknownPlanError where nobody has submitted it."""

    @abstractmethod
    def close(self) -> None:
        """Ends what waits here, and frees what is open; again is no error."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, one.name) for one in fields(self) if one.init)


@dataclass(eq=False)
class LocalSource(Source):
    """A process beside this one plans; each rank has its own, and all come to the same plans."""

    shared = False
    _planner: ProcessExecutor | None = field(default=None, init=False)
    _asked: dict[bytes, Future[Done | Refusal]] = field(default_factory=dict, init=False)
    _lock: Lock = field(default_factory=Lock, init=False)
    _over: bool = field(default=False, init=False)

    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        with self._lock:
            if self._over or key in self._asked:
                return
            if self._planner is None:
                self._planner = ProcessExecutor(1)
            self._asked[key] = self._planner.submit(plan_pack, request)

    def fetch(self, key: bytes, rank: int, wait_s: float, then: Sequence[bytes] = ()) -> IterationSlice:
        """Raises ServiceError where the request cannot be planned, WorkerDiedError."""
        future = self._asked.get(key)
        if future is None:
            raise UnknownPlanError(key)
        if not wait([future], wait_s).done:
            raise TimeoutError("it is still being planned")
        found = future.result()
        if isinstance(found, Refusal):
            raise ServiceError(found.type, found.detail, field=found.field)
        del self._asked[key]
        return IterationSlice.decode(expanded(Pack.decode(found.data, key).slice(rank)))

    def close(self) -> None:
        with self._lock:
            self._over = True
            if self._planner is not None:
                self._planner.shutdown(cancel_futures=True)


@dataclass(eq=False)
class FolderSource(Source):
    """Plans that are there already, found by what is asked, so the order of the samples is free. made: what is asked,
    as `ir.bytes.origin`, to say how it differs where a plan is not there. Raises ConfigError where there is no
    folder."""

    folder: str
    made: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not Path(self.folder).is_dir():
            rule, remedy = "is no folder", "name one that apportion precompute made, or the URL of a server"
            raise ConfigError("source", self.folder, rule, remedy)
        self._store = open_store(self.folder)

    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        """Nothing to do: all was planned before."""

    def fetch(self, key: bytes, rank: int, wait_s: float, then: Sequence[bytes] = ()) -> IterationSlice:
        """Raises ConfigError where it is not there, by the field in which other plans were asked for; StoreError."""
        found = self._store.slice(key, rank)
        if found is None:
            raise self._missing(key)
        return found

    def close(self) -> None:
        self._store.close()

    def _missing(self, key: bytes) -> ConfigError:
        told = made_for(Path(self.folder))
        own = {name: value for name, value in self.made.items() if value is not None and name in told}
        releases = [entry.name for entry in Path(self.folder).iterdir() if entry.is_dir()]
        if releases and __version__ not in releases:
            name, held, asked = "release", ", ".join(releases), __version__
        elif found := difference({name: told[name] for name in own}, own):
            name, held, asked = found
        else:
            most = f", which are the first {told['iterations']} of their samples" if told else ""
            rule = f"it is not among the plans in {self.folder}{most}"
            remedy = "ask more of precompute, or give the samples that it had"
            return ConfigError("source", f"the plan {key.hex()[:16]}", rule, remedy)
        rule = f"the plans in {self.folder} were made with {held!r}"
        return ConfigError(name, asked, rule, "give the same, or precompute into another folder")


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


def open_source(
    source: str | Path | Sequence[str] | Source,
    token: str | None,
    ca: str | Path | None,
    timeout_s: float,
    made: Mapping[str, Any],
    job: bytes,
) -> Source:
    """The source of that name: "local", a URL or several, or a folder. token, ca, timeout_s, job: as `ServiceSource`;
    made: as `FolderSource`. Raises ConfigError."""
    urls = (source,) if isinstance(source, str) else source
    if isinstance(urls, list | tuple) and urls and all(_is_url(one) for one in urls):
        return ServiceSource(tuple(urls), token, None if ca is None else str(ca), timeout_s, job)
    for name, value in (("token", token), ("ca", ca)):
        if value is not None:
            rule = "is for a planning service, and the source is none"
            raise ConfigError(name, "...", rule, "leave it out, or give the URL of a server as source")
    if source == "local":
        return LocalSource()
    if isinstance(source, str | Path):
        return FolderSource(str(source), made)
    if not isinstance(source, Source):
        remedy = 'write "local" to plan beside this process'
        raise ConfigError("source", source, "must be a URL, a folder or a source of plans", remedy)
    return source


def _is_url(name: Any) -> bool:
    return isinstance(name, str) and name.startswith(("http://", "https://"))
