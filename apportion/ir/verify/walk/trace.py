"""What the walk saw of a program: each rank walked by itself, where it stopped, and what tasks attend to.

For programs in which something is wrong, and for pictures; of a right one `judge` says so, sooner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.tensors import Tensor
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.view import Program
from apportion.ir.verify.walk import judge
from apportion.ir.verify.walk.judge import NOWHERE, PLACES, Posted, Scratch, Sets

_MOST = 64  # ranks of which it is sought what differs


@dataclass(frozen=True)
class Fault:
    """The first thing that is wrong on a rank.

    code: of `judge`, 0 where an operand does not fit. instruction: over all ranks, -1 for the end of the program; item:
    the row of its list, over all ranks. place: 2 * tensor + space; low, high: rows of it; holds, wanted: what they hold
    and what was to be there, addresses of tokens or NOWHERE, or numbers of head sets.
    """

    code: int
    rank: int
    instruction: int
    item: int
    place: int
    low: int
    high: int
    holds: int
    wanted: int


@dataclass(frozen=True, eq=False)
class Trace:
    """faults: of each rank at most one. parts: int32 [pieces, 8], bands of addresses of tasks, each with its task and
    the head set of its queries. complete: whether these are all."""

    faults: tuple[Fault, ...]
    parts: Ints
    complete: bool


def trace(program: Program, homes: Homes, sets: Sets, given: frozenset[Tensor]) -> Trace:
    """given: tensors whose home rows hold values at the start. Raises CapacityError for what is too large to follow."""
    posted = judge.post(program, homes, sets, given)
    if posted is None:
        return Trace((), np.zeros((0, 8), np.int32), False)
    ranks = [range(rank, rank + 1) for rank in range(program.ranks)]
    memory = Scratch(posted, ranks)
    stopped = {one.start: _line(memory) for one in ranks if not memory.walk(one, one.start)}
    before, complete = posted.sends.copy(), True
    faults: list[Fault] = []
    parts: list[Ints] = []
    for one in ranks:
        memory.walk(one, one.start)
        held, found, every = memory.settle_traced()
        complete = complete and every
        parts.append(found)
        parts[-1][:, 6] += posted.ptrs[3][one.start]
        if held < memory.taken and len(faults) < _MOST:
            stopped[one.start] = _untrue(memory, one, before)
        if one.start in stopped:
            faults.append(_fault(posted, one.start, stopped[one.start]))
    return Trace(tuple(faults), np.concatenate(parts), complete)


def _line(memory: Scratch) -> Ints:
    """What the walk noted last."""
    found: Ints = memory.near[PLACES].copy()
    return found


def _untrue(memory: Scratch, ranks: range, before: Ints) -> Ints:
    """Where the first condition of a rank that does not hold was made: it is walked again with room for those before
    it. before: the sends as they were when all ranks were walked, so that it makes the same conditions."""
    memory.posted.sends[:] = before
    memory.walk(ranks, ranks.start)
    held = memory.settle_traced()[0]
    memory.posted.sends[:] = before
    every, memory.conditions = memory.conditions, np.ascontiguousarray(memory.conditions[:, :held])
    memory.walk(ranks, ranks.start)
    memory.conditions = every
    return _line(memory)


def _fault(posted: Posted, rank: int, line: Ints) -> Fault:
    code, place, low, high, holds, wanted, step, item = line[judge.FAULT : judge.ITEM + 1].tolist()
    name = posted.program.list_name(step)
    if name not in (None, "transfers"):  # of which the walk had those of this rank alone
        item += int(posted.ptrs[4 if name == "rowops" else 3][rank])
    if code in (judge.NOT_SAME_TOKENS, judge.PARTIAL_MIXED, judge.WRONG_HOME):
        low, high, holds, wanted = _differing(posted, low, high, holds, wanted)
    elif code not in (judge.READ_OTHER_HEADS, judge.OTHER_KEYS, judge.RESULT_HEADS):
        holds, rows = _address(posted, holds, high - low)
        high = low + rows
    return Fault(code, rank, step, item, place, low, high, holds, wanted)


def _differing(posted: Posted, low: int, high: int, holds: int, wanted: int) -> tuple[int, int, int, int]:
    """Of rows that hold tokens where others are wanted the first run of them that differs, and its addresses."""
    while True:
        address, rows = _address(posted, holds, high - low)
        other, rows = _address(posted, wanted, rows)
        if address != other or low + rows == high:
            return low, low + rows, address, other
        low, holds, wanted = low + rows, holds + rows, wanted + rows


def _address(posted: Posted, token: int, rows: int) -> tuple[int, int]:
    """Of a token, NOWHERE where it is not known, and for how many of so many rows it goes on."""
    address, rows = judge.address_of(posted.sends, posted.parcels, token, rows)
    return max(int(address), NOWHERE), int(rows)
