"""A program as the simulator runs it: what each instruction takes, which launch it belongs to, and what it moves.

    instructions of all ranks ──► Script    work_us, and the launch that a launch or a wait is about
    transfers of all ranks    ──► Traffic   every send with its receive: one row a transfer, with its two ports

A *launch* is one rank's part of a round. Ports are numbered: a rank's own link out, then in, then the NICs out, then
in; each carries one transfer at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apportion.ir.cluster import Cluster
from apportion.ir.errors import VerifyError
from apportion.ir.isa import HEADLESS, KV_SIDE, OP_LIST, TABLES, Op, Tensor
from apportion.ir.model import Model
from apportion.ir.plan import Plan, ProgramSet, Table
from apportion.ir.sorting import stable_order
from apportion.planner.passes.sorting import sort_order

Ints = NDArray[np.integer[Any]]
Floats = NDArray[np.float64]

#: list -> bool [ops]: whether an op consumes its rows; bool [tensors]: which have KV heads, which have none
_CONSUMES = {
    name: np.array([OP_LIST.get(Op(op)) == name if op else False for op in range(max(Op) + 1)])
    for name in TABLES
}
_KV_SIDE, _HEADLESS = (
    np.array([Tensor(tensor) in group for tensor in range(max(Tensor) + 1)]) for group in (KV_SIDE, HEADLESS)
)
#: what an instruction is to the event loop
WORK, LAUNCH, WAIT = range(3)
#: bytes that 1 GB/s moves in a microsecond
BYTES_PER_US = 1e3


class Script(NamedTuple):
    """Instructions of all ranks and their launches, as the event loop reads them.

    ptr: int64 [ranks + 1] first instruction of each rank. role: int8 [instructions], WORK, LAUNCH or WAIT. work_us:
    float64 [instructions]. launch: int64 [instructions], the launch of a launch or wait, else -1.
    rank, round, channel: int64 [launches]. before, after: int64 [launches], the neighbours in the launch's channel, or
    -1. end_ptr: int64 [launches + 1] into ends: int64 [2 transfers], the transfers of each launch.
    """

    ptr: Ints
    role: Ints
    work_us: Floats
    launch: Ints
    rank: Ints
    round: Ints
    channel: Ints
    before: Ints
    after: Ints
    end_ptr: Ints
    ends: Ints


class Traffic(NamedTuple):
    """Transfers in the order that ports prefer: by round, by how far the receiver is behind the sender in the circle
    of ranks (so that all-to-all goes in shifts, which no two transfers dispute), by sender, as listed.

    sender, receiver: int64 [transfers], launches. out_port, in_port: int64. wire_us: float64, how long it occupies
    both ports. latency_us: float64, how much later it is complete. bytes, tensor: int64.
    """

    sender: Ints
    receiver: Ints
    out_port: Ints
    in_port: Ints
    wire_us: Floats
    latency_us: Floats
    bytes: Ints
    tensor: Ints


@dataclass(frozen=True, eq=False)
class Operands:
    """Operands of all ranks: tensor, rows, heads (1 for X and dX) and bytes, int64 [operands]; ptr [ranks + 1]."""

    tensor: Ints
    rows: Ints
    heads: Ints
    bytes: Ints
    ptr: Ints


@dataclass(frozen=True, eq=False)
class View:
    """The programs of all ranks of one kind and phase, and what follows from their tables."""

    plan: Plan
    phase: str
    source: ProgramSet

    @property
    def model(self) -> Model:
        return self.plan.request.model

    @property
    def cluster(self) -> Cluster:
        return self.plan.request.cluster

    @property
    def ranks(self) -> int:
        return self.plan.header.ranks

    @property
    def instructions(self) -> Table:
        return self.source["instructions"]

    @cached_property
    def rank_of(self) -> Ints:
        """int64 [instructions]: the rank of each instruction."""
        return self.instructions.rank_of_row()

    @cached_property
    def operands(self) -> Operands:
        table = self.source["operands"]
        tensor, rows = (table[name].astype(np.int64) for name in ("tensor", "rows"))
        heads = self._heads()[_KV_SIDE[tensor].astype(np.int64), table["heads"]]
        heads[_HEADLESS[tensor] & (tensor != Tensor.NONE)] = 1
        per_head = np.array([self.model.row_bytes(Tensor(t), 1) for t in range(max(Tensor) + 1)])
        return Operands(tensor, rows, heads, rows * heads * per_head[tensor], table.ptr)

    def _heads(self) -> Ints:
        """int64 [2, sets]: heads of each set, of query-side and KV-side tensors."""
        head = self.plan.header
        sets = [len(members) for members in head.head_sets]
        return np.array([[head.q_heads, *sets], [head.kv_heads, *sets]])

    def operand(self, name: str, column: str) -> Ints:
        """int64 [rows]: which of `operands` a column of a list names."""
        return self.source[name][column] + self._first_operands[name]

    @cached_property
    def _first_operands(self) -> dict[str, Ints]:
        """list -> int64 [rows]: the first operand of each row's rank."""
        first = self.operands.ptr[:-1]
        return {name: np.repeat(first, np.diff(self.source[name].ptr)) for name in OP_LIST.values() if name}

    def instruction_of(self, name: str) -> Ints:
        """int64 [rows]: the instruction that consumes each row of a list."""
        at = np.flatnonzero(_CONSUMES[name][self.instructions["op"]])
        return np.repeat(at, self.instructions["count"][at])

    @cached_property
    def launches(self) -> Ints:
        """int64 [launches]: the launch instructions, rank after rank in program order."""
        return np.flatnonzero(self.instructions["op"] == Op.LAUNCH)

    @cached_property
    def arena_rows(self) -> Ints:
        """int64 [ranks, tensors]: rows of each work arena."""
        arenas = self.source["arenas"]
        rows = np.zeros((self.ranks, max(Tensor) + 1), np.int64)
        rows[arenas.rank_of_row(), arenas["tensor"]] = arenas["rows"]
        return rows


