"""How the rounds of a program fit together: which transfer meets which, and which wait completes which launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import Op, Tensor
from apportion.ir.jit import jit
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
    mate = np.full(len(transfers), UNMATCHED, np.int64)
    _match(
        launches.order,
        launches.ptr,
        program.starts,
        instructions["count"],
        instructions.rank,
        transfers.data,
        transfers.rank,
        program.ranks,
        mate,
    )
    return Meeting(mate, _agreed(program, mate), _launch_of_wait(program))


def _agreed(program: Program, mate: Ints) -> Bools:
    transfers, operands = program["transfers"], program["operands"]
    # one number for tensor, rows and heads; equal numbers of different triples need 2**40 rows
    kind = (operands["rows"] * (max(Tensor) + 1) + operands["tensor"]) * len(
        program.q_sets.size
    ) + program.same_heads
    mine = kind[transfers["operand"] + operands.ptr[transfers.rank]]
    return (mate >= 0) & (mine == mine[mate])


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


@jit
def _match(
    order: Ints,
    ptr: Ints,
    starts: Ints,
    counts: Ints,
    rank_of: Ints,
    transfers: Ints,
    owner: Ints,
    ranks: int,
    mate: Ints,
) -> None:
    """Pairs the k-th send i -> j of each round with the k-th receive of j from i. Linear in the transfers.

    Two sets of queues, both linked through `after`: sends by destination, filled for the whole round in the order
    of source ranks; receives by source, filled for one destination at a time.
    """
    sent, sent_last = np.full(ranks, -1), np.full(ranks, -1)
    due, due_last = np.full(ranks, -1), np.full(ranks, -1)
    after = np.full(transfers.shape[1], -1)
    for turn in range(len(ptr) - 1):
        for launch in order[ptr[turn] : ptr[turn + 1]]:
            for t in range(starts[launch], starts[launch] + counts[launch]):
                if transfers[0, t] == 1:
                    _append(sent, sent_last, after, transfers[1, t], t)
        for launch in order[ptr[turn] : ptr[turn + 1]]:
            rank = rank_of[launch]
            for t in range(starts[launch], starts[launch] + counts[launch]):
                if transfers[0, t] == 0:
                    _append(due, due_last, after, transfers[1, t], t)
            t = sent[rank]
            while t >= 0:
                source = owner[t]
                other = due[source]
                if other >= 0:
                    mate[t], mate[other] = other, t
                    due[source] = after[other]
                t = after[t]
            sent[rank] = -1
            for t in range(starts[launch], starts[launch] + counts[launch]):
                due[transfers[1, t]] = -1
        for launch in order[ptr[turn] : ptr[turn + 1]]:
            for t in range(starts[launch], starts[launch] + counts[launch]):
                sent[transfers[1, t]] = -1


@jit
def _append(head: Ints, last: Ints, after: Ints, queue: int, item: int) -> None:
    if head[queue] < 0:
        head[queue] = item
    else:
        after[last[queue]] = item
    last[queue] = item
    after[item] = -1
