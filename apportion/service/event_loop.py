"""The event loop on which clients call servers: one per process, in a separate thread.

Safe to fork: a child would wait forever for a lock that the loop's thread holds at the fork (such as an import lock),
so the loop is paused between two callbacks during a fork. A child starts its own loop.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

FORK_S = 1.0  # longest wait of a fork for the loop
_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by pid; a child keeps its parent's: freeing takes locks
_forked: list[threading.Event] = []  # events that a paused loop waits for
T = TypeVar("T")


def event_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process, started on first use."""
    if (loop := _loops.get(os.getpid())) is None:
        new_loop = asyncio.new_event_loop()
        new_loop.set_default_executor(_Resolvers(1))
        loop = _loops.setdefault(os.getpid(), new_loop)
        if loop is new_loop:
            threading.Thread(target=new_loop.run_forever, name="apportion-client", daemon=True).start()
        else:  # another thread was first
            new_loop.close()
    return loop


class _Resolvers(ThreadPoolExecutor):
    """Daemon threads for name lookups: one that hangs blocks neither other lookups nor the end of the process."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def look_up() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        future.set_running_or_notify_cancel()
        threading.Thread(target=look_up, daemon=True).start()
        return future


def _before_fork() -> None:
    """Pauses the loop until `_after_fork`, for `FORK_S` at most."""
    loop = _loops.get(os.getpid())
    if loop is None or asyncio._get_running_loop() is loop:
        return
    paused, resumed = threading.Event(), threading.Event()

    def pause() -> None:
        paused.set()
        resumed.wait(FORK_S)

    loop.call_soon_threadsafe(pause)
    paused.wait(FORK_S)
    _forked.append(resumed)


def _after_fork() -> None:
    while _forked:
        _forked.pop().set()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forked.clear)
