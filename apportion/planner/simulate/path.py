"""Critical path of a program.

It is traced back from the last event to time 0. Every step has one cause:

    work on a rank        begins after the last wait that blocked
    a wait                ends with the last transfer of its launch on this rank
    a transfer            began when the later of its ranks started the round, or another transfer left a port
    a round in a channel  started at its launch, or when the previous round was complete

so the steps are contiguous and their durations sum to the makespan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.tensors import TENSOR_NAMES, Tensor
from apportion.planner.simulate.engine import NONE, Times, idle_until
from apportion.planner.simulate.launches import CAST, PACK, UNPACK, WORK_NAMES
from apportion.planner.simulate.program import LAUNCH, WAIT, WORK, Script, Traffic, launch_instructions


@dataclass(frozen=True)
class PathStep:
    """One step of the critical path, in microseconds: `kind` is "compute" (of `rank`) or "transfer" (from `peer` to
    `rank` in `round`). peer, round: -1 for compute. text: describes the step and what waits for it."""

    kind: str
    rank: int
    start_us: float
    end_us: float
    round: int
    peer: int
    text: str

    @property
    def us(self) -> float:
        return self.end_us - self.start_us

    def later(self, us: float) -> PathStep:
        """The same step, `us` later."""
        return replace(self, start_us=self.start_us + us, end_us=self.end_us + us)

    def to_data(self) -> dict[str, Any]:
        return asdict(self) | {"start_us": round(self.start_us, 3), "end_us": round(self.end_us, 3)}


def walk_back(op: Ints, finish_us: Floats, script: Script, traffic: Traffic, times: Times) -> list[PathStep]:
    """The steps of a run, first step first; empty if nothing takes time."""
    return _Walk(op, script, traffic, times).steps(finish_us)


def milliseconds(us: float) -> str:
    """Formats microseconds as milliseconds with three significant digits: `2.10 ms`."""
    ms = us / 1e3
    return f"{ms:.{max(0, 2 - int(np.floor(np.log10(ms)))) if ms > 0 else 0}f} ms"


class _Walk:
    """A backward walk through the times of one run. Steps are collected last first."""

    def __init__(self, op: Ints, script: Script, traffic: Traffic, times: Times) -> None:
        self._op, self._script, self._traffic, self._times = op, script, traffic, times
        self._launch_at = launch_instructions(script)
        self._until = idle_until(script, times)
        idle = (script.role == WAIT) & (self._until > times.begin)
        self._idle = np.maximum.accumulate(np.where(idle, np.arange(len(idle)), NONE))
        self._steps: list[PathStep] = []

    def steps(self, finish_us: Floats) -> list[PathStep]:
        ends = self._times.done
        rank = int(np.argmax(finish_us))
        at: tuple[int, int, float] | None
        if ends.max(initial=0.0) > finish_us[rank]:
            last = int(np.argmax(ends))
            at = self._complete(last, f"rank {self._script.rank[last]} is busy with round", float(ends[last]))
        else:
            at = self._work(rank, int(self._script.ptr[rank + 1]), float(finish_us[rank]), True)
        while at is not None:
            at = self._work(*at)
        return self._steps[::-1]

    def _work(self, rank: int, before: int, end: float, casts: bool = False) -> tuple[int, int, float] | None:
        """Adds a rank's work up to instruction `before` and time `end`, maybe casts too; returns the cause of the wait
        before this work."""
        first = int(self._script.ptr[rank])
        wait = int(self._idle[before - 1]) if before > first else NONE
        begin = float(self._until[wait]) if wait >= first else 0.0
        if end > begin:
            names = self._work_names(max(wait, first), before)
            names += [WORK_NAMES[CAST]] if casts and self._script.end_us[rank] > 0 else []
            text = f"rank {rank} computes {milliseconds(end - begin)} ({', '.join(names)})"
            self._steps.append(PathStep("compute", rank, begin, end, NONE, NONE, text))
        if wait < first:
            return None
        idle = milliseconds(begin - float(self._times.begin[wait]))
        return self._complete(int(self._script.launch[wait]), f"rank {rank} waits {idle} in round", begin)

    def _work_names(self, first: int, end: int) -> list[str]:
        """Names of the work that a range of instructions does on the compute stream, each once."""
        role, work = self._script.role[first:end], self._script.work_us[first:end]
        codes = np.select([role == LAUNCH, role == WAIT], [PACK, UNPACK], self._op[first:end])
        return [WORK_NAMES[code] for code in dict.fromkeys(codes[(role == WORK) | (work > 0)].tolist())]

    def _complete(self, launch: int, reason: str, end: float) -> tuple[int, int, float]:
        """Traces a launch's completion back to work on some rank: (rank, instruction, time)."""
        while True:
            transfer = int(self._times.last[launch])
            if transfer >= 0:
                launch, end = self._transfers(transfer, launch, reason, end)
            script, arrival = self._script, float(self._times.reached[launch])
            index, rank = int(self._launch_at[launch]), int(script.rank[launch])
            if arrival <= self._times.end[index]:
                return rank, index + 1, arrival
            reason = f"channel {script.channel[launch]} of rank {rank} is busy with round"
            launch, end = int(script.before[launch]), arrival

    def _transfers(self, transfer: int, launch: int, reason: str, end: float) -> tuple[int, float]:
        """Adds a transfer and those that held its ports before it. Returns the launch that the earliest of them waited
        for, and the time when that transfer was ready."""
        times, traffic = self._times, self._traffic
        text = f"{reason} {self._script.round[launch]} {self._purpose(transfer, launch)}"
        while True:
            start = float(times.start[transfer])
            self._steps.append(self._transfer_step(transfer, start, end, text))
            if start <= times.ready[transfer]:
                break
            last, transfer, end = transfer, int(times.cause[transfer]), start
            text = (
                f"{self._tile(transfer)} goes before {self._tile(last)} on the {self._port(transfer, last)}"
            )
        sides = int(traffic.sender[transfer]), int(traffic.receiver[transfer])
        return max(sides, key=lambda side: times.reached[side]), float(times.ready[transfer])

    def _transfer_step(self, transfer: int, start: float, end: float, label: str) -> PathStep:
        source, target, round_ = self._endpoints(transfer)
        text = f"{label} ({self._traffic.bytes[transfer] / 1e6:.3g} MB, {milliseconds(end - start)})"
        return PathStep("transfer", target, start, end, round_, source, text)

    def _endpoints(self, transfer: int) -> tuple[int, int, int]:
        sender, receiver = self._traffic.sender[transfer], self._traffic.receiver[transfer]
        script = self._script
        return int(script.rank[sender]), int(script.rank[receiver]), int(script.round[sender])

    def _name(self, transfer: int) -> str:
        return TENSOR_NAMES[Tensor(int(self._traffic.tensor[transfer]))]

    def _tile(self, transfer: int) -> str:
        source, target, round_ = self._endpoints(transfer)
        return f"{self._name(transfer)} from rank {source} to rank {target} (round {round_})"

    def _purpose(self, transfer: int, launch: int) -> str:
        source, target, _ = self._endpoints(transfer)
        if self._traffic.receiver[transfer] == launch:
            return f"for {self._name(transfer)} from rank {source}"
        return f"until rank {target} has {self._name(transfer)}"

    def _port(self, first: int, second: int) -> str:
        """The port that both transfers use."""
        source, target, _ = self._endpoints(second)
        port = self._traffic.out_port
        kind = "link" if port[second] < len(self._script.ptr) - 1 else "NIC"
        return f"{kind} out of rank {source}" if port[first] == port[second] else f"{kind} into rank {target}"
