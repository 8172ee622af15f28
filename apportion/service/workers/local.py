"""Processes of this machine: a deadline and a death end one task, and cost no other one."""

from __future__ import annotations

import ctypes
import multiprocessing.connection
import os
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing import spawn
from multiprocessing.context import ForkServerContext, ForkServerProcess
from queue import SimpleQueue
from typing import Any, ClassVar, TypeVar

from apportion.ir.errors import ApportionError

T = TypeVar("T")
PRELOADED = "apportion.service.workers.work"
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_KILLED_FIRST = b"800"  # of 1000: where memory ends, the system kills workers before servers and trainers


class WorkerDiedError(ApportionError, RuntimeError):
    """The process that had the task died: by a signal, or as the system's memory ended."""


class _Process(ForkServerProcess):
    """Does not import the main module of its parent, which a script without `if __name__ == "__main__"` would run."""

    _lock: ClassVar[threading.Lock] = threading.Lock()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        here = threading.get_ident()
        with _Process._lock:
            real = spawn.get_preparation_data

            def prepared(name: str) -> dict[str, Any]:
                own, data = threading.get_ident() == here, real(name)
                return {key: data[key] for key in data if not (own and key.startswith("init_main"))}

            spawn.get_preparation_data = prepared
            try:
                return ForkServerProcess._Popen(process_obj)
            finally:
                spawn.get_preparation_data = real


class _Context(ForkServerContext):
    Process = _Process


class ProcessExecutor(Executor):
    """workers: processes; task_s: a task that takes longer is ended, with `TimeoutError`; memory_bytes: that each may
    map beyond what it has at its start. Processes are forked from one that has the planner imported.

    Each process has a pool and a thread of its own: what processes share would be lost with one that is killed while it
    holds the lock.
    """

    def __init__(self, workers: int, task_s: float | None = None, memory_bytes: int | None = None) -> None:
        self._context, self._task_s = _Context(), task_s
        self._context.set_forkserver_preload([PRELOADED])
        self._limits = os.getpid(), memory_bytes
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._pids, self._stopped = set[int](), False
        self._threads = [threading.Thread(target=self._serve, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As `Executor.submit`; the future raises `TimeoutError`, and `WorkerDiedError`."""
        future: Future[T] = Future()
        self._tasks.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends all processes; at once where `cancel_futures`, else when all tasks are done."""
        self._stopped |= cancel_futures
        for _ in self._threads:
            self._tasks.put(None)
        for pid in list(self._pids) if cancel_futures else ():
            _kill(pid)
        for thread in self._threads if wait else ():
            thread.join()

    def _serve(self) -> None:
        """One thread, with a process that is made anew whenever it is gone."""
        process: _Worker | None = None
        while (task := self._tasks.get()) is not None:
            future, call = task
            if self._stopped:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if process is None or process.is_gone():
                    process = _Worker(self._context, self._limits, self._pids)
                future.set_result(process.run(call, self._task_s))
            except BaseException as error:
                future.set_exception(error)
        if process is not None:
            process.end()


class _Worker:
    """One process. Raises WorkerDiedError where it does not start."""

    def __init__(self, context: _Context, limits: tuple[int, int | None], pids: set[int]) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=_begin, initargs=limits)
        self._pids, self._is_gone = pids, False
        try:
            self._pid = self._pool.submit(os.getpid).result()
        except BrokenProcessPool as error:
            raise WorkerDiedError("a worker died when it started") from error
        self._pids.add(self._pid)

    def run(self, call: Callable[[], T], most_s: float | None) -> T:
        """Raises what the call raises, TimeoutError, and WorkerDiedError."""
        try:
            return self._pool.submit(call).result(most_s)
        except BrokenProcessPool as error:
            self.end()
            raise WorkerDiedError("a worker died") from error
        except TimeoutError:
            self.end()
            raise

    def is_gone(self) -> bool:
        """Whether it ended, also while it had nothing to do."""
        return self._is_gone or not _is_alive(self._pid)

    def end(self) -> None:
        self._is_gone = True
        self._pids.discard(self._pid)
        _kill(self._pid)
        self._pool.shutdown()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    """Of a process that somebody else waits for: dead ones linger until then."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _begin(parent: int, memory_bytes: int | None) -> None:
    """In a new worker: signals of the terminal are for the parent, whose end is this process's, too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(
        _DIES_WITH_PARENT, signal.SIGKILL
    )  # of the fork server, which ends with our parent
    threading.Thread(target=_watch, args=[parent], daemon=True).start()
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(_KILLED_FIRST)
    if memory_bytes is not None:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory_bytes,) * 2)


def _watch(parent: int) -> None:
    """Ends this process soon after its parent's parent is gone."""
    with suppress(OSError):
        file = os.pidfd_open(parent)
        multiprocessing.connection.wait([file])
        os._exit(1)
