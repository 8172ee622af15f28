"""Lower bounds of candidates before simulation, to drop losers early, and simulated prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from apportion.ir.bytes.codec import Plan
from apportion.ir.tensors import PHASES
from apportion.planner.lower.inputs import Lowered
from apportion.planner.pipeline.placing import PlacedProblem, splits_all
from apportion.planner.problem import Problem
from apportion.planner.simulate import prepare, recurrent_runs, run_all
from apportion.planner.simulate.losses import attainable_us


@dataclass(frozen=True)
class Price:
    """Simulated milliseconds of one call of every attention kind, as in `Simulation`, and microseconds over all layers,
    including recurrent ones: the total that the search compares, the ideal without communication or overheads, and the
    attainable time (`simulate.losses`)."""

    forward_ms: float
    backward_ms: float
    layers_us: float
    ideal_us: float
    attainable_us: float


def price(
    plan: Plan, problem: Problem, whole_us: Mapping[tuple[str, str], float], limit_us: float
) -> tuple[float, Price | None]:
    """The plan's lower bound over all layers, and its price if the bound is below `limit_us`. whole_us:
    `losses.whole_us` of each kind and phase.

    Raises VerifyError for a plan that cannot run.
    """
    prepared = prepare(plan, problem.cost)
    recurrent = recurrent_runs(plan, problem.cost, problem.cluster)
    counts = [problem.model.recurrent[kind].layers for kind, _ in recurrent]
    extra_us = sum(count * run.makespan_us for count, run in zip(counts, recurrent.values(), strict=True))
    bound = extra_us + sum(problem.layers[item.kind] * item.least_us for item in prepared)
    if bound >= limit_us:
        return bound, None
    simulation = run_all(plan, prepared, problem.cost)
    layers = [problem.layers[kind] for kind, _ in simulation.runs]
    value = sum(count * run.makespan_us for count, run in zip(layers, simulation.runs.values(), strict=True))
    ideal = sum(count * run.ideal_us for count, run in zip(layers, simulation.runs.values(), strict=True))
    attainable = sum(
        problem.layers[item.kind] * attainable_us(whole_us[item.kind, item.phase], item.work)
        for item in prepared
    )
    even = sum(count * run.ideal_us for count, run in zip(counts, recurrent.values(), strict=True))
    value, ideal, attainable = value + extra_us, ideal + even, attainable / float(problem.speeds.sum()) + even
    attainable = max(attainable, ideal)
    return bound, Price(simulation.forward_ms, simulation.backward_ms, value, ideal, attainable)


def least_placed_us(placed: PlacedProblem) -> float:
    """Lower bound over all layers: the busiest group's pairs at the best throughput; 0.0 if pairs are not computed at
    home. The speed of a group is the sum of its ranks' speeds, or, if it splits the heads of all kinds, its size times
    its slowest rank's speed."""
    problem, placement, first = placed.inner, placed.placement, placed.groups.first[:-1]
    if placement.execution is not None:
        return 0.0
    load, speeds = placement.rank_sums(placement.weight, len(first)), placed.problem.speeds
    if splits_all(placed.passes, placed.problem):
        rate = np.minimum.reduceat(speeds, first) * placed.groups.sizes
    else:
        rate = np.add.reduceat(speeds, first)
    pairs, heads = int((load / rate).max()), problem.model.q_heads
    return float(sum(problem.cost.ideal_us(phase, pairs, heads) for phase in PHASES))


def least_scheduled_us(placed: PlacedProblem, lowered: Lowered) -> float:
    """Lower bound over all layers: the busiest rank's tasks; 0.0 if heads are in stages or there is an `execution`."""
    if placed.placement.execution is not None:
        return 0.0
    problem, total = placed.problem, 0.0
    for (kind, phase), low in lowered.items():
        if low.sets.stages is not None:
            return 0.0
        if kind in problem.chosen_keys:  # its tasks have more pairs than are computed
            continue
        first = low.groups.first[:-1]
        slowest = np.minimum.reduceat(problem.speeds, first)
        tasks, heads, kv_heads = low.tasks, low.sets.query_heads[first], low.sets.key_heads[first]
        times = problem.cost.attention_us(
            phase, tasks.rows, tasks.k1 - tasks.k0, tasks.work, heads[tasks.exec], kv_heads[tasks.exec]
        )
        busy = np.bincount(tasks.exec, times, len(first)) / slowest
        total += problem.layers[kind] * float(busy.max())
    return total
