"""Entry: one request and its state."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from apportion.service.problems import ServiceError
from apportion.service.workers.work import Work


class State(StrEnum):
    QUEUED = "queued"
    PLANNING = "planning"
    READY = "ready"
    REFUSED = "refused"


class PlanRequest(NamedTuple):
    """A request in the engine's form. key: 32 bytes; data: canonical bytes; job: its digest; ranks: the job's."""

    key: bytes
    data: bytes
    job: bytes
    ranks: int


@dataclass(eq=False)
class Entry:
    """work: the work for the encoded request; job: digest of the request's job; ranks: of its cluster; tenant: who
    submitted it first; due: when it is needed, on the loop's clock; deaths: workers that died of it; seconds: of the
    worker; data: the result; plan: 32 bytes, its id; problem: why there is no result; ended, asked: when it was
    ready or refused, and when the first rank requested it, on the loop's clock."""

    key: bytes
    work: Work
    request: bytes
    job: bytes
    ranks: int
    tenant: str
    due: float
    since: float
    state: State = State.QUEUED
    deaths: int = 0
    seconds: float = 0.0
    data: bytes = b""
    plan: bytes = b""
    problem: ServiceError | None = None
    ended: float = 0.0
    asked: float | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def finish(self, state: State) -> None:
        """Wakes all waiters; the encoded request is no longer needed."""
        self.state, self.request, self.ended = state, b"", asyncio.get_running_loop().time()
        self.done.set()
