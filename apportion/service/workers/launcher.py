"""A child process that makes workers: the zygote, or the one that talks to Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from apportion.service.workers.errors import LaunchError, LineLostError
from apportion.service.workers.lines import Line

LOG = logging.getLogger("apportion.workers")
# seconds that a child may take to end, or to make a worker
PATIENCE_S = 5.0
_LOOK_S = 0.005
#: one process is one core: the pool has as many as it is to use
THREADS = ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "NUMBA")


class Launcher:
    """`python -m MODULE FD ARGUMENTS…`, with a control socket: see `zygote`. command: MODULE and ARGUMENTS;
    environment: beside ours; lost: called when it has ended, also before it was ready; resized: with the workers that
    it can make by now, where it says so by itself."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        lost: Callable[[], None],
        resized: Callable[[int], None],
    ) -> None:
        self._command, self._environment = command, environment
        self._lost, self._resized = lost, resized
        self._line: Line | None = None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def gone(self) -> bool:
        return self._line is None or self._line.gone

    async def start(self) -> int:
        """Start the child, anew where it has ended, and wait until it is ready; the workers that it can make at least.
        Raises LaunchError."""
        await self.close()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._child = self._spawn(theirs)
        except OSError as error:
            ours.close()
            raise LaunchError(f"python cannot be started: {error}") from error
        self._line = await Line.over(ours, self._command[0], lambda line: self._lost())
        self._line.told = lambda count: self._resized(int(count))
        try:
            return int(await self._line.expect())
        except LineLostError:
            await self.close()
            command = " ".join(self._command)
            raise LaunchError(f"python -m {command} ended before it was ready: see its output") from None
        except asyncio.CancelledError:
            self._line.drop()
            raise

    async def place(self, lost: Callable[[Line], None]) -> Line:
        """The line to a new worker. Raises LaunchError."""
        if self._line is None:
            raise LaunchError("the launcher was not started")
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                answer = self._line.expect()
                self._line.pass_on(theirs)
            async with asyncio.timeout(PATIENCE_S):
                name = f"worker {int(await answer)}"
        except (LineLostError, OSError) as error:  # TimeoutError is one
            self._line.drop()
            ours.close()
            raise LaunchError(f"{self._command[0]} does not answer any more") from error
        except asyncio.CancelledError:
            ours.close()
            raise
        return await Line.over(ours, name, lost)

    async def close(self) -> None:
        """End the child; where it does not end by itself, kill it."""
        if self._line is not None:
            self._line.drop()
        if self._child is not None:
            await _buried(self._child)
        self._child = self._line = None

    def _spawn(self, control: socket.socket) -> subprocess.Popen[bytes]:
        module, *arguments = self._command
        command = (sys.executable, "-P", "-m", module, str(control.fileno()), *arguments)
        return subprocess.Popen(
            command,
            env={**_environment(), **self._environment},
            stdin=subprocess.DEVNULL,
            stdout=2,  # only frames are for us
            pass_fds=(control.fileno(),),
            start_new_session=True,  # Ctrl-C is for the server
        )


def _environment() -> dict[str, str]:
    """This process's, with one thread a process, and with the packages that we see."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return os.environ | {"PYTHONPATH": path} | {f"{name}_NUM_THREADS": "1" for name in THREADS}


async def _buried(child: subprocess.Popen[bytes]) -> None:
    """Returns once it has ended, killed where it takes too long. Without a thread, which none can be started at the
    interpreter's exit."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await _ended(child)
    except TimeoutError:
        LOG.warning("%s did not end and is killed", child.args)
        os.killpg(child.pid, signal.SIGKILL)
        await _ended(child)


async def _ended(child: subprocess.Popen[bytes]) -> None:
    while child.poll() is None:
        await asyncio.sleep(_LOOK_S)
