"""Simulated time of recurrent layers: one layer of each kind, forward and backward, from the plan's runs and folds.

    forward   halo │ first and middle runs │ whole documents, early last runs │ outputs of the state │ late last runs
    wire                                   │   states    │   fold   │  states   │
    backward  late last runs, outputs      │ whole documents, early last runs │ first and middle runs │ halo
    fold      a rank's slots, in the order of their chains

Work is FLOPs of the chunked form (chunks of 64 tokens: products inside a chunk, with the state, and of the delta rule's
triangular solve), at `SHARE` of the rate of the hardware's linear layers; backward is `BACKWARD` times as much. Both
are assumed; nothing was measured on a GPU. Under the delta rule a middle run, which has a past and a next run, needs
key_dim more columns, for its transition, as do last runs on a rank with many such tokens (`EARLY_SHARE`). Other last
runs begin with the state that arrives. An exchange lasts as long as its busiest link or NIC needs, plus a latency and
two row operations; the states of all ranks leave together, once the last rank has summarised runs, or in backward has
the gradients of the states that it received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from apportion.ir.arrays import Bools, Floats, Ints
from apportion.ir.plan.tables import Recurrence, Table
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.recurrent import EARLY_SHARE, Recurrent
from apportion.ir.tensors import PHASES
from apportion.planner.simulate.durations import Costs
from apportion.planner.simulate.timeline import rounded

CHUNK = 64  # tokens per chunk of kernels
SHARE = 0.35  # fraction of the rate of linear layers: assumed, between .2 and .6
BACKWARD = 2.5  # relative to the forward's FLOPs: assumed
STEP_US = 2.0  # per slot of a chain, since each waits for the slot before it: assumed
_STATE_BYTES = 4  # per value of a state: float32


@dataclass(frozen=True, eq=False)
class RecurrentRun:
    """One layer of a recurrent kind in one phase. Times in microseconds.

    ideal_us: the kernel alone on all tokens, in whole documents, balanced by speed. kernel_us, summary_us: float64
    [ranks], the kernel, and the extra time of transitions and outputs of middle and early last runs. states_us: the
    two exchanges of states. bytes, max_rank_bytes: between ranks, in total, and sent or received by the busiest."""

    kind: str
    phase: str
    makespan_us: float
    ideal_us: float
    kernel_us: Floats
    summary_us: Floats
    halo_us: float
    states_us: tuple[float, float]
    fold_us: float
    bytes: int
    max_rank_bytes: int

    def to_data(self) -> dict[str, Any]:
        parts = ("makespan_us", "ideal_us", "halo_us", "states_us", "fold_us")
        ranks = {name: rounded(getattr(self, name)) for name in ("kernel_us", "summary_us")}
        times = {name: rounded(getattr(self, name)) for name in parts}
        sizes = {"bytes": {"total": self.bytes, "max_rank": self.max_rank_bytes}}
        return {"kind": self.kind, "phase": self.phase, **times, **sizes, "ranks": ranks}


def token_flops(kind: Recurrent) -> float:
    """Forward FLOPs per token of a chunked kernel, without a past."""
    return _flops(kind, kind.value_dim)


def transition_flops(kind: Recurrent) -> float:
    """Additional FLOPs per token of a middle run, for the columns of its transition; 0 without the delta rule."""
    columns = kind.value_dim + kind.key_dim
    return _flops(kind, columns) - _flops(kind, kind.value_dim) if kind.delta else 0.0


def output_flops(kind: Recurrent) -> float:
    """Additional FLOPs per token of a run with a past, for what the incoming state adds to the output."""
    return 2.0 * kind.heads * kind.key_dim * kind.value_dim


def _flops(kind: Recurrent, columns: int) -> float:
    """FLOPs per token with `columns` columns in a head's state."""
    key = kind.key_dim
    chunk_flops, state = 2 * CHUNK * (key + columns), 4 * key * columns
    if kind.delta:
        chunk_flops, state = chunk_flops + 2 * CHUNK * (2 * key + columns), state + 2 * key * columns
    return float(kind.heads * (chunk_flops + state))


