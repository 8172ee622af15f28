"""Discrete-event simulation of a plan's programs on given hardware.

    Plan ──program──► PricedTasks, RowWork ──durations──┐
                └───► Traffic, Script ──────────────────┴─engine──► Times ──timeline──► Run ──► Simulation
                                                                                └─ path, trace

Each rank has one compute stream, which executes its instructions in program order, and one stream for each channel,
which executes the rank's rounds in the order of their launches. A transfer takes latency + bytes / bandwidth
(alpha-beta). During the second term it occupies a port of its sender and one of its receiver: within a node the ranks'
own links, between nodes the NICs, which the ranks of a node share; directions are separate. A launch packs staged
messages before its transfers can begin; `wait` idles the compute stream until all of the rank's transfers of the round
are complete, and unpacks them. With `contention`, kernels are slower during a transfer of their rank; with
`congestion`, transfers between nodes take longer if several meet in a round. `launches` lists the kernels of a program,
`durations` computes their times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import ConfigError, VerifyError
from apportion.ir.fields import instance
from apportion.ir.plan import totals
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.hardware import Hardware
from apportion.ir.tensors import PHASES
from apportion.planner.cost import CostModel
from apportion.planner.simulate import engine
from apportion.planner.simulate.durations import Costs, Work, end_us, work_us
from apportion.planner.simulate.path import PathStep
from apportion.planner.simulate.program import (
    WAIT,
    PricedTasks,
    RowWork,
    Script,
    Traffic,
    View,
    add_congestion,
    port_count,
    prepare_tables,
    relink,
)
from apportion.planner.simulate.recurrent import RecurrentRun, run_recurrent
from apportion.planner.simulate.simulation import Simulation
from apportion.planner.simulate.timeline import Run, Spans

__all__ = [
    "Costs",
    "PreparedProgram",
    "RecurrentRun",
    "Run",
    "Simulation",
    "Spans",
    "PathStep",
    "makespans_us",
    "prepare",
    "run_all",
    "simulate",
    "simulate_with",
]


def simulate(
    plan: Plan, hardware: Hardware | str | None = None, cluster: Cluster | None = None
) -> Simulation:
    """Simulates one call of every attention kind, forward and backward, and one layer of every recurrent kind.

    hardware: kernel times, default the built-in H100. cluster: links, NICs and speeds, default the plan's own (see
    `simulate.scenarios`). Equal arguments give equal times, to the bit. Raises VerifyError for a plan that cannot run,
    ConfigError for a cluster of a different shape.
    """
    instance("plan", plan, Plan, "make one with plan(...)")
    machine = Hardware.named(hardware) or Hardware.load("h100")
    return simulate_with(plan, CostModel(machine, plan.request.model), machine.name, cluster)


def simulate_with(plan: Plan, costs: Costs, hardware: str = "", cluster: Cluster | None = None) -> Simulation:
    """Like `simulate`, with any cost model; `hardware` is its name."""
    return run_all(plan, prepare(plan, costs, cluster), costs, hardware, cluster)


@dataclass(frozen=True, eq=False)
class PreparedProgram:
    """A program of one kind and phase, ready for the event loop. work: see `Work`; ideal_us: see `Run`; contention:
    relative slowdown of kernels during transfers."""

    kind: str
    phase: str
    view: View
    traffic: Traffic
    script: Script
    row_work: RowWork
    work: Work
    ideal_us: float
    contention: float

    @property
    def least_us(self) -> float:
        """Lower bound on the makespan: the largest of all ranks' work and all ports' transfer times."""
        work = busy_us(self.view, self.script)
        ports, traffic = port_count(self.view.cluster), self.traffic
        wires = [np.bincount(port, traffic.wire_us, ports) for port in (traffic.out_port, traffic.in_port)]
        return float(max(work.max(), *(wire.max() for wire in wires)))


def prepare(plan: Plan, costs: Costs, cluster: Cluster | None = None) -> list[PreparedProgram]:
    """Prepares the programs of a plan, which need not be sealed, kind by kind; cluster: by default the plan's. Raises
    VerifyError for a plan that cannot run, ConfigError for a cluster of a different shape."""
    keys = [(kind, phase) for kind in plan.header.kinds for phase in PHASES if (kind, phase) in plan.programs]
    return [prepare_program(plan, kind, phase, costs, cluster) for kind, phase in keys]


def prepare_program(
    plan: Plan, kind: str, phase: str, costs: Costs, cluster: Cluster | None = None
) -> PreparedProgram:
    """Like `prepare`, for one program."""
    view = View(plan, phase, plan.programs[kind, phase], _checked_cluster(plan, cluster))
    script, traffic, tasks, row_work = prepare_tables(view, float(costs.post_us))
    traffic = add_congestion(traffic, script, costs.congestion, view.ranks)
    chosen, share = _chosen_pairs(plan, kind, view)
    script, work = _timed_script(view, costs, script, tasks, row_work, share)
    pairs = int((tasks.pairs * tasks.heads).sum()) if chosen is None else chosen
    # all pairs at saturated throughput, spread over the ranks by their speeds
    ideal = float(costs.ideal_us(phase, pairs, 1)) / float(view.speeds.sum())
    return PreparedProgram(kind, phase, view, traffic, script, row_work, work, ideal, costs.contention)


def _chosen_pairs(plan: Plan, kind: str, view: View) -> tuple[int | None, Floats | None]:
    """For a kind that chooses keys at run time: the pairs computed, summed over heads; and float64 [ranks], their share
    of the pairs of each rank's tasks. (None, None) for other kinds."""
    if plan.request.model.keys_of(kind) is None:
        return None, None
    chosen, pairs = totals.work(plan, kind, view.phase), totals.pairs(view.source, plan.header, view.phase)
    return int(chosen.sum()), chosen / np.maximum(pairs, 1)


