"""Give every block a home rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.errors import CapacityError
from apportion.planner.passes.shard import row_weights
from apportion.planner.problem import Placement, Problem, Shards
from apportion.planner.solvers.lpt import LptResult, lpt, makespan_bound

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Lpt:
    """LPT over pieces under the token cap (FCP, section 4.1). A piece that fits nowhere whole is cut to fill the
    room that is left, lightest ranks first; such pieces are the lightest, so little work moves."""

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        weights, sizes = shards.per_piece(shards.weight), shards.per_piece(shards.lengths)
        allowed = _allowed(problem, shards)
        result = lpt(weights, sizes, problem.ranks, problem.token_cap, problem.speeds, allowed)
        home = result.bin[shards.piece]
        if (home >= 0).all():
            return Placement(shards.starts, home, shards.weight, result.bound)
        starts, home = _fill(problem, shards, home, result, allowed)
        weight = row_weights(problem, starts)
        # what was cut is no longer indivisible: it counts by its parts
        cut = np.repeat(result.bin[shards.piece] < 0, np.diff(np.searchsorted(starts, shards.starts)))
        items = np.concatenate([weights[result.bin >= 0], weight[cut]])
        return Placement(starts, home, weight, makespan_bound(items, problem.speeds))


def _allowed(problem: Problem, shards: Shards) -> list[tuple[int, ...] | None] | None:
    """Ranks that each piece may live on, from the sequences' `home_ranks`."""
    homes = problem.batch.home_ranks
    if not homes:
        return None
    # neighbours that share a block have equal home_ranks (see `Blocks`), so its first sequence tells
    sequence = np.searchsorted(problem.batch.starts, shards.starts[:-1], "right") - 1
    allowed: list[tuple[int, ...] | None] = [None] * shards.pieces
    for piece, index in zip(shards.piece.tolist(), sequence.tolist(), strict=True):
        allowed[piece] = homes.get(index)
    return allowed


def _fill(
    problem: Problem,
    shards: Shards,
    home: Ints,
    result: LptResult,
    allowed: list[tuple[int, ...] | None] | None,
) -> tuple[Ints, Ints]:
    """Cut the blocks without a home along the room that is left; returns starts and homes of the finer blocks."""
    room = (problem.token_cap - result.used).tolist()
    order = np.lexsort((np.arange(problem.ranks), result.load / problem.speeds)).tolist()
    cuts: dict[int, list[tuple[int, int]]] = {}
    for block in np.flatnonzero(home < 0).tolist():
        order = [rank for rank in order if room[rank]]
        only = allowed[int(shards.piece[block])] if allowed else None
        at, end = int(shards.starts[block]), int(shards.starts[block + 1])
        parts = cuts.setdefault(block, [])
        for rank in order:
            if at == end:
                break
            if only is None or rank in only:
                step = min(room[rank], end - at)
                parts.append((at, rank))
                at, room[rank] = at + step, room[rank] - step
        if at < end:
            raise _full(problem, shards, only, allowed)
    return _with_cuts(shards, home, cuts)


def _full(
    problem: Problem,
    shards: Shards,
    only: tuple[int, ...] | None,
    allowed: list[tuple[int, ...] | None] | None,
) -> CapacityError:
    sizes = shards.per_piece(shards.lengths).tolist()
    need = sum(size for size, ranks in zip(sizes, allowed or [], strict=True) if ranks == only)
    return CapacityError(
        f"{need} tokens have home_ranks {only}, which hold at most {problem.token_cap} each, other pieces included: "
        f"raise token_cap or widen home_ranks"
    )


def _with_cuts(shards: Shards, home: Ints, cuts: dict[int, list[tuple[int, int]]]) -> tuple[Ints, Ints]:
    parts = [
        part
        for block, rank in enumerate(home.tolist())
        for part in cuts.get(block, [(int(shards.starts[block]), rank)])
    ]
    starts = np.array([at for at, _ in parts] + [int(shards.starts[-1])], np.int64)
    return starts, np.array([rank for _, rank in parts], np.int64)
