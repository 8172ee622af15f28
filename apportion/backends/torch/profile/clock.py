"""Clocks for profiles: the best of several runs on a device.

A CPU process of one thread is timed by its CPU time, which other load does not stretch; a GPU by its events; all else
by wall time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from apportion.backends.torch.transport import Flight

Work = Callable[[], object]


@dataclass(frozen=True)
class Runs:
    """The number of runs to take the best of: at least `least`, and up to `most` while they fit `budget_us`."""

    least: int = 2
    most: int = 10
    budget_us: float = 10_000.0


def best_us(work: Work, device: torch.device, runs: Runs) -> float:
    """The best time in microseconds, after a warm-up run."""
    work()
    best, total = float("inf"), 0.0
    for run in range(runs.most):
        if run >= runs.least and total > runs.budget_us:
            break
        elapsed = once_us(work, device)
        best, total = min(best, elapsed), total + elapsed
    return max(best, 1e-3)


def once_us(work: Work, device: torch.device) -> float:
    """The time of one run in microseconds."""
    if device.type == "cuda":
        return overlapped_us(Flight, work, device)
    clock = time.process_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    start = clock()
    work()
    return (clock() - start) / 1e3


def wall_us(work: Work, device: torch.device) -> float:
    """The wall time in microseconds until the work (e.g. a transfer) is done, on whichever device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter_ns()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter_ns() - start) / 1e3


def overlapped_us(start: Callable[[], Flight], work: Work, device: torch.device) -> float:
    """The microseconds of work on the current stream while the flight from `start` is under way; waits for both."""
    if device.type != "cuda":
        flight = start()
        elapsed = wall_us(work, device)
        flight.wait()
        return elapsed
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    flight = start()
    begin.record()
    work()
    end.record()
    flight.wait()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end) * 1e3)
