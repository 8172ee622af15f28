"""A program in three segments, so that two programs can take turns on a rank.

    dispatch   up to the last launch that needs nothing to arrive or to be computed before it
    compute    up to the last attention task, and the launches that send its results home
    collect    the rest: waits, sums, what is passed on, finish

Ranks cut by rounds, the same on all of them. So where all ranks take turns alike, they launch the rounds of both
programs in one order, and as with a single program the lowest round under way can always finish: whoever has yet to
launch it is kept by nothing but waits for lower ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.isa import ATTENTION, Op

#: above all rounds
NO_ROUND = 2**31
_WAITS = (Op.WAIT,)
#: what needs something to have arrived, or takes so long that no launch should come after it
_LATE = (*_WAITS, *ATTENTION)


class Cuts(NamedTuple):
    """The rounds at which segments begin: dispatch launches those below `compute`, collect those from `collect` on."""

    compute: int
    collect: int


def own_cuts(op: Ints, round_: Ints) -> Cuts:
    """Where a rank alone would cut; op, round: its instructions, [n]."""
    launches, number = op == Op.LAUNCH, np.arange(len(op))
    late = launches & (number >= _first(op, _LATE, 0))
    sent = launches & (number < _first(op, _WAITS, _end(np.isin(op, ATTENTION))))
    compute, collect = (round_[chosen].tolist() for chosen in (late, sent))
    return Cuts(min(compute, default=NO_ROUND), max(collect, default=-1) + 1)


def agreed_cuts(ranks: Iterable[Cuts]) -> Cuts:
    """What all ranks can keep to: none dispatches a round that another has to wait or compute for, and none has to
    collect before it has computed."""
    compute, collect = zip(*ranks, strict=True)
    return Cuts(min(compute), max(collect))


def segment_ends(op: Ints, round_: Ints, cuts: Cuts) -> tuple[int, int]:
    """The ends of a rank's dispatch and compute, as numbers of instructions; cuts: those that all ranks agreed on."""
    dispatch, sent = (_end((op == Op.LAUNCH) & (round_ < cut)) for cut in cuts)
    return dispatch, max(dispatch, sent, _end(np.isin(op, ATTENTION)))


def _first(op: Ints, ops: tuple[Op, ...], start: int) -> int:
    """The first instruction from `start` on with one of these ops, or the program's end."""
    found = np.flatnonzero(np.isin(op[start:], ops))
    return start + int(found[0]) if len(found) else len(op)


def _end(chosen: Bools) -> int:
    """After the last that is chosen; 0 without one."""
    found = np.flatnonzero(chosen)
    return int(found[-1]) + 1 if len(found) else 0
