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

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.isa import OP_NAMES, RULES, Rule


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
