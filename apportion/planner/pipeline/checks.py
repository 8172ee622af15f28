"""Consistency checks between planning steps, to find a fault in the step that caused it.

    with checked_steps():
        ap.plan(...)

The verifier proves finished plans, and shares nothing with these checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.errors import VerifyError
from apportion.planner.lower.inputs import Lowering
from apportion.planner.pipeline.steps import Passes
from apportion.planner.problem import Placement, Problem, Shards
from apportion.planner.route.routes import Routes
from apportion.planner.schedule.rounds import Schedule
from apportion.planner.tasks.cells import cut_cells
from apportion.planner.tasks.tasks import Edges, Tasks

_Arguments = ParamSpec("_Arguments")
_ON: ContextVar[bool] = ContextVar("checked steps", default=False)


@contextmanager
def checked_steps() -> Iterator[None]:
    """Checks plans made in this context after each step: VerifyError names the step, its pass and the first wrong row.
    The plans do not change."""
    before = _ON.set(True)
    try:
        yield
    finally:
        _ON.reset(before)


def _if_enabled(check: Callable[_Arguments, None]) -> Callable[_Arguments, None]:
    @wraps(check)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        if _ON.get():
            check(*args, **kwargs)

    return checked


class Checks:
    """Checks for one recipe's passes; active only inside `checked_steps`."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    @_if_enabled
    def shards(self, problem: Problem, shards: Shards) -> None:
        """Blocks partition the batch's tokens in order; pieces are numbered."""
        must = _Requirement("shard", self._passes.shard)
        must.span("starts", shards.starts, problem.batch.tokens)
        must.hold_in_rows("piece", (shards.piece >= 0) & (shards.piece < len(shards.piece)))
        must.hold("piece, weight", len(shards.piece) == len(shards.weight) == len(shards.starts) - 1)
        must.hold_in_rows("weight", shards.weight >= 0)

    @_if_enabled
    def placement(self, problem: Problem, shards: Shards, placed: Placement) -> None:
        """Every block has a home; the work is preserved and the token cap kept."""
        must = _Requirement("place", self._passes.place)
        must.span("starts", placed.starts, problem.batch.tokens)
        homes = problem.ranks if placed.groups is None else len(placed.groups) - 1
        if placed.groups is not None:
            must.span("groups", placed.groups, problem.ranks)
        must.hold("home, weight", len(placed.home) == len(placed.weight) == len(placed.starts) - 1)
        must.hold_in_rows("home", (placed.home >= 0) & (placed.home < homes))
        must.hold("weight, total of all blocks", int(placed.weight.sum()) == int(shards.weight.sum()))
        if placed.groups is None and not self._passes.place.is_uncapped:
            must.hold_in_rows(
                "tokens, of each rank", placed.rank_sums(placed.lengths, homes) <= problem.token_caps
            )
        for (kind, phase), execution in (placed.execution or {}).items():
            cells = len(cut_cells(problem.bands[kind], placed.starts))
            label = f"execution of {kind} {phase}"
            must.hold(f"{label}, shape", execution.rank.shape == (placed.head_groups, cells))
            must.hold_in_rows(
                f"{label}, rank", (execution.rank.reshape(-1) >= 0) & (execution.rank.reshape(-1) < homes)
            )

    @_if_enabled
    def tasks(self, bands: Ints, starts: Ints, tasks: Tasks, edges: Edges, groups: int) -> None:
        """Tasks cover all pairs of the masks, once for each head group; each task has its edges."""
        must = _Requirement("place", self._passes.place)
        work = cut_cells(bands, starts).work.sum()
        must.hold("tasks, total pairs", int(tasks.work.sum()) == int(work) * groups)
        must.hold_in_rows("tasks, rows", tasks.rows > 0)
        must.hold_in_rows("tasks, keys", tasks.k1 > tasks.k0)
        for edge in (tasks.edge, tasks.query_edge):
            must.hold_in_rows("tasks, edge", (edge >= -1) & (edge < len(edges)))
            remote = np.flatnonzero(edge >= 0)
            must.hold_in_rows("tasks, edge to where they run", edges.dst[edge[remote]] == tasks.exec[remote])
        must.hold_in_rows("edges, from home", edges.src == edges.home)

    @_if_enabled
    def routed(self, star: Edges, routed: Routes, ranks: int) -> None:
        """All rows of the star (home -> ranks that need them) still arrive, relayed only by ranks that have them."""
        must, edges = _Requirement("route", self._passes.route), routed.edges
        must.hold_in_rows("ranks", (edges.src != edges.dst) & (edges.dst >= 0) & (edges.dst < ranks))
        must.hold_in_rows("parent, before its children", edges.parent < np.arange(len(edges)))
        relays = np.flatnonzero(edges.parent >= 0)
        must.hold_in_rows(
            "parent, to where its children begin", edges.dst[edges.parent[relays]] == edges.src[relays]
        )
        must.hold_in_rows("roots begin at home", (edges.parent >= 0) | (edges.src == edges.home))
        must.hold("arrives", len(routed.arrives) == len(star))
        home, row, rows, dst = (
            column[routed.arrives] for column in (edges.home, edges.row, edges.rows, edges.dst)
        )
        must.hold_in_rows("arrives, where it is needed", dst == star.dst)
        is_covered = (row <= star.row) & (row + rows >= star.row + star.rows)
        must.hold_in_rows("arrives, with all its rows", is_covered & (home == star.home))

    @_if_enabled
    def schedule(self, routed: Routes, schedule: Schedule) -> None:
        """Every edge has a round, relays later than their parents."""
        must, edges = _Requirement("schedule", self._passes.schedule), schedule.edges
        must.hold("edges", len(edges) == len(routed.edges) == len(schedule.round))
        must.hold_in_rows("round", (schedule.round >= 0) & (schedule.round < max(schedule.rounds, 1)))
        relays = np.flatnonzero(edges.parent >= 0)
        must.hold_in_rows(
            "round, after its parent's", schedule.round[relays] > schedule.round[edges.parent[relays]]
        )
        must.hold_in_rows("when, non-decreasing", np.diff(schedule.when) >= 0)
        must.hold("channel", len(schedule.channel) == schedule.rounds)

    @_if_enabled
    def lowering(self, low: Lowering) -> None:
        """Tasks run after the rounds of their tiles."""
        must, schedule = _Requirement("schedule", self._passes.schedule), low.schedule
        must.hold_in_rows("stage", (low.stage >= 0) & (low.stage < schedule.stages))
        for edge in (low.tasks.edge, low.tasks.query_edge):
            remote = np.flatnonzero(edge >= 0)
            arrival = schedule.leads + schedule.round[edge[remote]]
            must.hold_in_rows("stage, after its tiles'", low.stage[remote] >= arrival)
        must.hold_in_rows("tasks, in program order", np.diff(low.stage)[np.diff(low.tasks.exec) == 0] >= 0)


class _Requirement:
    """Raises VerifyError for a violated rule."""

    def __init__(self, step: str, made_by: object) -> None:
        self._where = f"{step} ({made_by!r})"

    def hold(self, rule: str, is_met: bool) -> None:
        if not is_met:
            raise VerifyError(f"{self._where}: {rule} is wrong")

    def hold_in_rows(self, rule: str, flags: Bools | Any) -> None:
        rows = np.flatnonzero(~np.asarray(flags, bool))
        if len(rows):
            raise VerifyError(f"{self._where}: {rule} is wrong in {len(rows)} rows, first row {rows[0]}")

    def span(self, rule: str, starts: Ints, end: int) -> None:
        """Checks that `starts` ascends from 0 to `end`."""
        self.hold(f"{rule}, from 0 to {end}", int(starts[0]) == 0 and int(starts[-1]) == end)
        self.hold_in_rows(f"{rule}, ascending", np.diff(starts) > 0)
