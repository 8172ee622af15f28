"""What simulating a pair of halves found: the times of each way to run them, and what taking turns gains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from apportion.ir.arrays import Floats
from apportion.ir.bytes.codec import Plan

WAYS = ("turns", "serial", "single", "signal")
WHOLE = "whole"


class Way(NamedTuple):
    """One of the ways: when the last rank is finished, and float64 [ranks], how long each compute stream waits."""

    makespan_us: float
    exposed_us: Floats


@dataclass(frozen=True, eq=False)
class PairRun:
    """Some layers of one attention kind in one phase, linear layers included. busy_us: float64 [ranks], what the
    compute streams do in any of the ways, at full speed."""

    kind: str
    phase: str
    layers: int
    busy_us: Floats
    turns: Way
    serial: Way
    single: Way
    signal: Way
    whole: Way | None = None

    @property
    def ways(self) -> dict[str, Way]:
        """By name: those that were simulated."""
        found = dict(zip(WAYS, (self.turns, self.serial, self.single, self.signal), strict=True))
        return found if self.whole is None else found | {WHOLE: self.whole}

    @property
    def gain(self) -> float:
        """Over the single stream: 0.1 is a time 1.1 times as long there."""
        return _gain(self.single.makespan_us, self.turns.makespan_us)

    @property
    def serial_gain(self) -> float:
        """Over one half after the other, whose programs hide what they can."""
        return _gain(self.serial.makespan_us, self.turns.makespan_us)

    @property
    def whole_gain(self) -> float | None:
        """Over the undivided microbatch, where its plan was given."""
        return None if self.whole is None else _gain(self.whole.makespan_us, self.turns.makespan_us)

    @property
    def hidden(self) -> float:
        """The part of what a single stream adds to free communication that turns hide; 1.0 where it adds nothing."""
        added = self.single.makespan_us - self.signal.makespan_us
        return (self.single.makespan_us - self.turns.makespan_us) / added if added > 0 else 1.0

    def to_data(self) -> dict[str, Any]:
        """Plain data."""
        ways = self.ways
        return {
            "kind": self.kind,
            "phase": self.phase,
            "layers": self.layers,
            "busy_us": round(float(self.busy_us.max(initial=0.0)), 3),
            "makespan_us": {name: round(way.makespan_us, 3) for name, way in ways.items()},
            "exposed_us": {
                name: round(float(way.exposed_us.max(initial=0.0)), 3) for name, way in ways.items()
            },
            "gain": self.gain,
            "serial_gain": self.serial_gain,
            "whole_gain": self.whole_gain,
            "hidden": self.hidden,
        }


@dataclass(frozen=True, eq=False)
class Pair:
    """Two halves, all kinds and phases. runs: (kind, phase) -> PairRun."""

    ping: Plan
    pong: Plan
    hardware: str
    runs: Mapping[tuple[str, str], PairRun]

    def ms(self, way: str = "turns") -> float:
        """All runs in one of the ways, one after the other. Raises KeyError for one that was not simulated."""
        return float(sum(run.ways[way].makespan_us for run in self.runs.values())) / 1e3

    @property
    def gain(self) -> float:
        """Of all runs together over the single stream."""
        return _gain(self.ms("single"), self.ms())

    @property
    def serial_gain(self) -> float:
        """Of all runs together over one half after the other."""
        return _gain(self.ms("serial"), self.ms())

    @property
    def whole_gain(self) -> float | None:
        """Of all runs together over the undivided microbatch, where its plan was given."""
        return _gain(self.ms(WHOLE), self.ms()) if WHOLE in self._ways else None

    @property
    def _ways(self) -> tuple[str, ...]:
        return tuple(next(iter(self.runs.values())).ways)

    def to_data(self) -> dict[str, Any]:
        """Plain data: the figures above, and those of every run."""
        return {
            "recipes": [plan.header.recipe for plan in (self.ping, self.pong)],
            "ranks": self.ping.header.ranks,
            "hardware": self.hardware,
            "ms": {way: round(self.ms(way), 6) for way in self._ways},
            "gain": self.gain,
            "serial_gain": self.serial_gain,
            "whole_gain": self.whole_gain,
            "runs": [run.to_data() for run in self.runs.values()],
        }


def _gain(other: float, turns: float) -> float:
    return other / turns - 1.0 if turns else 0.0
