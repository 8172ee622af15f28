"""The report of a plan: areas, bytes, slots, rounds, bounds, sizes and imbalance, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.plan.tables import Layout, ProgramSet
from apportion.ir.plan.totals import chosen_keys, communication_volumes, rounds, sum_volumes
from apportion.ir.tensors import FETCHED, PHASES, RETURNED, SIDES, Side
from apportion.planner import bounds
from apportion.planner.inner.groups import Groups
from apportion.planner.inner.lone import LoneSequences
from apportion.planner.lower.inputs import Lowered, Lowering, held_tokens, leading
from apportion.planner.pipeline.headers import home_layout
from apportion.planner.pipeline.placing import PlacedProblem
from apportion.planner.problem import Departure, Placement, Problem, Shards, exact_sums
from apportion.planner.shard.blocks import row_areas
from apportion.planner.solvers.colouring.matching import max_degree
from apportion.planner.solvers.status import Status
from apportion.planner.tasks.rows import Rows


@dataclass(frozen=True)
class PurposeTraffic:
    """Traffic of tiles for one purpose."""

    kind: str
    phase: str
    name: str
    slots: int
    max_degree: int
    rounds: int
    bytes: int

    def repeated(self, turns: int) -> PurposeTraffic:
        """The total over `turns` repetitions with equal shares of the bytes."""
        slots, degree, rounds = (turns * n for n in (self.slots, self.max_degree, self.rounds))
        return replace(self, slots=slots, max_degree=degree, rounds=rounds)

    def combined(self, other: PurposeTraffic) -> PurposeTraffic:
        """The total with concurrent traffic for the same purpose between other ranks."""
        slots, degree = max(self.slots, other.slots), max(self.max_degree, other.max_degree)
        rounds, size = max(self.rounds, other.rounds), self.bytes + other.bytes
        return replace(self, slots=slots, max_degree=degree, rounds=rounds, bytes=size)


def build_report(
    problem: Problem,
    placed: PlacedProblem,
    lowered: Sequence[Lowered],
    programs: Mapping[tuple[str, str], ProgramSet],
    layouts: Mapping[str, Layout],
    parts: list[bytes],
) -> dict[str, Any]:
    """Builds the report of a plan; byte counts are of one attention call of each kind, forward and backward. lowered:
    one for each separately lowered part of the ranks; tiles of all parts move at the same time."""
    placement, lone, groups, low = placed.placement, placed.lone, placed.groups, leading(lowered[0])
    traffic = _merge_traffic([item for part in lowered for item in _all_traffic(problem, part)])
    pairs, fullest = _pairs_per_group(problem, placement, lone, low.rows, groups)
    load = _pairs_per_rank(problem, lowered, layouts)
    mean = float(load.sum()) / problem.speeds.sum()
    block_tokens, heaviest = _largest(placed.shards, placement)
    heaviest /= int(groups.sizes.max())
    sizes = [len(part) for part in parts]
    bound = _makespan_bound(placement, lowered) if lone is None else 0.0
    makespan = bounds.makespan(bound, load, problem.speeds)
    return {
        "recipe": problem.policy.recipe.name,
        "ranks": problem.ranks,
        "tokens": problem.batch.tokens,
        "block_tokens": block_tokens,
        "heaviest_piece_over_mean": _ratio(heaviest, mean),
        "imbalance_bound": max(1.0, _ratio(makespan.bound or 0.0, mean)),
        "imbalance": {
            "compute": _over_mean(load, problem.speeds),
            "tokens": problem.batch.largest_excess(held_tokens(lowered), problem.token_shares),
        },
        "area": {kind: int(kind_pairs.sum()) for kind, kind_pairs in pairs.items()},
        "bytes": sum_volumes(
            communication_volumes(programs, low.sets.sets, problem.model, problem.cluster).values()
        ).summary(),
        "slots": sum(item.slots for item in traffic),
        "max_degree": sum(item.max_degree for item in traffic),
        "rounds": rounds(programs),
        "exchanges": [dict(vars(item)) for item in traffic],
        "bounds": {
            bound.name: bound.to_data()
            for bound in (
                makespan,
                bounds.slots([item.max_degree for item in traffic], [item.slots for item in traffic]),
                _kv_bound(problem, lowered, pairs, fullest, traffic),
            )
        },
        "plan_bytes": {"largest_rank": max(sizes), "total": sum(sizes)},
        "termination": _termination(placement, makespan),
    }


def departures(placed: PlacedProblem, lowered: Sequence[Lowered]) -> tuple[Departure, ...]:
    """Departures of all passes from the request, without duplicates."""
    routes = (low.schedule.routed for part in lowered for low in part.values())
    return tuple(dict.fromkeys([*placed.departures, *(d for item in routes for d in item.departures)]))


def compute_imbalance(problem: Problem, lowered: Sequence[Lowered], layouts: Mapping[str, Layout]) -> float:
    """The busiest rank's load over its speed, divided by total load over total speed, less 1."""
    return _over_mean(_pairs_per_rank(problem, lowered, layouts), problem.speeds)


