"""How much attention programs compute."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from apportion.ir.bands import area
from apportion.ir.plan import Header, ProgramSet


def pairs(programs: ProgramSet, header: Header) -> NDArray[np.float64]:
    """[ranks] pairs of (query, key) that each rank's forward programs compute, over heads."""
    tasks, operands = programs["tasks"], programs["operands"]
    rank = tasks.rank_of_row()
    first = operands.ptr[:-1][rank]
    rows = [operands["rows"][first + tasks[side]].astype(np.int64) for side in ("q", "kv")]
    zero = np.zeros_like(rows[0])
    bands = np.stack([zero, rows[0], zero, rows[1], tasks["dmin"], tasks["dmax"]], axis=1).astype(np.int64)
    heads = np.array([header.q_heads, *(len(heads) for heads in header.head_sets)], np.int64)
    computed = area(bands) * heads[operands["heads"][first + tasks["q"]]]
    return np.asarray(np.bincount(rank, computed, programs.ranks), np.float64)
