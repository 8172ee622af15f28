"""What a simulation found: timelines of every rank, and the figures that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from apportion.ir import cards
from apportion.ir.arrays import Floats, Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.isa import Op
from apportion.ir.request.cluster import Cluster
from apportion.ir.tensors import TENSOR_NAMES, Tensor
from apportion.planner.simulate.durations import Costs, Work
from apportion.planner.simulate.engine import Times, idle_until
from apportion.planner.simulate.launches import CAST, PACK, UNPACK
from apportion.planner.simulate.losses import Losses, find_losses, whole_us
from apportion.planner.simulate.path import PathStep, walk_back
from apportion.planner.simulate.program import LAUNCH, WAIT, Script, Traffic, launch_instructions
from apportion.planner.simulate.trace import DEFAULT_RANKS, build_trace

#: what a rank starts, columns of a run
STARTED = ("instructions", "launches", "messages", "rounds")
COMPUTE = 0  # the compute stream; channel c is stream 1 + c
NOBODY = -1


class Spans(NamedTuple):
    """What every stream does, as columns [spans]: on stream 0 instructions that take time, waits that find something to
    wait for, and what packs, unpacks and casts; transfers, once at each end, on stream 1 + channel. Rank after rank,
    stream after stream.

    rank, stream, op (a code of `WORK_NAMES`), instruction (its number on the rank; a transfer's launch; of casts the
    number of them all), round (-1 for work), peer (-1 but for transfers): int64. start_us, end_us: float64.
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

    makespan_us: when the last rank is finished. ideal_us: the same pairs without overhead and communication, balanced
    by speed. work: of all ranks, at speed 1. compute_us, exposed_us, finish_us: float64 [ranks], busy and idle time of
    the compute stream (idle is waiting for rounds), and its end; slowed_us: float64 [ranks], what of compute_us is due
    to transfers on the wire. sent_bytes, received_bytes: int64 [ranks]. launches,
    messages, rounds: int64 [ranks], the kernels that the executor starts, the messages that it posts, sent and
    received, and in how many rounds. peak_rows: int64 [ranks, tensors], work rows by `Tensor`: the arenas, which the
    planner made as large as what lives at once.
    op: int8 [instructions], script, traffic, times: the program as it ran.
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
        """Ideal over simulated time, 1.0 where there is nothing to do."""
        return self.ideal_us / self.makespan_us if self.makespan_us else 1.0

    @property
    def instructions(self) -> Ints:
        """int64 [ranks]."""
        return np.diff(self.script.ptr)

    @cached_property
    def spans(self) -> Spans:
        """The timelines of all ranks."""
        parts = (*_compute_spans(self), *(_transfer_spans(self, sends) for sends in (True, False)))
        columns = [np.concatenate(columns) for columns in zip(*parts, strict=True)]
        found = Spans(*columns)
        order = np.lexsort((found.peer, found.start_us, found.stream, found.rank))
        return Spans(*(column[order] for column in columns))

    def critical_path(self) -> list[PathStep]:
        """What the makespan consists of, first step first: each begins where the one before ends."""
        return walk_back(self.op, self.finish_us, self.script, self.traffic, self.times)

    def to_data(self, spans: bool = True) -> dict[str, Any]:
        """Plain data: the figures, columns over ranks and, with `spans`, the columns of the timelines."""
        data: dict[str, Any] = {
            "kind": self.kind,
            "phase": self.phase,
            "makespan_us": _rounded(self.makespan_us),
            "ideal_us": _rounded(self.ideal_us),
            "efficiency": self.efficiency,
            "bytes": _bytes((self,)),
            "ranks": {
                name: _rounded(getattr(self, name)) for name in ("compute_us", "exposed_us", "finish_us")
            }
            | {name: getattr(self, name).tolist() for name in ("sent_bytes", "received_bytes", *STARTED)},
            "peak_rows": _named_rows(self.peak_rows.max(axis=0, initial=0)),
            "critical_path": [step.to_data() for step in self.critical_path()],
        }
        if spans:
            data["spans"] = {name: _rounded(column) for name, column in self.spans._asdict().items()}
        return data


