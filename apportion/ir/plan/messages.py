"""Messages of a round: the tiles between two ranks in one direction form one message.

    transfers of a launch    → 2 KV[0:512)   → 5 Q[0:64)   → 2 KV[512:900)        ← 2 dKV[0:128)
    messages                 → 2 (both KV tiles, in this order)   → 5              ← 2

A tile holds the values of its rows in the order of a work arena (fused tensors: row by row, k next to v), or part by
part (o, then lse). Parts start at multiples of `ALIGNMENT` bytes, so that any dtype can view them.

A message is *direct* if its bytes already lie contiguously in memory; all others are *staged*: copied into a buffer at
launch, and out of one after the wait. Results and gradients rounded for transfer (`Header.narrows`) are staged.
Executors and the simulator apply this rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from apportion._core import messages as core
from apportion.ir.arrays import Bools, Ints
from apportion.ir.latent import Latent
from apportion.ir.orders import stable_order
from apportion.ir.plan.ops import instruction_of
from apportion.ir.plan.programs import head_counts
from apportion.ir.plan.tables import Header, ProgramSet
from apportion.ir.request.model import ELEMENT_BYTES
from apportion.ir.tensors import HEADLESS, Tensor

#: alignment of each part of a message
ALIGNMENT = 16

#: tensors stored as one array in arenas; the home rows of KV are two arrays, which the caller passes in
_ONE_ARRAY = frozenset(t for t in Tensor if t.contents.fused or len(t.contents.parts) == 1)

_IS_ONE = np.array([[t in _ONE_ARRAY and t != Tensor.KV, t in _ONE_ARRAY] for t in Tensor])  # [tensor, space]


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages of programs. of: int64 [transfers], the message of each. Per message, all [messages]: instruction:
    int64, its launch, numbered over all ranks; peer: int64; send, staged: bool. A launch's messages are adjacent,
    receives first, each direction sorted by peer."""

    of: Ints
    instruction: Ints
    peer: Ints
    send: Bools
    staged: Bools

    def __len__(self) -> int:
        return len(self.peer)


class RowSizes(NamedTuple):
    """Row sizes of operands. heads: int64 [2, 1 + head sets], head counts of the query and the KV side, for all heads
    and each set; ordered: bool [1 + head sets], True if a set is 0, 1, ..., the order of home rows. number_bytes: int64
    [tensors], bytes of a row of one head; one_array: bool [tensors * spaces], True if the tensor is one array and its
    numbers travel unchanged."""

    heads: Ints
    ordered: Bools
    number_bytes: Ints
    one_array: Bools
    alignment: int = ALIGNMENT


def find_messages(programs: ProgramSet, header: Header) -> Messages:
    """Groups the transfers of programs (of one or more ranks) into messages."""
    group, first, staged = core.group(programs.arrays, row_sizes(header))
    table, instructions = programs["transfers"], programs["instructions"]
    launch = instruction_of(instructions["op"], instructions["count"], "transfers")[first]
    send, peer = (table[name][first].astype(np.int64) for name in ("send", "peer"))
    order = stable_order((launch * 2 + send) * header.ranks + peer)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return Messages(number[group], launch[order], peer[order], send[order] == 1, staged[order] == 1)


def row_sizes(header: Header) -> RowSizes:
    """Row sizes for plans with this header."""
    heads = head_counts(header.q_heads, header.kv_heads, header.head_sets)
    is_range = [True, *([*members] == [*range(len(members))] for members in header.head_sets)]
    keeps_dtype = np.array([not header.narrows(tensor) for tensor in Tensor])
    number_bytes = _number_bytes(header.head_dim, header.v_head_dim, header.dtype, header.latent)
    return RowSizes(heads, np.array(is_range), number_bytes, (_IS_ONE & keeps_dtype[:, None]).reshape(-1))


@lru_cache(64)
def _number_bytes(head_dim: int, v_head_dim: int, dtype: str, latent: Latent | None) -> Ints:
    """int64 [tensors]: bytes of a row of one head; 1 for headless tensors, whose width a plan does not contain."""
    model, wide = ELEMENT_BYTES[dtype], max(4, ELEMENT_BYTES[dtype])
    sizes = np.ones(len(Tensor), np.int64)
    for tensor in set(Tensor) - HEADLESS:
        widths = tensor.contents.widths(head_dim, v_head_dim, 0, latent)
        sizes[tensor] = sum(max(width, 1) for width in widths) * (wide if tensor.contents.wide else model)
    return sizes