def run_recurrent(
    recurrence: Recurrence, kinds: Mapping[str, Recurrent], element_bytes: int, costs: Costs, cluster: Cluster
) -> dict[tuple[str, str], RecurrentRun]:
    """(kind, phase) -> the run, for `kinds` in the plan's order. element_bytes: of the model's dtype."""
    tables = _Tables.of(recurrence, cluster)
    flop_us = float(costs.linear_us(np.array(1))) / (2 * costs.linear_parameters) / SHARE
    return {
        (name, phase): _run(name, number, kind, phase, tables, element_bytes, flop_us, costs)
        for number, (name, kind) in enumerate(kinds.items())
        for phase in PHASES
    }


class _Tables(NamedTuple):
    """Common input of all kinds and phases. tokens: int64 [4, ranks], of whole documents, of first, last and middle
    runs. Per slot: rank: int64, the folding rank; leads, past: bool, if a slot follows or precedes; depth: int64, slots
    before it in its chain."""

    recurrence: Recurrence
    cluster: Cluster
    speeds: Floats
    tokens: Ints
    rank: Ints
    leads: Bools
    past: Bools
    depth: Ints

    @staticmethod
    def of(recurrence: Recurrence, cluster: Cluster) -> _Tables:
        runs, folds = recurrence["runs"], recurrence["folds"]
        part = 2 * (runs["past"] >= 0) + runs["leads"]
        index = part * cluster.ranks + runs.rank_of_row()
        tokens = np.bincount(index, runs["rows"], 4 * cluster.ranks).reshape(4, cluster.ranks)
        rank = folds.rank_of_row()
        past = folds["parent"] >= 0
        parent = folds.ptr[rank] + folds["parent"]
        leads = np.zeros(len(folds), bool)
        leads[parent[past]] = True
        speeds = np.asarray(cluster.speeds or np.ones(cluster.ranks), np.float64)
        depth = _depths(np.where(past, parent, -1))
        return _Tables(recurrence, cluster, speeds, tokens.astype(np.int64), rank, leads, past, depth)


def _depths(parent: Ints) -> Ints:
    """int64: the number of ancestors of each. parent: -1 for none."""
    depth, parent = (parent >= 0).astype(np.int64), parent.copy()
    while (index := np.flatnonzero(parent >= 0)).size:
        ancestor = parent[index]
        depth[index] += depth[ancestor]
        parent[index] = parent[ancestor]
    return depth


def _run(
    name: str,
    number: int,
    kind: Recurrent,
    phase: str,
    tables: _Tables,
    element_bytes: int,
    flop_us: float,
    costs: Costs,
) -> RecurrentRun:
    cluster, speeds = tables.cluster, tables.speeds
    column_us = flop_us * (1.0 if phase == "forward" else BACKWARD)
    whole, first, last, middle = (tokens * token_flops(kind) * column_us / speeds for tokens in tables.tokens)
    early = last * (tables.tokens[2] > EARLY_SHARE * tables.tokens.sum(0))
    kernel, late, past = whole + first + last + middle, last - early, middle + early
    transition, output = (flops(kind) / token_flops(kind) for flops in (transition_flops, output_flops))
    halo = _halo(tables.recurrence["halo"], kind, element_bytes, costs, cluster)
    send, reply, fold = _states(tables, number, kind, phase, costs)
    summarised, read, rows = first + middle * (1 + transition), past * output, halo.us * (kernel > whole)
    overlapped = whole + early * (1 + transition)
    if phase == "forward":
        before, waiting, after = rows + summarised, last + middle, read + late
    else:
        before, waiting, after = read + late, first + middle, summarised + rows
    arrival = float(before.max()) + send.us + fold + reply.us
    ends = np.maximum(before + overlapped, arrival * (waiting > 0)) + after
    even = float(tables.tokens.sum()) * token_flops(kind) * column_us / float(speeds.sum())
    sent = halo.bytes + send.bytes + reply.bytes
    return RecurrentRun(
        name,
        phase,
        float(ends.max(initial=0.0)),
        even,
        kernel,
        past * (transition + output),
        halo.us,
        (send.us, reply.us),
        fold,
        int(sent[0].sum()),
        int(sent.max(initial=0)),
    )


