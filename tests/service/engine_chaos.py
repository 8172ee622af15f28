"""Many clients who do anything in any order, and leave in the middle of it, on a store and workers that fail: whatever
is answered is right, and when all is deleted nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from apportion.planner.iteration.jobs import plan_job
from apportion.service.engine import Engine
from apportion.service.errors import ServiceError
from apportion.service.limits import Limits
from apportion.service.store.memory import MemoryStore
from tests.service.engines import JOB, KEY, DownStore, LocalPool, Rig, batch, run, until

NAMES = ("a", "b", "c")
STREAMS = ("train", "eval", "more")
CONTENTS = 12
LIMITS = Limits(
    jobs=2, job_streams=2, pending=6, queue_total=10, keep=4, epochs=3, store_packs=8, cache_bytes=4000
)


@dataclass
class Chaos:
    """answers: bodies that were given; refusals: other answers."""

    engine: Engine
    store: DownStore
    random: random.Random
    bodies: dict[tuple[int, int], bytes]
    answers: int = 0
    refusals: int = 0

    async def client(self, steps: int) -> None:
        for _ in range(steps):
            (step,) = self.random.choices(list(self._weights()), list(self._weights().values()))
            try:
                async with asyncio.timeout(self.random.choice([0.002, 60.0, 60.0, 60.0])):
                    await step()
            except ServiceError:
                self.refusals += 1
                await asyncio.sleep(0.001)
            except TimeoutError:
                pass

    def _weights(self) -> dict[Callable[[], Awaitable[None]], int]:
        rare: dict[Callable[[], Awaitable[None]], int]
        rare = {self.begin: 2, self.create: 2, self.delete: 1, self.fail: 3}
        return {self.submit: 60, self.fetch: 60, **rare}

    def _place(self) -> tuple[str, int, int]:
        """Mostly around the front of a job that there is."""
        name = self.random.choice([job.name for job in self.engine.jobs()] or ["none"])
        epoch = self.random.choice(sorted(self.engine.job(name).streams.values()) or [0])
        return name, epoch, self.random.randrange(8) + max(self.engine.epoch_state(name, epoch).front - 3, 0)

    async def submit(self) -> None:
        name, epoch, number = self._place()
        await self.engine.submit(name, epoch, number, batch(number % CONTENTS))

    async def fetch(self) -> None:
        name, epoch, number = self._place()
        rank = self.random.randrange(JOB.ranks)
        body = await self.engine.fetch(name, epoch, number, rank, self.random.choice([0.0, 0.02]))
        if body is not None:
            self.answers += 1
            assert body.data == self.bodies[number % CONTENTS, rank]

    async def begin(self) -> None:
        name = self.random.choice(NAMES)
        await self.engine.begin_epoch(name, f"run{self.random.randrange(50)}", self.random.choice(STREAMS))

    async def create(self) -> None:
        name = self.random.choice(NAMES)
        await self.engine.create_job(name, JOB, 3, KEY)
        await self.engine.begin_epoch(name, "first")

    async def delete(self) -> None:
        await self.engine.delete_job(self.random.choice(NAMES))

    async def fail(self) -> None:
        self.store.down, self.store.after = True, self.random.random() < 0.5
        await asyncio.sleep(self.random.random() * 0.02)
        self.store.down = False


def case(seed: int, steps: int = 300) -> dict[str, int]:
    """Figures. Raises AssertionError."""
    return run(_chaos(random.Random(seed), steps), 600.0)


async def _chaos(rng: random.Random, steps: int) -> dict[str, int]:
    store, pool = DownStore(MemoryStore()), LocalPool(2)
    plans = [plan_job(JOB, batch(number)).plan for number in range(CONTENTS)]
    bodies = {
        (number, rank): plan.slice_for(rank).encode()
        for number, plan in enumerate(plans)
        for rank in range(JOB.ranks)
    }
    pool.deadly, pool.slow = {3}, {7}
    async with Rig(store, pool, LIMITS).started() as engine:
        chaos = Chaos(engine, store, rng, bodies)
        await chaos.create()
        await asyncio.gather(*(chaos.client(steps) for _ in range(8)))
        store.down = False
        await _check_nothing_left(engine, store)
    left = [key for key, _ in store.records() if not key.startswith("past/")]
    assert left == [], left
    return {"answers": chaos.answers, "refusals": chaos.refusals, "planned": len(pool.begun)}


async def _check_nothing_left(engine: Engine, store: DownStore) -> None:
    for job in engine.jobs():
        await engine.delete_job(job.name)
    await until(lambda: engine.snapshot().at_workers == 0)
    await until(lambda: engine.snapshot().unplanned == 0)  # what is planned for nobody is stored all the same
    await until(lambda: engine.snapshot().packs == len(list(store.packs())) <= LIMITS.store_packs)
    left = engine.snapshot()
    assert left.pack_bytes == sum(size for _, size in store.packs())
    assert (left.unplanned, left.unplanned_bytes, left.waiting, left.cached, left.cache_bytes) == (0,) * 5
