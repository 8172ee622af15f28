"""LPT placement: a home rank for every block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.planner.problem import Placement, PlacePass, Problem, Shards, exact_sums
from apportion.planner.shard.blocks import (
    AUTO_IMBALANCE,
    kind_weights,
    pieces_to_ranks,
    row_times,
    row_weights,
)
from apportion.planner.solvers.contracts import PartitionProblem
from apportion.planner.solvers.partition.lpt import makespan_bound
from apportion.planner.solvers.status import Status, Termination
from apportion.planner.solvers.use import PartitionSolver

#: weight of a kind that is balanced by itself, relative to the others
DOMINANT = 64


@dataclass(frozen=True)
class Lpt(PlacePass):
    """LPT over pieces under the token cap (FCP, section 4.1), or another solver of kind partition; `lpt_near` gathers
    sequences on few nodes. A piece that fits on no rank is cut to fill the remaining room, lightest ranks first; such
    pieces are the lightest, so little work moves. An exact solver never cuts pieces; LPT's placement is used if it is
    lighter. Several attention kinds are weighted to reduce the sum over kinds of their busiest ranks' loads. weigh:
    what to balance: pairs, or task times on the request's hardware, where many short tasks cost more."""

    solver: PartitionSolver = PartitionSolver("lpt")
    weigh: Literal["pairs", "time"] = "pairs"

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        if self.weigh == "time":
            return _place(problem, shards, row_times(problem, shards.starts), self.solver)
        result = lightest_placement(
            problem, lambda factor: _place(problem, shards, _rows(problem, shards, factor), self.solver)
        )
        if self.solver.entry.heuristic:
            return result
        # an exact solver keeps pieces whole; LPT may leave some to be cut
        lpt = PartitionSolver("lpt")
        other = lightest_placement(
            problem, lambda factor: _place(problem, shards, _rows(problem, shards, factor), lpt)
        )
        return min([result, other], key=lambda placement: busiest_load(problem, placement))


def lightest_placement(problem: Problem, place: Callable[[Mapping[str, int]], Placement]) -> Placement:
    """The placement with the smallest sum over kinds of layers x busiest rank, among those that `place` finds when it
    weights the pairs of each kind by its layers, or one kind almost alone; ties go to the first."""
    layers = problem.layers
    first = place(layers)
    if len(layers) == 1:
        return first
    variants = [place({**layers, kind: DOMINANT * count}) for kind, count in layers.items()]
    return min([first, *variants], key=lambda placement: busiest_load(problem, placement))


def busiest_load(problem: Problem, placement: Placement) -> float:
    """Sum over kinds of layers x the busiest rank's pairs over its speed."""
    cost = 0.0
    for kind in problem.bands:
        load = placement.rank_sums(kind_weights(problem, kind, placement.starts), problem.ranks)
        cost += problem.layers[kind] * float((load / problem.speeds).max())
    return cost


def _place(problem: Problem, shards: Shards, balanced_weight: Ints, solver: PartitionSolver) -> Placement:
    """Places blocks. balanced_weight: int64 [blocks], the quantity to balance."""
    weights, case = shards.piece_weights, pieces_to_ranks(problem, shards, balanced_weight)
    solution = None if shards.solved is None or balanced_weight is not shards.weight else shards.solved
    result = solution[1] if solution is not None and solution[0] == solver else solver(case)
    end = None if solver.entry.heuristic else result.termination
    home = result.bin[shards.piece]
    starts, weight, items = shards.starts, shards.weight, weights
    if (home < 0).any():
        starts, home = _cut_into_room(problem, shards, case, result.bin)
        weight = row_weights(problem, starts)
        # cut pieces are no longer indivisible: the bound counts their parts
        cut = np.repeat(result.bin[shards.piece] < 0, np.diff(np.searchsorted(starts, shards.starts)))
        items = np.concatenate([weights[result.bin >= 0], weight[cut]])
    bound = makespan_bound(items, problem.speeds)
    return _with_block_limit(problem, shards, Placement(starts, home, weight, bound, termination=end))


def _with_block_limit(problem: Problem, shards: Shards, placement: Placement) -> Placement:
    """Adds the block limit to the placement's termination if that is why it is uneven and the solver has no other
    limit."""
    if shards.limit is None or placement.termination is not None:
        return placement
    load = placement.rank_sums(placement.weight, problem.ranks)
    busiest, mean = float((load / problem.speeds).max()), float(load.sum() / problem.speeds.sum())
    if busiest <= (1 + AUTO_IMBALANCE) * mean:
        return placement
    end = Termination(Status.FEASIBLE, min(placement.bound, busiest), busiest, shards.limit)
    return replace(placement, termination=end)


def _rows(problem: Problem, shards: Shards, factor: Mapping[str, int]) -> Ints:
    """int64 [blocks]: pairs of each block's queries, weighted by kind."""
    if factor == problem.layers:
        return shards.weight
    parts = [factor[kind] * kind_weights(problem, kind, shards.starts) for kind in problem.bands]
    rows: Ints = np.sum(parts, axis=0, dtype=np.int64)
    return rows


def _cut_into_room(problem: Problem, shards: Shards, case: PartitionProblem, bins: Ints) -> tuple[Ints, Ints]:
    """Cuts the blocks without a home to fill the remaining room; returns starts and homes of the finer blocks."""
    home, allowed, is_placed = bins[shards.piece], case.allowed, bins >= 0
    room = (case.caps - exact_sums(bins[is_placed], case.sizes[is_placed], problem.ranks)).tolist()
    load = exact_sums(bins[is_placed], case.weights[is_placed], problem.ranks)
    order = np.lexsort((np.arange(problem.ranks), load / problem.speeds)).tolist()
    cuts: dict[int, list[tuple[int, int]]] = {}
    for block in np.flatnonzero(home < 0).tolist():
        order = [rank for rank in order if room[rank]]
        home_ranks = allowed[int(shards.piece[block])] if allowed else None
        token, end = int(shards.starts[block]), int(shards.starts[block + 1])
        parts = cuts.setdefault(block, [])
        for rank in order:
            if token == end:
                break
            if home_ranks is None or rank in home_ranks:
                step = min(room[rank], end - token)
                parts.append((token, rank))
                token, room[rank] = token + step, room[rank] - step
        if token < end:
            raise _no_room_error(problem, shards, home_ranks, allowed)
    return _with_cuts(shards, home, cuts)


def _no_room_error(
    problem: Problem,
    shards: Shards,
    home_ranks: tuple[int, ...] | None,
    allowed: Sequence[tuple[int, ...] | None] | None,
) -> CapacityError:
    sizes, caps = shards.per_piece(shards.lengths).tolist(), problem.token_caps
    room = caps.max() if home_ranks is None else caps[list(home_ranks)].max()
    if allowed is None:
        return CapacityError(f"{sum(sizes)} tokens do not fit on ranks that hold {caps.sum()} in total")
    need = sum(size for size, ranks in zip(sizes, allowed, strict=True) if ranks == home_ranks)
    return CapacityError(
        f"{need} tokens have home_ranks {home_ranks}, which hold at most {room} each, other pieces included: "
        f"raise token_cap or widen home_ranks"
    )


def _with_cuts(shards: Shards, home: Ints, cuts: dict[int, list[tuple[int, int]]]) -> tuple[Ints, Ints]:
    parts = [
        part
        for block, rank in enumerate(home.tolist())
        for part in cuts.get(block, [(int(shards.starts[block]), rank)])
    ]
    starts = np.array([token for token, _ in parts] + [int(shards.starts[-1])], np.int64)
    return starts, np.array([rank for _, rank in parts], np.int64)
