"""All runs of a plan together: figures, losses, the critical path, and what notebooks and traces show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from apportion.ir import cards
from apportion.ir.arrays import Floats
from apportion.ir.bytes.codec import Plan
from apportion.ir.request.cluster import Cluster
from apportion.planner.simulate.durations import Costs
from apportion.planner.simulate.losses import Losses, find_losses, whole_us
from apportion.planner.simulate.path import PathStep
from apportion.planner.simulate.recurrent import RecurrentRun
from apportion.planner.simulate.timeline import STARTED, Run, bytes_of, named_rows, rounded
from apportion.planner.simulate.trace import DEFAULT_RANKS, build_trace


@dataclass(frozen=True, eq=False)
class Simulation:
    """One call of every attention kind, forward and backward, and one layer of every recurrent kind.

    costs: what it was priced with; hardware: its name. runs: (kind, phase) -> Run, in the order in which they follow
    each other: kind after kind, forward then backward; recurrent: the same of recurrent kinds, which no other figure
    but `recurrent_ms` has in it. cluster: what they ran on.
    """

    plan: Plan
    costs: Costs
    hardware: str
    runs: Mapping[tuple[str, str], Run]
    recurrent: Mapping[tuple[str, str], RecurrentRun]
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
    def recurrent_ms(self) -> float:
        """One layer of each recurrent kind, forward and backward."""
        return sum(run.makespan_us for run in self.recurrent.values()) / 1e3

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
        more = f", {self.recurrent_ms:.3f} ms recurrent" if self.recurrent else ""
        times = f"{self.forward_ms:.3f} ms forward, {self.backward_ms:.3f} ms backward{more}"
        return f"<Simulation: {times} on {self.hardware}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: times of a call, and how long each rank computes."""
        rows = [
            ("forward", f"{self.forward_ms:.3f} ms"),
            ("backward", f"{self.backward_ms:.3f} ms"),
            *(
                (f"{kind}, {phase}", f"{run.makespan_us / 1e3:.3f} ms")
                for (kind, phase), run in self.recurrent.items()
            ),
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
        return named_rows(np.max([run.peak_rows.max(axis=0) for run in self.runs.values()], axis=0))

    @property
    def peak_work_rows(self) -> int:
        """Work rows of all tensors together, on the rank and in the run that have most."""
        return max(int(run.peak_rows.sum(axis=1).max(initial=0)) for run in self.runs.values())

    @property
    def bytes(self) -> dict[str, int]:
        """total, max_rank (the larger of what the busiest rank sends and receives) and inter_node, in all runs."""
        return bytes_of(tuple(self.runs.values()))

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
            "forward_ms": rounded(self.forward_ms),
            "backward_ms": rounded(self.backward_ms),
            "exposed_ms": rounded(self.exposed_ms),
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
            "recurrent": [run.to_data() for run in self.recurrent.values()],
        }
