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
    """A request in the engine's form. key: 32 bytes; data: canonical bytes; job: digest of the job; ranks: number of
    the job's ranks."""

    key: bytes
    data: bytes
    job: bytes
    ranks: int


@dataclass(eq=False)
class Entry:
    """A request and its state. work: function that workers apply to the encoded request; job: digest of its job; ranks:
    its number of ranks; tenant: who submitted it first; deaths: workers that died planning it; seconds: worker time;
    data: the result; plan: the plan's id, 32 bytes; problem: why there is no result. Times on the loop's clock: due:
    when needed; since: submitted; ended: ready or refused; first_use: first requested by a rank."""

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
        """Sets the final state, wakes all waiters, and frees the encoded request."""
        self.state, self.request, self.ended = state, b"", asyncio.get_running_loop().time()
        self.done.set()
