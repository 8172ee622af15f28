"""Arrays of the properties of ops and tensors in `ir.isa`, indexed by code; the list rows that instructions consume."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.isa import OPERAND_COLUMNS, RULES, Rule
from apportion.ir.tensors import HEADLESS, KV_SIDE, Tensor

#: lists by number; NO_LIST means none
LISTS = tuple(OPERAND_COLUMNS)
NO_LIST = len(LISTS)


def list_table(rules: Mapping[int, Rule]) -> Ints:
    """int64 [codes]: the number of the list that each op consumes."""
    table = np.full(max(rules) + 1, NO_LIST)
    for op, rule in rules.items():
        if rule.list:
            table[op] = LISTS.index(rule.list)
    return table


LIST_OF_OP = list_table(RULES)
#: bool [tensors]: True for tensors with KV heads; True for headless ones
IS_KEY, IS_HEADLESS = (np.array([tensor in group for tensor in Tensor]) for group in (KV_SIDE, HEADLESS))


def starts_of(op: Ints, count: Ints) -> Ints:
    """int64 [instructions]: the first row that each instruction consumes of its list, numbered over all ranks.
    op, count: columns of the instructions."""
    lists, starts = LIST_OF_OP[op], np.zeros(len(op), np.int64)
    for number in range(NO_LIST):
        index = np.flatnonzero(lists == number)
        starts[index] = np.cumsum(count[index]) - count[index]
    return starts


def instruction_of(op: Ints, count: Ints, name: str) -> Ints:
    """int64 [rows]: the instruction, numbered over all ranks, that consumes each row of a list.
    op, count: columns of the instructions."""
    index = np.flatnonzero(LIST_OF_OP[op] == LISTS.index(name))
    return np.repeat(index, count[index])
