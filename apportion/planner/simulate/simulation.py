"""All simulated runs of a plan: figures, losses, the critical path, and views for notebooks and traces."""

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

    costs: the cost model; hardware: its name. runs: (kind, phase) -> Run, in execution order: kind by kind, forward
    then backward; recurrent: the same for recurrent kinds, included only in `recurrent_ms`. cluster: the simulated
    cluster.
    """

    plan: Plan
    costs: Costs
    hardware: str
    runs: Mapping[tuple[str, str], Run]
    recurrent: Mapping[tuple[str, str], RecurrentRun]
    cluster: Cluster

    @property
    def forward_ms(self) -> float:
        """Forward milliseconds, summed over one call of each attention kind."""
        return self._ms("forward")

    @property
    def backward_ms(self) -> float:
        """Backward milliseconds, summed over one call of each attention kind."""
        return self._ms("backward")

    def _ms(self, phase: str) -> float:
        return sum(run.makespan_us for run in self.runs.values() if run.phase == phase) / 1e3

    @property
    def recurrent_ms(self) -> float:
        """One layer of each recurrent kind, forward and backward."""
        return sum(run.makespan_us for run in self.recurrent.values()) / 1e3

    @property
    def exposed_us(self) -> Floats:
        """float64 [ranks]: waiting time of each compute stream, over all runs."""
        total: Floats = np.sum([run.exposed_us for run in self.runs.values()], axis=0, dtype=np.float64)
        return total

    @property
    def exposed_ms(self) -> float:
        """Longest waiting time of any rank, summed over all runs."""
        return float(self.exposed_us.max(initial=0.0)) / 1e3

    @property
    def efficiency(self) -> float:
        """Ideal time (work balanced by speed, no communication or overhead) over simulated time, for all runs
        together; 1.0 if there is no work."""
        simulated = sum(run.makespan_us for run in self.runs.values())
        return sum(run.ideal_us for run in self.runs.values()) / simulated if simulated else 1.0

    def __repr__(self) -> str:
        suffix = f", {self.recurrent_ms:.3f} ms recurrent" if self.recurrent else ""
        times = f"{self.forward_ms:.3f} ms forward, {self.backward_ms:.3f} ms backward{suffix}"
        return f"<Simulation: {times} on {self.hardware}>"

    def _repr_html_(self) -> str:
        """HTML for notebooks: times of a call, and compute time of each rank."""
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
        return cards.card(title, rows, cards.bars("compute time of each rank, and the mean", busy))

    @cached_property
    def losses(self) -> Mapping[tuple[str, str], Losses]:
        """(kind, phase) -> the run's time by cause: ideal and lost."""
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
        """The losses of all runs together."""
        return Losses(*(float(sum(parts)) for parts in zip(*self.losses.values(), strict=True)))

    @property
    def lost_ms(self) -> dict[str, float]:
        """The losses by name, in milliseconds."""
        return {name: us / 1e3 for name, us in self.lost._asdict().items()}

    @property
    def attainable(self) -> float:
        """Attainable efficiency (see `losses`); 1.0 if there is no work."""
        lost = self.lost
        return lost.ideal / lost.attainable if lost.attainable else 1.0

    @property
    def of_attainable(self) -> float:
        """Efficiency relative to the attainable one; 1.0 if there is no work."""
        lost = self.lost
        return lost.attainable / sum(lost) if sum(lost) else 1.0

    @property
    def time_imbalance(self) -> float:
        """Work of the busiest rank over an even division by speed, less 1, over all runs; 0.0 if there is no work."""
        lost = self.lost
        even = sum(lost) - lost.stalls - lost.contention - lost.imbalance
        return lost.imbalance / even if even else 0.0

    @property
    def peak_rows(self) -> dict[str, int]:
        """Tensor name -> rows of the largest work arena of any rank and run."""
        return named_rows(np.max([run.peak_rows.max(axis=0) for run in self.runs.values()], axis=0))

    @property
    def peak_work_rows(self) -> int:
        """Largest number of work rows of all tensors together, on any rank and run."""
        return max(int(run.peak_rows.sum(axis=1).max(initial=0)) for run in self.runs.values())

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes over all runs: total, max_rank (larger of sent and received at the busiest rank) and inter_node."""
        return bytes_of(tuple(self.runs.values()))

    @property
    def busiest(self) -> dict[str, int]:
        """The rank with the most kernel launches over all runs, with its instructions, launches, messages and
        rounds."""
        sums = {name: sum(getattr(run, name) for run in self.runs.values()) for name in STARTED}
        rank = int(np.argmax(sums["launches"]))
        return {"rank": rank, **{name: int(column[rank]) for name, column in sums.items()}}

    def critical_path(self) -> list[PathStep]:
        """The concatenated critical paths of the runs, which end at forward_ms + backward_ms."""
        steps, start = [], 0.0
        for run in self.runs.values():
            steps += [step.later(start) for step in run.critical_path()]
            start += run.makespan_us
        return steps

    def trace(self, ranks: Sequence[int] | None = None) -> dict[str, Any]:
        """The timelines as Chrome trace events (opens in ui.perfetto.dev): one process per rank, one thread per stream,
        one arrow per transfer; runs are consecutive, and all ranks begin a run at the same time.

        ranks: the ranks to show; by default all if there are up to 64, else those on the critical path and the first
        ones. `otherData` lists them. Raises ConfigError for an unknown rank.
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