class _Wire(NamedTuple):
    """An exchange. us: time until the last rank has everything. bytes: int64 [2, ranks], sent to and received from
    other ranks."""

    us: float
    bytes: Ints


def _states(
    tables: _Tables, number: int, kind: Recurrent, phase: str, costs: Costs
) -> tuple[_Wire, _Wire, float]:
    """The exchange to the folding ranks, the one back, and the time of the fold between them."""
    folds, cluster = tables.recurrence["folds"], tables.cluster
    index = np.flatnonzero(folds["kind"] == number)
    holder, folder, heads = folds["peer"][index], tables.rank[index], folds["heads"][index]
    past, leads = tables.past[index], tables.leads[index]
    state, transition = _STATE_BYTES * kind.state_numbers, _STATE_BYTES * kind.transition_numbers
    if phase == "forward":
        outgoing, incoming = state * leads + transition * (leads & past), state * past
    else:
        outgoing, incoming = state * past, state * leads
    send = _exchange(holder, folder, outgoing * heads, costs, cluster)
    reply = _exchange(folder, holder, incoming * heads, costs, cluster)
    if not len(index):
        return send, reply, 0.0
    state_bytes = np.bincount(folder, (2 * state + transition) * past * heads, cluster.ranks)
    steps = np.zeros(cluster.ranks)
    np.maximum.at(steps, folder, tables.depth[index])
    return send, reply, float((costs.moved_us(state_bytes.astype(np.int64)) + STEP_US * steps).max())


def _halo(halo: Table, kind: Recurrent, element_bytes: int, costs: Costs, cluster: Cluster) -> _Wire:
    """The exchange before the convolution, of as many rows as the widest kind needs."""
    if kind.conv <= 1:
        return _Wire(0.0, np.zeros((2, cluster.ranks), np.int64))
    sends = np.flatnonzero(halo["send"] == 1)
    sizes = halo["rows"][sends].astype(np.int64) * kind.conv_channels * element_bytes
    return _exchange(halo.rank_of_row()[sends], halo["peer"][sends].astype(np.int64), sizes, costs, cluster)


def _exchange(source: Ints, target: Ints, sizes: Ints, costs: Costs, cluster: Cluster) -> _Wire:
    """Simulates an exchange. source, target, sizes: int64 [n], sending rank, receiving rank and bytes."""
    ranks = cluster.ranks
    remote = (source != target) & (sizes > 0)
    source, target, sizes = source[remote], target[remote], sizes[remote]
    sent = np.stack([np.bincount(end, sizes, ranks) for end in (source, target)]).astype(np.int64)
    if not len(sizes):
        return _Wire(0.0, sent)
    is_inter = cluster.node_of(source) != cluster.node_of(target)
    wires, latency = [0.0], cluster.intra_latency_us
    for end in (source, target):
        wires.append(np.bincount(end[~is_inter], sizes[~is_inter], ranks).max() / (cluster.intra_gbs * 1e3))
        if is_inter.any():
            nics = cluster.nodes * cluster.nics_per_node
            load = np.bincount(_nic(end[is_inter], cluster), sizes[is_inter], nics)
            wires.append(load.max() / (cluster.inter_gbs * 1e3))
            latency = max(latency, cluster.inter_latency_us)
    packing_us = 2 * float(costs.rowop_us(np.array(2 * sent.max())))
    return _Wire(float(max(wires)) + latency + packing_us, sent)


def _nic(rank: Ints, cluster: Cluster) -> Ints:
    local, per_node = rank % cluster.ranks_per_node, cluster.nics_per_node
    return cluster.node_of(rank) * per_node + local * per_node // cluster.ranks_per_node
