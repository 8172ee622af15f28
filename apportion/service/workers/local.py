"""Processes of this machine, by pebble: a deadline and a death end one task, and cost no other one."""

from __future__ import annotations

import ctypes
import multiprocessing.connection
import os
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from multiprocessing import spawn
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, ClassVar, TypeVar

from pebble import ProcessExpired, ProcessPool

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
    map beyond what it has at its start. Processes are forked from one that has the planner imported."""

    def __init__(self, workers: int, task_s: float | None = None, memory_bytes: int | None = None) -> None:
        context = _Context()
        context.set_forkserver_preload([PRELOADED])
        self._task_s = task_s
        self._pool: Any = ProcessPool(
            max_workers=workers, initializer=_begin, initargs=[os.getpid(), memory_bytes], context=context
        )

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """As `Executor.submit`; the future raises `TimeoutError`, and `WorkerDiedError`. Cancelling it ends a task that
        runs."""
        ours: Future[T] = Future()
        theirs: Any = self._pool.schedule(fn, args=args, kwargs=kwargs, timeout=self._task_s)
        ours.add_done_callback(lambda done: theirs.cancel() if done.cancelled() else None)
        theirs.add_done_callback(lambda done: _copy(done, ours))
        return ours

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends all processes; what runs is ended, too, where `cancel_futures` says so."""
        self._pool.stop() if cancel_futures else self._pool.close()
        if wait or cancel_futures:
            self._pool.join()


def _copy(done: Future[Any], ours: Future[Any]) -> None:
    if ours.cancelled() or not ours.set_running_or_notify_cancel():
        return
    if done.cancelled():
        ours.set_exception(WorkerDiedError("the workers were stopped"))
    elif (error := done.exception()) is None:
        ours.set_result(done.result())
    elif isinstance(error, ProcessExpired):
        ours.set_exception(WorkerDiedError(f"a worker died (status {error.exitcode})"))
    else:
        ours.set_exception(error)


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
