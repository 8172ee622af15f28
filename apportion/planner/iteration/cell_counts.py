"""How many cells the placements of an iteration have, counted before any is made: few hostile bytes ask for many."""

from __future__ import annotations

import numpy as np

from apportion.ir.arrays import Ints, group_of, within
from apportion.ir.errors import DecodeError
from apportion.planner.pipeline.placing import Placed
from apportion.planner.problem import Problem

#: for the cells of an iteration, the blocks of queries in an attention kind, and its cells that an execution places:
#: about 1.4 GB of any of these
MOST_CELLS, MOST_PLACED = 1 << 24, 1 << 22


def check_cells(cells: int) -> None:
    if cells > MOST_CELLS:
        raise DecodeError(f"assignment: its blocks make {cells} cells or more, at most {MOST_CELLS} are read")


def cells_of(placed: Placed) -> int:
    placement = placed.placement
    return counted_cells(
        placed.inner, placement.starts, placement.head_groups if placement.execution is not None else None
    )


def counted_cells(problem: Problem, starts: Ints, executed: int | None) -> int:
    """Cells of all attention kinds, or more than `MOST_CELLS`. executed: head groups whose cells are placed by
    themselves."""
    cells = [count_cells(bands, starts) for bands in problem.bands.values()]
    if executed is not None and executed * max(cells) > MOST_PLACED:
        return MOST_CELLS + 1
    return (executed or 1) * sum(cells)


def count_cells(bands: Ints, starts: Ints) -> int:
    """How many cells `cut_cells` makes of these; more than `MOST_CELLS` where they have more than `MOST_PLACED` blocks
    of queries. Takes time and memory for these blocks alone."""
    first = np.maximum(np.searchsorted(starts, bands[:, 0], "right") - 1, 0)
    blocks = np.maximum(np.searchsorted(starts, bands[:, 1], "left") - first, 0)
    if max(int(blocks.sum()), len(starts)) > MOST_PLACED:
        return MOST_CELLS + 1
    of = group_of(blocks)
    block = within(blocks) + first[of]
    q0, q1, k0, k1, dmin, dmax = bands[of].T
    q0, q1 = np.maximum(q0, starts[block]), np.minimum(q1, starts[block + 1])
    k0, k1 = np.maximum(k0, q0 - dmax), np.minimum(k1, q1 - dmin)
    keys = np.searchsorted(starts, k1, "left") - np.searchsorted(starts, k0, "right") + 1
    return int(keys[(q0 < q1) & (k0 < k1)].sum())
