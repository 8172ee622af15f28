"""Has tasks done by a pool whose workers may die."""

from __future__ import annotations

from dataclasses import dataclass

from apportion.ir.fields import integer
from apportion.service.workers.errors import DeadlineError, PoisonedError, RefusedError, WorkerDiedError
from apportion.service.workers.pool import Pool
from apportion.service.workers.tasks import Done, Task


@dataclass
class Counters:
    """Since the start. plans, lowered: tasks done; refused, deadlines, poisoned: tasks without a result; retries:
    that followed the death of a worker; ms: that workers took over what they have done."""

    plans: int = 0
    lowered: int = 0
    refused: int = 0
    deadlines: int = 0
    poisoned: int = 0
    retries: int = 0
    ms: float = 0.0

    def count(self, task: Task, done: Done) -> None:
        self.ms += done.ms
        if task.kind == "plan":
            self.plans += 1
        else:
            self.lowered += 1


class Supervisor:
    """Gives a task whose worker died to another one, `retries` times. `pool` is started and closed by its owner.
    Raises ConfigError."""

    def __init__(self, pool: Pool, retries: int = 2) -> None:
        self.pool, self.retries = pool, integer("retries", retries, 0)
        self.counters = Counters()

    async def run(self, task: Task, deadline_s: float) -> Done:
        """As `Pool.run`, of each attempt; PoisonedError in place of WorkerDiedError."""
        for attempt in range(self.retries + 1):
            try:
                done = await self._attempt(task, deadline_s)
            except WorkerDiedError as error:
                last = str(error)
                self.counters.retries += attempt < self.retries
            else:
                self.counters.count(task, done)
                return done
        self.counters.poisoned += 1
        raise PoisonedError(self.retries + 1, last)

    async def _attempt(self, task: Task, deadline_s: float) -> Done:
        try:
            return await self.pool.run(task, deadline_s)
        except RefusedError:
            self.counters.refused += 1
            raise
        except DeadlineError:
            self.counters.deadlines += 1
            raise
