"""What a plan is worth on given hardware: its real programs, run by a discrete-event simulation.

    Plan ──program──► Script, Traffic ──durations──► ──engine──► Times ──timeline──► Run ──► Simulation
                                                                           └─ path, trace

Each rank has one compute stream, which takes its instructions in program order, and one stream for each channel, which
takes the rank's rounds in the order of their launches. A transfer costs latency + bytes / bandwidth (alpha-beta) and
occupies, for the second term, a port of its sender and one of its receiver: within a node the ranks' own links, between
nodes the NICs, which the ranks of a node share; directions are separate. Launching takes no time on the compute
stream; `wait` idles it until all of the rank's transfers of the round are complete.
"""

from __future__ import annotations

import numpy as np

from apportion.ir.errors import VerifyError
from apportion.ir.hardware import Hardware
from apportion.ir.isa import PHASES
from apportion.ir.plan import Plan
from apportion.planner.cost import CostModel
from apportion.planner.simulate import engine
from apportion.planner.simulate.durations import Costs, task_pairs, work_us
from apportion.planner.simulate.path import Step
from apportion.planner.simulate.program import (
    WAIT,
    Floats,
    Ints,
    Script,
    Traffic,
    View,
    find_traffic,
    port_count,
    write_script,
)
from apportion.planner.simulate.timeline import Run, Simulation, Spans

__all__ = ["Costs", "Run", "Simulation", "Spans", "Step", "simulate", "simulate_with"]


def simulate(plan: Plan, hardware: Hardware | str | None = None) -> Simulation:
    """Simulates one call of every attention kind, forward and backward.

    hardware: kernel times, default the built-in H100; links, NICs and speeds are those of the plan's cluster.
    Equal arguments give equal times, to the bit. Raises VerifyError for a plan that cannot run.
    """
    used = Hardware.named(hardware) or Hardware.load("h100")
    return simulate_with(plan, CostModel(used, plan.request.model), used.name)


def simulate_with(plan: Plan, costs: Costs, hardware: str = "") -> Simulation:
    """As `simulate`, with any cost model; `hardware` is its name."""
    keys = [(kind, phase) for kind in plan.header.kinds for phase in PHASES if (kind, phase) in plan.programs]
    return Simulation(plan, hardware, {key: _run(plan, *key, costs) for key in keys})


def _run(plan: Plan, kind: str, phase: str, costs: Costs) -> Run:
    view = View(plan, phase, plan.programs[kind, phase])
    pairs = task_pairs(view)
    traffic = find_traffic(view)
    script = write_script(view, work_us(view, costs, pairs), traffic)
    times, finish, blocked = engine.run(script, traffic, port_count(view.cluster))
    _check_finished(kind, phase, script, blocked)
    sent, received = _traffic_bytes(script, traffic, view.ranks)
    return Run(
        kind,
        phase,
        float(max(finish.max(), times.done.max(initial=0.0))),
        _ideal_us(view, costs, pairs),
        np.bincount(view.rank_of, script.work_us, view.ranks).astype(np.float64),
        _exposed_us(view, script, times),
        finish,
        sent,
        received,
        int(traffic.bytes[traffic.out_port >= 2 * view.ranks].sum()),  # through a NIC
        view.arena_rows,
        view.instructions["op"],
        script,
        traffic,
        times,
    )


def _check_finished(kind: str, phase: str, script: Script, blocked: Ints) -> None:
    stuck = np.flatnonzero(blocked >= 0)
    if len(stuck):
        rank = int(stuck[0])
        raise VerifyError(
            f"{kind} {phase}: {len(stuck)} ranks wait for rounds that never complete, rank {rank} for round "
            f"{script.round[blocked[rank]]}: the launches of the ranks are not in one order; verify the plan"
        )


def _exposed_us(view: View, script: Script, times: engine.Times) -> Floats:
    waits = script.role == WAIT
    idle = times.end[waits] - times.begin[waits]
    return np.bincount(view.rank_of[waits], idle, view.ranks).astype(np.float64)


def _traffic_bytes(script: Script, traffic: Traffic, ranks: int) -> tuple[Ints, Ints]:
    """int64 [ranks]: bytes that each rank sends, and receives."""
    sums = np.zeros((2, ranks), np.int64)
    for row, side in zip(sums, (traffic.sender, traffic.receiver), strict=True):
        np.add.at(row, script.rank[side], traffic.bytes)
    return sums[0], sums[1]


def _ideal_us(view: View, costs: Costs, pairs: Ints) -> float:
    """All pairs at saturated throughput, spread over the ranks by their speeds."""
    heads = view.operands.heads[view.operand("tasks" if view.phase == "forward" else "grads", "q")]
    speeds = view.cluster.speeds
    total_speed = view.ranks if speeds is None else sum(speeds)
    return float(costs.ideal_us(view.phase, int((pairs * heads).sum()), 1)) / total_speed
