"""How the rounds of a program fit together: which transfer meets which, and which wait completes which launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from apportion.ir.isa import Op
from apportion.ir.jit import lean
from apportion.ir.plan import Ints

if TYPE_CHECKING:
    from apportion.ir.verify.view import Program

Bools = NDArray[np.bool_]

UNMATCHED = -1

# columns of the ends of transfers
PEER, OWNER, TILE, AFTER = range(4)


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
    mate, agreed = np.full(len(transfers), UNMATCHED), np.zeros(len(transfers), bool)
    _match(
        launches.order,
        launches.ptr,
        program.starts,
        instructions["count"],
        instructions.rank,
        transfers.data,
        transfers.ptr,
        program["operands"].ptr,
        program.facts.tile,
        np.empty((len(transfers), 4), _narrow(program)),
        np.full((4, program.ranks), UNMATCHED, np.int64),
        mate,
        agreed,
    )
    return Meeting(mate, agreed, _launch_of_wait(program))


def _narrow(program: Program) -> type[np.signedinteger[Any]]:
    """Of two types the smaller one that holds what `_match` notes: half the bytes are half the time."""
    largest = max(int(program.facts.tile.max(initial=0)), len(program["transfers"]))
    return np.int32 if largest < 2**31 else np.int64


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
    transfers: Ints,
    transfer_ptr: Ints,
    bases: Ints,
    tile: Ints,
    ends: Ints,
    queues: Ints,
    mate: Ints,
    agreed: Bools,
) -> None:
    """Pairs the k-th send i -> j of each round with the k-th receive of j from i. Linear in the transfers.

    ends: [transfers, 4], filled here: twice the peer, plus 1 for a send; the rank; the tile that is moved; the next
    transfer of a queue. The rounds visit the ranks' rows in leaps, each of which costs a line of the cache: all that
    they need of a row is in one. queues: int64 [4, ranks], first and last of two sets of queues: sends by
    destination, filled for the whole round in the order of source ranks; receives by source, filled for one
    destination at a time.
    """
    for rank in range(len(transfer_ptr) - 1):
        for t in range(transfer_ptr[rank], transfer_ptr[rank + 1]):
            ends[t, PEER], ends[t, OWNER] = 2 * transfers[1, t] + transfers[0, t], rank
            ends[t, TILE] = tile[bases[rank] + transfers[2, t]]
    for turn in range(len(ptr) - 1):
        for i in range(ptr[turn], ptr[turn + 1]):
            launch = order[i]
            for t in range(starts[launch], starts[launch] + counts[launch]):
                if ends[t, PEER] & 1:
                    _append(queues, 0, ends, t)
        for i in range(ptr[turn], ptr[turn + 1]):
            launch = order[i]
            for t in range(starts[launch], starts[launch] + counts[launch]):
                if not ends[t, PEER] & 1:
                    _append(queues, 2, ends, t)
            t = queues[0, rank_of[launch]]
            while t >= 0:
                source = ends[t, OWNER]
                other = queues[2, source]
                if other >= 0:
                    mate[t], mate[other] = other, t
                    agreed[t] = agreed[other] = ends[t, TILE] == ends[other, TILE]
                    queues[2, source] = ends[other, AFTER]
                t = ends[t, AFTER]
            queues[0, rank_of[launch]] = -1
            for t in range(starts[launch], starts[launch] + counts[launch]):
                queues[2, ends[t, PEER] >> 1] = -1
        for i in range(ptr[turn], ptr[turn + 1]):
            launch = order[i]
            for t in range(starts[launch], starts[launch] + counts[launch]):
                queues[0, ends[t, PEER] >> 1] = -1


@lean
def _append(queues: Ints, which: int, ends: Ints, item: int) -> None:
    queue = ends[item, PEER] >> 1
    if queues[which, queue] < 0:
        queues[which, queue] = item
    else:
        ends[queues[which + 1, queue], AFTER] = item
    queues[which + 1, queue] = item
    ends[item, AFTER] = -1