@dataclass(frozen=True, eq=False)
class Simulation:
    """One call of every attention kind, forward and backward.

    costs: what it was priced with; hardware: its name. runs: (kind, phase) -> Run, in the order in which they follow
    each other: kind after kind, forward then backward. cluster: what they ran on.
    """

    plan: Plan
    costs: Costs
    hardware: str
    runs: Mapping[tuple[str, str], Run]
    cluster: Cluster

    @property
    def forward_ms(self) -> float:
        """One call of each kind."""
        return self._ms("forward")

    @property
    def backward_ms(self) -> float:
        """One call of each kind."""
        return self._ms("backward")

    def _ms(self, phase: str) -> float:
        return sum(run.makespan_us for run in self.runs.values() if run.phase == phase) / 1e3

    @property
    def exposed_us(self) -> Floats:
        """float64 [ranks]: how long each compute stream waits for rounds, in all runs."""
        total: Floats = np.sum([run.exposed_us for run in self.runs.values()], axis=0, dtype=np.float64)
        return total

    @property
    def exposed_ms(self) -> float:
        """The rank that waits longest, in all runs."""
        return float(self.exposed_us.max(initial=0.0)) / 1e3

    @property
    def efficiency(self) -> float:
        """Ideal balanced time by speeds, without communication and overheads, over simulated time, all runs together;
        1.0 where there is nothing to do."""
        simulated = sum(run.makespan_us for run in self.runs.values())
        return sum(run.ideal_us for run in self.runs.values()) / simulated if simulated else 1.0

    def __repr__(self) -> str:
        return f"<Simulation: {self.forward_ms:.3f} ms forward, {self.backward_ms:.3f} ms backward on {self.hardware}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: times of a call, and how long each rank computes."""
        rows = [
            ("forward", f"{self.forward_ms:.3f} ms"),
            ("backward", f"{self.backward_ms:.3f} ms"),
            ("efficiency", f"{100 * self.efficiency:.1f} % of balanced work without communication"),
            *((f"of these, {name}", f"{value:.3f} ms") for name, value in self.lost_ms.items() if value),
        ]
        busy = np.sum([run.compute_us for run in self.runs.values()], axis=0)
        title = f"{self.plan.header.recipe} on {self.plan.header.ranks} ranks, simulated on {self.hardware}"
        return cards.card(title, rows, cards.bars("time that each rank computes, and its mean", busy))

    @cached_property
    def losses(self) -> Mapping[tuple[str, str], Losses]:
        """(kind, phase) -> where the time of the run goes."""
        request = self.plan.request
        speeds = np.asarray(self.cluster.speeds or np.ones(self.cluster.ranks), np.float64)
        return {
            key: find_losses(
                run.makespan_us,
                run.ideal_us,
                whole_us(request.batch, request.model, *key, self.costs),
                run.work,
                run.compute_us,
                run.slowed_us,
                speeds,
            )
            for key, run in self.runs.items()
        }

    @property
    def lost(self) -> Losses:
        """All runs together."""
        return Losses(*(float(sum(parts)) for parts in zip(*self.losses.values(), strict=True)))

    @property
    def lost_ms(self) -> dict[str, float]:
        """The same by name, in milliseconds."""
        return {name: us / 1e3 for name, us in self.lost._asdict().items()}

    @property
    def attainable(self) -> float:
        """The efficiency of what is attainable (see `losses`); 1.0 where there is nothing to do."""
        lost = self.lost
        return lost.ideal / lost.attainable if lost.attainable else 1.0

    @property
    def of_attainable(self) -> float:
        """Efficiency as a share of what is attainable; 1.0 where there is nothing to do."""
        lost = self.lost
        return lost.attainable / sum(lost) if sum(lost) else 1.0

    @property
    def time_imbalance(self) -> float:
        """Work of the busiest rank over what it would be divided by speed, less 1, over all runs; 0.0 without work."""
        lost = self.lost
        even = sum(lost) - lost.stalls - lost.contention - lost.imbalance
        return lost.imbalance / even if even else 0.0

    @property
    def peak_rows(self) -> dict[str, int]:
        """Tensor name -> rows of the largest work arena of any rank and run."""
        return _named_rows(np.max([run.peak_rows.max(axis=0) for run in self.runs.values()], axis=0))

    @property
    def peak_work_rows(self) -> int:
        """Work rows of all tensors together, on the rank and in the run that have most."""
        return max(int(run.peak_rows.sum(axis=1).max(initial=0)) for run in self.runs.values())

    @property
    def bytes(self) -> dict[str, int]:
        """total, max_rank (the larger of what the busiest rank sends and receives) and inter_node, in all runs."""
        return _bytes(tuple(self.runs.values()))

    @property
    def busiest(self) -> dict[str, int]:
        """The rank that starts most kernels in all runs, with its instructions, launches, messages and rounds."""
        sums = {name: sum(getattr(run, name) for run in self.runs.values()) for name in STARTED}
        rank = int(np.argmax(sums["launches"]))
        return {"rank": rank, **{name: int(column[rank]) for name, column in sums.items()}}

    def critical_path(self) -> list[PathStep]:
        """The critical paths of the runs, one after the other, as one: it ends at forward_ms + backward_ms."""
        steps, start = [], 0.0
        for run in self.runs.values():
            steps += [step.later(start) for step in run.critical_path()]
            start += run.makespan_us
        return steps

    def trace(self, ranks: Sequence[int] | None = None) -> dict[str, Any]:
        """The timelines as Chrome trace events (opens in ui.perfetto.dev): a process a rank, a thread a stream, an
        arrow a transfer; the runs follow each other and all ranks begin each at the same time.

        ranks: those to show; by default all of up to 64, of more those on the critical path and the first ones.
        `otherData` says which are there. Raises ConfigError for a rank that the plan does not have.
        """
        return build_trace(self.plan, list(self.runs.values()), self.critical_path(), ranks, DEFAULT_RANKS)

    def to_data(self, spans: bool = True) -> dict[str, Any]:
        """Plain data: the figures above, and those of every run (see `Run.to_data`)."""
        return {
            "recipe": self.plan.header.recipe,
            "ranks": self.plan.header.ranks,
            "hardware": self.hardware,
            "forward_ms": _rounded(self.forward_ms),
            "backward_ms": _rounded(self.backward_ms),
            "exposed_ms": _rounded(self.exposed_ms),
            "efficiency": self.efficiency,
            "attainable": self.attainable,
            "of_attainable": self.of_attainable,
            "imbalance": {"time": self.time_imbalance},
            "lost_ms": self.lost_ms,
            "bytes": self.bytes,
            "busiest": self.busiest,
            "peak_rows": self.peak_rows,
            "runs": [
                run.to_data(spans) | {"lost_us": self.losses[key]._asdict()} for key, run in self.runs.items()
            ],
        }


