"""Results of simulating two halves: times of each execution mode, and the gain of alternation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from apportion.ir.arrays import Floats
from apportion.ir.bytes.codec import Plan

MODES = ("turns", "serial", "single", "signal")
WHOLE = "whole"


class ModeTimes(NamedTuple):
    """One execution mode: makespan, and float64 [ranks], waiting time of each compute stream."""

    makespan_us: float
    exposed_us: Floats


@dataclass(frozen=True, eq=False)
class PairRun:
    """Some layers of one attention kind in one phase, with linear layers. busy_us: float64 [ranks], work of the compute
    streams at full speed, in any mode."""

    kind: str
    phase: str
    layers: int
    busy_us: Floats
    turns: ModeTimes
    serial: ModeTimes
    single: ModeTimes
    signal: ModeTimes
    whole: ModeTimes | None = None

    @property
    def modes(self) -> dict[str, ModeTimes]:
        """The simulated modes by name."""
        result = dict(zip(MODES, (self.turns, self.serial, self.single, self.signal), strict=True))
        return result if self.whole is None else result | {WHOLE: self.whole}

    @property
    def gain(self) -> float:
        """Relative gain over the single stream: 0.1 if that takes 1.1 times as long."""
        return _gain(self.single.makespan_us, self.turns.makespan_us)

    @property
    def serial_gain(self) -> float:
        """Relative gain over serial execution of the halves, which overlaps within each program."""
        return _gain(self.serial.makespan_us, self.turns.makespan_us)

    @property
    def whole_gain(self) -> float | None:
        """Relative gain over the undivided microbatch, if its plan was given."""
        return None if self.whole is None else _gain(self.whole.makespan_us, self.turns.makespan_us)

    @property
    def hidden_fraction(self) -> float:
        """Fraction of the single stream's exposed communication that alternation hides; 1.0 if there is none."""
        exposed_us = self.single.makespan_us - self.signal.makespan_us
        return (self.single.makespan_us - self.turns.makespan_us) / exposed_us if exposed_us > 0 else 1.0


@dataclass(frozen=True, eq=False)
class Pair:
    """Results of two halves, all kinds and phases. runs: (kind, phase) -> PairRun."""

    ping: Plan
    pong: Plan
    hardware: str
    runs: Mapping[tuple[str, str], PairRun]

    def ms(self, mode: str = "turns") -> float:
        """Total of all runs in one mode. Raises KeyError for a mode that was not simulated."""
        return float(sum(run.modes[mode].makespan_us for run in self.runs.values())) / 1e3

    @property
    def gain(self) -> float:
        """Relative gain of all runs together over the single stream."""
        return _gain(self.ms("single"), self.ms())

    @property
    def serial_gain(self) -> float:
        """Relative gain of all runs together over serial execution."""
        return _gain(self.ms("serial"), self.ms())

    @property
    def whole_gain(self) -> float | None:
        """Relative gain of all runs together over the undivided microbatch, if its plan was given."""
        return _gain(self.ms(WHOLE), self.ms()) if WHOLE in self._mode_names else None

    @property
    def _mode_names(self) -> tuple[str, ...]:
        return tuple(next(iter(self.runs.values())).modes)


def _gain(other: float, turns: float) -> float:
    return other / turns - 1.0 if turns else 0.0
