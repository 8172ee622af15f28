"""Pools of workers; those here come from a launcher, each at the end of a line of its own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from apportion.ir.fields import integer, number
from apportion.service.workers.errors import ClosedError, DeadlineError, LaunchError, RefusedError
from apportion.service.workers.launcher import LOG, Launcher
from apportion.service.workers.lines import Line
from apportion.service.workers.tasks import MAX_TASK, Done, Task, encode, read_reply

# seconds between attempts to start a launcher again, doubled each time up to the second
BACK_OFF_S = (0.1, 5.0)
#: workers of a pool: each is a socket and a process
MOST = 1024


class Pool(Protocol):
    """Workers that do one task at a time each. Used from one event loop.

    size: workers that there should be; alive: that there are; restarts: how many were replaced; resized: called when
    size has changed.
    """

    size: int
    restarts: int
    resized: Callable[[], None]

    @property
    def alive(self) -> int: ...

    async def start(self) -> None:
        """Returns once all workers are there. Raises LaunchError."""

    async def run(self, task: Task, deadline_s: float) -> Done:
        """The result. Waits for a free worker first; that is no part of the deadline. Who stops waiting has the worker
        killed. Raises RefusedError, DeadlineError, WorkerDiedError, ClosedError, DecodeError."""

    async def close(self, drain_s: float = 0.0) -> None:
        """Take nothing more, wait so long for what is running, then kill what is left."""


class LinePool:
    """`size` workers, 0: as many as the launcher says at the time, and until it does as this machine has cores. One
    that dies is replaced, and so is the launcher: until `close`, `alive` comes back to `size` by itself. Raises
    ConfigError."""

    def __init__(
        self, size: int, command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._asked = integer("workers", size, 0, MOST)
        self.size = size or min(os.cpu_count() or 1, MOST)
        self._launcher = Launcher(command, environment, self._launcher_lost, self._resize)
        self.resized: Callable[[], None] = lambda: None
        self._lines: set[Line] = set()
        self._free: asyncio.Queue[Line | None] = asyncio.Queue()
        self._short, self._quiet = asyncio.Event(), asyncio.Event()
        self.restarts = self._busy = 0
        self._closed = False
        self._tender: asyncio.Task[None] | None = None

    @property
    def alive(self) -> int:
        return len(self._lines)

    async def start(self) -> None:
        """As `Pool`, and so the others."""
        try:
            await self._fill()
        except BaseException:
            await self.close()
            raise
        self._tender = asyncio.create_task(self._tend())

    async def run(self, task: Task, deadline_s: float) -> Done:
        deadline_s = number("deadline_s", deadline_s, above=True)
        if len(data := encode(task)) > MAX_TASK:
            raise RefusedError("CapacityError", f"the task has {len(data)} bytes, a worker takes {MAX_TASK}")
        line = await self._take()
        try:
            async with asyncio.timeout(deadline_s):
                reply = await line.ask(data)
        except TimeoutError:
            self._give_up(line)
            raise DeadlineError(deadline_s) from None
        except BaseException:
            self._give_up(line)
            raise
        self._give_back(line)
        return read_reply(reply)

    async def close(self, drain_s: float = 0.0) -> None:
        self._closed = True
        self._free.put_nowait(None)
        if self._tender is not None:
            self._tender.cancel()
            await asyncio.gather(self._tender, return_exceptions=True)
        await self._drained(drain_s)
        for line in tuple(self._lines):
            line.drop()
        await self._launcher.close()

    async def _drained(self, drain_s: float) -> None:
        end = time.monotonic() + drain_s
        while self._busy and (left := end - time.monotonic()) > 0:
            self._quiet.clear()
            try:
                await asyncio.wait_for(self._quiet.wait(), left)
            except TimeoutError:
                return

    async def _take(self) -> Line:
        while not self._closed:
            line = await self._free.get()
            if line is None or self._closed:
                break
            if not line.gone:
                self._busy += 1
                return line
        self._free.put_nowait(None)  # for the next who waits
        raise ClosedError("the workers were stopped")

    def _give_back(self, line: Line) -> None:
        self._busy -= 1
        self._quiet.set()
        self._free.put_nowait(line)
        self._trim()

    def _give_up(self, line: Line) -> None:
        self._busy -= 1
        self._quiet.set()
        line.drop()

    def _worker_lost(self, line: Line) -> None:
        if line not in self._lines:  # there were too many
            return
        self._lines.discard(line)
        if not self._closed:
            self.restarts += 1
            LOG.warning("%s has died, %d of %d are left", line.name, self.alive, self.size)
        self._short.set()

    def _launcher_lost(self) -> None:
        self._short.set()

    async def _tend(self) -> None:
        pause_s = BACK_OFF_S[0]
        while True:
            await self._short.wait()
            self._short.clear()
            try:
                await self._fill()
                pause_s = BACK_OFF_S[0]
            except (LaunchError, OSError) as error:
                LOG.error("no worker can be started, next attempt in %g s: %s", pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, BACK_OFF_S[1])
                self._short.set()

    async def _fill(self) -> None:
        if self._closed:
            raise ClosedError("the workers were stopped")
        if self._launcher.gone:
            self._resize(await self._launcher.start())
        self._trim()
        while self.alive < self.size:
            line = await self._launcher.place(self._worker_lost)
            if not line.gone:  # already
                self._lines.add(line)
                self._free.put_nowait(line)

    def _trim(self) -> None:
        """Let those go that are too many and have nothing to do."""
        while not self._closed and self.alive > self.size and not self._free.empty():
            if (line := self._free.get_nowait()) is not None:
                self._lines.discard(line)
                line.drop()

    def _resize(self, capacity: int) -> None:
        before, self.size = self.size, self._asked or max(1, min(capacity, MOST))
        if self.size != before:
            LOG.info("there can be %d workers now, there could be %d", self.size, before)
            self._short.set()
            self.resized()
