"""Durations of instructions on their rank's compute stream, vectorized.

    attention   its tasks as one call, kernel launches, and memory traffic of accumulators in excess of results; with
                latent rows, one expansion of each row read
    row ops     a launch, and the bytes read and written
    launch      packing of staged messages, before the round starts: their bytes twice
    wait        unpacking, after the round is complete
    the end     of a backward call: gradients of home rows are cast

A hardware's kernel times include writing each result once in the model's dtype. An accumulator is wider, and is read
before each write, once per instruction instead of once per task.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.request.model import Model
from apportion.planner.congestion import Congestion
from apportion.planner.simulate.latent import expanded_rows
from apportion.planner.simulate.launches import KERNELS
from apportion.planner.simulate.program import PricedTasks, RowWork, View


class Costs(Protocol):
    """Cost model interface of the simulator (see `planner.cost.CostModel`): microseconds at speed 1."""

    def attention_us(
        self, phase: str, q_rows: Ints, kv_rows: Ints, pairs: Ints, q_heads: Ints, kv_heads: Ints, /
    ) -> Floats: ...

    def chain_us(self, phase: str, q_rows: Ints, kv_rows: Ints, diagonals: Ints, /) -> Floats: ...

    def expansion_us(self, phase: str, rows: int | Ints, heads: int | Ints, /) -> Floats: ...

    def launch_us(self, phase: str, /) -> float: ...

    def ideal_us(self, phase: str, pairs: int, q_heads: int, /) -> Floats: ...

    def moved_us(self, moved_bytes: Ints, /) -> Floats: ...

    def rowop_us(self, moved_bytes: Ints, /) -> Floats: ...

    @property
    def post_us(self) -> float: ...

    @property
    def contention(self) -> float: ...

    @property
    def congestion(self) -> Congestion | None: ...

    def linear_us(self, tokens: Ints, /) -> Floats: ...

    @property
    def linear_parameters(self) -> int: ...


class Work(NamedTuple):
    """A program's work in microseconds at speed 1, over all ranks. tasks: by throughput, with the expansion of latent
    rows; kernels: the same, each call at least its longest chain (`chain_us`); launches: of kernels; rows: the rest."""

    tasks: float
    kernels: float
    launches: float
    rows: float


def work_us(
    view: View, costs: Costs, tasks: PricedTasks, row_work: RowWork, share: Floats | None = None
) -> tuple[Floats, Work]:
    """float64 [instructions]: work (before a launch's round, after a wait's round); and its parts. A rank of speed s
    takes 1/s times as long as one of speed 1. share: float64 [ranks], computed fraction of each rank's task pairs;
    None: all."""
    kernels, launches, accumulated, moved = np.zeros((4, len(row_work.moved)))
    total = 0.0
    if len(tasks.at):
        task_us = np.add.reduceat(costs.attention_us(view.phase, *tasks[:5]), tasks.first)
        chains = np.maximum.reduceat(
            costs.chain_us(view.phase, tasks.rows, tasks.keys, tasks.diagonals), tasks.first
        )
        if share is not None:
            task_us, chains = (times * share[view.rank_of[tasks.at]] for times in (task_us, chains))
        # the tasks of an instruction are one call: it takes the sum of their times, but at least the longest chain of
        # tiles in a task
        kernels[tasks.at] = np.maximum(task_us, chains)
        launches[tasks.at] = KERNELS[view.instructions["op"][tasks.at]] * costs.launch_us(view.phase)
        accumulated[tasks.at] = costs.moved_us(tasks.accumulated)
        total = float(task_us.sum())
    # the rows of an instruction are one kernel, as are the tiles it packs or unpacks
    index = np.flatnonzero(row_work.moved)
    moved[index] = costs.rowop_us(row_work.moved[index])
    if view.model.latent is not None:
        expanded = expanded_rows(view)
        index = np.flatnonzero(expanded.rows)
        expansions = costs.expansion_us(view.phase, expanded.rows[index], expanded.heads[index])
        kernels[index] += expansions
        total += float(expansions.sum())
    busy = kernels + launches + accumulated + moved
    if len(row_work.projection):
        busy += _projection_us(view.model, costs, row_work)
    parts = float(kernels.sum()), float(launches.sum())
    work = Work(total, *parts, float(busy.sum()) - parts[0] - parts[1])
    return busy / view.speeds[view.rank_of], work


def end_us(view: View, costs: Costs, moved: Ints) -> Floats:
    """float64 [ranks]: casting gradients after the last instruction. moved: int64 [ranks], bytes."""
    casts: Floats = np.where(moved > 0, costs.rowop_us(moved), 0.0)
    return casts / view.speeds


def _projection_us(model: Model, costs: Costs, row_work: RowWork) -> Floats:
    """float64 [instructions]: time of projections, by their share of the multiplications of a layer's linear work."""
    share = row_work.products // model.element_bytes * model.hidden / costs.linear_parameters
    times = share * costs.linear_us(row_work.rows)
    return np.bincount(row_work.projection, times, len(row_work.moved)).astype(np.float64)