def _over_mean(load: Floats, speeds: Floats) -> float:
    mean = float(load.sum()) / speeds.sum()
    return _ratio(float((load / speeds).max()), mean) - 1 if mean else 0.0


def _pairs_per_rank(problem: Problem, lowered: Sequence[Lowered], layouts: Mapping[str, Layout]) -> Floats:
    """float64 [ranks]: pairs, or keys chosen by queries, times layers; of the less even phase, if phases differ."""
    equal = all(low is part[kind, PHASES[0]] for part in lowered for (kind, _), low in part.items())
    loads = {phase: np.zeros(problem.ranks) for phase in (PHASES[:1] if equal else PHASES)}
    for kind, phase in lowered[0]:
        if phase in loads:
            pairs = chosen_keys(problem.batch, problem.model, kind, layouts[home_layout(layouts)])
            if pairs is None:
                pairs = np.concatenate([part[kind, phase].pairs for part in lowered])
            loads[phase] += problem.layers[kind] * pairs
    return max(loads.values(), key=lambda load: float((load / problem.speeds).max()))


def _termination(placement: Placement, makespan: bounds.Bound) -> dict[str, Any]:
    """The limit at which planning stopped, and the proven bound on the makespan; `solver`: the same for the solver that
    chose the homes, in its own units."""
    result = placement.termination
    record = {"status": str(Status.FEASIBLE), "limit": None, "bound": makespan.bound, "value": makespan.value}
    if result is None:
        return record
    limit = None if result.limit is None else str(result.limit)
    solver = {"status": str(result.status), "bound": result.bound, "value": result.value, "gap": result.gap}
    return record | {"limit": limit, "solver": solver}


def _largest(shards: Shards, placement: Placement) -> tuple[int, float]:
    """Tokens of the largest block and pairs of the heaviest piece; for recipes without blocks, of the longest and
    heaviest run of tokens that they keep together."""
    if shards.block_tokens:
        return shards.block_tokens, float(shards.piece_weights.max())
    return int(placement.lengths.max()), float(placement.weight.max())


def _makespan_bound(placement: Placement, lowered: Sequence[Lowered]) -> float:
    """Bound on one rank's load. Groups of ranks share their load; groups of several sizes, or a mix of kinds with split
    and with unsplit heads, have no bound other than the mean."""
    sizes = {
        size for part in lowered for low in part.values() for size in np.unique(low.groups.sizes).tolist()
    }
    return placement.bound / sizes.pop() if len(sizes) == 1 else 0.0


def _ratio(value: float, mean: float) -> float:
    return float(value / mean) if mean else 0.0


@dataclass(frozen=True)
class _DeliveredRows:
    """Rows delivered by the tiles of one attention kind, by side: rows times the receiver's heads, for all tiles and
    for those with complete results; and the `max_degree` of all tiles and of query tiles."""

    all: tuple[int, int]
    complete: tuple[int, int]
    degree: int
    query_degree: int


def _delivered_rows(low: Lowering) -> _DeliveredRows:
    groups, edges = low.groups, low.edges
    totals, result_totals = [], []
    queries, keys = low.edges_of["query"], low.edges_of["key"]
    for tiles, heads, results in (
        (queries, low.sets.query_heads, low.whole_results),
        (keys, low.sets.tile_heads, np.zeros(len(keys), bool)),
    ):
        head_counts = exact_sums(groups.of_rank, heads, len(groups))
        moved_rows = tiles.rows * head_counts[tiles.dst] if len(tiles) else np.zeros(0, np.int64)
        totals.append(int(moved_rows.sum()))
        result_totals.append(int(moved_rows[results].sum()))
    query_degree = max_degree(queries.src, queries.dst, len(groups))
    degree = max_degree(edges.src, edges.dst, len(groups))
    return _DeliveredRows((totals[0], totals[1]), (result_totals[0], result_totals[1]), degree, query_degree)


def _all_traffic(problem: Problem, lowered: Lowered) -> list[PurposeTraffic]:
    delivered = {id(low): _delivered_rows(low) for low in lowered.values()}
    return [
        item
        for (kind, phase), low in lowered.items()
        for item in _traffic(problem, kind, phase, low, delivered[id(low)])
    ]


