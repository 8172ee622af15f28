"""The event loop, which runs all ranks' scripts against time, in the compiled core: `core/planner/simulate.cpp`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion._core import simulate as core
from apportion.ir.arrays import Floats, Ints
from apportion.planner.simulate.program import WAIT, Script, Traffic

NONE, NOT_YET = core.NONE, core.NOT_YET


class Times(NamedTuple):
    """What the event loop finds, float64 microseconds; NOT_YET where it never happened. A launch happens at its end.

    begin, end: [instructions]. reached, done: [launches], when its channel took it up and when it was complete.
    ready, start: [transfers]. last: int64 [launches], the transfer that was complete last, NONE without transfers.
    cause: int64 [transfers], the transfer that left the port it had waited for, NONE where it did not wait.
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
    """The times of a program, when each rank's compute stream ends [ranks], and the launch that it still waits for
    [ranks], NONE where it ran to its end. contention: by how much longer work takes beside transfers."""
    found = core.run(script, traffic, ports, contention)
    return Times(*found[:8]), *found[8:]


def idle_until(script: Script, times: Times) -> Floats:
    """float64 [instructions]: when a wait has nothing to wait for any more; when others begin."""
    until, waits = times.begin.copy(), np.flatnonzero(script.role == WAIT)
    until[waits] = np.maximum(until[waits], times.done[script.launch[waits]])
    return until
