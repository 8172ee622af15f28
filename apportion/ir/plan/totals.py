"""What programs do in all: the pairs that they attend to, the bytes that they move, and in how many rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from apportion._core import totals as core
from apportion.ir.arrays import Bools, Floats, Ints
from apportion.ir.isa import RESULTS, TASK_LIST, Op
from apportion.ir.plan.ops import LIST_OF_OP, LISTS
from apportion.ir.plan.programs import head_table
from apportion.ir.plan.tables import Header, ProgramSet
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.tensors import Tensor

Key = tuple[str, str]  # kind, phase


def pairs(programs: ProgramSet, header: Header, phase: str = "forward") -> Floats:
    """[ranks] pairs of (query, key) that each rank's programs of a phase compute, over heads."""
    tasks, operands = programs[TASK_LIST[phase]], programs["operands"]
    sizes = np.array([header.q_heads, *(len(heads) for heads in header.head_sets)], np.int64)
    q, kv, dmin, dmax = (tasks[name] for name in ("q", "kv", "dmin", "dmax"))
    rows, heads = operands["rows"], operands["heads"]
    return core.pairs(q, kv, dmin, dmax, tasks.ptr, operands.ptr, rows, heads, sizes)


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
        between = core.move(
            until,
            results,
            table["send"],
            table["peer"],
            table["operand"],
            operands["tensor"],
            operands["rows"],
            operands["heads"],
            table.ptr,
            operands.ptr,
            row_bytes[0],
            row_bytes[1],
            node,
            sent,
            received,
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


def _launches(program: ProgramSet) -> tuple[Ints, Bools]:
    """int64 and bool [launches], over all ranks: the row behind the last transfer of each; whether results travel."""
    instructions = program["instructions"]
    at = np.flatnonzero(LIST_OF_OP[instructions["op"]] == LISTS.index("transfers"))
    results = instructions["mode"][at] & RESULTS > 0
    return np.cumsum(instructions["count"][at], dtype=np.int64), results
