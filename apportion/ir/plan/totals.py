"""Totals of programs: attention pairs, bytes sent and number of rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from apportion._core import totals as core
from apportion.ir.arrays import Floats, Ints
from apportion.ir.isa import Op
from apportion.ir.masks.profile import profile
from apportion.ir.plan.programs import head_counts
from apportion.ir.plan.tables import Header, Layout, PlanTables, ProgramSet
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.tensors import Tensor

Key = tuple[str, str]  # kind, phase


def pairs(programs: ProgramSet, header: Header, phase: str = "forward") -> Floats:
    """float64 [ranks]: (query, key) pairs that each rank's programs compute in a phase, summed over heads."""
    sizes = np.array([header.q_heads, *(len(heads) for heads in header.head_sets)], np.int64)
    return core.pairs(programs.arrays, phase == "backward", sizes)


def chosen_keys(batch: Batch, model: Model, kind: str, layout: Layout) -> Floats | None:
    """float64 [ranks]: number of keys that a kind's queries on each rank of the layout choose at run time, by
    `Model.balance`: min(visible keys, n) per query; None for kinds without such a choice."""
    keys, spans = model.keys_of(kind), layout.spans
    if keys is None:
        return None
    weights = profile({kind: batch.bands(kind)}, {kind: 1}).capped(keys)
    token = spans.wide("token")
    sums = weights.between(token, token + spans.wide("length"))
    return np.bincount(spans.rank_of_row(), sums, spans.ranks).astype(np.float64)


def work(plan: PlanTables, kind: str, phase: str = "forward") -> Floats:
    """float64 [ranks]: pairs that each rank's program computes, or keys that its queries choose, summed over heads."""
    layout = plan.layouts.get("attention") or plan.layout(plan.header.home_layout)
    chosen_pairs = chosen_keys(plan.request.batch, plan.request.model, kind, layout)
    return (
        pairs(plan.programs[kind, phase], plan.header, phase)
        if chosen_pairs is None
        else chosen_pairs * plan.header.q_heads
    )


def loads(plan: PlanTables, phase: str) -> Floats:
    """float64 [ranks]: `work` of a phase, times the layers of each kind, summed over kinds, per query head."""
    result = np.zeros(plan.header.ranks)
    for kind, program_phase in plan.programs:
        if program_phase == phase:
            layers = plan.request.model.layers_of(kind)
            result += layers * (work(plan, kind, phase) / plan.header.q_heads)
    return result


def rounds(programs: Mapping[Key, ProgramSet]) -> int:
    """The number of rounds launched by any rank, over all programs."""
    total = 0
    for program in programs.values():
        instructions = program["instructions"]
        launched = instructions.wide("round")[instructions["op"] == Op.LAUNCH]
        total += int(np.count_nonzero(np.bincount(launched)))
    return total


@dataclass(frozen=True, eq=False)
class CommunicationVolume:
    """Bytes sent and received by programs. sent, received: int64 [ranks]; between: bytes that cross nodes."""

    sent: Ints
    received: Ints
    between: int

    def summary(self) -> dict[str, int]:
        """Total bytes, the larger of sent and received at the busiest rank, and bytes between nodes."""
        busiest = int(max(self.sent.max(), self.received.max()))
        return {"total": int(self.sent.sum()), "max_rank": busiest, "inter_node": self.between}


def sum_volumes(parts: Iterable[CommunicationVolume]) -> CommunicationVolume:
    """Sums over several programs."""
    items = list(parts)
    sent, received = (np.sum([getattr(item, key) for item in items], axis=0) for key in ("sent", "received"))
    return CommunicationVolume(sent, received, sum(item.between for item in items))


def communication_volumes(
    programs: Mapping[Key, ProgramSet], head_sets: Sequence[Sequence[int]], model: Model, cluster: Cluster
) -> dict[Key, CommunicationVolume]:
    """Bytes that each program sends and receives. head_sets: as in a plan's header."""
    heads = head_counts(model.q_heads, model.kv_heads, head_sets)
    row_bytes = [[model.sent_bytes(tensor, 1), model.sent_result_bytes(tensor)] for tensor in Tensor]
    sizes = heads, np.array([*zip(*row_bytes, strict=True)], np.int64), cluster.ranks_per_node
    return {key: CommunicationVolume(*core.move(program.arrays, *sizes)) for key, program in programs.items()}
