"""Engines for tests: a pool in this process that really plans, and can be told to hold tasks, to die or to be slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from apportion.ir.bytes.job import Job, decode_request
from apportion.ir.errors import ApportionError
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.planner.recipe.recipes import find_recipe
from apportion.service.engine import Body, Engine
from apportion.service.errors import StoreError
from apportion.service.limits import Limits
from apportion.service.store import Store
from apportion.service.store.memory import MemoryStore
from apportion.service.workers import worker
from apportion.service.workers.errors import DeadlineError, LaunchError, RefusedError, WorkerDiedError
from apportion.service.workers.supervisor import Supervisor
from apportion.service.workers.tasks import Done, Task

T = TypeVar("T")

KEY = b"k" * 32
JOB = Job(Cluster(1, 2), Model(2, 1, 16), Policy(find_recipe("fcp")), 2048)


def batch(number: int) -> list[Batch]:
    """A small batch that `number` decides."""
    return [Batch.from_lengths([1 + number % 1000, 1 + number // 1000])]


def number_of(task: Task) -> int:
    """The number of the batch in a "plan" task."""
    _, (found,) = decode_request(task.payload)
    low, high = found.lengths[-2:].tolist()
    return int(low - 1 + 1000 * (high - 1))


def run(work: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
    """Its result. Raises TimeoutError."""
    return asyncio.run(_within(work, timeout_s))


async def _within(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    return await asyncio.wait_for(work, timeout_s)


async def until(done: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits until `done()`. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not done():
            await asyncio.sleep(0.002)


@dataclass
class Clock:
    """A clock that stands still until it is moved."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class LocalPool:
    """Plans in threads of this process. begun: numbers of the batches, in the order in which they came to a worker.

    held: tasks wait until `let` or `open`. deadly: batches over which workers die; slow: which run into the deadline.
    failures: of the pool itself, before it works; lowering: what it ends with instead.
    """

    def __init__(self, size: int = 1, *, held: bool = False) -> None:
        self.size = self.alive = size
        self.restarts = 0
        self.resized: Callable[[], None] = lambda: None
        self.begun: list[int] = []
        self.lowered = self.running = 0
        self.deadly: set[int] = set()
        self.slow: set[int] = set()
        self.failures = 0
        self.lowering: Exception | None = None
        self._workers = asyncio.Semaphore(size)
        self._held = held
        self._let: dict[int, asyncio.Event] = {}

    async def start(self) -> None:
        pass

    async def close(self, drain_s: float = 0.0) -> None:
        pass

    def let(self, *numbers: int) -> None:
        for number in numbers:
            self._let.setdefault(number, asyncio.Event()).set()

    def hold(self) -> None:
        self._held = True

    def open(self) -> None:
        self._held = False
        self.let(*self._let)

    async def run(self, task: Task, deadline_s: float) -> Done:
        async with self._workers:
            self.running += 1
            try:
                await self._disturbed(task, deadline_s)
                return await asyncio.to_thread(_planned, task)
            finally:
                self.running -= 1

    async def _disturbed(self, task: Task, deadline_s: float) -> None:
        if task.kind == "lower":
            self.lowered += 1
            if self.lowering is not None:
                raise self.lowering
            return
        number = number_of(task)
        self.begun.append(number)
        if self.failures:
            self.failures -= 1
            raise LaunchError("no process can be started")
        if number in self.deadly:
            self.restarts += 1
            raise WorkerDiedError("killed by signal 9")
        if number in self.slow:
            raise DeadlineError(deadline_s)
        if self._held:
            await self._let.setdefault(number, asyncio.Event()).wait()


def _planned(task: Task) -> Done:
    try:
        return worker.run(task)
    except ApportionError as error:
        raise RefusedError(type(error).__name__, str(error), getattr(error, "field", None)) from None


class DownStore:
    """A store whose server can be gone: it fails then, before or after it did what was asked.

    failing: methods that fail though it is there.
    """

    def __init__(self, store: Store) -> None:
        self.behind = store
        self.down = self.after = False
        self.failing: Collection[str] = ()

    may_be_wiped, lost = False, ""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.behind, name)

        def call(*args: object) -> Any:
            if self.down and self.after:
                method(*args)
            if self.down or name in self.failing:
                raise StoreError("nobody answers at 127.0.0.1:1")
            return method(*args)

        return call


@dataclass
class Rig:
    """An engine and all that is under it."""

    store: Store = field(default_factory=MemoryStore)
    pool: LocalPool = field(default_factory=LocalPool)
    limits: Limits = field(default_factory=Limits)
    clock: Callable[[], float] = time.monotonic
    spare: int = 0

    @asynccontextmanager
    async def started(self, drain_s: float = 5.0) -> AsyncIterator[Engine]:
        """An engine that is stopped at the end; the store stays open for the next one."""
        engine = Engine(self.store, Supervisor(self.pool), self.limits, self.clock, self.spare)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop(drain_s)

    @asynccontextmanager
    async def with_job(self, name: str = "run", job: Job = JOB, lookahead: int = 8) -> AsyncIterator[Engine]:
        """An engine with a job in its first epoch."""
        async with self.started() as engine:
            await begin(engine, name, job, lookahead)
            yield engine


async def begin(engine: Engine, name: str, job: Job = JOB, lookahead: int = 8, run_id: str = "first") -> int:
    """The epoch of a run of a job, both made if need be."""
    await engine.create_job(name, job, lookahead, KEY)
    epoch, _ = await engine.begin_epoch(name, run_id)
    return epoch


async def submit(engine: Engine, *numbers: int, name: str = "run", epoch: int = 1) -> list[bool]:
    """Iterations with the batch of their number."""
    return list(
        await asyncio.gather(*(engine.submit(name, epoch, number, batch(number)) for number in numbers))
    )


async def take(
    engine: Engine, number: int, rank: int = 0, name: str = "run", epoch: int = 1, wait_s: float = 60.0
) -> Body:
    """The rank's body of an iteration. Raises TimeoutError."""
    body = await engine.fetch(name, epoch, number, rank, wait_s)
    if body is None:
        raise TimeoutError(f"iteration {number}, rank {rank}: not within {wait_s} s")
    return body


async def raised(work: Awaitable[Any], kind: type[T]) -> T:
    """The error of that kind that it ends with."""
    try:
        found = await work
    except BaseException as error:
        if isinstance(error, kind):
            return error
        raise
    raise AssertionError(f"returned {found!r}, {kind.__name__} was expected")
