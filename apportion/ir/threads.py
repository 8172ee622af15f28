"""Independent parts of a plan on several cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

from apportion.ir.fields import integer

MOST_THREADS = 1024

Item = TypeVar("Item")
Made = TypeVar("Made")


def spread(function: Callable[[Item], Made], items: Iterable[Item], threads: int) -> list[Made]:
    """What the function makes of each, in order; on so many threads, of which compiled loops let each other run."""
    every = list(items)
    if threads == 1 or len(every) < 2:
        return [function(item) for item in every]
    with ThreadPoolExecutor(min(threads, len(every))) as pool:
        made = [pool.submit(copy_context().run, function, item) for item in every]
        return [one.result() for one in made]


def checked_threads(threads: int) -> int:
    """The number of threads. Raises ConfigError for one that is none."""
    return integer("threads", threads, 1, MOST_THREADS)
