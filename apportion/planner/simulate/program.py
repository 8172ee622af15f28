"""Simulator form of a program: durations and launches of instructions, and transfers.

    instructions of all ranks ──► Script    work_us, and the launch of each launch or wait
    transfers of all ranks    ──► Traffic   every send with its receive: one row per transfer, with its two ports

A *launch* is one rank's part of a round. Ports are numbered: all ranks' own links out, then in, then all NICs out, then
in; each carries one transfer at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from apportion._core import script as core
from apportion.ir.arrays import Floats, Ints
from apportion.ir.bytes.codec import Plan
from apportion.ir.errors import VerifyError
from apportion.ir.isa import OPERAND_COLUMNS, RULES, Rule, Use
from apportion.ir.plan.messages import row_sizes
from apportion.ir.plan.programs import ProgramView
from apportion.ir.plan.tables import ProgramSet
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.tensors import Tensor
from apportion.planner.congestion import Congestion
from apportion.planner.simulate.launches import KERNELS

#: bytes per microsecond at 1 GB/s
BYTES_PER_US = 1e3
#: roles of instructions in the event loop
WORK, LAUNCH, WAIT = range(3)


class Script(NamedTuple):
    """Instructions of all ranks and their launches, as the event loop reads them.

    ptr: int64 [ranks + 1] first instruction of each rank. role: uint8 [instructions], WORK, LAUNCH or WAIT. work_us:
    float64 [instructions], before a launch, after the round of a wait. end_us: float64 [ranks], work after the last
    instruction. launch: int64 [instructions], the launch of a LAUNCH or WAIT, else -1. rank, round, channel: int64
    [launches]. before, after: int64 [launches], the neighbours in the launch's channel, or -1. end_ptr: int64 [launches
    + 1] into ends: int64 [2 transfers], the transfers of each launch.
    """

    ptr: Ints
    role: Ints
    work_us: Floats
    end_us: Floats
    launch: Ints
    rank: Ints
    round: Ints
    channel: Ints
    before: Ints
    after: Ints
    end_ptr: Ints
    ends: Ints


class Traffic(NamedTuple):
    """Transfers in order of port priority: by round, by distance from sender to receiver in the circle of ranks (so
    that an all-to-all proceeds in conflict-free shifts), by sender, then as listed.

    sender, receiver: int64 [transfers], launches. out_port, in_port: int64. wire_us: float64, occupancy of both ports.
    latency_us: float64, further time until completion. bytes, tensor: int64.
    """

    sender: Ints
    receiver: Ints
    out_port: Ints
    in_port: Ints
    wire_us: Floats
    latency_us: Floats
    bytes: Ints
    tensor: Ints


class PricedTasks(NamedTuple):
    """Attention tasks to price. rows, keys, pairs, heads, kv_heads, diagonals: int64 [tasks], of each task's band.
    first, at, accumulated: int64 [instructions with tasks], the first task, the instruction, and accumulator bytes
    beyond the results in the model's dtype, each row once per instruction."""

    rows: Ints
    keys: Ints
    pairs: Ints
    heads: Ints
    kv_heads: Ints
    diagonals: Ints
    first: Ints
    at: Ints
    accumulated: Ints


class RowWork(NamedTuple):
    """Row work other than attention. moved: int64 [instructions], bytes read and written by row operations, packing
    and unpacking, except rows that tasks complete. cast: int64 [ranks], the same for casting gradients at a call's end.
    kernels, messages: int64 [ranks], kernels started, messages posted. projection, rows, products: int64 [projections]:
    the instruction, its rows of X, and bytes of a projected row in the model's dtype (times 3 in backward)."""

    moved: Ints
    cast: Ints
    kernels: Ints
    messages: Ints
    projection: Ints
    rows: Ints
    products: Ints


@dataclass(frozen=True, eq=False)
class View(ProgramView):
    """The programs of all ranks of one kind and phase. cluster: the simulated cluster."""

    plan: Plan
    phase: str
    source: ProgramSet
    cluster: Cluster

    @property
    def model(self) -> Model:
        return self.plan.request.model

    @property
    def ranks(self) -> int:
        return self.plan.header.ranks

    @cached_property
    def speeds(self) -> Floats:
        """float64 [ranks]: relative speed."""
        speeds = self.cluster.speeds
        return np.ones(self.ranks) if speeds is None else np.asarray(speeds, np.float64)


def pass_table(rules: Mapping[int, Rule]) -> Ints:
    """int64 [2, codes, 4]: number of reads and writes of operands a, b, c, d by an op; [0] for rows added to a sum, [1]
    for rows that begin one."""
    table = np.zeros((2, max(rules) + 1, len(OPERAND_COLUMNS["rowops"])), np.int64)
    for op, rule in rules.items():
        for argument in rule.arguments if rule.list == "rowops" else ():
            first, later = argument.passes or (1, 2 if argument.use is Use.ADD else 1)
            table[:, op, rule.columns.index(argument.column)] = later, first
    return table


