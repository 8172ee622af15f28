"""The event loop on which clients call servers: one for each process, in a thread of its own.

Forks are safe. A child process would wait forever for a lock that the loop's thread holds at the time of the fork, such
as that of a module being imported, so the loop is paused between two callbacks during a fork. A child starts its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

FORK_S = 1.0  # that a fork waits for the loop
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process; a parent's stay: freeing them takes its locks
_forked: list[threading.Event] = []  # what a paused loop waits for
T = TypeVar("T")


def event_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process, started on first use."""
    if (found := _loops.get(os.getpid())) is None:
        made = asyncio.new_event_loop()
        made.set_default_executor(_Resolvers(1))
        found = _loops.setdefault(os.getpid(), made)
        if found is made:
            threading.Thread(target=made.run_forever, name="apportion-client", daemon=True).start()
        else:  # another thread was first
            made.close()
    return found


class _Resolvers(ThreadPoolExecutor):
    """Threads in which names are looked up: one that hangs holds up neither another one nor the end of the process."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        found: Future[T] = Future()

        def look_up() -> None:
            try:
                found.set_result(fn(*args, **kwargs))
            except Exception as error:
                found.set_exception(error)

        found.set_running_or_notify_cancel()
        threading.Thread(target=look_up, daemon=True).start()
        return found


def _before_fork() -> None:
    """Pauses the loop until `_after_fork`, for `FORK_S` at most."""
    loop = _loops.get(os.getpid())
    if loop is None or asyncio._get_running_loop() is loop:
        return
    paused, over = threading.Event(), threading.Event()

    def pause() -> None:
        paused.set()
        over.wait(FORK_S)

    loop.call_soon_threadsafe(pause)
    paused.wait(FORK_S)
    _forked.append(over)


def _after_fork() -> None:
    while _forked:
        _forked.pop().set()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked.clear)
