"""What a round puts on the wire: the tiles between two ranks in one direction are one message.

    transfers of a launch    → 2 KV[0:512)   → 5 Q[0:64)   → 2 KV[512:900)        ← 2 dKV[0:128)
    messages                 → 2 (both KV tiles, in this order)   → 5              ← 2

A tile is its rows' numbers as they lie in a work arena (`FUSED` tensors: one row after another, k beside v), or one
part after the other (o, then lse). Parts start at multiples of `ALIGNMENT` bytes, so that any dtype can view them.

A message is *direct* where its bytes already lie in memory as they travel; the others are *staged*: copied into a
buffer when the round is launched, and out of one when it was waited for. Executors and simulator go by this rule.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.ir.isa import ALL_TO_ALL, HEADLESS, KV_SIDE, Op, Space, Tensor
from apportion.ir.model import ELEMENT_BYTES
from apportion.ir.plan import Header, Ints, ProgramSet

#: where each part of a message starts
ALIGNMENT = 16

#: tensors whose parts lie side by side in each row and head of an arena: k and v, dk and dv, lse and delta
FUSED = frozenset({Tensor.KV, Tensor.DKV, Tensor.DELTA})
#: tensors of one array in arenas; the home rows of KV are two arrays, which the caller passes in
_ONE_ARRAY = FUSED | {Tensor.Q, Tensor.DX, Tensor.DQ, Tensor.DO}

_IS_ONE = np.array([[t in _ONE_ARRAY and t != Tensor.KV, t in _ONE_ARRAY] for t in Tensor])  # [tensor, space]
_IS_KV, _IS_HEADLESS = (np.array([t in group for t in Tensor]) for group in (KV_SIDE, HEADLESS))


@dataclass(frozen=True, eq=False)
class Messages:
    """of: int64 [transfers], the message of each. Of each message, all [messages]: instruction: int64, its launch,
    counted over the instructions of all ranks; peer: int64; send, staged: bool. A launch's messages are side by side,
    those it receives first, each side by peer."""

    of: Ints
    instruction: Ints
    peer: Ints
    send: Ints
    staged: Ints

    def __len__(self) -> int:
        return len(self.peer)


def find_messages(programs: ProgramSet, header: Header) -> Messages:
    """The messages of the programs of one rank, or of many."""
    table, instructions = programs["transfers"], programs["instructions"]
    launches = np.flatnonzero(instructions["op"] == Op.LAUNCH)
    launch = np.repeat(launches, instructions["count"][launches])
    key = (launch * 2 + table["send"]) * header.ranks + table["peer"].astype(np.int64)
    keys, first, of = np.unique(key, return_index=True, return_inverse=True)
    staged = np.zeros(len(keys), bool)
    np.logical_or.at(staged, of, ~_lies_ready(programs, header))
    order = np.argsort(of, kind="stable")
    inside = of[order[1:]] == of[order[:-1]]
    staged[of[order[1:]][inside & _is_apart(programs, header, order)]] = True
    at = launch[first]
    staged |= instructions["mode"][at] == ALL_TO_ALL
    return Messages(of, at, table["peer"][first].astype(np.int64), table["send"][first] == 1, staged)


def _operand_of(programs: ProgramSet) -> Ints:
    """int64 [transfers]: the operand of each, counted over the operands of all ranks."""
    first = np.repeat(programs["operands"].ptr[:-1], np.diff(programs["transfers"].ptr))
    return programs["transfers"]["operand"] + first


def _lies_ready(programs: ProgramSet, header: Header) -> Ints:
    """bool [transfers]: whether the operand is one piece of memory: all the columns of one array."""
    found, at = programs["operands"], _operand_of(programs)
    tensor, space, heads = (found[name][at].astype(np.int64) for name in ("tensor", "space", "heads"))
    ready: Ints = _IS_ONE[tensor, space] & (
        _columns(header, tensor, heads) == _width(programs, header, tensor, space)
    )
    return ready


def _columns(header: Header, tensor: Ints, heads: Ints) -> Ints:
    """int64 [n]: head columns of operands."""
    sizes = np.array([0, *map(len, header.head_sets)])
    whole = np.where(_IS_KV[tensor], header.kv_heads, header.q_heads)
    return np.where(_IS_HEADLESS[tensor], 1, np.where(heads == 0, whole, sizes[heads]))


def _width(programs: ProgramSet, header: Header, tensor: Ints, space: Ints) -> Ints:
    """int64 [transfers]: head columns of the array that holds the operand."""
    arenas = programs["arenas"]
    work = np.zeros((programs.ranks, len(Tensor)), np.int64)
    work[arenas.rank_of_row(), arenas["tensor"]] = arenas["heads"]
    held = work[programs["transfers"].rank_of_row(), tensor]
    home = _columns(header, tensor, np.zeros_like(tensor))
    return np.where(_IS_HEADLESS[tensor], 1, np.where(space == Space.WORK, held, home))


def _is_apart(programs: ProgramSet, header: Header, order: Ints) -> Ints:
    """bool [transfers - 1]: whether a transfer of a message does not lie right behind the one before it."""
    at = _operand_of(programs)[order]
    found = programs["operands"]
    tensor, space, row, rows = (
        found[name][at].astype(np.int64) for name in ("tensor", "space", "row", "rows")
    )
    follows = (tensor[1:] == tensor[:-1]) & (space[1:] == space[:-1]) & (row[1:] == row[:-1] + rows[:-1])
    heads = _columns(header, tensor, found["heads"][at].astype(np.int64))
    fills = (rows * heads * _number_bytes(header)[tensor] % ALIGNMENT == 0)[:-1]
    apart: Ints = ~(follows & fills)
    return apart


def _number_bytes(header: Header) -> Ints:
    """int64 [tensors]: bytes of a row of one head; 1 for the headless, whose width a plan does not know."""
    model, wide = ELEMENT_BYTES[header.dtype], max(4, ELEMENT_BYTES[header.dtype])
    qk, v = header.head_dim, header.v_head_dim
    found = {
        Tensor.Q: qk * model,
        Tensor.KV: (qk + v) * model,
        Tensor.O: (v + 1) * wide,
        Tensor.DQ: qk * wide,
        Tensor.DKV: (qk + v) * wide,
        Tensor.DO: v * model,
        Tensor.DELTA: 2 * wide,
    }
    return np.array([found.get(tensor, 1) for tensor in Tensor])
