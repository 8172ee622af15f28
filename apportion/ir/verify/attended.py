"""Attention of tasks as bands of tokens, and exact comparison of bands: areas and overlaps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion._core import verify as core
from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.ir.orders import stable_order

MOST = 16  # reported overlaps
_FREE_STEPS = 2**26  # comparisons of two bands that are allowed in any case: a tenth of a second
_STEPS_PER_BAND = 512
_FREE_PIECES, _PIECES_PER_TASK = 2**22, 64


@dataclass(frozen=True, eq=False)
class Tasks:
    """The attention of a program in pieces of global tokens.

    bands: int64 [6, pieces], clipped; task: int64 [pieces], each piece's row in the task list; heads: int64 [pieces],
    the head set of its queries. complete: False if a dataflow fault hides the tokens of some tasks. multiplicities:
    int64 [lists, heads], if pieces belong to lists (`lists.py`) instead of tasks: how often each head has each list;
    `heads` is then the list of each piece, and `task` is empty.
    """

    bands: Ints
    task: Ints
    heads: Ints
    complete: bool
    multiplicities: Ints | None = None


def most_pieces(tasks: int) -> int:
    """The limit on token runs for `tasks` tasks."""
    return _FREE_PIECES + _PIECES_PER_TASK * tasks


def too_many_pieces_error(limit: int) -> CapacityError:
    """The error for tasks with more pieces than the limit."""
    return CapacityError(f"the tasks fall into more than {limit} runs of tokens: too many to verify")


def areas_inside(bands: Ints, mask: Ints) -> tuple[Ints, Ints]:
    """Two int64 [tasks]: the number of pairs of each task, and of those that the mask allows."""
    budget = _FREE_STEPS + _STEPS_PER_BAND * (bands.shape[1] + mask.shape[1])
    areas = core.measure(bands, mask, budget)
    if areas is None:
        raise CapacityError(
            f"tasks and mask overlap in more than {budget} pairs of bands: too many to verify"
        )
    return areas


def corner_order(bands: Ints) -> Ints:
    """The sorting order of bands by (q0, k0)."""
    return stable_order(bands[0] * (int(bands[3].max(initial=0)) + 1) + bands[2])


def overlaps(bands: Ints) -> Ints:
    """int64 [n, 3]: (piece, later piece, number of shared pairs) of pieces that share a pair; at most `MOST`."""
    budget = _FREE_STEPS + _STEPS_PER_BAND * bands.shape[1]
    pairs = core.sweep(bands, corner_order(bands), budget, MOST)
    if pairs is None:
        raise CapacityError(f"the tasks overlap in more than {budget} pairs of bands: too many to verify")
    return pairs.T


def is_exact(bands: Ints, mask: Ints, area: int) -> bool:
    """True if bands [6, pieces] exactly cover a mask [6, bands] of `area` pairs; both int64. Raises CapacityError."""
    areas, inner_areas = areas_inside(bands, mask)
    return bool(np.array_equal(areas, inner_areas)) and int(areas.sum()) == area and not len(overlaps(bands))
