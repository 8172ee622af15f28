"""What a round puts on the wire: the tiles between two ranks in one direction are one message.

    transfers of a launch    → 2 KV[0:512)   → 5 Q[0:64)   → 2 KV[512:900)        ← 2 dKV[0:128)
    messages                 → 2 (both KV tiles, in this order)   → 5              ← 2

A tile is its rows' numbers as they lie in a work arena (fused tensors: one row after another, k beside v), or one
part after the other (o, then lse). Parts start at multiples of `ALIGNMENT` bytes, so that any dtype can view them.

A message is *direct* where its bytes already lie in memory as they travel; the others are *staged*: copied into a
buffer when the round is launched, and out of one when it was waited for. Results are, and gradients that are rounded on
their way (`Header.narrows`). Executors and simulator go by this rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from apportion._core import messages as core
from apportion.ir.arrays import Bools, Ints
from apportion.ir.isa import ALL_TO_ALL, RESULTS, Op
from apportion.ir.orders import stable_order
from apportion.ir.plan.ops import IS_HEADLESS
from apportion.ir.plan.programs import arena_table, head_table
from apportion.ir.plan.tables import Header, ProgramSet
from apportion.ir.request.model import ELEMENT_BYTES
from apportion.ir.tensors import HEADLESS, Space, Tensor

#: where each part of a message starts
ALIGNMENT = 16

#: tensors of one array in arenas; the home rows of KV are two arrays, which the caller passes in
_ONE_ARRAY = frozenset(t for t in Tensor if t.contents.fused or len(t.contents.parts) == 1)

_IS_ONE = np.array([[t in _ONE_ARRAY and t != Tensor.KV, t in _ONE_ARRAY] for t in Tensor])  # [tensor, space]


@dataclass(frozen=True, eq=False)
class Messages:
    """of: int64 [transfers], the message of each. Of each message, all [messages]: instruction: int64, its launch,
    counted over the instructions of all ranks; peer: int64; send, staged: bool. A launch's messages are side by side,
    those it receives first, each side by peer."""

    of: Ints
    instruction: Ints
    peer: Ints
    send: Bools
    staged: Bools

    def __len__(self) -> int:
        return len(self.peer)


class MessageGroups(NamedTuple):
    """Transfers by message, these in the order of their first tiles. of: int32 [transfers], the message of each; first:
    int32 [messages], a message's first transfer; staged: bool [messages]."""

    of: Ints
    first: Ints
    staged: Bools


class _OperandMemory(NamedTuple):
    """Where operands lie. tensor, space, row, rows, heads: integers [operands]. columns, row_bytes: int64 [tensors,
    none and head sets], what a row of an operand takes; width: int64 [ranks, tensors * spaces], head columns of the
    array that holds them, 0 where there are several arrays, or numbers change their dtype on the wire; ordered: bool
    [none and head sets], whether its heads are 0, 1, ..., as home rows have them."""

    tensor: Ints
    space: Ints
    row: Ints
    rows: Ints
    heads: Ints
    columns: Ints
    row_bytes: Ints
    width: Ints
    ordered: Bools


class _LaunchLists(NamedTuple):
    """Launches and their transfers, rank after rank. tiles, rank, first: int64 [launches], how many, and where the
    operands of the rank begin; swapped: bool [launches], whether all its messages are staged; send, peer, operand:
    integers [transfers]."""

    tiles: Ints
    rank: Ints
    first: Ints
    swapped: Bools
    send: Ints
    peer: Ints
    operand: Ints


def find_messages(programs: ProgramSet, header: Header) -> Messages:
    """The messages of the programs of one rank, or of many."""
    groups, table = group_tiles(programs, header), programs["transfers"]
    launches, count = _launches(programs)
    at = np.repeat(launches, count)[groups.first]
    send, peer = (table[name][groups.first].astype(np.int64) for name in ("send", "peer"))
    order = stable_order((at * 2 + send) * header.ranks + peer)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return Messages(number[groups.of], at[order], peer[order], send[order] == 1, groups.staged[order])


def group_tiles(programs: ProgramSet, header: Header) -> MessageGroups:
    """As `find_messages`, without order."""
    lists, memory = _lists(programs), _memory(programs, header)
    return MessageGroups(*core.group(lists, memory, header.ranks, ALIGNMENT))


def _lists(programs: ProgramSet) -> _LaunchLists:
    launches, count = _launches(programs)
    instructions, table = programs["instructions"], programs["transfers"]
    rank = instructions.rank_of_row()[launches]
    # an all-to-all is one buffer; results are rounded on their way
    swapped = instructions["mode"][launches] & (ALL_TO_ALL | RESULTS) > 0
    return _LaunchLists(count, rank, programs["operands"].ptr[rank], swapped, *table.values)


def _launches(programs: ProgramSet) -> tuple[Ints, Ints]:
    """int64 [launches]: the launch instructions, and the transfers of each."""
    instructions = programs["instructions"]
    launches = np.flatnonzero(instructions["op"] == Op.LAUNCH)
    return launches, instructions.wide("count")[launches]


def _memory(programs: ProgramSet, header: Header) -> _OperandMemory:
    operands, arenas = programs["operands"], programs["arenas"]
    columns = head_table(header.q_heads, header.kv_heads, header.head_sets)
    width = np.zeros((programs.ranks, len(Tensor), len(Space)), np.int64)
    width[:, :, Space.HOME] = columns[:, 0]
    width[:, :, Space.WORK] = arena_table(
        arenas.rank_of_row(), arenas["tensor"], arenas["heads"], programs.ranks
    )
    width[:, IS_HEADLESS] = 1
    tensor, space, row, rows, heads = (operands[name] for name in ("tensor", "space", "row", "rows", "heads"))
    row_bytes = columns * _number_bytes(header)[:, None]
    ordered = np.array(
        [True, *(members == tuple(range(len(members))) for members in map(tuple, header.head_sets))]
    )
    as_held = np.array([not header.narrows(tensor) for tensor in Tensor])
    width *= _IS_ONE & as_held[:, None]
    arrays = width.reshape(programs.ranks, -1)
    return _OperandMemory(tensor, space, row, rows, heads, columns, row_bytes, arrays, ordered)


def _number_bytes(header: Header) -> Ints:
    """int64 [tensors]: bytes of a row of one head; 1 for the headless, whose width a plan does not know."""
    model, wide = ELEMENT_BYTES[header.dtype], max(4, ELEMENT_BYTES[header.dtype])
    found = np.ones(len(Tensor), np.int64)
    for tensor in set(Tensor) - HEADLESS:
        widths = tensor.contents.widths(header.head_dim, header.v_head_dim, 0)
        found[tensor] = sum(max(width, 1) for width in widths) * (wide if tensor.contents.wide else model)
    return found
