"""Loss analysis: composition of a run's time, and its attainable minimum.

    makespan   ideal │ inherent │ cutting │ launches │ row work │ imbalance │ contention │ stalls
               └─ attainable ───┘
               └─ mean work of the ranks, by speed ─────────────┘
               └─ work of the busiest rank at full speed ────────────────────┘
               └─ work of the busiest rank, slowed down by transfers ─────────────────────┘

*Attainable* is the time of all bands of the batch, each computed whole, with all heads, by one task, divided evenly by
the ranks' speeds: no cut, no launch, no communication. No plan is faster if tasks cost at least as much as the bands
they are cut from. Cost models may violate that; a plan whose tasks cost less in total is therefore compared with that
total, a bound for all plans with these tasks.
"""

from __future__ import annotations

from typing import NamedTuple

from apportion.ir.arrays import Floats
from apportion.ir.masks.bands import merge_adjacent
from apportion.ir.request.batch import Batch
from apportion.ir.request.model import Model
from apportion.planner.cost import bands_us
from apportion.planner.simulate.durations import Costs, Work


class Losses(NamedTuple):
    """Microseconds; their sum is the makespan.

    ideal: all pairs at saturated throughput. inherent: extra cost of whole bands that are short or sparse. cutting:
    cost of tasks in excess of whole bands, including kernels too short to fill a device. launches: of kernels. rows:
    copies, sums, packing, casts, accumulators wider than results, and projections. All of these are divided evenly by
    speed. imbalance: excess of the busiest rank's work. contention: slowdown of the busiest rank by transfers. stalls:
    the rest: every rank waits for at least this long.
    """

    ideal: float
    inherent: float
    cutting: float
    launches: float
    rows: float
    imbalance: float
    contention: float
    stalls: float

    @property
    def attainable(self) -> float:
        return self.ideal + self.inherent


def whole_us(batch: Batch, model: Model, kind: str, phase: str, costs: Costs) -> float:
    """Time of all bands of a kind, each as one task with all heads, at speed 1, after merging bands. Each latent row is
    expanded once."""
    bands = float(bands_us(costs, model, phase, merge_adjacent(batch.bands(kind))).sum())
    if model.latent is None:
        return bands
    return bands + float(costs.expansion_us(phase, batch.tokens * model.q_heads, 0))


def attainable_us(whole: float, work: Work) -> float:
    """Attainable time at speed 1. whole: `whole_us`."""
    return min(whole, work.tasks)


def find_losses(
    makespan_us: float,
    ideal_us: float,
    whole: float,
    work: Work,
    compute_us: Floats,
    slowed_us: Floats,
    speeds: Floats,
) -> Losses:
    """The losses of one run. whole: `whole_us`; compute_us, slowed_us: float64 [ranks], busy time of the compute
    streams, and the part of it due to transfers; speeds: float64 [ranks]."""
    speed, busy = float(speeds.sum()), compute_us - slowed_us
    attainable = max(attainable_us(whole, work) / speed, ideal_us)
    even, busiest = float((busy * speeds).sum()) / speed, float(busy.max(initial=0.0))
    longest = float(compute_us.max(initial=0.0))
    return Losses(
        ideal_us,
        attainable - ideal_us,
        work.kernels / speed - attainable,
        work.launches / speed,
        even - (work.kernels + work.launches) / speed,
        busiest - even,
        longest - busiest,
        makespan_us - longest,
    )