def _rounded(value: Any) -> Any:
    """To a nanosecond."""
    return np.round(value, 3).tolist()


def _named_rows(rows: Ints) -> dict[str, int]:
    return {TENSOR_NAMES[Tensor(code)]: int(count) for code, count in enumerate(rows) if count}


def _bytes(runs: Sequence[Run]) -> dict[str, int]:
    sent = np.sum([run.sent_bytes for run in runs], axis=0)
    received = np.sum([run.received_bytes for run in runs], axis=0)
    return {
        "total": int(sent.sum()),
        "max_rank": int(np.maximum(sent, received).max(initial=0)),
        "inter_node": sum(run.inter_node_bytes for run in runs),
    }


def _compute_spans(run: Run) -> Iterator[Spans]:
    """Waiting, then working, of every instruction; then casts."""
    script, times = run.script, run.times
    until, op = idle_until(script, times), run.op.astype(np.int64)
    yield _instruction_spans(run, op, times.begin, until)
    work = np.select([script.role == LAUNCH, script.role == WAIT], [PACK, UNPACK], op)
    yield _instruction_spans(run, work, until, times.end)
    ranks = np.flatnonzero(script.end_us > 0)
    nobody, end = np.full(len(ranks), NOBODY), run.finish_us[ranks]
    casts, stream, number = np.full(len(ranks), CAST), np.full(len(ranks), COMPUTE), run.instructions[ranks]
    yield Spans(ranks, stream, casts, end - script.end_us[ranks], end, number, nobody, nobody)


def _instruction_spans(run: Run, op: Ints, start: Floats, end: Floats) -> Spans:
    """What takes time between `start` and `end` of the instructions."""
    at = np.flatnonzero(end > start)
    rank, instruction = _on_rank(run.script, at)
    round_ = np.append(run.script.round, NOBODY)[run.script.launch[at]]
    compute, nobody = np.full(len(at), COMPUTE), np.full(len(at), NOBODY)
    return Spans(rank, compute, op[at], start[at], end[at], instruction, round_, nobody)


def _transfer_spans(run: Run, sends: bool) -> Spans:
    script, traffic, times = run.script, run.traffic, run.times
    mine, other = (traffic.sender, traffic.receiver) if sends else (traffic.receiver, traffic.sender)
    rank, instruction = _on_rank(script, launch_instructions(script)[mine])
    return Spans(
        rank,
        1 + script.channel[mine],
        np.full(len(mine), int(Op.LAUNCH)),
        times.start,
        times.start + traffic.wire_us + traffic.latency_us,
        instruction,
        script.round[mine],
        script.rank[other],
    )


def _on_rank(script: Script, at: Ints) -> tuple[Ints, Ints]:
    """(rank, number on it) of instructions."""
    rank = np.searchsorted(script.ptr, at, side="right") - 1
    return rank, at - script.ptr[rank]
