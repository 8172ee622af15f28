"""How the rounds of a program fit together: which transfer meets which, and which wait completes which launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import Op, Tensor
from apportion.ir.jit import lean
from apportion.ir.plan import Ints

if TYPE_CHECKING:
    from apportion.ir.verify.view import Program

Bools = NDArray[np.bool_]

UNMATCHED = -1


@dataclass(frozen=True, eq=False)
class Meeting:
    """How the rounds of a program fit together.

    mate: int64 [transfers], the transfer that each one meets, or UNMATCHED. agreed: bool
    [transfers], both sides name the same tensor, rows and heads. launch_of: int64 [instructions], for a
    wait the launch that it completes, for a launch its wait; -1 elsewhere and where there is none.
    """

    mate: Ints
    agreed: Bools
    launch_of: Ints


def meet(program: Program) -> Meeting:
    instructions, launches, transfers = program["instructions"], program.launches, program["transfers"]
    # narrow columns: the rounds visit the ranks' rows in leaps, and half the bytes are half the time
    mate, after = (np.full(len(transfers), UNMATCHED, np.int32) for _ in range(2))
    _match(
        launches.order,
        launches.ptr,
        program.starts,
        instructions["count"],
        instructions.rank,
        (transfers["peer"] * 2 + transfers["send"]).astype(np.int32),
        transfers.rank.astype(np.int32),
        np.full((4, program.ranks), UNMATCHED, np.int64),
        after,
        mate,
    )
    mate = mate.astype(np.int64)
    return Meeting(mate, _agreed(program, mate), _launch_of_wait(program))


def _agreed(program: Program, mate: Ints) -> Bools:
    transfers, operands = program["transfers"], program["operands"]
    # one number for tensor, rows and heads; equal numbers of different triples need 2**40 rows
    kind = (operands["rows"] * (max(Tensor) + 1) + operands["tensor"]) * len(
        program.q_sets.size
    ) + program.same_heads
    mine = kind[transfers["operand"] + operands.ptr[transfers.rank]]
    agreed: Bools = (mate >= 0) & (mine == mine[mate])
    return agreed


def _launch_of_wait(program: Program) -> Ints:
    """Launches and waits of a (rank, round) share a key; the first wait of a launch is its partner."""
    instructions = program["instructions"]
    key = instructions.rank * (int(instructions["round"].max(initial=0)) + 1) + instructions["round"]
    partner = np.full(len(instructions), -1, np.int64)
    at = np.flatnonzero(instructions["op"] == Op.LAUNCH)
    if len(at) == 0:
        return partner
    order = at[np.argsort(key[at], kind="stable")]
    waits = np.flatnonzero(instructions["op"] == Op.WAIT)
    found = np.minimum(np.searchsorted(key[order], key[waits]), len(order) - 1)
    launch = order[found]
    paired = key[launch] == key[waits]
    partner[waits[paired]] = launch[paired]
    partner[launch[paired][::-1]] = waits[paired][::-1]  # the first one is written last
    return partner


@lean
def _match(
    order: Ints,
    ptr: Ints,
    starts: Ints,
    counts: Ints,
    rank_of: Ints,
    ends: Ints,
    owner: Ints,
    queues: Ints,
    after: Ints,
    mate: Ints,
) -> None:
    """Pairs the k-th send i -> j of each round with the k-th receive of j from i. Linear in the transfers.

    ends: int32 [transfers], twice the peer, plus 1 for a send. owner, after, mate: int32 [transfers].
    queues: int64 [4, ranks], first and last of two sets of queues, both linked through `after`: sends by
    destination, filled for the whole round in the order of source ranks; receives by source, filled for one
    destination at a time.
    """
    for turn in range(len(ptr) - 1):
        for i in range(ptr[turn], ptr[turn + 1]):
            launch = order[i]
            for t in range(starts[launch], starts[launch] + counts[launch]):
                if ends[t] & 1:
                    _append(queues, 0, after, ends[t] >> 1, t)
        for i in range(ptr[turn], ptr[turn + 1]):
            launch = order[i]
            for t in range(starts[launch], starts[launch] + counts[launch]):
                if not ends[t] & 1:
                    _append(queues, 2, after, ends[t] >> 1, t)
            t = queues[0, rank_of[launch]]
            while t >= 0:
                source = owner[t]
                other = queues[2, source]
                if other >= 0:
                    mate[t], mate[other] = other, t
                    queues[2, source] = after[other]
                t = int(after[t])
            queues[0, rank_of[launch]] = -1
            for t in range(starts[launch], starts[launch] + counts[launch]):
                queues[2, ends[t] >> 1] = -1
        for i in range(ptr[turn], ptr[turn + 1]):
            launch = order[i]
            for t in range(starts[launch], starts[launch] + counts[launch]):
                queues[0, ends[t] >> 1] = -1


@lean
def _append(queues: Ints, which: int, after: Ints, queue: int, item: int) -> None:
    if queues[which, queue] < 0:
        queues[which, queue] = item
    else:
        after[queues[which + 1, queue]] = item
    queues[which + 1, queue] = item
    after[item] = -1