def _timed_script(
    view: View, costs: Costs, script: Script, tasks: PricedTasks, row_work: RowWork, share: Floats | None
) -> tuple[Script, Work]:
    """The script with the durations of its work."""
    busy, work = work_us(view, costs, tasks, row_work, share)
    return script._replace(work_us=busy, end_us=end_us(view, costs, row_work.cast)), work


def makespans_us(
    plan: Plan, systems: Sequence[tuple[CostModel, Cluster]]
) -> list[dict[tuple[str, str], float]]:
    """(kind, phase) -> makespan as in `simulate`, for each (cost model, cluster) of `systems`; these differ in links,
    kernels and congestion. Builds tables once, prices work once for equal kernels, and runs the event loop once for
    equal transfer times. Raises the errors of `simulate`."""
    kernels = [costs.kernels for costs, _ in systems]
    first = [kernels.index(item) for item in kernels]
    result: list[dict[tuple[str, str], float]] = [{} for _ in systems]
    for kind, phase in plan.programs:
        view = View(plan, phase, plan.programs[kind, phase], _checked_cluster(plan, systems[0][1]))
        script, traffic, tasks, row_work = prepare_tables(view, systems[0][0].post_us)
        _, share = _chosen_pairs(plan, kind, view)
        timed = {n: _timed_script(view, systems[n][0], script, tasks, row_work, share)[0] for n in set(first)}
        makespans: dict[tuple[object, ...], float] = {}
        for n, (costs, cluster) in enumerate(systems):
            linked = add_congestion(relink(traffic, view, cluster), script, costs.congestion, view.ranks)
            contention = costs.contention if len(linked.bytes) else 0.0
            key = (first[n], contention, linked.wire_us.tobytes(), linked.latency_us.tobytes())
            if key not in makespans:
                times, finish, blocked = engine.run(timed[first[n]], linked, port_count(cluster), contention)
                _check_finished(kind, phase, script, blocked)
                makespans[key] = _makespan_us(times, finish)
            result[n][kind, phase] = makespans[key]
    return result


def _makespan_us(times: engine.Times, finish: Floats) -> float:
    return float(max(finish.max(), times.done.max(initial=0.0)))