def _merge_traffic(traffic: list[PurposeTraffic]) -> list[PurposeTraffic]:
    """Merges traffic for the same purpose, which moves at the same time."""
    merged: dict[tuple[str, str, str], PurposeTraffic] = {}
    for item in traffic:
        key = item.kind, item.phase, item.name
        merged[key] = merged[key].combined(item) if key in merged else item
    return list(merged.values())


def _traffic(
    problem: Problem, kind: str, phase: str, low: Lowering, delivered: _DeliveredRows
) -> list[PurposeTraffic]:
    items = _exchange_bytes(problem, kind, low, phase, "in")
    items.append(_tiles(problem, kind, phase, low, delivered, "fetch"))
    if phase == "backward" or low.tasks.queries_move:
        items.append(_tiles(problem, kind, phase, low, delivered, "return"))
    return items + _exchange_bytes(problem, kind, low, phase, "out")


def _tiles(
    problem: Problem, kind: str, phase: str, low: Lowering, delivered: _DeliveredRows, name: str
) -> PurposeTraffic:
    """Traffic of tiles on their way out, or of sums on their way back."""
    schedule, model, size = low.schedule, problem.model, 0
    tensors, results = (FETCHED, False) if name == "fetch" else (RETURNED, True)
    for side, rows, result_rows in zip(SIDES, delivered.all, delivered.complete, strict=True):
        row_bytes = sum(model.sent_bytes(tensor, 1) for tensor in tensors[side, phase])
        size += row_bytes * rows
        if results and result_rows:
            size += (sum(map(model.sent_result_bytes, tensors[side, phase])) - row_bytes) * result_rows
    degree = delivered.query_degree if results and phase == "forward" else delivered.degree
    item = PurposeTraffic(kind, phase, name, schedule.slots, degree, schedule.rounds, size)
    return item.repeated(low.sets.tile_turns)


def _exchange_bytes(problem: Problem, kind: str, low: Lowering, phase: str, way: str) -> list[PurposeTraffic]:
    exchange, model = low.exchange, problem.model
    if exchange is None:
        return []
    dst, tensors = exchange.dst[exchange.moved_copies], FETCHED if way == "in" else RETURNED

    def head_bytes(side: Side) -> int:
        results = way == "out" and exchange.sends_results(phase, side)
        bytes_of = model.sent_result_bytes if results else partial(model.sent_bytes, heads=1)
        return sum(map(bytes_of, tensors[side, phase]))

    queries, keys = map(head_bytes, SIDES)
    heads = low.sets.query_heads[dst] * queries + low.sets.key_heads[dst] * keys
    size = int((exchange.pieces.rows[exchange.piece[exchange.moved_copies]] * heads).sum())
    slots, name = exchange.slots, f"{'ulysses' if low.groups.split else 'reshuffle'}_{way}"
    item = PurposeTraffic(kind, phase, name, slots.slots, slots.max_degree, slots.rounds, size)
    return [item.repeated(low.sets.turns)]


def _pairs_per_group(
    problem: Problem, placement: Placement, lone: LoneSequences | None, rows: Rows, groups: Groups
) -> tuple[dict[str, Ints], int]:
    """kind -> int64 [groups], pairs of the queries with homes in each group of ranks; and tokens of the fullest
    group."""
    starts, home = placement.starts, placement.home
    if lone is not None:
        starts, home = lone.in_groups(rows, groups.of_rank)
    pairs = {
        kind: exact_sums(home, row_areas(bands, starts), len(groups)) for kind, bands in problem.bands.items()
    }
    return pairs, int(exact_sums(home, np.diff(starts), len(groups)).max())


def _kv_bound(
    problem: Problem,
    lowered: Sequence[Lowered],
    pairs: Mapping[str, Ints],
    fullest: int,
    traffic: list[PurposeTraffic],
) -> bounds.Bound:
    """The bound on bytes of KV, sent forward and backward, and of returned KV gradients, between ranks or groups of
    ranks."""
    low = leading(lowered[0])
    value = sum(item.bytes for item in traffic if item.name in ("fetch", "return"))
    queries_move = any(low.tasks.queries_move for part in lowered for low in part.values())
    caps = {kind: int(kind_pairs.max()) for kind, kind_pairs in pairs.items()}
    # groups of an uncapped place pass may exceed their ranks' caps
    cap = max(problem.token_cap * int(low.groups.sizes.max()), fullest)
    return bounds.kv_bytes(problem.batch, problem.model, cap, caps, float(value), queries_move)
