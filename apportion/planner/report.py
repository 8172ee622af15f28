"""What a plan is worth: areas, bytes, slots, rounds, bounds, sizes and imbalance, in plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import PHASES, Tensor
from apportion.planner import bounds
from apportion.planner.passes.lowering import Lowering
from apportion.planner.passes.schedule import Slots
from apportion.planner.passes.shard import row_areas
from apportion.planner.problem import Placement, Problem, Shards, exact_sums

Ints = NDArray[np.integer[Any]]

IN = {
    "forward": (Tensor.Q, Tensor.KV),
    "backward": (Tensor.Q, Tensor.KV, Tensor.DO, Tensor.DELTA),
}
OUT = {"forward": (Tensor.O,), "backward": (Tensor.DQ, Tensor.DKV)}


@dataclass(frozen=True)
class Exchange:
    """Tiles that travel together: int64 [tiles] ranks and bytes."""

    kind: str
    phase: str
    name: str
    slots: Slots
    src: Ints
    dst: Ints
    tile_bytes: Ints

    def summary(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "phase": self.phase,
            "name": self.name,
            "slots": self.slots.slots,
            "max_degree": self.slots.max_degree,
            "rounds": self.slots.rounds,
            "bytes": int(self.tile_bytes.sum()),
        }


def build_report(
    problem: Problem,
    shards: Shards,
    placement: Placement,
    lowered: Mapping[str, Lowering],
    parts: list[bytes],
) -> dict[str, Any]:
    """The report of a plan; byte counts are of one attention call of each kind, forward and backward."""
    exchanges = [exchange for kind, low in lowered.items() for exchange in _exchanges(problem, kind, low)]
    load = placement.rank_sums(placement.weight, problem.ranks)
    tokens = placement.rank_sums(placement.lengths, problem.ranks)
    time, mean = load / problem.speeds, float(load.sum()) / problem.speeds.sum()
    heaviest = int(shards.per_piece(shards.weight).max()) if shards.pieces else 0
    sizes = [len(part) for part in parts]
    return {
        "recipe": problem.policy.recipe.name,
        "ranks": problem.ranks,
        "tokens": problem.batch.tokens,
        "block_tokens": shards.block_tokens,
        "heaviest_piece_over_mean": _ratio(heaviest, mean),
        "imbalance_bound": max(1.0, _ratio(placement.bound, mean)),
        "imbalance": {
            "compute": _ratio(float(time.max()), mean) - 1 if mean else 0.0,
            "tokens": float(tokens.max()) / float(tokens.mean()) - 1,
        },
        "area": {kind: int(problem.batch.area(kind)) for kind in problem.batch.kinds},
        "bytes": _bytes(problem, placement, exchanges),
        "slots": sum(exchange.slots.slots for exchange in exchanges),
        "max_degree": sum(exchange.slots.max_degree for exchange in exchanges),
        "rounds": sum(exchange.slots.rounds for exchange in exchanges),
        "exchanges": [exchange.summary() for exchange in exchanges],
        "plan_bytes": {"largest_rank": max(sizes), "total": sum(sizes)},
        "termination": {
            "status": "FEASIBLE",
            "limit": None,
            "bound": float(placement.bound),
            "value": float(time.max()),
        },
    }


def _ratio(value: float, mean: float) -> float:
    return float(value / mean) if mean else 0.0


def _exchanges(problem: Problem, kind: str, low: Lowering) -> list[Exchange]:
    edges, found = low.edges, []
    rows = edges.rows.astype(np.int64)
    kv, dkv = problem.model.row_bytes(Tensor.KV), problem.model.row_bytes(Tensor.DKV)
    for phase in PHASES:
        found.extend(_shuffled(problem, kind, low, phase, "reshuffle_in", IN))
        found.append(Exchange(kind, phase, "fetch", low.slots, edges.src, edges.dst, rows * kv))
        if phase == "backward":
            found.append(Exchange(kind, phase, "return", low.slots, edges.dst, edges.src, rows * dkv))
        found.extend(_shuffled(problem, kind, low, phase, "reshuffle_out", OUT))
    return found


def _shuffled(
    problem: Problem,
    kind: str,
    low: Lowering,
    phase: str,
    name: str,
    tensors: Mapping[str, tuple[Tensor, ...]],
) -> list[Exchange]:
    shuffle = low.reshuffle
    if shuffle is None:
        return []
    row_bytes = sum(problem.model.row_bytes(tensor) for tensor in tensors[phase])
    src, dst, rows = (column[shuffle.moved] for column in (shuffle.src, shuffle.dst, shuffle.rows))
    src, dst = (src, dst) if name == "reshuffle_in" else (dst, src)
    return [Exchange(kind, phase, name, shuffle.slots, src, dst, rows * row_bytes)]


def _bytes(problem: Problem, placement: Placement, exchanges: list[Exchange]) -> dict[str, int]:
    """total; of the busiest rank (the larger of what it sends and receives); between nodes; and the lower bound."""
    sent, received = np.zeros(problem.ranks, np.int64), np.zeros(problem.ranks, np.int64)
    node, between = problem.cluster.node_of(np.arange(problem.ranks)), 0
    for exchange in exchanges:
        sent += exact_sums(exchange.src, exchange.tile_bytes, problem.ranks)
        received += exact_sums(exchange.dst, exchange.tile_bytes, problem.ranks)
        apart = node[exchange.src] != node[exchange.dst]
        between += int(exchange.tile_bytes[apart].sum())
    return {
        "total": int(sent.sum()),
        "max_rank": int(max(sent.max(), received.max())),
        "inter_node": between,
        "bound": sum(_byte_bound(problem, placement, kind) for kind in problem.batch.kinds),
    }


def _byte_bound(problem: Problem, placement: Placement, kind: str) -> int:
    """KV goes out forward and backward and its gradient comes back, each at least this many tokens."""
    pairs = placement.rank_sums(row_areas(problem.bands[kind], placement.starts), problem.ranks)
    tokens = bounds.foreign_kv_tokens(problem.batch, kind, problem.token_cap, int(pairs.max()))
    return tokens * (2 * problem.model.row_bytes(Tensor.KV) + problem.model.row_bytes(Tensor.DKV))