def _checked_cluster(plan: Plan, cluster: Cluster | None) -> Cluster:
    """`cluster`, by default the plan's, checked to have the plan's ranks."""
    default = plan.request.cluster
    if cluster is None:
        return default
    instance("cluster", cluster, Cluster)
    shape, actual = (default.nodes, default.ranks_per_node), (cluster.nodes, cluster.ranks_per_node)
    if actual != shape:
        rule = f"must have the {shape[0]} x {shape[1]} ranks of the plan"
        raise ConfigError(
            "cluster.nodes x cluster.ranks_per_node",
            f"{actual[0]} x {actual[1]}",
            rule,
            "change only links or speeds",
        )
    return cluster


def busy_us(view: View, script: Script) -> Floats:
    """float64 [ranks]: total work of the compute streams at full speed."""
    busy: Floats = np.bincount(view.rank_of, script.work_us, view.ranks) + script.end_us
    return busy


def run_all(
    plan: Plan,
    prepared: list[PreparedProgram],
    costs: Costs,
    hardware: str = "",
    cluster: Cluster | None = None,
) -> Simulation:
    """Runs a plan's prepared programs. cluster: as for `prepare`. Raises VerifyError for a program that cannot run."""
    runs = {(item.kind, item.phase): _run(item) for item in prepared}
    run_cluster = _checked_cluster(plan, cluster)
    return Simulation(plan, costs, hardware, runs, recurrent_runs(plan, costs, run_cluster), run_cluster)


def recurrent_runs(plan: Plan, costs: Costs, cluster: Cluster) -> dict[tuple[str, str], RecurrentRun]:
    """(kind, phase) -> one layer of a recurrent kind; empty if the plan has none."""
    if plan.recurrence is None:
        return {}
    size = plan.request.model.element_bytes
    return run_recurrent(plan.recurrence, plan.header.recurrent, size, costs, cluster)


def _run(prepared: PreparedProgram) -> Run:
    view, script, traffic = prepared.view, prepared.script, prepared.traffic
    times, finish, blocked = engine.run(script, traffic, port_count(view.cluster), prepared.contention)
    _check_finished(prepared.kind, prepared.phase, script, blocked)
    busy, exposed = busy_us(view, script), _exposed_us(view, script, times)
    slowed = np.maximum(finish - exposed - busy, 0.0) if prepared.contention > 0 else np.zeros(view.ranks)
    return Run(
        prepared.kind,
        prepared.phase,
        _makespan_us(times, finish),
        prepared.ideal_us,
        prepared.work,
        busy + slowed,
        slowed,
        exposed,
        finish,
        *_traffic_bytes(script, traffic, view.ranks),
        int(traffic.bytes[traffic.out_port >= 2 * view.ranks].sum()),  # through a NIC
        prepared.row_work.kernels,
        prepared.row_work.messages,
        np.bincount(script.rank, minlength=view.ranks),
        view.arena_rows,
        view.instructions["op"],
        script,
        traffic,
        times,
    )


def _check_finished(kind: str, phase: str, script: Script, blocked: Ints) -> None:
    ranks = np.flatnonzero(blocked >= 0)
    if len(ranks):
        rank = int(ranks[0])
        raise VerifyError(
            f"{kind} {phase}: {len(ranks)} ranks wait for rounds that never complete, rank {rank} for round "
            f"{script.round[blocked[rank]]}: the ranks launch in different orders; verify the plan"
        )


def _exposed_us(view: View, script: Script, times: engine.Times) -> Floats:
    waits = script.role == WAIT
    idle = engine.idle_until(script, times)[waits] - times.begin[waits]
    return np.bincount(view.rank_of[waits], idle, view.ranks).astype(np.float64)


def _traffic_bytes(script: Script, traffic: Traffic, ranks: int) -> tuple[Ints, Ints]:
    """int64 [ranks] twice: bytes that each rank sends, and receives."""
    sides = (script.rank[side] for side in (traffic.sender, traffic.receiver))
    sent, received = (np.bincount(end, traffic.bytes, ranks).astype(np.int64) for end in sides)
    return sent, received
