"""Independent parts of a plan on several cores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def spread(function: Callable[[Item], Made], items: Iterable[Item], threads: int) -> list[Made]:
    """What the function makes of each, in order; on so many threads, of which compiled loops let each other run."""
    every = list(items)
    if threads == 1 or len(every) < 2:
        return [function(item) for item in every]
    with ThreadPoolExecutor(min(threads, len(every))) as pool:
        return list(pool.map(function, every))
