"""The planning steps in order, each with the previous one's result as input.

    Problem ─shard─► Shards ─place─► PlacedProblem ─schedule─► Lowered ─lower, remap─► UnsealedPlan ─seal─► Plan

A search runs them for several recipes; `api` runs them once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

from apportion.ir.arrays import Ints
from apportion.ir.bytes import codec, table_bytes
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import CapacityError
from apportion.ir.plan.tables import Layout, Move, ProgramSet, Recurrence, Request
from apportion.ir.threads import spread
from apportion.planner.lower.inputs import Lowered, held_tokens, leading
from apportion.planner.pipeline.feasibility import check_policy_limits
from apportion.planner.pipeline.headers import build_header, build_layouts, home_layout
from apportion.planner.pipeline.lowering import lower_parts
from apportion.planner.pipeline.placing import PlacedProblem
from apportion.planner.pipeline.report import build_report, departures
from apportion.planner.pipeline.scheduling import schedule
from apportion.planner.pipeline.steps import Passes
from apportion.planner.pipeline.watch import Stopwatch
from apportion.planner.problem import Pass, Problem
from apportion.planner.recurrent import recurrence
from apportion.planner.remap import Remapping
from apportion.planner.tasks.cells import check_tasks


@dataclass(frozen=True)
class UnsealedPlan:
    """Result of the passes, not yet encoded and without a report. problem: with the token cap that the plan keeps;
    lowered: one for each separately lowered part of the ranks."""

    problem: Problem
    placed: PlacedProblem
    lowered: tuple[Lowered, ...]
    programs: Mapping[tuple[str, str], ProgramSet]
    layouts: Mapping[str, Layout]
    remapping: Remapping | None = None

    @property
    def moves(self) -> tuple[Move, ...]:
        """Moves to layouts for other layers."""
        return () if self.remapping is None else self.remapping.moves

    @cached_property
    def recurrence(self) -> Recurrence | None:
        """The tables of recurrent layers for the home layout; None if the model has no such layers."""
        kinds, batch = self.problem.model.recurrent, self.problem.batch
        return recurrence(self.layouts[home_layout(self.layouts)], batch, kinds) if kinds else None

    def plan(self, report: Mapping[str, Any] = MappingProxyType({})) -> Plan:
        """The plan before sealing, whose programs can be simulated. A plan without a report has no digest of the
        hardware, which is slow to compute."""
        problem, hardware = self.problem, self.problem.hardware
        header = build_header(problem, self.layouts, leading(self.lowered[0]).sets)
        digest = hardware.digest() if hardware is not None and report else ""
        request = Request(problem.batch, problem.cluster, problem.model, problem.policy, digest)
        return Plan(header, request, self.layouts, self.programs, self.moves, report, self.recurrence)


@dataclass(frozen=True)
class PlanResult:
    """A sealed plan, the placement it was made from, and the report of the search that found it."""

    plan: Plan
    placed: PlacedProblem
    search: Mapping[str, Any] | None = None


class SearchPass(Pass, Protocol):
    """Chooses the passes of a plan."""

    @abstractmethod
    def __call__(self, problem: Problem, watch: Stopwatch) -> PlanResult:
        """Returns the plan; its report has `search`. Raises ConfigError, CapacityError."""
        ...


def draft(
    placed: PlacedProblem, watch: Stopwatch, lowered: Lowered | None = None, threads: int = 1
) -> UnsealedPlan:
    """Runs the passes after placement; given `lowered`, those after `schedule`. Raises ConfigError, CapacityError."""
    with watch("schedule"):
        parts = [(0, placed)] if lowered is not None else placed.isolated_parts()
        items = [lowered] if lowered is not None else spread(schedule, [part for _, part in parts], threads)
        for key in items[0]:
            check_tasks(sum(len(part[key].tasks) for part in items))
    problem = _with_kept_cap(placed.problem, placed.passes, items)
    with watch("lower"):
        network = problem.cost.network(problem.cluster)
        programs = lower_parts([first for first, _ in parts], items, threads, network)
        layouts = build_layouts(problem, placed, items)
    if placed.passes.remap is None:
        return UnsealedPlan(problem, placed, tuple(items), programs, layouts)
    with watch("remap"):
        remapping = placed.passes.remap(problem, layouts[home_layout(layouts)])
    return UnsealedPlan(problem, placed, tuple(items), programs, {**layouts, **remapping.layouts}, remapping)


def seal(
    draft: UnsealedPlan, watch: Stopwatch, search: Mapping[str, Any] | None = None, threads: int = 1
) -> Plan:
    """Encodes the plan and builds its report. search: the report's entry for the search that found the plan.

    Raises CapacityError if the plan breaks a limit of the policy.
    """
    problem, placed = draft.problem, draft.placed
    with watch("encode"):
        tables = table_bytes.tables_of(draft.layouts, draft.programs, draft.moves, draft.recurrence)
        parts = table_bytes.encode_parts(tables, problem.ranks, threads)
    with watch("report"):
        report = build_report(problem, placed, draft.lowered, draft.programs, draft.layouts, parts)
        if placed.passes.pods is not None:
            report |= {"pods": len(draft.lowered)}
        if found_departures := departures(placed, draft.lowered):
            report |= {"departures": [dict(vars(departure)) for departure in found_departures]}
        if draft.remapping is not None:
            report |= {"remap": draft.remapping.entry}
        if search is not None:
            report |= {"search": search, "termination": report["termination"] | {"limit": search["stopped"]}}
    check_policy_limits(problem, report, draft.programs, draft.layouts)
    with watch("seal"):
        return codec.seal(draft.plan(report), parts)


def _with_kept_cap(problem: Problem, passes: Passes, lowered: Sequence[Lowered]) -> Problem:
    """The problem with a token cap that the plan keeps, in the layout to which the cap applies. The policy's cap
    stays; raises CapacityError if a rank exceeds it. Default caps stay if every rank keeps its own, except equal ones
    with a recipe that has no token cap. In all other cases the cap becomes the largest number of tokens on a rank, or
    the largest default cap if that is more. For instance, a rank can exceed its default cap in the loader's layout,
    which is even regardless of speeds."""
    tokens, caps, token_cap = held_tokens(lowered), problem.token_caps, problem.policy.token_cap
    if token_cap is not None:
        _check_cap(tokens, token_cap)
        return problem
    own = passes.place.is_uncapped
    if (tokens <= (caps if own else problem.member_room)).all() and (not own or caps.min() < caps.max()):
        return problem
    cap = max(int(tokens.max()), problem.token_cap)
    return replace(problem, policy=replace(problem.policy, token_cap=cap))


def _check_cap(tokens: Ints, cap: int) -> None:
    fullest = int(tokens.argmax())
    if tokens[fullest] > cap:
        raise CapacityError(
            f"rank {fullest} would hold {tokens[fullest]} tokens, but policy.token_cap is {cap}: raise token_cap to "
            f"{tokens[fullest]}, leave it out, or use a recipe that plans under it, such as fcp"
        )
