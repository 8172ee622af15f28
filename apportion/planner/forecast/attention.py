"""Attention of a step: plans and simulates the microbatches of the groups that may be slowest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ConfigError
from apportion.ir.isa import Op
from apportion.ir.plan.tables import Table
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy
from apportion.ir.tensors import PHASES
from apportion.planner.api import sketch
from apportion.planner.cost import CostModel
from apportion.planner.forecast.grids import groups_of
from apportion.planner.forecast.parallelism import Parallelism
from apportion.planner.pack import Sequential, Wlb
from apportion.planner.pipeline.feasibility import attention_bytes
from apportion.planner.problem import Problem
from apportion.planner.recipe.recipes import pack_of
from apportion.planner.remap import LINEAR
from apportion.planner.simulate import makespans_us, recurrent_runs
from apportion.planner.simulate.pair.run import turns_us

#: number of groups of a static grid that are planned because they have the most pairs
HEAVIEST = 3


@dataclass(frozen=True, eq=False)
class PlannedMicrobatch:
    """Plan of one microbatch in one group, or of its two halves, ping and pong, which alternate.

    tokens: of the fullest rank; busy: largest tokens over speed of any rank; even: the same in the linear
    layout of a remap, if any; rows: int64 [ranks], tokens of each rank in the layout of the FFN; bytes: home and work
    rows of a call on the fullest rank; stages: number of stages in which its programs compute Q, K and V of some
    heads, 0 if the layer computes them; moves_us: time of moves between the layouts, per layer, both phases.
    """

    plan: Plan
    tokens: int
    busy: float
    even: float
    rows: Ints = field(repr=False)
    bytes: int
    stages: int
    moves_us: float
    pong: Plan | None = None

    @property
    def projects(self) -> bool:
        """True if its programs compute Q, K and V."""
        return self.stages > 0


@dataclass(frozen=True)
class AttentionTimes:
    """Times over all layers of the model, in microseconds until the last rank is done; recurrent: of recurrent layers,
    forward and backward."""

    forward_us: float
    backward_us: float
    recurrent: tuple[float, float] = (0.0, 0.0)


def plan_attention(
    parallelism: Parallelism, batch: Batch, cluster: Cluster, model: Model, hardware: Hardware, seed: int
) -> tuple[list[list[PlannedMicrobatch]], int]:
    """Plans the microbatches, in order, of the groups that may be slowest; also returns the pairs of all groups. batch:
    all sequences of a step. Raises ConfigError, CapacityError."""
    group, rank_model = parallelism.group(cluster), parallelism.rank_model(model)
    step = Problem(batch, group, rank_model, Policy(parallelism.recipe, seed=seed), hardware)
    count, packing = parallelism.groups(cluster), parallelism.packing or "order"
    microbatches = [groups_of(part, count, packing) for part in _microbatches(parallelism.steps(), step)]
    groups = list(zip(*microbatches, strict=True))
    pairs = [sum(_pairs(rank_model, microbatch) for microbatch in batches) for batches in groups]
    result: list[list[PlannedMicrobatch]] = []
    for batches in (groups[number] for number in _slowest(groups, pairs)):
        result.append([])
        for microbatch in batches:
            parts = _halves(replace(step, batch=microbatch)) if parallelism.ping_pong else [microbatch]
            result[-1].append(_build_microbatch(*(sketch(replace(step, batch=half)) for half in parts)))
    return result, sum(pairs)


def _pairs(model: Model, batch: Batch) -> int:
    """Pairs allowed by the masks, over all layers."""
    return sum(model.layers_of(kind) * batch.area(kind) for kind in batch.kinds)


def _slowest(groups: Sequence[Sequence[Batch]], pairs: Sequence[int]) -> list[int]:
    """Chooses groups to plan: the one with the most tokens, and those with the most pairs. Groups have at most their
    even share of tokens, so they differ in attention only, and the step ends with the slowest."""
    longest = max(range(len(groups)), key=lambda number: sum(batch.tokens for batch in groups[number]))
    heaviest = sorted(range(len(groups)), key=lambda number: -pairs[number])
    return list(dict.fromkeys((longest, *heaviest[:HEAVIEST])))


def _halves(problem: Problem) -> list[Batch]:
    """Splits a batch into halves of about equal predicted time. Raises CapacityError for a single sequence."""
    return [problem.batch.take(indexes) for indexes in Wlb(microbatches=2)(problem).microbatches]


def _microbatches(count: int, problem: Problem) -> list[Batch]:
    if count == 1:
        return [problem.batch]
    packer = replace(pack_of(problem.policy.recipe) or Sequential(), microbatches=count)  # type: ignore[type-var]
    packing = packer(problem)
    if deferred := len(packing.deferred):
        rule = f"{deferred} sequences would be deferred to a later step, but a forecast has only one step"
        raise ConfigError("recipe.pack.defer", True, rule, "use the recipe without defer")
    return [problem.batch.take(indexes) for indexes in packing.microbatches]


def _build_microbatch(ping: Plan, pong: Plan | None = None) -> PlannedMicrobatch:
    plans = [ping] if pong is None else [ping, pong]
    home = np.sum([plan.layouts[plan.header.home_layout].rows_per_rank for plan in plans], 0)
    speeds = np.asarray(ping.request.cluster.speeds or np.ones(len(home)))
    even = np.sum([plan.layouts[_even_layout(plan)].rows_per_rank for plan in plans], 0)
    programs = [program for plan in plans for program in plan.programs.values()]
    return PlannedMicrobatch(
        ping,
        int(home.max()),
        float((home / speeds).max()),
        float((even / speeds).max()),
        even,
        sum(attention_bytes(plan) for plan in plans),
        max(_stages(program["instructions"]) for program in programs),
        sum(float(plan.report["remap"]["moves_us"]) for plan in plans if LINEAR in plan.layouts),
        pong,
    )


def _even_layout(plan: Plan) -> str:
    return LINEAR if LINEAR in plan.layouts else plan.header.home_layout


def _stages(instructions: Table) -> int:
    """The largest number of projection instructions on a rank."""
    return int(np.bincount(instructions.rank_of_row()[instructions["op"] == Op.PROJECT]).max(initial=0))


def attend(
    planned: PlannedMicrobatch,
    systems: Sequence[tuple[CostModel, Cluster]],
    around: Sequence[Mapping[str, tuple[float, float]]],
) -> list[AttentionTimes]:
    """Simulates the calls under several costs and clusters of one group; for halves, returns the time in excess of the
    work around attention (see `turns_us`) of the rank with the most such work."""
    if planned.pong is None:
        layers = makespans_us(planned.plan, systems)
    else:
        layers = [
            {
                key: max(us - sum(extra[key[1]]) * planned.busy, 0.0)
                for key, us in turns_us(planned.plan, planned.pong, costs, extra, cluster).items()
            }
            for (costs, cluster), extra in zip(systems, around, strict=True)
        ]
    model, times = planned.plan.request.model, list[AttentionTimes]()
    for layer, (costs, cluster) in zip(layers, systems, strict=True):
        forward, backward = (
            sum(model.layers_of(kind) * us for (kind, name), us in layer.items() if name == phase)
            for phase in PHASES
        )
        times.append(AttentionTimes(forward, backward, _recurrent_us(planned.plan, costs, cluster)))
    return times


def _recurrent_us(plan: Plan, costs: CostModel, cluster: Cluster) -> tuple[float, float]:
    kinds, runs = plan.request.model.recurrent, recurrent_runs(plan, costs, cluster)
    forward, backward = (
        sum(kinds[kind].layers * run.makespan_us for (kind, name), run in runs.items() if name == phase)
        for phase in PHASES
    )
    return forward, backward


def largest(planned: list[list[PlannedMicrobatch]]) -> PlannedMicrobatch:
    """The microbatch with the most tokens on a rank, but with the largest `bytes` of any microbatch."""
    items = [item for group in planned for item in group]
    return replace(max(items, key=lambda item: item.tokens), bytes=max(item.bytes for item in items))
