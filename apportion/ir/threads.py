"""Runs independent parts of planning on several cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from apportion.ir.fields import integer

MAX_THREADS = 1024

Item = TypeVar("Item")
Result = TypeVar("Result")


def spread(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """Maps the function over the items on `threads` threads; results are in order. Compiled loops release the GIL."""
    item_list = list(items)
    if threads == 1 or len(item_list) < 2:
        return [function(item) for item in item_list]
    with ThreadPoolExecutor(min(threads, len(item_list))) as pool:
        futures = [pool.submit(copy_context().run, function, item) for item in item_list]
        return [future.result() for future in futures]


def checked_threads(threads: int) -> int:
    """Returns `threads` if it is a valid number of threads. Raises ConfigError otherwise."""
    return integer("threads", threads, 1, MAX_THREADS)