def product_table(rules: Mapping[int, Rule]) -> Ints:
    """int64 [codes]: number of products with the weights of the layer's projection."""
    return np.array([rules[op].products if op in rules else 0 for op in range(max(rules) + 1)])


_OPS = (KERNELS, product_table(RULES), pass_table(RULES).reshape(-1, len(OPERAND_COLUMNS["rowops"])))


def prepare_tables(view: View, post_us: float) -> tuple[Script, Traffic, PricedTasks, RowWork]:
    """Builds the tables for the simulator from a program, in the compiled core: `core/planner/simulate_script.cpp`. The
    script has no durations yet. post_us: time to post a message. A transfer's latency includes posting all
    messages of its launch, on the side that has more. Raises VerifyError for a program that cannot run."""
    plan, cluster = view.plan, view.cluster
    (unmatched, unlaunched), script, traffic, tasks, row_work = core.prepare(
        view.source.arrays,
        row_sizes(plan.header),
        _sizes(view.model),
        _OPS,
        (
            view.ranks,
            cluster.ranks_per_node,
            cluster.nics_per_node,
            np.array([cluster.intra_gbs, cluster.inter_gbs]) * BYTES_PER_US,
            np.array([cluster.intra_latency_us, cluster.inter_latency_us], np.float64),
        ),
        post_us,
        plan.layout(plan.header.home_layout).rows_per_rank,
        view.phase == "backward",
    )
    if len(unmatched):
        round_, source, target, sent, received = unmatched.tolist()
        raise VerifyError(
            f"{view.phase}, round {round_}: rank {source} sends {sent} tiles to rank {target}, which receives "
            f"{received}: such a plan cannot run; verify it"
        )
    if len(unlaunched):
        rank, round_ = unlaunched.tolist()
        raise VerifyError(
            f"rank {rank} waits for round {round_} but never launches it: such a plan cannot run; verify it"
        )
    role, *launches = script
    zeros = np.zeros(len(role)), np.zeros(view.ranks)
    full_script = Script(view.instructions.ptr, role, *zeros, *launches)
    return full_script, Traffic(*traffic), PricedTasks(*tasks), RowWork(*row_work)


@lru_cache(64)
def _sizes(model: Model) -> Ints:
    """int64 [5, tensors], bytes: of a row of one head in memory, in the model's dtype, sent, and sent as a result (0
    if not a sum); of a row with all heads, read and written by a cast."""
    wide, narrow = model.accumulator_bytes, model.element_bytes
    rows = np.zeros((5, len(Tensor)), np.int64)
    for t in Tensor:
        cast = model.row_bytes(t) // wide * (wide + narrow)
        sent = model.sent_bytes(t, 1), model.sent_result_bytes(t)
        rows[:, t] = model.row_bytes(t, 1), model.result_bytes(t), *sent, cast
    return rows


def add_congestion(traffic: Traffic, script: Script, congestion: Congestion | None, ranks: int) -> Traffic:
    """The traffic with congestion delays between nodes."""
    inter = np.flatnonzero(traffic.in_port >= 2 * ranks)
    if congestion is None or not len(inter):
        return traffic
    sender, receiver = traffic.sender[inter], traffic.receiver[inter]
    message = np.unique(sender * len(script.rank) + receiver, return_inverse=True)[1]
    ports = traffic.out_port[inter], traffic.in_port[inter]
    wire = traffic.wire_us.copy()
    wire[inter] *= congestion.factors(script.round[receiver], *ports, message, traffic.bytes[inter])
    return traffic._replace(wire_us=wire)


def relink(traffic: Traffic, view: View, cluster: Cluster) -> Traffic:
    """The traffic of a view, without congestion, over the links of another cluster with the same ranks."""
    inter = (traffic.in_port >= 2 * view.ranks).astype(np.int64)
    rates = np.array([cluster.intra_gbs, cluster.inter_gbs]) * BYTES_PER_US
    names = ("intra_latency_us", "inter_latency_us")
    diff = np.array([getattr(cluster, name) - getattr(view.cluster, name) for name in names])
    return traffic._replace(wire_us=traffic.bytes / rates[inter], latency_us=traffic.latency_us + diff[inter])


def launch_instructions(script: Script) -> Ints:
    """int64 [launches]: the instruction of each launch."""
    return np.flatnonzero(script.role == LAUNCH)


def port_count(cluster: Cluster) -> int:
    return 2 * (cluster.ranks + cluster.nodes * cluster.nics_per_node)
