"""Splits a program into three segments, so that two programs can alternate on a rank.

    dispatch   up to the last launch that depends on no arrival and no computation
    compute    up to the last attention task, and the launches that send its results home
    collect    the rest: waits, sums, forwarding, finish

All ranks cut at the same rounds. So if all alternate in the same way, they launch the rounds of both programs in one
order and, as with a single program, the lowest round in flight can always finish: a rank that has not yet launched it
waits only for lower rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.isa import ATTENTION, Op

#: greater than every round number
NO_ROUND = 2**31
_WAITS = (Op.WAIT,)
#: ops that depend on an arrival, or take so long that no dispatch launch may follow them
_LATE = (*_WAITS, *ATTENTION)


class Cuts(NamedTuple):
    """First rounds of segments: dispatch launches rounds below `compute`, collect launches rounds from `collect` on."""

    compute: int
    collect: int


def own_cuts(op: Ints, round_: Ints) -> Cuts:
    """The cuts of one rank on its own. op, round_: columns of its instructions, [n]."""
    launches, number = op == Op.LAUNCH, np.arange(len(op))
    late = launches & (number >= _first(op, _LATE, 0))
    before_collect = launches & (number < _first(op, _WAITS, _end(np.isin(op, ATTENTION))))
    compute, collect = (round_[mask].tolist() for mask in (late, before_collect))
    return Cuts(min(compute, default=NO_ROUND), max(collect, default=-1) + 1)


def agreed_cuts(ranks: Iterable[Cuts]) -> Cuts:
    """Cuts valid on all ranks: no rank dispatches a round that another launches after a wait or attention, and no rank
    defers to its collect segment a round that another launches before that segment."""
    compute, collect = zip(*ranks, strict=True)
    return Cuts(min(compute), max(collect))


def segment_ends(op: Ints, round_: Ints, cuts: Cuts) -> tuple[int, int]:
    """Instruction numbers at which a rank's dispatch and compute segments end. cuts: common to all ranks."""
    dispatch, launch_end = (_end((op == Op.LAUNCH) & (round_ < cut)) for cut in cuts)
    return dispatch, max(dispatch, launch_end, _end(np.isin(op, ATTENTION)))


def _first(op: Ints, ops: tuple[Op, ...], start: int) -> int:
    """The first instruction from `start` on with one of these ops, or the program's length."""
    matches = np.flatnonzero(np.isin(op[start:], ops))
    return start + int(matches[0]) if len(matches) else len(op)


def _end(mask: Bools) -> int:
    """The end of the last instruction in the mask; 0 if there is none."""
    matches = np.flatnonzero(mask)
    return int(matches[-1]) + 1 if len(matches) else 0
