"""Background tasks of one owner, who can wait for them and end them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from apportion.service.errors import StoppingError

T = TypeVar("T")


class LiveTasks:
    """Keeps tasks alive until they are done. Who needs a task's error awaits it; others never hear of it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)
        return task

    async def finish(self, within_s: float) -> None:
        """Waits so long for all tasks, those that are spawned meanwhile included; then cancels the rest."""
        try:
            async with asyncio.timeout(within_s):
                while self._tasks:
                    await asyncio.wait(self._tasks)
        except TimeoutError:
            await asyncio.sleep(0)  # who is cancelled before the first step cannot clean up
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen


async def shared(task: asyncio.Task[T]) -> T:
    """What the task returns, to all who wait; it goes on when one of them is cancelled. Raises StoppingError where the
    task was."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        waiting = asyncio.current_task()
        if task.cancelled() and waiting is not None and not waiting.cancelling():
            raise StoppingError("the server has stopped: ask the next one", retry_after=1.0) from None
        raise
