"""Planner processes on this machine: a timeout or a crash ends one task and affects no other.

    thread ── pipes ── workers.process.main      one pair per worker

A process is a fresh interpreter: it never imports the main module of the program that started it, so any process can
start workers. Only bytes are exchanged: the function's name and the request one way, the outcome the other.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from apportion.ir.errors import ApportionError
from apportion.service.workers.process import read_frame, read_outcome, write_task
from apportion.service.workers.work import Completion, Refusal

T = TypeVar("T")
_PROGRAM = "from apportion.service.workers.process import main; main()"
#: libraries whose thread pools are limited: a process uses one core
_THREADS = ("OMP", "OPENBLAS", "MKL", "NUMEXPR")


class WorkerDiedError(ApportionError, RuntimeError):
    """The process of a task died, by a signal or because the system ran out of memory."""


class ProcessExecutor(Executor):
    """Executor of planner processes, each started with its first task. workers: number of processes; task_s: time limit
    of a task, after which it raises `TimeoutError`; memory_bytes: address space that each may map in addition to its
    size at start."""

    def __init__(self, workers: int, task_s: float | None = None, memory_bytes: int | None = None) -> None:
        self._task_s, self._memory_bytes = task_s, memory_bytes
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[..., Any], bytes] | None] = SimpleQueue()
        self._workers, self._stopped = set[_Worker](), False
        self._threads = [
            threading.Thread(target=self._serve, name="apportion-planner", daemon=True)
            for _ in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Submits a task. fn: from `workers.work`, or another module-level function from bytes to an outcome; args: the
        request. The future raises `TimeoutError`, and `WorkerDiedError`."""
        (request,) = args
        future: Future[T] = Future()
        self._tasks.put((future, fn, request))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends all processes: at once with `cancel_futures`, else after all tasks."""
        self._stopped |= cancel_futures
        for _ in self._threads:
            self._tasks.put(None)
        for worker in list(self._workers) if cancel_futures else ():
            worker.kill()
        for thread in self._threads if wait else ():
            thread.join()

    def _serve(self) -> None:
        """Body of a thread, which has one process and restarts it whenever it has died."""
        worker: _Worker | None = None
        while (task := self._tasks.get()) is not None:
            future, fn, request = task
            if self._stopped:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if worker is None or worker.is_gone():
                    self._remove_worker(worker)
                    self._workers.add(worker := _Worker(self._memory_bytes))
                future.set_result(worker.run(fn, request, self._task_s))
            except BaseException as error:
                future.set_exception(error)
        self._remove_worker(worker)

    def _remove_worker(self, worker: _Worker | None) -> None:
        if worker is not None:
            self._workers.discard(worker)
            worker.end()


class _Worker:
    """One planner process."""

    def __init__(self, memory_bytes: int | None) -> None:
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        one_thread = {f"{name}_NUM_THREADS": "1" for name in _THREADS}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(os.getpid()), str(memory_bytes or 0)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | one_thread | {"PYTHONPATH": path},
        )

    def run(self, fn: Callable[..., Any], request: bytes, limit_s: float | None) -> Completion | Refusal:
        """Runs a task. Raises TimeoutError or WorkerDiedError; in either case the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            write_task(self._process.stdin, fn, request)
            ready = select.poll()
            ready.register(self._process.stdout, select.POLLIN)
            if not ready.poll(None if limit_s is None else 1e3 * limit_s):
                self.kill()
                raise TimeoutError(f"planning took longer than {limit_s} s")
            return read_outcome(read_frame(self._process.stdout))
        except (OSError, EOFError) as error:
            if isinstance(error, TimeoutError):
                raise
            self.kill()
            raise WorkerDiedError(f"a worker died (status {self._process.wait()})") from None

    def is_gone(self) -> bool:
        """True if the process has ended, even without a task."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kills the process, from any thread."""
        self._process.kill()

    def end(self) -> None:
        self.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # unread input of the process
                file.close()  # type: ignore[union-attr]
