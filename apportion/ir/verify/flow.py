"""Runs the interpreter of `machine.py` over a program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.ir.errors import CapacityError
from apportion.ir.plan import Ints
from apportion.ir.verify.cells import Cells
from apportion.ir.verify.machine import (
    COUNTERS,
    FAULT_LINES,
    FAULTS,
    FULL,
    FULL_LINE,
    MOST_FAULTS,
    NO_TOKEN,
    PART_LINE,
    PARTS,
    SUSPECT_LINES,
    SUSPECTS,
    interpret,
)
from apportion.ir.verify.view import Program


@dataclass(frozen=True, eq=False)
class Flow:
    """What the interpreter found.

    tokens: int64 [2, tasks], the global tokens of the first query and the first key row of each task; SEVERAL where
    its rows are not consecutive tokens (then `parts` holds its pieces), NO_TOKEN where they are not known.
    parts: int64 [parts, 7] (task, first query row, rows, token, first key row, rows, token), rows counted from the
    operands' first. faults: int64 [faults, 8]. suspects: the same, for tiles overwritten before anyone read them,
    which is waste unless a task then read something else. memory: the cells at the end.
    """

    tokens: Ints
    parts: Ints
    faults: Ints
    suspects: Ints
    memory: Cells


def run(program: Program, memory: Cells) -> Flow:
    """Executes the program. Raises CapacityError where rows fall into too many pieces, which no real plan does."""
    tasks = len(program["tasks"]) + len(program["grads"])
    tokens = np.full((2, tasks), NO_TOKEN, np.int64)
    table, launches = program["instructions"], program.launches
    interpret(
        memory.lines,
        table.data,
        table.ptr,
        program.starts,
        program.meeting.launch_of,
        np.searchsorted(launches.rounds, table["round"]),
        np.diff(launches.ptr),
        program["operands"].ptr + memory.slots,
        program["transfers"].data,
        np.where(program.meeting.agreed, program.meeting.mate, -1),
        np.empty((len(program["transfers"]), 3), np.int64),
        program["tasks"].data,
        program["grads"].data,
        program["rowops"].data,
        tokens,
    )
    counters = memory.lines[COUNTERS]
    if memory.lines[FULL_LINE, FULL]:
        raise CapacityError("the rows of the program fall into too many pieces to verify")
    faults, suspects = (memory.lines[first : first + MOST_FAULTS] for first in (FAULT_LINES, SUSPECT_LINES))
    parts = memory.lines[counters[PART_LINE] - counters[PARTS] : counters[PART_LINE], :7]
    return Flow(tokens, parts, faults[: counters[FAULTS]], suspects[: counters[SUSPECTS]], memory)
