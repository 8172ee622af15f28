"""Hand-written plans simulated with a cost of one microsecond per pair, and invariants of any timeline."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apportion.ir.bytes.codec import Plan
from apportion.planner.congestion import Congestion
from apportion.planner.simulate import Run, simulate_with
from apportion.planner.simulate.program import WAIT
from tests.support.parse import parse

PLANS = sorted(Path(__file__).resolve().parents[1].glob("plans/*.txt"))


PLANS += sorted((Path(__file__).resolve().parents[2] / "apportion" / "schemas" / "golden").glob("*.txt"))


# a row of KV is 64 bytes: 1 us within a node, 2 us between nodes, and latencies of 3 and 5 us
CLUSTER = {"intra_gbs": 0.064, "inter_gbs": 0.032, "intra_latency_us": 3, "inter_latency_us": 5}


MODEL = {"q_heads": 1, "kv_heads": 1, "head_dim": 4, "dtype": "fp64", "hidden": 8, "ffn": 10}


@dataclass(frozen=True)
class Unit:
    """A cost model with one microsecond per pair and head; other work costs nothing unless its fields are set."""

    launch: float = 0.0
    chain: float = 0.0
    a_byte: float = 0.0
    a_token: float = 0.0
    a_row: float = 0.0
    post_us: float = 0.0
    contention: float = 0.0
    congestion: Congestion | None = None
    linear_parameters: int = 8 * (2 * 4 + 2 * 4 + 3 * 10)

    def attention_us(self, phase: str, rows: Any, keys: Any, pairs: Any, heads: Any, kv_heads: Any) -> Any:
        return np.asarray(pairs * heads, np.float64)

    def chain_us(self, phase: str, rows: Any, keys: Any, diagonals: Any) -> Any:
        return np.full(len(rows), self.chain)

    def launch_us(self, phase: str) -> float:
        return self.launch

    def ideal_us(self, phase: str, pairs: Any, heads: Any) -> Any:
        return np.asarray(pairs * heads, np.float64)

    def moved_us(self, moved_bytes: Any) -> Any:
        return moved_bytes * self.a_byte

    def rowop_us(self, moved_bytes: Any) -> Any:
        return self.a_row + moved_bytes * self.a_byte

    def linear_us(self, tokens: Any) -> Any:
        return np.asarray(tokens * self.a_token)


def work(pairs: int) -> str:
    """An instruction, as text, that takes `pairs` microseconds."""
    return f"attend Q.home[0:{pairs}) KV.home[0:1) -> O.home[0:{pairs}) full"


def plan_of(*programs: str, phase: str = "forward", model: dict[str, Any] = MODEL, **cluster: Any) -> Plan:
    """A plan with these programs, one text per rank; all ranks are on one node unless `cluster` changes that."""
    shape = {"nodes": 1, "ranks_per_node": len(programs), **CLUSTER, **cluster}
    batch, policy = (
        {"lengths": [64 * len(programs)], "mask": {"full": {}}},
        {"recipe": {"name": "x", "steps": {}}},
    )
    request = {"batch": batch, "cluster": shape, "model": model, "policy": policy}
    head = f"apportion.plan 3.0\nrequest {json.dumps(request)}\n"
    ranks = [
        f"rank {rank}\nlayout attention: row=0 token={64 * rank} length=64 sequence=0 position={64 * rank}\n"
        f"program default {phase}\n{program}\n"
        for rank, program in enumerate(programs)
    ]
    return parse(head + "\n".join(ranks))


def forward(*programs: str, costs: Unit = Unit(), **cluster: Any) -> Run:
    return simulate_with(plan_of(*programs, **cluster), costs).runs["default", "forward"]


def transfers(run: Run) -> dict[tuple[int, int, int], tuple[float, float]]:
    """(round, source, target) -> (start, completion)."""
    script, traffic, start = run.script, run.traffic, run.times.start
    end = start + traffic.wire_us + traffic.latency_us
    keys = (script.round[traffic.sender], script.rank[traffic.sender], script.rank[traffic.receiver])
    columns = [column.tolist() for column in (*keys, start, end)]
    return {(number, *ends): (begin, done) for number, *ends, begin, done in zip(*columns, strict=True)}


def overlapped_us(run: Run, rank: int, begin: float, end: float) -> float:
    """The time in an interval during which at least one transfer of the rank is in flight, computed naively."""
    script, traffic = run.script, run.traffic
    own_ends = (script.rank[traffic.sender] == rank) | (script.rank[traffic.receiver] == rank)
    spans = zip(run.times.start[own_ends], (run.times.start + traffic.wire_us)[own_ends], strict=True)
    total, reach = 0.0, begin
    for start, free in sorted(spans):
        total += max(0.0, min(free, end) - max(start, reach))
        reach = max(reach, free)
    return total


def run_invariants(run: Run, contention: float = 0.0) -> None:
    """Asserts all that defines a timeline, computed naively."""
    script, traffic, times = run.script, run.traffic, run.times
    free = times.start + traffic.wire_us
    complete = free + traffic.latency_us
    for launch in range(len(script.rank)):
        own_ends = script.ends[script.end_ptr[launch] : script.end_ptr[launch + 1]]
        before = script.before[launch]
        at = np.flatnonzero((script.launch == launch) & (script.role != WAIT))[0]
        taken_up = max(times.end[at], times.done[before] if before >= 0 else 0.0)
        assert times.reached[launch] == taken_up
        assert times.done[launch] == max([taken_up, *complete[own_ends]])
    both_ready = np.maximum(times.reached[traffic.sender], times.reached[traffic.receiver])
    assert (times.ready == both_ready).all()
    on_port = defaultdict(list)
    for transfer, ports in enumerate(zip(traffic.out_port.tolist(), traffic.in_port.tolist(), strict=True)):
        for port in ports:
            on_port[port].append((times.start[transfer], free[transfer]))
    for spans in on_port.values():
        spans.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
    for transfer in np.flatnonzero(times.start > times.ready).tolist():
        ports = traffic.out_port[transfer], traffic.in_port[transfer]
        at = float(times.ready[transfer])
        while at < times.start[transfer]:  # its two ports are never free at the same time
            later = [end for port in ports for begin, end in on_port[port] if begin <= at < end]
            assert later, (transfer, at)
            at = max(later)

    def after(rank: int, begin: float, work: float, end: float) -> float:
        """The end of work that starts at `begin`. end: the simulated one."""
        if not contention:
            return begin + work
        slowed = overlapped_us(run, rank, begin, end) * contention / (1 + contention)
        assert end - begin == pytest.approx(work + slowed, abs=1e-6)
        return end

    for rank in range(len(script.ptr) - 1):
        clock = 0.0
        for at in range(script.ptr[rank], script.ptr[rank + 1]):
            assert times.begin[at] == clock
            wait = script.role[at] == WAIT
            clock = max(clock, times.done[script.launch[at]]) if wait else clock
            clock = after(rank, clock, script.work_us[at], times.end[at])
            assert times.end[at] == clock
        assert run.finish_us[rank] == after(rank, clock, script.end_us[rank], run.finish_us[rank])
    assert run.makespan_us == max([*run.finish_us, *times.done])
    np.testing.assert_allclose(run.compute_us + run.exposed_us, run.finish_us)


def path_invariants(run: Run) -> None:
    path = run.critical_path()
    assert sum(step.us for step in path) == pytest.approx(run.makespan_us)
    if path:
        assert (path[0].start_us, path[-1].end_us) == (0.0, run.makespan_us)
    for first, second in pairwise(path):
        assert first.end_us == second.start_us


STRATEGIES = ("fcp", "ring", "allgather", "ulysses", "usp", "loongtrain", "hybrid_dp", "wlb", "contiguous")