def find_traffic(view: View) -> Traffic:
    """Every send with its receive: the k-th send i -> j of a round meets the k-th receive of j from i.

    Raises VerifyError where one has no counterpart.
    """
    table, at = view.source["transfers"], view.instruction_of("transfers")
    own, peer, ranks = view.rank_of[at], table["peer"].astype(np.int64), view.ranks
    sends = table["send"] == 1
    source, target = np.where(sends, own, peer), np.where(sends, peer, own)
    round_ = view.instructions["round"][at].astype(np.int64)
    key = (round_ * ranks + (target - source) % ranks) * ranks + source
    out, into = (_sorted(np.flatnonzero(side), key) for side in (sends, ~sends))
    if not np.array_equal(key[out], key[into]):
        raise VerifyError(_unmatched(view, round_, source, target, key, out, into))
    operand = view.operand("transfers", "operand")[out]
    number = np.cumsum(view.instructions["op"] == Op.LAUNCH) - 1
    ends = _Ends(source[out], target[out], view.operands.bytes[operand])
    return Traffic(
        number[at[out]],
        number[at[into]],
        *_ports(view.cluster, ends),
        *_link_us(view.cluster, ends),
        ends.bytes,
        view.operands.tensor[operand],
    )


def _sorted(rows: Ints, key: Ints) -> Ints:
    return rows[stable_order(key[rows])]


def _unmatched(view: View, round_: Ints, source: Ints, target: Ints, key: Ints, out: Ints, into: Ints) -> str:
    """The first transfer that only one side lists."""
    keys = np.unique(key)
    counts = [np.bincount(np.searchsorted(keys, key[side]), minlength=len(keys)) for side in (out, into)]
    first = int(np.flatnonzero(counts[0] != counts[1])[0])
    row = int(np.flatnonzero(key == keys[first])[0])
    sent, received = (int(count[first]) for count in counts)
    return (
        f"{view.phase}, round {round_[row]}: rank {source[row]} sends {sent} tiles to rank {target[row]}, which "
        f"receives {received}: such a plan cannot run; verify it"
    )


