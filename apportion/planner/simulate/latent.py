"""Expansion of latent rows in instructions: each row read by tasks, once per query head that reads it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Ints, changes
from apportion.ir.isa import TASK_LIST
from apportion.ir.plan.programs import head_counts
from apportion.planner.simulate.program import View


class Expansion(NamedTuple):
    """int64 [instructions]: row-head combinations, and the heads whose weights are used."""

    rows: Ints
    heads: Ints


def expanded_rows(view: View) -> Expansion:
    """The expansions of the executor (`backends/torch/memory/latent_rows.py`) in each instruction of a program."""
    name = TASK_LIST[view.phase]
    tasks, operands, header = view.source[name], view.source["operands"], view.plan.header
    base = operands.ptr[tasks.rank_of_row()]
    kv, index = base + tasks.wide("kv"), view.instruction_of(name)
    sets, space = operands.wide("heads")[base + tasks.wide("q")], operands.wide("space")[kv]
    start = operands.wide("row")[kv]
    order = np.lexsort((start, sets, space, index))
    index, sets, space, start = index[order], sets[order], space[order], start[order]
    end = start + operands.wide("rows")[kv[order]]
    first = changes(index, space, sets)
    group_offset = (np.cumsum(first) - 1) * (int(end.max(initial=0)) + 1)  # offsets that separate the groups
    covered_end = np.maximum.accumulate(end + group_offset)
    previous_end = np.append(0, covered_end[:-1])
    new_rows = np.maximum(end + group_offset - np.maximum(start + group_offset, previous_end), 0)
    heads = head_counts(header.q_heads, header.kv_heads, header.head_sets)[0][sets]
    count = len(view.instructions["op"])
    rows, counts = (np.bincount(index, weights, count) for weights in (new_rows * heads, first * heads))
    return Expansion(rows.astype(np.int64), counts.astype(np.int64))
