"""Plans fetched and samples read in torch's data-loader processes.

process k of n    iterations k, k + n, k + 2n, …: plan, rows ──► in order ──► the trainer
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from apportion.ir.bytes.iteration_slice import IterationSlice
from apportion.ir.errors import ExecutionError
from apportion.trainer.loading.fetching import LATE, Ahead, Fetched, fetch
from apportion.trainer.loading.iterations import Asked, Draw, Iterations, Wanted
from apportion.trainer.loading.rows import Dataset, Form, Rows, rows_of
from apportion.trainer.loading.sources.source import Source

PREFETCHED = 2  # iterations that each process has ready


class Parcel(NamedTuple):
    """One iteration from a process. data: the encoded slice, uint8, empty where there was no plan in time, and why.
    rows: as in `Fetched`."""

    data: Tensor
    rows: tuple[Rows, ...]
    why: str


@dataclass(frozen=True, eq=False)
class Share(IterableDataset[Parcel]):
    """A rank's share of a pass, as a dataset that every process holds a copy of."""

    dataset: Dataset
    source: Source
    asked: Asked
    draw: Draw
    start: int
    rank: int
    form: Form
    timeout_s: float

    def __iter__(self) -> Iterator[Parcel]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        iterations = Iterations(self.asked, self.draw, self.start)
        with closing(copy(self.source)) as source:
            number = self.start + first
            while (wanted := iterations.at(number)) is not None:
                iterations.forget(number)
                late, until_s = deque(LATE, 1), time.monotonic() + self.timeout_s
                goes_on = partial(_is_before, until_s)
                found = fetch(source, wanted, self.rank, self.timeout_s, goes_on, late)
                yield self._parcel(wanted, found, late[-1])
                number += step

    def _parcel(self, wanted: Wanted, found: IterationSlice | None, why: str) -> Parcel:
        if found is None:
            return Parcel(torch.empty(0, dtype=torch.uint8), (), why)
        data = torch.frombuffer(bytearray(found.encode()), dtype=torch.uint8)
        return Parcel(data, tuple(rows_of(self.dataset, wanted, found, self.form)), "")


class Collecting:
    """What the processes read, in order."""

    def __init__(self, share: Share, processes: int, ahead: Ahead) -> None:
        options: Any = {"batch_size": None, "collate_fn": _as_it_is, "prefetch_factor": PREFETCHED}
        self._ahead = ahead
        self._parcels: Any = iter(DataLoader(share, num_workers=processes, **options))

    def take(self, number: int) -> Fetched:
        """What the trainer asks for next. Raises TimeoutError where a process had no plan of it in time, and what went
        wrong in one."""
        if self._parcels is None:
            raise ExecutionError("the pass is over")
        parcel = next(self._parcels)
        error = self._ahead.failed(number)
        if error is not None:
            raise error
        if not len(parcel.data):
            raise TimeoutError(parcel.why)
        return Fetched(IterationSlice.decode(parcel.data.numpy().tobytes()), parcel.rows)

    def close(self) -> None:
        """Ends the processes."""
        parcels, self._parcels = self._parcels, None
        if parcels is not None:  # torch waits for the last reference; the traceback of an error may hold it
            parcels._shutdown_workers()


def _is_before(until_s: float) -> bool:
    return time.monotonic() < until_s


def _as_it_is(parcel: Any) -> Any:
    return parcel
