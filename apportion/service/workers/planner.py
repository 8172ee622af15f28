"""Workers for code that has no event loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Literal, Self

from apportion.ir.errors import ApportionError
from apportion.ir.fields import integer
from apportion.service.workers.errors import ClosedError
from apportion.service.workers.pool import Pool
from apportion.service.workers.processes import ProcessPool
from apportion.service.workers.supervisor import Supervisor
from apportion.service.workers.tasks import Done, Task

DEADLINE_S = 60.0


def pool_of(workers: int | Literal["ray"], memory_bytes: int = 0, spare: int = 0) -> Pool:
    """So many processes of this machine, and `spare` more, each with so much memory (0: no limit); or the cores of a
    Ray cluster, which limits memory itself. Raises ConfigError, MissingDependencyError."""
    if workers != "ray":
        return ProcessPool(integer("workers", workers) + spare, memory_bytes=memory_bytes)
    from apportion.service.workers.ray.pool import RayPool

    return RayPool()


class Planner:
    """Has tasks done in the background, for any thread. It starts with `with`, or else with the first task.

    workers: so many processes, or "ray". retries: as `Supervisor`. Raises ConfigError, MissingDependencyError.
    """

    def __init__(self, workers: int | Literal["ray"] = 1, retries: int = 2) -> None:
        self.supervisor = Supervisor(pool_of(workers), retries)
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started: Future[None] = Future()

    @property
    def size(self) -> int:
        """Workers; of Ray known when it has started."""
        return self.supervisor.pool.size

    def __enter__(self) -> Self:
        """Returns once the workers are there. Raises LaunchError."""
        try:
            self._running()
            self._started.result()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, task: Task, deadline_s: float = DEADLINE_S) -> Future[Done]:
        """The result to come, at once; its errors are those of `Supervisor.run` and LaunchError. A future that is
        cancelled has its worker killed. Raises ClosedError."""
        with self._lock:
            loop = self._running()
            return asyncio.run_coroutine_threadsafe(self._run(task, deadline_s), loop)

    def close(self) -> None:
        """Cancel what is not done, kill the workers, and wait until they are gone."""
        with self._lock:
            thread, self._closed = self._thread, True
            if thread is not None and self._loop is not None and thread.is_alive():
                self._loop.call_soon_threadsafe(self._stop.set)
        if thread is not None:
            thread.join()

    def _running(self) -> asyncio.AbstractEventLoop:
        """The loop of our thread, both made where they are not there yet."""
        if self._closed:
            raise ClosedError("the planner was closed")
        if self._loop is None:
            self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
            self._thread = threading.Thread(target=self._main, name="apportion-planner", daemon=True)
            self._thread.start()
        return self._loop

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # type: ignore[arg-type,return-value]
            runner.run(self._serve())

    async def _serve(self) -> None:
        pool = self.supervisor.pool
        try:
            await pool.start()
            self._started.set_result(None)
        except ApportionError as error:
            self._started.set_exception(error)
        await self._stop.wait()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await pool.close()

    async def _run(self, task: Task, deadline_s: float) -> Done:
        await asyncio.wrap_future(self._started)
        return await self.supervisor.run(task, deadline_s)