class _Ends(NamedTuple):
    """int64 [transfers]: ranks and bytes of each."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    bytes: Ints


def _ports(cluster: Cluster, ends: _Ends) -> tuple[Ints, Ints]:
    """(out, in) ports. Ranks of a node share its NICs evenly, neighbours together."""
    ranks, nics = cluster.ranks, cluster.nodes * cluster.nics_per_node
    outside = cluster.node_of(ends.source) != cluster.node_of(ends.target)
    out = np.where(outside, 2 * ranks + _nic(cluster, ends.source), ends.source)
    into = np.where(outside, 2 * ranks + nics + _nic(cluster, ends.target), ranks + ends.target)
    return out, into


def _nic(cluster: Cluster, rank: Ints) -> Ints:
    """int64: the number of each rank's NIC, over all nodes."""
    node, local = np.divmod(rank, cluster.ranks_per_node)
    nic: Ints = node * cluster.nics_per_node + local * cluster.nics_per_node // cluster.ranks_per_node
    return nic


def port_count(cluster: Cluster) -> int:
    return 2 * (cluster.ranks + cluster.nodes * cluster.nics_per_node)


def _link_us(cluster: Cluster, ends: _Ends) -> tuple[Floats, Floats]:
    """(time on the wire, latency) of each transfer."""
    outside = cluster.node_of(ends.source) != cluster.node_of(ends.target)
    rate = np.where(outside, cluster.inter_gbs, cluster.intra_gbs) * BYTES_PER_US
    latency: Floats = np.where(outside, cluster.inter_latency_us, cluster.intra_latency_us)
    return ends.bytes / rate, latency


def write_script(view: View, work_us: Floats, traffic: Traffic) -> Script:
    """The script of a program. Raises VerifyError for a wait without launch."""
    table, at = view.instructions, view.launches
    role = np.full(len(table), WORK, np.int8)
    role[at], role[table["op"] == Op.WAIT] = LAUNCH, WAIT
    rank, round_, channel = (
        view.rank_of[at],
        *(table[name][at].astype(np.int64) for name in ("round", "channel")),
    )
    before, after = neighbours(rank * (int(channel.max(initial=0)) + 1) + channel)
    ends = np.concatenate([traffic.sender, traffic.receiver])
    order = sort_order(ends, len(at))
    return Script(
        table.ptr.astype(np.int64),
        role,
        work_us,
        _launch_numbers(view, role),
        rank,
        round_,
        channel,
        before,
        after,
        np.concatenate([[0], np.cumsum(np.bincount(ends, minlength=len(at)))]).astype(np.int64),
        (order % max(len(traffic.sender), 1)).astype(np.int64),
    )


def neighbours(stream: Ints) -> tuple[Ints, Ints]:
    """int64 [launches] each: the launches before and after each one in its stream, -1 for none."""
    before, after = np.full((2, len(stream)), -1)
    order = np.argsort(stream, kind="stable")
    same = np.flatnonzero(stream[order[1:]] == stream[order[:-1]])
    before[order[same + 1]], after[order[same]] = order[same], order[same + 1]
    return before, after


def _launch_numbers(view: View, role: Ints) -> Ints:
    """int64 [instructions]: the launch that a launch starts or a wait waits for."""
    table, found = view.instructions, np.full(len(role), -1)
    key = view.rank_of * (int(table["round"].max(initial=0)) + 1) + table["round"]
    launches, waits = view.launches, np.flatnonzero(role == WAIT)
    found[launches] = np.arange(len(launches))
    order = np.argsort(key[launches], kind="stable")
    rising = key[launches][order]
    place = np.searchsorted(rising, key[waits])
    missing = np.append(rising, -1)[place] != key[waits]
    if missing.any():
        wait = int(waits[np.argmax(missing)])
        raise VerifyError(
            f"rank {view.rank_of[wait]} waits for round {table['round'][wait]} and never launches it: such a plan "
            "cannot run; verify it"
        )
    found[waits] = order[place]
    return found


def launch_instructions(script: Script) -> Ints:
    """int64 [launches]: the instruction of each launch."""
    return np.flatnonzero(script.role == LAUNCH)
