"""The event loop over all ranks' scripts, in the compiled core: `core/planner/simulate.cpp`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion._core import simulate as core
from apportion.ir.arrays import Floats, Ints
from apportion.planner.simulate.program import WAIT, Script, Traffic

NONE, NOT_YET = core.NONE, core.NOT_YET


class Times(NamedTuple):
    """Event times, float64 microseconds; NOT_YET for events that never happened. A launch takes effect when it ends.

    begin, end: [instructions]. reached, done: [launches], when the channel starts and completes each launch. ready,
    start: [transfers]. last: int64 [launches], the transfer completed last, NONE if there are no transfers. cause:
    int64 [transfers], the transfer for whose port it waited, NONE if it did not wait.
    """

    begin: Floats
    end: Floats
    reached: Floats
    done: Floats
    ready: Floats
    start: Floats
    last: Ints
    cause: Ints


def run(script: Script, traffic: Traffic, ports: int, contention: float = 0.0) -> tuple[Times, Floats, Ints]:
    """The times of a program, the end of each rank's compute stream [ranks], and the launch that blocks it [ranks],
    NONE if it ran to its end. contention: relative slowdown of work during transfers."""
    columns = core.run(script, traffic, ports, contention)
    return Times(*columns[:8]), *columns[8:]


def idle_until(script: Script, times: Times) -> Floats:
    """float64 [instructions]: when the idle time of a wait ends; when any other instruction begins."""
    idle_end, waits = times.begin.copy(), np.flatnonzero(script.role == WAIT)
    idle_end[waits] = np.maximum(idle_end[waits], times.done[script.launch[waits]])
    return idle_end
