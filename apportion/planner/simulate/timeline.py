"""Results of a simulation: timelines of every rank, and derived figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.isa import Op
from apportion.ir.tensors import TENSOR_NAMES, Tensor
from apportion.planner.simulate.durations import Work
from apportion.planner.simulate.engine import Times, idle_until
from apportion.planner.simulate.launches import CAST, PACK, UNPACK
from apportion.planner.simulate.path import PathStep, walk_back
from apportion.planner.simulate.program import LAUNCH, WAIT, Script, Traffic, launch_instructions

#: counts of a rank's activities: columns of a run
STARTED = ("instructions", "launches", "messages", "rounds")
COMPUTE = 0  # the compute stream; channel c is stream 1 + c
NOBODY = -1


class Spans(NamedTuple):
    """Activities of every stream, as columns [spans]: on stream 0 instructions with a duration, blocking waits,
    packing, unpacking and casts; transfers, once at each end, on stream 1 + channel. Sorted by rank, then stream.

    rank, stream, op (a code of `WORK_NAMES`), instruction (its number on the rank; a transfer's launch; for casts the
    number of instructions), round (-1 for work), peer (-1 except for transfers): int64. start_us, end_us: float64.
    """

    rank: Ints
    stream: Ints
    op: Ints
    start_us: Floats
    end_us: Floats
    instruction: Ints
    round: Ints
    peer: Ints


@dataclass(frozen=True, eq=False)
class Run:
    """One attention call of one kind and phase on all ranks, which start together at 0. Times in microseconds.

    makespan_us: when the last rank ends. ideal_us: the same pairs without overhead or communication, balanced by speed.
    work: of all ranks, at speed 1. compute_us, exposed_us, finish_us: float64 [ranks], busy and idle time of the
    compute stream (idle is waiting for rounds), and its end; slowed_us: float64 [ranks], part of compute_us due to
    transfers. sent_bytes, received_bytes: int64 [ranks]. launches, messages, rounds: int64 [ranks], numbers of kernels,
    of messages sent and received, and of rounds. peak_rows: int64 [ranks, tensors], work rows by `Tensor`: arena sizes,
    which equal peak use. op: int8 [instructions], script, traffic, times: the program as it ran.
    """

    kind: str
    phase: str
    makespan_us: float
    ideal_us: float
    work: Work
    compute_us: Floats
    slowed_us: Floats
    exposed_us: Floats
    finish_us: Floats
    sent_bytes: Ints
    received_bytes: Ints
    inter_node_bytes: int
    launches: Ints
    messages: Ints
    rounds: Ints
    peak_rows: Ints
    op: Ints
    script: Script
    traffic: Traffic
    times: Times

    @property
    def efficiency(self) -> float:
        """Ideal over simulated time, 1.0 if there is no work."""
        return self.ideal_us / self.makespan_us if self.makespan_us else 1.0

    @property
    def instructions(self) -> Ints:
        """int64 [ranks]: number of instructions."""
        return np.diff(self.script.ptr)

    @cached_property
    def spans(self) -> Spans:
        """The timelines of all ranks."""
        parts = (*_compute_spans(self), *(_transfer_spans(self, sends) for sends in (True, False)))
        columns = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
        result = Spans(*columns)
        order = np.lexsort((result.peer, result.start_us, result.stream, result.rank))
        return Spans(*(column[order] for column in columns))

    def critical_path(self) -> list[PathStep]:
        """The steps of the makespan, first step first, each beginning at the end of the previous one."""
        return walk_back(self.op, self.finish_us, self.script, self.traffic, self.times)

    def to_data(self, spans: bool = True) -> dict[str, Any]:
        """Plain data: the figures, columns over ranks and, with `spans`, the columns of the timelines."""
        data: dict[str, Any] = {
            "kind": self.kind,
            "phase": self.phase,
            "makespan_us": rounded(self.makespan_us),
            "ideal_us": rounded(self.ideal_us),
            "efficiency": self.efficiency,
            "bytes": bytes_of((self,)),
            "ranks": {
                name: rounded(getattr(self, name)) for name in ("compute_us", "exposed_us", "finish_us")
            }
            | {name: getattr(self, name).tolist() for name in ("sent_bytes", "received_bytes", *STARTED)},
            "peak_rows": named_rows(self.peak_rows.max(axis=0, initial=0)),
            "critical_path": [step.to_data() for step in self.critical_path()],
        }
        if spans:
            data["spans"] = {name: rounded(column) for name, column in self.spans._asdict().items()}
        return data


def rounded(value: Any) -> Any:
    """Microseconds as plain data, rounded to a nanosecond."""
    return np.round(value, 3).tolist()


def named_rows(rows: Ints) -> dict[str, int]:
    """Tensor name -> rows, from int64 [tensors], without zeros."""
    return {TENSOR_NAMES[Tensor(code)]: int(count) for code, count in enumerate(rows) if count}


def bytes_of(runs: Sequence[Run]) -> dict[str, int]:
    """Bytes sent and received, summed over the runs: in total, on the busiest rank, between nodes."""
    sent = np.sum([run.sent_bytes for run in runs], axis=0)
    received = np.sum([run.received_bytes for run in runs], axis=0)
    return {
        "total": int(sent.sum()),
        "max_rank": int(np.maximum(sent, received).max(initial=0)),
        "inter_node": sum(run.inter_node_bytes for run in runs),
    }


def _compute_spans(run: Run) -> Iterator[Spans]:
    """Spans of waiting, then working, of every instruction; then casts."""
    script, times = run.script, run.times
    idle_end, op = idle_until(script, times), run.op.astype(np.int64)
    yield _instruction_spans(run, op, times.begin, idle_end)
    work = np.select([script.role == LAUNCH, script.role == WAIT], [PACK, UNPACK], op)
    yield _instruction_spans(run, work, idle_end, times.end)
    ranks = np.flatnonzero(script.end_us > 0)
    no_peers, end = np.full(len(ranks), NOBODY), run.finish_us[ranks]
    casts, stream, number = np.full(len(ranks), CAST), np.full(len(ranks), COMPUTE), run.instructions[ranks]
    yield Spans(ranks, stream, casts, end - script.end_us[ranks], end, number, no_peers, no_peers)


def _instruction_spans(run: Run, op: Ints, start: Floats, end: Floats) -> Spans:
    """Spans between `start` and `end` of instructions with a duration."""
    index = np.flatnonzero(end > start)
    rank, instruction = _rank_and_number(run.script, index)
    round_ = np.append(run.script.round, NOBODY)[run.script.launch[index]]
    compute, no_peers = np.full(len(index), COMPUTE), np.full(len(index), NOBODY)
    return Spans(rank, compute, op[index], start[index], end[index], instruction, round_, no_peers)


def _transfer_spans(run: Run, sends: bool) -> Spans:
    script, traffic, times = run.script, run.traffic, run.times
    side, other = (traffic.sender, traffic.receiver) if sends else (traffic.receiver, traffic.sender)
    rank, instruction = _rank_and_number(script, launch_instructions(script)[side])
    return Spans(
        rank,
        1 + script.channel[side],
        np.full(len(side), int(Op.LAUNCH)),
        times.start,
        times.start + traffic.wire_us + traffic.latency_us,
        instruction,
        script.round[side],
        script.rank[other],
    )


def _rank_and_number(script: Script, index: Ints) -> tuple[Ints, Ints]:
    """(rank, number on it) of each instruction."""
    rank = np.searchsorted(script.ptr, index, side="right") - 1
    return rank, index - script.ptr[rank]
