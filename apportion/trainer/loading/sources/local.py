"""Plans that a process beside this one makes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Lock

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.transport import expanded
from apportion.service.pack import Pack
from apportion.service.problems import ServiceError, UnknownPlanError
from apportion.service.workers import Done, ProcessExecutor, Refusal, plan_pack
from apportion.trainer.loading.sources.source import Source


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
