"""Kernel launches and messages of the executor for a program, and the casts at the end of a call. Counts are for the
stage engine, whichever kernels a hardware file describes; engines with a kernel per task launch more.

    attend        1 kernel               launch   1 if it sends staged messages: packs their tiles into buffers
    attend_grad   2: dQ; dK and dV       wait     1 if it receives staged messages: unpacks them
    row ops       1 for all their rows   the end  1 for the gradients that a backward call returns: home rows, from
                                                  the accumulator's dtype to the model's

A projection belongs to the layer, and counts only for storing its rows, or adding them into dX. The messages of a round
are those of `ir.plan.messages`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.isa import OP_NAMES, RULES, Rule


def kernel_table(rules: Mapping[int, Rule]) -> Ints:
    """int64 [codes]: kernels of an instruction of each op, except packing and unpacking."""
    return np.array([rules[op].kernels if op in rules else 0 for op in range(max(rules) + 1)])


KERNELS = kernel_table(RULES)

#: codes of activities other than instructions, in addition to `Op`
PACK, UNPACK, CAST = 101, 102, 103
#: activities of a compute stream by code
WORK_NAMES = MappingProxyType(
    {**{int(op): name for op, name in OP_NAMES.items()}, PACK: "pack", UNPACK: "unpack", CAST: "cast"}
)
