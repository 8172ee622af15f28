"""Reports of iterations, made by a process that can be killed: simulating a plan takes seconds and gigabytes."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from apportion.service.engine import PlanSource
from apportion.service.errors import ConflictError, LimitError, OverloadError

#: reports that are made at a time, and that wait
AT_ONCE, WAITING = 1, 4
DEADLINE_S = 60.0
#: address space of the process
MEMORY_BYTES = 6 << 30
_SAID = 300  # characters of what the process said last
_SAYS_WHY = 3  # status of `python -m apportion.report` where it makes no page and says why


class Reports:
    """Makes reports, one after another."""

    def __init__(self, deadline_s: float = DEADLINE_S, memory_bytes: int = MEMORY_BYTES) -> None:
        self._deadline_s, self._memory_bytes = deadline_s, memory_bytes
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._asked = 0

    async def make(self, source: PlanSource) -> bytes:
        """The page, HTML. Raises OverloadError where too many wait, LimitError where it takes too long or too much
        memory, ConflictError where this release makes another plan."""
        if self._asked >= AT_ONCE + WAITING:
            raise OverloadError(f"{self._asked} reports are being made, ask again later", retry_after=5.0)
        self._asked += 1
        try:
            async with self._turn, self._process(source) as process:
                return await self._page(process, source.payload)
        finally:
            self._asked -= 1

    @asynccontextmanager
    async def _process(self, source: PlanSource) -> AsyncIterator[Process]:
        """Killed at the end, whatever happens."""
        command = [sys.executable, "-P", "-m", "apportion.report", source.kind, source.id.hex()]
        alone = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=alone
        )
        resource.prlimit(process.pid, resource.RLIMIT_AS, (self._memory_bytes, self._memory_bytes))
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _page(self, process: Process, payload: bytes) -> bytes:
        try:
            async with asyncio.timeout(self._deadline_s):
                page, said = await process.communicate(payload)
        except TimeoutError:
            raise LimitError(f"its report took more than {self._deadline_s:g} s: {_REMEDY}") from None
        if process.returncode == 0:
            return page
        last = said.decode("utf-8", "replace").strip().rpartition("\n")[2][:_SAID]
        if process.returncode == _SAYS_WHY:
            raise ConflictError(last)
        raise LimitError(f"its report could not be made ({last or 'it was killed'}): {_REMEDY}")


_REMEDY = "make it where there is room, with apportion plan and apportion report"
