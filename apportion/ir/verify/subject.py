"""The plan under verification, and what rules derive from it, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import CapacityError
from apportion.ir.isa import Op
from apportion.ir.plan.tables import Layout
from apportion.ir.plan.totals import Moved, moved
from apportion.ir.tensors import Tensor
from apportion.ir.verify import scan as scanner
from apportion.ir.verify.attended import Tasks, tasks_of
from apportion.ir.verify.homes import Homes, find_homes
from apportion.ir.verify.interpreter import cells, flow as interpreter
from apportion.ir.verify.view import Program, head_sets
from apportion.ir.verify.walk import judge
from apportion.ir.verify.walk.lists import MOST_TOKENS, Lists

T = TypeVar("T")


# Runs of consecutive home rows a task or transfer that are made room for, in turn: few are the rule.
_ROOM = (1, 16, 256, 1024)


@dataclass(frozen=True, eq=False)
class Subject:
    """A plan as the rules see it. threads: how many `judge` may use."""

    plan: Plan
    threads: int = 1
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def home(self) -> Layout:
        """The layout of home rows."""
        return self.plan.layouts[self.plan.header.home_layout]

    @cached_property
    def attention(self) -> Layout:
        """The layout in which attention is computed; where ranks split heads and have no such rows, home rows'."""
        return self.plan.layouts.get("attention", self.home)

    @cached_property
    def token_shares(self) -> Floats:
        """float64 [ranks]: the batch's tokens by speed."""
        request = self.plan.request
        speeds = np.asarray(request.cluster.speeds or np.ones(request.cluster.ranks), np.float64)
        rates = speeds / speeds.max()
        shares: Floats = request.batch.tokens * rates / rates.sum()
        return shares

    @cached_property
    def homes(self) -> Homes:
        """Its rows on one axis."""
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

    @cached_property
    def runnable(self) -> tuple[Program, ...]:
        """Programs whose rounds have an order in which they can happen."""
        return tuple(program for program in self.programs if program.rises)

    def mask(self, kind: str) -> Ints:
        """int64 [bands, 6]: what a kind allows, in global tokens, sorted by (q0, k0)."""
        return self.plan.request.batch.bands(kind)

    @cached_property
    def moved(self) -> Mapping[tuple[str, str], Moved]:
        """(kind, phase) -> bytes that a program moves."""
        plan = self.plan
        return moved(plan.programs, plan.header.head_sets, plan.request.model, plan.request.cluster)

    def scan(self, program: Program) -> scanner.Scan:
        return self.once("scan", program, scanner.scan)

    def flow(self, program: Program) -> interpreter.Flow:
        """What happens when the program runs. Raises CapacityError."""
        return self.once("flow", program, self._flow)

    def exact_flow(self, program: Program) -> interpreter.Flow:
        """The same, with all that it suspects. Raises CapacityError."""
        return self.once("exact flow", program, lambda p: self._run(p, lazy=False))

    def _flow(self, program: Program) -> interpreter.Flow:
        found = self._run(program, lazy=True)
        good = not len(found.faults) and not len(interpreter.left_over(program, found.memory)[0])
        return found if good else self.exact_flow(program)

    def _run(self, program: Program, lazy: bool) -> interpreter.Flow:
        for room in _ROOM[:-1]:
            try:
                return self._run_in(program, room, lazy)
            except CapacityError:
                continue  # rows of many runs: small blocks
        return self._run_in(program, _ROOM[-1], lazy)

    def _run_in(self, program: Program, room: int, lazy: bool) -> interpreter.Flow:
        given = self.given(program)
        memory = cells.build(program, self.homes, given, program.owed, room)
        return interpreter.run(program, memory, given, self.scan(program).written_at_home, lazy)

    def judge(self) -> bool:
        """Whether `judge.py` is sure of all programs, and their tasks cover the masks: then nothing need run."""
        sets = judge.sets_of(self.programs[0].q_sets, self.programs[0].kv_sets) if self.programs else None
        if sets is None or self.plan.request.batch.tokens > MOST_TOKENS:
            return False
        every: dict[str, Lists] = {}
        for program in self.programs:
            kind, phase = program.kind, program.phase
            lists = every.setdefault(kind, Lists(program.q_sets, self.homes, self.mask(kind)))
            before, count = lists.following, len(program.source[program.task_list])
            lists.begin(count)
            if not judge.judge(program, self.homes, sets, self.taken(program), lists, self.threads):
                return False
            try:
                lists.end(count)
                tasks = self._cache.get(("tasks", kind, "forward"))
                if tasks is None or not np.array_equal(before, lists.following):
                    if not lists.are_exact():
                        return False
                    tasks = lists.tasks()
            except CapacityError:
                return False
            self._cache["coverage", kind, phase] = ()
            self._cache["tasks", kind, phase] = tasks
        return True

    def taken(self, program: Program) -> frozenset[Tensor]:
        """Those of `given` that are known without a run."""
        first = next((p for p in self.programs if (p.kind, p.phase) == (program.kind, "forward")), None)
        if first is None:
            return frozenset()
        inputs = frozenset({Tensor.X} if first.uses(Op.PROJECT) else {Tensor.Q, Tensor.KV})
        return inputs if program is first else inputs | {Tensor.O, Tensor.DO}

    def tasks(self, program: Program) -> Tasks:
        """Its tasks in global tokens. Raises CapacityError."""
        return self.once("tasks", program, lambda p: tasks_of(p, self.flow(p), self.homes))

    def repeats(self, program: Program) -> bool:
        """Whether its tasks are those of the forward program of its kind, one by one, which cover the mask."""
        first = next((p for p in self.programs if (p.kind, p.phase) == (program.kind, "forward")), program)
        if first is program or self._cache.get(("coverage", first.kind, first.phase)) != ():
            return False
        ours, before = self.tasks(program), self.tasks(first)
        if ours is before:
            return True
        if not (ours.complete and before.complete and np.array_equal(ours.bands, before.bands)):
            return False
        if not (program.splits_heads or first.splits_heads):
            return True
        return np.array_equal(ours.heads, before.heads)

    def given(self, program: Program) -> frozenset[Tensor]:
        """Tensors whose home rows hold values when the program starts.

        Forward gets X where the layer's projection makes Q and KV, else Q and KV. Backward gets what forward had
        and left in home rows, the output and its gradient.
        """
        if program.phase == "forward":
            return self.taken(program)
        before = [other for other in self.runnable if (other.kind, other.phase) == (program.kind, "forward")]
        kept = frozenset().union(*map(self._kept, before))
        return kept | {Tensor.O, Tensor.DO}

    def _kept(self, program: Program) -> frozenset[Tensor]:
        given = self.given(program)
        if Tensor.X not in given:
            return given
        memory = self.flow(program).memory
        return given | {tensor for tensor in (Tensor.Q, Tensor.KV) if memory.all_at_home(tensor)}

    def once(self, what: str, program: Program, make: Callable[[Program], T]) -> T:
        """What `make` says of the program, under that name, made where it is asked for first."""
        key = (what, program.kind, program.phase)
        if key not in self._cache:
            self._cache[key] = make(program)
        return self._cache[key]  # type: ignore[no-any-return]

    def home_of(self, token: int) -> tuple[int, int]:
        """(rank, row) where a global token is at home."""
        spans = self.home.spans
        inside = np.flatnonzero((spans["token"] <= token) & (token < spans["token"] + spans["length"]))
        span = int(inside[0])
        rank = int(np.searchsorted(spans.ptr, span, side="right")) - 1
        return rank, int(spans["row"][span] + token - spans["token"][span])
