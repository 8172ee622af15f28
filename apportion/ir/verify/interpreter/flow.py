"""Runs the interpreter of `machine.py` over a program."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.errors import CapacityError
from apportion.ir.isa import OPERAND_COLUMNS
from apportion.ir.plan.ops import LIST_OF_OP
from apportion.ir.tensors import Tensor
from apportion.ir.verify.interpreter.cells import PLACES, MemoryCells
from apportion.ir.verify.interpreter.machine import (
    BEGIN,
    CLEARED,
    COUNTERS,
    END,
    FAULT_LINES,
    FAULTS,
    FRAMES,
    FULL,
    FULL_LINE,
    LAZY,
    LIVE,
    MOST_FAULTS,
    NO_TOKEN,
    NOT_A_PARTIAL,
    NOT_YET,
    PART_LINE,
    PARTIAL_MIXED,
    PARTS,
    PROMISES,
    RUNS,
    SCRIPT,
    SEVERAL_RUNS,
    SUSPECT_LINES,
    SUSPECTS,
    UNKNOWN,
    VALUE,
    find_undelivered,
    interpret,
    settle_rest,
)
from apportion.ir.verify.view import Program

_MOST_LEFT = 64


@dataclass(frozen=True, eq=False)
class Flow:
    """What the interpreter found.

    tokens: int64 [2, tasks], the tokens of the first query and the first key row of each task, by their addresses (see
    `homes`); SEVERAL where its rows are not consecutive ones (then `parts` holds its pieces), NO_TOKEN where they are
    not known.
    parts: int64 [parts, 7] (task, first query row, rows, token, first key row, rows, token), rows counted from the
    operands' first, tokens by address.
    faults: int64 [faults, 8]. suspects: the same, for tiles overwritten before anyone read them, which is waste
    unless a task then read something else. memory: the cells at the end.
    """

    tokens: Ints
    parts: Ints
    faults: Ints
    suspects: Ints
    memory: MemoryCells


def run(
    program: Program, memory: MemoryCells, given: frozenset[Tensor], written_at_home: int, lazy: bool
) -> Flow:
    """Executes the program. given: tensors whose home rows hold values; written_at_home: as in `Scan`.

    lazy: quicker, see `machine.LAZY`. A program that it finds nothing wrong with has nothing wrong; what it finds may
    not be so, and suspects may be missing.

    Raises CapacityError where rows fall into too many pieces, which no real plan does.
    """
    lines, transfers = memory.lines, program["transfers"]
    tokens = np.full((2, len(program["tasks"]) + len(program["grads"])), NO_TOKEN, np.int64)
    lines[FULL_LINE, LAZY] = lazy
    carried = np.zeros((len(transfers), 2), np.int64)
    promised = np.empty((len(program["rowops"]), 4), np.int64)
    interpret(
        lines,
        program["instructions"].data,
        program["instructions"].ptr,
        program.starts,
        program.partner,
        program["operands"].ptr + memory.slots,
        transfers.data,
        transfers.ptr,
        np.where(program.meeting.agreed, program.meeting.mate, -1),
        sum(1 << tensor for tensor in given) & ~written_at_home,
        carried,
        promised,
        program["tasks"].data,
        program["grads"].data,
        program["rowops"].data,
        LIST_OF_OP,
        SCRIPT,
        FRAMES,
        tokens,
        program["instructions"].ptr[:-1].copy(),
        np.zeros(program.ranks, np.int64),
        np.zeros(max(map(len, OPERAND_COLUMNS.values())), np.int64),
    )
    settle_rest(lines, len(memory.lanes), carried)
    if lines[FULL_LINE, FULL]:
        raise CapacityError("the rows of the program fall into too many pieces to verify")
    counters = lines[COUNTERS]
    faults, suspects = (lines[first : first + MOST_FAULTS] for first in (FAULT_LINES, SUSPECT_LINES))
    parts = lines[counters[PART_LINE] - counters[PARTS] : counters[PART_LINE], :7]
    broken = _broken_promises(lines, carried, promised[: lines[FULL_LINE, PROMISES]])
    return Flow(
        tokens,
        parts,
        np.concatenate([faults[: counters[FAULTS]], broken]),
        suspects[: counters[SUSPECTS]],
        memory,
    )


def left_over(program: Program, memory: MemoryCells) -> tuple[Ints, Ints]:
    """(lines, lanes) of the cells that end in the wrong state, the first few: see `find_undelivered`."""
    at, lanes = memory.now()
    found = np.zeros(_MOST_LEFT, np.int64)
    owed = sum(1 << tensor for tensor in program.owed)
    count = find_undelivered(memory.lines, at, lanes, memory.columns, PLACES, owed, found)
    return at[found[:count]], lanes[found[:count]]


def _broken_promises(lines: Ints, carried: Ints, promised: Ints) -> Ints:
    """[faults, 8] of additions that took a partial for granted and got another."""
    state, token = carried[promised[:, 0]].T
    harmless = (state == CLEARED) | (state == UNKNOWN) | (state == NOT_YET)
    wrong = ~harmless & ((state != LIVE) | (token != promised[:, 1]))
    faults = [
        fault
        for at in np.flatnonzero(wrong).tolist()
        if (fault := _broken_promise(lines, carried[promised[at, 0]].tolist(), promised[at].tolist()))
    ]
    return np.array(faults[:MOST_FAULTS], np.int64).reshape(-1, 8)


def _broken_promise(lines: Ints, carried: list[int], promised: list[int]) -> tuple[int, ...] | None:
    (state, token), (_, wanted, instruction, x) = carried, promised
    if state == SEVERAL_RUNS:
        runs = lines[token : token + int(lines[token, RUNS])]
        bad = runs[(runs[:, 4] == VALUE) | ((runs[:, 4] == LIVE) & (runs[:, 3] != wanted + runs[:, 1]))]
        if not len(bad):
            return None
        state, token = int(bad[0, 4]), int(bad[0, 3] - bad[0, 1])
    begin, end = int(lines[x, BEGIN]), int(lines[x, END])
    code = NOT_A_PARTIAL if state == VALUE else PARTIAL_MIXED
    return code, instruction, 0, x, begin, end, wanted - begin, token - begin
