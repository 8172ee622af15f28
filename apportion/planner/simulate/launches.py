"""What the executor starts for a program: kernels, messages, and the casts at the end of a call. It is the stage engine
that is described, whoever's kernels a hardware file has the times of; engines that go task by task start more.

    attend        1 kernel               launch   1 where it sends staged messages: packs their tiles into buffers
    attend_grad   2: dQ; dK and dV       wait     1 where its round brought staged ones: unpacks them
    row ops       1 for all their rows   the end  1 for the gradients that a backward call returns: home rows, from
                                                  the accumulator's dtype to the model's

A projection is the layer's own, and counts only for what puts its rows in place, or adds them into dX. The messages of
a round are those of `ir.plan.messages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from apportion._core import traffic as core
from apportion.ir.arrays import Ints
from apportion.ir.isa import OP_NAMES, RULES, Op, Rule
from apportion.ir.plan.messages import group_tiles
from apportion.ir.tensors import Tensor
from apportion.planner.simulate.program import View


def kernel_table(rules: Mapping[int, Rule]) -> Ints:
    """int64 [codes]: kernels that an instruction of an op starts, besides what it packs or unpacks."""
    return np.array([rules[op].kernels if op in rules else 0 for op in range(max(rules) + 1)])


KERNELS = kernel_table(RULES)

#: codes of what is no instruction, beside `Op`
PACK, UNPACK, CAST = 101, 102, 103
#: what a compute stream does, by its code
WORK_NAMES = MappingProxyType(
    {**{int(op): name for op, name in OP_NAMES.items()}, PACK: "pack", UNPACK: "unpack", CAST: "cast"}
)


class Posted(NamedTuple):
    """Of each launch, int64 [launches]: the messages that it posts, sent and received, and the bytes that are read and
    written to copy tiles into those that are sent (packed), and out of those that are received (unpacked)."""

    messages: Ints
    packed: Ints
    unpacked: Ints


def find_posted(view: View) -> Posted:
    """The messages of all launches."""
    groups, rows = group_tiles(view.source, view.plan.header), view.operands.rows
    return Posted(*core.posted(view.tiles, *groups, rows, view.in_place))


def count_kernels(view: View, posted: Posted) -> Ints:
    """int64 [instructions]: kernels that each starts."""
    table = view.instructions
    kernels: Ints = np.where(table["count"] > 0, KERNELS[table["op"]], 0)
    waits = np.flatnonzero(table["op"] == Op.WAIT)
    kernels[view.launches] = posted.packed > 0
    kernels[waits] = posted.unpacked[view.launch_of[waits]] > 0
    for op, (some, left) in (
        (Op.DELIVER, view.delivered),
        (Op.FINISH, view.finished),
        (Op.DELTA, view.stated),
    ):
        at = np.flatnonzero(table["op"] == op)
        of_row = view.instruction_of("rowops")[some]
        kernels[at] = np.bincount(of_row, left, len(kernels))[at] > 0
    return kernels


def cast_bytes(view: View) -> Ints:
    """int64 [ranks]: what casting the gradients of home rows that no task has left complete, one kernel at the end of a
    call, reads and writes; 0 forward, where `finish` has written the output."""
    if view.phase == "forward":
        return np.zeros(view.ranks, np.int64)
    model, plan = view.model, view.plan
    rows: Ints = plan.layout(plan.header.home_layout).rows_per_rank
    wide, narrow = model.accumulator_bytes, model.element_bytes
    if (view.instructions["op"] == Op.PROJECT_GRAD).any():
        return rows * (model.row_bytes(Tensor.DX) // wide * (wide + narrow))
    moved, ranks, first = np.zeros_like(rows), np.arange(view.ranks), np.zeros_like(rows)
    for column, tensor in (("dq", Tensor.DQ), ("dkv", Tensor.DKV)):
        left = rows - view.complete[column].within(ranks, first, rows)
        moved += left * (model.row_bytes(tensor) // wide * (wide + narrow))
    return moved
