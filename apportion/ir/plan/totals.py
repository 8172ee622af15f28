"""What programs do in all: the pairs that they attend to, the bytes that they move, and in how many rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.isa import RESULTS, TASK_LIST, Op
from apportion.ir.loops.jit import jit
from apportion.ir.masks.areas import area_of
from apportion.ir.plan.ops import LIST_OF_OP, LISTS
from apportion.ir.plan.programs import head_table
from apportion.ir.plan.tables import Header, ProgramSet, Table
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.tensors import Tensor

Key = tuple[str, str]  # kind, phase

_BLOCK = 2**20  # rows that are widened at a time


def pairs(programs: ProgramSet, header: Header, phase: str = "forward") -> Floats:
    """[ranks] pairs of (query, key) that each rank's programs of a phase compute, over heads."""
    tasks, operands = programs[TASK_LIST[phase]], programs["operands"]
    sizes = np.array([header.q_heads, *(len(heads) for heads in header.head_sets)], np.int64)
    blocks = 1 + (len(tasks) + len(operands)) // _BLOCK
    if blocks == 1:
        return _pairs_of(tasks, operands, sizes)
    ends = np.unique(np.linspace(0, tasks.ranks, blocks + 1).astype(np.int64)).tolist()
    found = [
        _pairs_of(tasks.ranks_between(first, end), operands.ranks_between(first, end), sizes)
        for first, end in pairwise(ends)
    ]
    return np.concatenate(found)


def _pairs_of(tasks: Table, operands: Table, sizes: Ints) -> Floats:
    """As `pairs`, of some ranks; sizes: int64 [none and head sets], heads of each."""
    q, kv, dmin, dmax = (tasks.wide(name) for name in ("q", "kv", "dmin", "dmax"))
    ptr, first = (np.asarray(one.ptr, np.int64) for one in (tasks, operands))
    return _pairs(q, kv, dmin, dmax, ptr, first, operands.wide("rows"), operands.wide("heads"), sizes)


@jit
def _pairs(
    q: Ints,
    kv: Ints,
    dmin: Ints,
    dmax: Ints,
    ptr: Ints,
    first: Ints,
    rows: Ints,
    heads: Ints,
    sizes: Ints,
) -> Floats:
    """The area of each task's band, as `bands.area` has it, times its heads."""
    found = np.zeros(len(ptr) - 1)
    for rank in range(len(ptr) - 1):
        for task in range(ptr[rank], ptr[rank + 1]):
            query, key = first[rank] + q[task], first[rank] + kv[task]
            below = area_of(0, rows[query], 0, rows[key], dmin[task], dmax[task])
            found[rank] += below * sizes[heads[query]]
    return found


def loads(programs: Mapping[Key, ProgramSet], header: Header, model: Model, phase: str) -> Floats:
    """[ranks] pairs times layers of all kinds in a phase, in shares of the heads."""
    found = np.zeros(header.ranks)
    for (kind, own), program in programs.items():
        if own == phase:
            found += model.layers_of(kind) * (pairs(program, header, phase) / header.q_heads)
    return found


def rounds(programs: Mapping[Key, ProgramSet]) -> int:
    """Rounds that are launched anywhere, of all programs together."""
    found = 0
    for program in programs.values():
        instructions = program["instructions"]
        launched = instructions.wide("round")[instructions["op"] == Op.LAUNCH]
        found += int(np.count_nonzero(np.bincount(launched)))
    return found


@dataclass(frozen=True, eq=False)
class Moved:
    """Bytes that programs send. sent, received: int64 [ranks]; between: those that cross nodes."""

    sent: Ints
    received: Ints
    between: int

    def summary(self) -> dict[str, int]:
        """total; of the busiest rank, the larger of what it sends and receives; and between nodes."""
        busiest = int(max(self.sent.max(), self.received.max()))
        return {"total": int(self.sent.sum()), "max_rank": busiest, "inter_node": self.between}


def in_all(parts: Iterable[Moved]) -> Moved:
    """Of several programs together."""
    every = list(parts)
    sent, received = (np.sum([getattr(one, way) for one in every], axis=0) for way in ("sent", "received"))
    return Moved(sent, received, sum(one.between for one in every))


def moved(
    programs: Mapping[Key, ProgramSet], head_sets: Sequence[Sequence[int]], model: Model, cluster: Cluster
) -> dict[Key, Moved]:
    """What each program moves, by its sends. head_sets: as in a plan's header."""
    node = np.asarray(cluster.node_of(np.arange(cluster.ranks)), np.int64)
    row_bytes, found = _row_bytes(head_sets, model), {}
    for key, program in programs.items():
        sent, received = np.zeros((2, cluster.ranks), np.int64)
        operands, table = program["operands"], program["transfers"]
        until, results = _launches(program)
        send, peer, operand = _alike(table, ("send", "peer", "operand"))
        tensor, rows, heads = _alike(operands, ("tensor", "rows", "heads"))
        ptr, first = (np.asarray(one.ptr, np.int64) for one in (table, operands))
        between = int(
            _move(
                until,
                results,
                send,
                peer,
                operand,
                tensor,
                rows,
                heads,
                ptr,
                first,
                row_bytes,
                node,
                sent,
                received,
            )
        )
        found[key] = Moved(sent, received, between)
    return found


def _row_bytes(head_sets: Sequence[Sequence[int]], model: Model) -> Ints:
    """int64 [2, tensors, none and head sets]: bytes of a row of an operand that travels, and of a result."""
    per_head = np.array(
        [[model.sent_bytes(tensor, 1), model.sent_result_bytes(tensor)] for tensor in Tensor]
    ).T
    found: Ints = per_head[:, :, None] * head_table(model.q_heads, model.kv_heads, head_sets)
    return found


def _launches(program: ProgramSet) -> tuple[Ints, Ints]:
    """int64 [launches], over all ranks: the row behind the last transfer of each, and 1 where results travel."""
    instructions = program["instructions"]
    at = np.flatnonzero(LIST_OF_OP[instructions["op"]] == LISTS.index("transfers"))
    results = instructions["mode"][at] & RESULTS > 0
    return np.cumsum(instructions["count"][at], dtype=np.int64), results.astype(np.int64)


def _alike(table: Table, names: tuple[str, ...]) -> list[Ints]:
    """Columns as they are planned, int32, or all as int64: what loops are compiled for."""
    columns = [table[name] for name in names]
    return (
        columns
        if all(column.dtype == np.int32 for column in columns)
        else [table.wide(name) for name in names]
    )


@jit
def _move(
    until: Ints,
    results: Ints,
    send: Ints,
    peer: Ints,
    operand: Ints,
    tensor: Ints,
    rows: Ints,
    heads: Ints,
    ptr: Ints,
    first: Ints,
    row_bytes: Ints,
    node: Ints,
    sent: Ints,
    received: Ints,
) -> int:
    """Adds the sends of a program to those of each rank; returns the bytes between nodes."""
    between, launch = 0, 0
    for rank in range(len(ptr) - 1):
        for row in range(ptr[rank], ptr[rank + 1]):
            while row >= until[launch]:
                launch += 1
            if send[row]:
                at = first[rank] + operand[row]
                moved = rows[at] * row_bytes[results[launch], tensor[at], heads[at]]
                sent[rank] += moved
                received[peer[row]] += moved
                if node[rank] != node[peer[row]]:
                    between += moved
    return between
