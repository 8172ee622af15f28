"""A planner in a process of its own, behind pipes, for whoever must not have its main module imported a second time: a
trainer's script begins to train.

    python -P -m apportion.service.workers.pipe      stdin: u32 size · request, …      stdout: u32 size · answer, …
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from struct import Struct
from threading import Thread
from typing import IO

import msgspec

from apportion.service.workers.local import WorkerDiedError
from apportion.service.workers.work import Done, Refusal, plan_pack

_SIZE = Struct("<I")


class PlannerProcess:
    """Plans requests in the order in which they come, until it is closed or this process ends."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", __name__]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sys.path))}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._tasks = SimpleQueue[tuple[bytes, Future[Done | Refusal]] | None]()
        self._thread = Thread(target=self._run, name="apportion-planner", daemon=True)
        self._thread.start()

    def submit(self, request: bytes) -> Future[Done | Refusal]:
        """What `plan_pack` makes of a request; or WorkerDiedError."""
        future = Future[Done | Refusal]()
        self._tasks.put((request, future))
        return future

    def close(self) -> None:
        """Ends the process, whatever it plans; again is no error."""
        self._process.kill()
        self._process.wait()
        self._tasks.put(None)
        self._thread.join()
        for file in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # of what the process did not read
                file.close()  # type: ignore[union-attr]

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            request, future = task
            try:
                future.set_result(self._answer(request))
            except WorkerDiedError as error:
                future.set_exception(error)

    def _answer(self, request: bytes) -> Done | Refusal:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _write(self._process.stdin, request)
            is_done, *fields = msgspec.msgpack.decode(_read(self._process.stdout))
        except (OSError, EOFError):
            raise WorkerDiedError(f"the planner's process died (status {self._process.wait()})") from None
        return Done(*fields) if is_done else Refusal(*fields)


def _write(file: IO[bytes], body: bytes) -> None:
    file.write(_SIZE.pack(len(body)) + body)
    file.flush()


def _read(file: IO[bytes]) -> bytes:
    """The next body. Raises EOFError behind the last."""
    head = file.read(_SIZE.size)
    body = file.read(_SIZE.unpack(head)[0]) if len(head) == _SIZE.size else b""
    if not body:
        raise EOFError
    return body


def main() -> None:
    """Plans what comes, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, for the trainer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a solver prints is no answer
    try:
        while True:
            found = plan_pack(_read(sys.stdin.buffer))
            _write(answers, msgspec.msgpack.encode([isinstance(found, Done), *found]))
    except (EOFError, BrokenPipeError):
        os._exit(0)


if __name__ == "__main__":
    main()
