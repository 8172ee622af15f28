"""Timing of planning steps, on request."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Milliseconds per step, if requested."""

    def __init__(self, timings: dict[str, float] | None) -> None:
        self._timings = timings

    @contextmanager
    def __call__(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._timings is not None:
            self._timings[step] = (time.perf_counter() - start) * 1e3


#: discards timings
SILENT = Stopwatch(None)
