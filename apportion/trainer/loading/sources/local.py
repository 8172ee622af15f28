"""Plans that a process beside this one makes."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Lock
from typing import ClassVar

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.bytes.transport import expanded
from apportion.ir.loops.jit import compiling
from apportion.service.pack import Pack
from apportion.service.problems import ServiceError, UnknownPlanError
from apportion.service.workers import Done, ProcessExecutor, Refusal, plan_pack
from apportion.trainer.loading.sources.source import Source

LOG = logging.getLogger(__name__)
FIRST_S = 10.0  # for a first plan, after which it is said what may take so long
COMPILING_S = 1200.0  # of a first plan at most; 250 s were seen on two busy cores


@dataclass(eq=False)
class LocalSource(Source):
    """A process beside this one plans; each rank has its own, and all come to the same plans. compiled_s: until the
    first plan comes to this process and says what was compiled for it, all time counts."""

    shared = False
    _has_planned: ClassVar[bool] = False  # some source of this process
    _planner: ProcessExecutor | None = field(default=None, init=False)
    _asked: dict[bytes, Future[Done | Refusal]] = field(default_factory=dict, init=False)
    _begun_s: float | None = field(default=None, init=False)
    _there_s: float | None = field(default=None, init=False)  # seconds compiled there
    _lock: Lock = field(default_factory=Lock, init=False)
    _told: bool = field(default=False, init=False)
    _over: bool = field(default=False, init=False)

    def submit(self, key: bytes, request: bytes, ahead: int) -> None:
        with self._lock:
            if self._over or key in self._asked:
                return
            if self._planner is None:
                self._planner, self._begun_s = ProcessExecutor(1), time.monotonic()
            self._asked[key] = self._planner.submit(plan_pack, request)

    def fetch(self, key: bytes, rank: int, wait_s: float, then: Sequence[bytes] = ()) -> IterationSlice:
        """Raises ServiceError where the request cannot be planned, WorkerDiedError."""
        future = self._asked.get(key)
        if future is None:
            raise UnknownPlanError(key)
        if not wait([future], wait_s).done:
            self._tell()
            raise TimeoutError("it is still being planned")
        found = future.result()
        if isinstance(found, Refusal):
            raise ServiceError(found.type, found.detail, field=found.field)
        self._there_s, LocalSource._has_planned = found.compiled_s, True
        del self._asked[key]
        return IterationSlice.decode(expanded(Pack.decode(found.data, key).slice(rank)))

    def close(self) -> None:
        with self._lock:
            self._over = True
            if self._planner is not None:
                self._planner.shutdown(cancel_futures=True)

    @property
    def compiled_s(self) -> float:
        there_s = self._there_s
        if there_s is None:
            first = self._begun_s is not None and not self._has_planned
            there_s = min(time.monotonic() - (self._begun_s or 0.0), COMPILING_S) if first else 0.0
        return compiling.seconds + there_s

    def _tell(self) -> None:
        """Once, where the first plan takes long."""
        elapsed_s = time.monotonic() - (self._begun_s or 0.0)
        if not self._has_planned and not self._told and elapsed_s > FIRST_S:
            self._told = True
            LOG.warning(
                "the first plan is not there after %.0f s: where the planner's loops are not compiled yet, once for "
                "each installation, it takes minutes; `apportion warmup` does it beforehand",
                elapsed_s,
            )
