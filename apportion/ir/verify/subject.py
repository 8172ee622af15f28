"""The plan under verification, with cached quantities derived from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from apportion._core import verify as core
from apportion.ir.arrays import Floats, Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import CapacityError
from apportion.ir.isa import Op
from apportion.ir.plan.tables import Layout
from apportion.ir.plan.totals import CommunicationVolume, communication_volumes
from apportion.ir.tensors import Tensor
from apportion.ir.verify.attended import Tasks, most_pieces, too_many_pieces_error
from apportion.ir.verify.homes import Homes, find_homes
from apportion.ir.verify.view import Program, head_sets
from apportion.ir.verify.walk import judge
from apportion.ir.verify.walk.judge import Sets, ZerosError, sets_of
from apportion.ir.verify.walk.lists import MOST_TOKENS, Lists

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Subject:
    """A plan as the rules see it. threads: number of threads for the walk."""

    plan: Plan
    threads: int = 1
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    _tasks: dict[tuple[str, str], Tasks] = field(default_factory=dict, repr=False)

    @cached_property
    def home(self) -> Layout:
        """The layout of home rows."""
        return self.plan.layouts[self.plan.header.home_layout]

    @cached_property
    def attention(self) -> Layout:
        """The layout in which attention is computed; the layout of home rows if the plan has no separate one, as when
        ranks split heads."""
        return self.plan.layouts.get("attention", self.home)

    @cached_property
    def token_shares(self) -> Floats:
        """float64 [ranks]: each rank's share of the batch's tokens, in proportion to speed."""
        request = self.plan.request
        speeds = np.asarray(request.cluster.speeds or np.ones(request.cluster.ranks), np.float64)
        rates = speeds / speeds.max()
        shares: Floats = request.batch.tokens * rates / rates.sum()
        return shares

    @cached_property
    def homes(self) -> Homes:
        """The home rows on one axis of addresses."""
        return find_homes(self.home)

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        header = self.plan.header
        q_sets = head_sets(header.q_heads, header.head_sets)
        kv_sets = head_sets(header.kv_heads, header.head_sets)
        rows = np.ascontiguousarray(self.home.rows_per_rank, np.int64)
        return tuple(
            Program(kind, phase, programs, q_sets, kv_sets, rows)
            for (kind, phase), programs in self.plan.programs.items()
        )

    def mask(self, kind: str) -> Ints:
        """int64 [bands, 6]: the mask of a kind, in global tokens, sorted by (q0, k0)."""
        return self.plan.request.batch.bands(kind)

    @cached_property
    def volumes(self) -> Mapping[tuple[str, str], CommunicationVolume]:
        """(kind, phase) -> bytes moved by a program."""
        plan = self.plan
        return communication_volumes(
            plan.programs, plan.header.head_sets, plan.request.model, plan.request.cluster
        )

    @cached_property
    def _sets(self) -> Sets:
        if self.plan.request.batch.tokens > MOST_TOKENS:
            raise CapacityError(f"the batch has more than {MOST_TOKENS} tokens")
        return sets_of(self.programs[0].q_sets, self.programs[0].kv_sets)

    @cached_property
    def holds(self) -> bool:
        """True if all programs are correct and their tasks cover the masks; False also if they are too large to
        decide."""
        try:
            try:
                return self._all_correct(together=False)
            except ZerosError:
                return self._all_correct(together=True)
        except CapacityError:
            return False

    def _all_correct(self, together: bool) -> bool:
        lists: dict[str, Lists] = {}
        return all(self._is_correct(program, lists, together) for program in self.programs)

    def _is_correct(self, program: Program, lists_by_kind: dict[str, Lists], together: bool) -> bool:
        """True if a program is correct. lists_by_kind: lists of earlier programs. Raises CapacityError, ZerosError."""
        kind = program.kind
        lists = lists_by_kind.setdefault(kind, Lists(program.q_sets, self.homes, self.mask(kind)))
        previous, count = lists.list_of_set, len(program.source[program.task_list])
        lists.begin(count)
        tensors = self.inputs(program)
        if not judge.judge(program, self.homes, self._sets, tensors, lists, self.threads, together):
            return False
        lists.end(count)
        tasks = self._tasks.get((kind, "forward"))
        if tasks is None or not np.array_equal(previous, lists.list_of_set):
            if not lists.are_exact():
                return False
            tasks = lists.tasks()
        self._tasks[kind, program.phase] = tasks
        return True

    def inputs(self, program: Program) -> frozenset[Tensor]:
        """Tensors whose home rows hold values at the start.

        Forward: X if the layer's projection computes Q and KV, else Q and KV. Backward: the inputs of forward, the
        output and its gradient.
        """
        first = next((p for p in self.programs if (p.kind, p.phase) == (program.kind, "forward")), None)
        if first is None:
            return frozenset()
        inputs = frozenset({Tensor.X} if first.uses(Op.PROJECT) else {Tensor.Q, Tensor.KV})
        return inputs if program is first else inputs | {Tensor.O, Tensor.DO}

    def tasks(self, program: Program) -> Tasks:
        """The program's tasks in global tokens; if the plan `holds`, they come from its lists and have no task numbers.
        Raises CapacityError."""
        if self.holds:
            return self._tasks[program.kind, program.phase]
        return self.traced_tasks(program)

    def traced_tasks(self, program: Program) -> Tasks:
        """The program's tasks in global tokens, one by one. Raises CapacityError."""
        return self.cached("tasks", program, self._trace_tasks)

    def _trace_tasks(self, program: Program) -> Tasks:
        trace, limit = self.trace(program), most_pieces(len(program.source[program.task_list]))
        if trace is None:
            return Tasks(np.zeros((6, 0), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), False)
        pieces = core.cut(trace, self.homes.starts, self.homes.tokens, limit)
        if pieces is None:
            raise too_many_pieces_error(limit)
        return Tasks(pieces[:6], pieces[6], pieces[7], trace.is_complete)

    def trace(self, program: Program) -> core.Trace | None:
        """The trace of the walk, rank by rank; None if it cannot start. Raises CapacityError."""
        return self.cached("trace", program, lambda p: judge.trace(p, self.homes, self._sets, self.inputs(p)))

    def cached(self, name: str, program: Program, make: Callable[[Program], T]) -> T:
        """Returns `make(program)`, cached under `name` and the program."""
        key = (name, program.kind, program.phase)
        if key not in self._cache:
            self._cache[key] = make(program)
        return self._cache[key]  # type: ignore[no-any-return]

    def home_of(self, token: int) -> tuple[int, int]:
        """(rank, row): the home of a global token."""
        spans = self.home.spans
        holders = np.flatnonzero((spans["token"] <= token) & (token < spans["token"] + spans["length"]))
        span = int(holders[0])
        rank = int(np.searchsorted(spans.ptr, span, side="right")) - 1
        return rank, int(spans["row"][span] + token - spans["token"][span])
