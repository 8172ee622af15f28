"""A request and its state."""

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
    """A request in the engine's form. key: 32 bytes; data: canonical bytes; job: digest of the job; ranks: of the
    job."""

    key: bytes
    data: bytes
    job: bytes
    ranks: int


@dataclass(eq=False)
class Entry:
    """A request and its state. work: the function for the encoded request; job: digest of its job; ranks: of its
    cluster; tenant: the first that submitted it; deaths: of workers that planned it; seconds: of worker time; data:
    the result; plan: id, 32 bytes; problem: the reason for having no result. Times on the loop's clock: due: needed;
    since: submitted; ended: ready or refused; first_use: first requested by a rank."""

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
    first_use: float | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def finish(self, state: State) -> None:
        """Ends in a state: wakes all waiters, and frees the encoded request."""
        self.state, self.request, self.ended = state, b"", asyncio.get_running_loop().time()
        self.done.set()
