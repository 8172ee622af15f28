"""What follows from the columns of programs, of a rank or of all: whose rows are whose, how many heads, what room.

Verifier, simulator, messages and executors ask here. Indexes are used as they stand: `ir.structure` has checked them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from apportion.ir.isa import Tensor
from apportion.ir.ops import IS_HEADLESS, IS_KEY, LIST_OF_OP, LISTS, NO_LIST
from apportion.ir.plan import Ints


def starts_of(op: Ints, count: Ints) -> Ints:
    """int64 [instructions]: the first row of its list, over all ranks, that each instruction consumes.
    op, count: columns of the instructions."""
    lists, starts = LIST_OF_OP[op], np.zeros(len(op), np.int64)
    for number in range(NO_LIST):
        at = np.flatnonzero(lists == number)
        starts[at] = np.cumsum(count[at]) - count[at]
    return starts


def instruction_of(op: Ints, count: Ints, name: str) -> Ints:
    """int64 [rows]: the instruction, over all ranks, that consumes each row of a list.
    op, count: columns of the instructions."""
    at = np.flatnonzero(LIST_OF_OP[op] == LISTS.index(name))
    return np.repeat(at, count[at])


def head_table(q_heads: int, kv_heads: int, head_sets: Sequence[Sequence[int]]) -> Ints:
    """int64 [tensors, none and head sets]: heads of an operand of a tensor with the heads of a set, none for
    all; 1 for tensors without heads."""
    sets = [len(members) for members in head_sets]
    heads: Ints = np.where(IS_KEY[:, None], [kv_heads, *sets], [q_heads, *sets])
    heads[IS_HEADLESS] = 1
    return heads


def arena_table(rank: Ints, tensor: Ints, sizes: Ints, ranks: int) -> Ints:
    """int64 [ranks, tensors]: rows, or head columns, of each work arena; 0 where there is none.
    rank, tensor, sizes: of the arenas."""
    table = np.zeros((ranks, len(Tensor)), np.int64)
    table[rank, tensor] = sizes
    return table
