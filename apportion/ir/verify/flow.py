"""The dataflow of all ranks, executed on cells: which tokens each row holds, and where each partial result is.

Rounds rise on every rank and `wait r` follows `launch r`, so there is one order in which everything can happen: for
each round in turn, all ranks that launch it run up to and including that launch, then its tiles arrive. Every wait
met on the way is for a round that has been launched by all. So no rank ever blocks, and one pass decides.

The interpreter knows nothing of numbers, only of cells (`cells.py`):

    read        rows hold a value of the heads named and are not in flight
    take        rows hold a partial; afterwards they are spent
    put         rows get a value or a partial: nothing live is overwritten, nothing being sent or received is touched
    accumulate  rows hold a partial of the same tokens, or the op is the first on them

A broken promise becomes a row of `faults`; what it would have written is UNKNOWN, and UNKNOWN is never reported.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.ir.errors import CapacityError
from apportion.ir.isa import Op, Tensor
from apportion.ir.jit import jit
from apportion.ir.plan import Ints
from apportion.ir.verify.cells import (
    BUSY,
    CLEARED,
    EMPTY,
    HOME_OFFSET,
    IN_FLIGHT,
    LIVE,
    NEXT,
    NOWHERE,
    OFFSET,
    ONE_SEND,
    ROW,
    SPENT,
    STATE,
    UNIT,
    UNKNOWN,
    UNREAD,
    VALUE,
    Cells,
)
from apportion.ir.verify.view import Program

# fault codes
(
    READ_UNWRITTEN,
    READ_IN_FLIGHT,
    READ_OTHER_HEADS,
    READ_PARTIAL,
    WRITE_SENDING,
    WRITE_IN_FLIGHT,
    NOT_SAME_TOKENS,
    ADD_TO_UNWRITTEN,
    PARTIAL_SPENT,
    PARTIAL_LOST,
    PARTIAL_MIXED,
    NOT_A_PARTIAL,
    WRONG_HOME,
    ALREADY_FINISHED,
    TWICE,
    UNREAD_LOST,
) = range(1, 17)

# columns of a fault
CODE, INSTRUCTION, ITEM, OPERAND, LOW, HIGH, HOLDS, WANTED = range(8)
_MOST_FAULTS = 32

# what counts as readable, as bits of states
_VALUES = 1 << VALUE
_PARTIALS = (1 << LIVE) | (1 << CLEARED)

# counters that the interpreter keeps
_CELLS, _FAULTS, _RUNS, _FULL, _INSTRUCTION, _ITEM, _SUSPECTS = range(7)
_MOST_RUNS = 2**22

#: token of a task operand that has no single one
SEVERAL, NO_TOKEN = -1, -2
_MIXED = NOWHERE + 1
_HIDDEN = NOWHERE + 2

_ACCUMULATOR_BITS = (1 << Tensor.O) | (1 << Tensor.DX) | (1 << Tensor.DQ) | (1 << Tensor.DKV)

_LAUNCH, _WAIT, _ATTEND, _ATTEND_GRAD = int(Op.LAUNCH), int(Op.WAIT), int(Op.ATTEND), int(Op.ATTEND_GRAD)
_DELTA, _MERGE, _ADD, _COPY = int(Op.DELTA), int(Op.MERGE), int(Op.ADD), int(Op.COPY)
_CLEAR, _PROJECT, _PROJECT_GRAD = int(Op.CLEAR), int(Op.PROJECT), int(Op.PROJECT_GRAD)


@dataclass(frozen=True, eq=False)
class Flow:
    """What the interpreter found.

    tokens: int64 [2, tasks], the global tokens of the first query and the first key row of each task; SEVERAL where
    its rows are not consecutive tokens (then `runs` holds its parts), NO_TOKEN where they are not known.
    runs: int64 [runs, 7] (task, first query row, rows, token, first key row, rows, token), rows counted from the
    operands' first. faults: int64 [faults, 8]. suspects: the same, for tiles overwritten before anyone read them,
    which is waste unless a task then read something else. memory: the cells at the end.
    """

    tokens: Ints
    runs: Ints
    faults: Ints
    suspects: Ints
    memory: Cells


def run(program: Program, memory: Cells) -> Flow:
    """Executes the program. Raises CapacityError where rows fall into too many pieces, which no real plan does."""
    tasks = len(program["tasks"]) + len(program["grads"])
    tokens = np.full((2, tasks), NO_TOKEN, np.int64)
    runs = np.zeros((4 * tasks + 4096, 7), np.int64)
    faults = np.zeros((2, _MOST_FAULTS, 8), np.int64)
    counters = np.zeros(8, np.int64)
    counters[_CELLS] = memory.count
    mate = np.where(program.meeting.agreed, program.meeting.mate, -1)
    launches = program.launches
    _interpret(
        memory.cells,
        memory.pieces,
        memory.ptr,
        program["operands"].data,
        program["operands"].ptr,
        program["instructions"].data,
        program["instructions"].ptr,
        program["instructions"].rank,
        program.starts,
        program.meeting.launch_of,
        launches.order,
        launches.ptr,
        program["transfers"].data,
        program["transfers"].rank,
        mate,
        program["tasks"].data,
        program["grads"].data,
        program["rowops"].data,
        tokens,
        runs,
        faults,
        counters,
    )
    if counters[_FULL]:
        raise CapacityError("the rows of the program fall into too many pieces to verify")
    used = Cells(
        memory.cells[: counters[_CELLS]], int(counters[_CELLS]), memory.pieces, memory.ptr, memory.columns
    )
    return Flow(
        tokens,
        runs[: counters[_RUNS]],
        faults[0, : counters[_FAULTS]],
        faults[1, : counters[_SUSPECTS]],
        used,
    )


@jit
def _interpret(
    cells: Ints,
    pieces: Ints,
    ptr: Ints,
    operands: Ints,
    operand_ptr: Ints,
    instructions: Ints,
    instruction_ptr: Ints,
    rank_of: Ints,
    starts: Ints,
    launch_of: Ints,
    order: Ints,
    order_ptr: Ints,
    transfers: Ints,
    owner: Ints,
    mate: Ints,
    tasks: Ints,
    grads: Ints,
    rowops: Ints,
    tokens: Ints,
    runs: Ints,
    faults: Ints,
    counters: Ints,
) -> None:
    """All rounds in turn, then the rest of every rank."""
    at = instruction_ptr[:-1].copy()
    turns = len(order_ptr) - 1
    for turn in range(turns + 1):
        low, high = (order_ptr[turn], order_ptr[turn + 1]) if turn < turns else (0, len(at))
        for i in range(low, high):
            rank = rank_of[order[i]] if turn < turns else i
            end = order[i] + 1 if turn < turns else instruction_ptr[rank + 1]
            base = operand_ptr[rank]
            for step in range(at[rank], end):
                op, count, first = instructions[0, step], instructions[4, step], starts[step]
                counters[_INSTRUCTION] = step
                if op == _ATTEND:
                    for item in range(first, first + count):
                        counters[_ITEM] = item
                        _attend(
                            cells, pieces, ptr, operands, tasks, base, item, tokens, runs, faults, counters
                        )
                elif op == _ATTEND_GRAD:
                    for item in range(first, first + count):
                        counters[_ITEM] = item
                        _attend_grad(
                            cells, pieces, ptr, operands, grads, base, item, tokens, runs, faults, counters
                        )
                elif op == _LAUNCH:
                    for item in range(first, first + count):
                        counters[_ITEM] = item
                        x = base + transfers[2, item]
                        if transfers[0, item]:
                            _start_send(cells, pieces, ptr, operands, x, faults, counters)
                        else:
                            _start_receive(cells, pieces, ptr, operands, x, faults, counters)
                elif op == _WAIT:
                    launch = launch_of[step]
                    if 0 <= launch < step and launch_of[launch] == step:
                        for item in range(starts[launch], starts[launch] + instructions[4, launch]):
                            _complete(
                                cells, pieces, ptr, operands, base + transfers[2, item], transfers[0, item]
                            )
                else:
                    for item in range(first, first + count):
                        counters[_ITEM] = item
                        _row_op(cells, pieces, ptr, operands, rowops, base, item, op, faults, counters)
            at[rank] = end
        if turn < turns:
            for i in range(low, high):
                launch = order[i]
                counters[_INSTRUCTION] = launch
                for item in range(starts[launch], starts[launch] + instructions[4, launch]):
                    counters[_ITEM] = item
                    x = operand_ptr[rank_of[launch]] + transfers[2, item]
                    other = mate[item]
                    if transfers[0, item] == 0 and other >= 0:
                        source = operand_ptr[owner[other]] + transfers[2, other]
                        _move(cells, pieces, ptr, operands, source, x, False, False, True, faults, counters)
                    elif transfers[0, item] == 0:
                        _forget(cells, pieces, ptr, operands, x)
            for i in range(low, high):
                launch = order[i]
                for item in range(starts[launch], starts[launch] + instructions[4, launch]):
                    x = operand_ptr[rank_of[launch]] + transfers[2, item]
                    if transfers[0, item] == 1:
                        _spend(cells, pieces, ptr, operands, x)


@jit
def _fault(
    faults: Ints, counters: Ints, code: int, x: int, low: int, high: int, holds: int, wanted: int
) -> None:
    found = counters[_FAULTS]
    if found < faults.shape[1]:
        row = faults[0, found]
        row[0], row[1], row[2], row[3] = code, counters[_INSTRUCTION], counters[_ITEM], x
        row[4], row[5], row[6], row[7] = low, high, holds, wanted
        counters[_FAULTS] = found + 1


@jit
def _suspect(faults: Ints, counters: Ints, x: int, low: int, high: int, holds: int) -> None:
    found = counters[_SUSPECTS]
    if found < faults.shape[1]:
        row = faults[1, found]
        row[0], row[1], row[2], row[3] = UNREAD_LOST, counters[_INSTRUCTION], counters[_ITEM], x
        row[4], row[5], row[6], row[7] = low, high, holds, NOWHERE
        counters[_SUSPECTS] = found + 1


@jit
def _look(
    cells: Ints, pieces: Ints, ptr: Ints, operands: Ints, x: int, accepted: int, faults: Ints, counters: Ints
) -> int:
    """Reads operand x, whose states must be among `accepted`. The offset of its rows where it is one, else _MIXED;
    _HIDDEN where a row is unknown."""
    end = operands[2, x] + operands[3, x]
    found = NOWHERE
    for piece in range(ptr[x], ptr[x + 1]):
        cell = pieces[0, piece]
        while True:
            state = cells[cell, STATE]
            after = cells[cell, NEXT]
            if cells[cell, BUSY] & IN_FLIGHT:
                _fault(
                    faults, counters, READ_IN_FLIGHT, x, cells[cell, ROW], cells[after, ROW], NOWHERE, NOWHERE
                )
            if (accepted >> state) & 1 and cells[cell, UNIT] == pieces[1, piece]:
                offset = cells[cell, OFFSET]
                found = offset if found in (NOWHERE, offset) else found if found == _HIDDEN else _MIXED
            else:
                if state != UNKNOWN:
                    code, holds = READ_OTHER_HEADS, cells[cell, UNIT]
                    if not (accepted >> state) & 1:
                        code, holds = _reading_fault(state), cells[cell, OFFSET]
                    _fault(
                        faults,
                        counters,
                        code,
                        x,
                        cells[cell, ROW],
                        cells[after, ROW],
                        holds,
                        pieces[1, piece],
                    )
                    cells[cell, STATE] = UNKNOWN
                found = _HIDDEN
            cells[cell, BUSY] &= ~UNREAD
            cell = after
            if cells[cell, ROW] >= end:
                break
    return found


@jit
def _reading_fault(state: int) -> int:
    if state == EMPTY:
        return READ_UNWRITTEN
    if state == SPENT:
        return PARTIAL_SPENT
    return NOT_A_PARTIAL if state == VALUE else READ_PARTIAL


@jit
def _split(cells: Ints, counters: Ints, cell: int, row: int) -> None:
    """Cuts a cell at `row`; the left part keeps the number."""
    new = counters[_CELLS]
    if new == len(cells):
        counters[_FULL] = 1
        return
    counters[_CELLS] = new + 1
    cells[new] = cells[cell]
    cells[new, ROW] = row
    cells[cell, NEXT] = new


@jit
def _move(
    cells: Ints,
    pieces: Ints,
    ptr: Ints,
    operands: Ints,
    source: int,
    target: int,
    adding: bool,
    first: bool,
    arriving: bool,
    faults: Ints,
    counters: Ints,
) -> None:
    """Writes to the rows of `target` what the rows of `source` hold: their tokens, and for a partial its state.

    adding: accumulate a contribution (first: the first on its rows); else put. A value that is accumulated is a
    task's result and becomes LIVE. `source` without heads goes to every lane of `target`.
    """
    shift = operands[2, source] - operands[2, target]
    end = operands[2, target] + operands[3, target]
    paired = ptr[source + 1] - ptr[source] == ptr[target + 1] - ptr[target]
    for piece in range(ptr[target], ptr[target + 1]):
        a = pieces[0, ptr[source] + (piece - ptr[target] if paired else 0)]
        b = pieces[0, piece]
        row = operands[2, target]
        while row < end:
            state, offset, unit = cells[a, STATE], cells[a, OFFSET], cells[a, UNIT]
            stop = cells[cells[a, NEXT], ROW] - shift
            while stop < end:
                after = cells[a, NEXT]
                if (
                    cells[after, STATE] != state
                    or cells[after, OFFSET] != offset
                    or cells[after, UNIT] != unit
                ):
                    break
                a = after
                stop = cells[cells[a, NEXT], ROW] - shift
            if offset != NOWHERE:
                offset += shift
            while row < stop and row < end:
                if cells[cells[b, NEXT], ROW] > stop:
                    _split(cells, counters, b, stop)
                    if counters[_FULL]:
                        return
                if adding:
                    _accumulate(
                        cells, operands, b, target, state, offset, pieces[1, piece], first, faults, counters
                    )
                else:
                    _put(
                        cells,
                        operands,
                        b,
                        target,
                        state,
                        offset,
                        pieces[1, piece],
                        arriving,
                        faults,
                        counters,
                    )
                b = cells[b, NEXT]
                row = cells[b, ROW]
            a = cells[a, NEXT]


@jit
def _untouched(cells: Ints, b: int, x: int, arriving: bool, faults: Ints, counters: Ints) -> None:
    """A cell that is written is neither being sent nor being received."""
    busy = cells[b, BUSY]
    if busy >= ONE_SEND:
        _fault(
            faults, counters, WRITE_SENDING, x, cells[b, ROW], cells[cells[b, NEXT], ROW], NOWHERE, NOWHERE
        )
    if busy & IN_FLIGHT and not arriving:
        _fault(
            faults, counters, WRITE_IN_FLIGHT, x, cells[b, ROW], cells[cells[b, NEXT], ROW], NOWHERE, NOWHERE
        )


@jit
def _overwritten(cells: Ints, operands: Ints, b: int, x: int, faults: Ints, counters: Ints) -> None:
    """Nothing that is still needed is overwritten."""
    low, high = cells[b, ROW], cells[cells[b, NEXT], ROW]
    state = cells[b, STATE]
    if state == LIVE:
        _fault(faults, counters, PARTIAL_LOST, x, low, high, cells[b, OFFSET], NOWHERE)
    elif state == VALUE and (_ACCUMULATOR_BITS >> operands[0, x]) & 1 and cells[b, HOME_OFFSET] != NOWHERE:
        _fault(faults, counters, ALREADY_FINISHED, x, low, high, cells[b, OFFSET], NOWHERE)
    elif state == VALUE and cells[b, BUSY] & UNREAD:
        _suspect(faults, counters, x, low, high, cells[b, OFFSET])


@jit
def _put(
    cells: Ints,
    operands: Ints,
    b: int,
    x: int,
    state: int,
    offset: int,
    unit: int,
    arriving: bool,
    faults: Ints,
    counters: Ints,
) -> None:
    if not arriving:  # a receive was checked when it was launched
        _untouched(cells, b, x, arriving, faults, counters)
        _overwritten(cells, operands, b, x, faults, counters)
    _write(cells, b, x, state, offset, unit, faults, counters)
    cells[b, BUSY] |= UNREAD


@jit
def _write(
    cells: Ints, b: int, x: int, state: int, offset: int, unit: int, faults: Ints, counters: Ints
) -> None:
    home = cells[b, HOME_OFFSET]
    if home != NOWHERE and state == CLEARED:
        offset = home
    if home != NOWHERE and offset != home and state != UNKNOWN and state > SPENT:
        _fault(faults, counters, WRONG_HOME, x, cells[b, ROW], cells[cells[b, NEXT], ROW], home, offset)
        state = UNKNOWN
    if state <= SPENT:  # its reader was reported
        state = UNKNOWN
    cells[b, STATE] = state
    cells[b, OFFSET] = offset
    cells[b, UNIT] = unit


@jit
def _accumulate(
    cells: Ints,
    operands: Ints,
    b: int,
    x: int,
    state: int,
    offset: int,
    unit: int,
    first: bool,
    faults: Ints,
    counters: Ints,
) -> None:
    """Adds a contribution of tokens row + offset to a cell: a task's result or a partial."""
    result = LIVE if state == VALUE else state
    low, high = cells[b, ROW], cells[cells[b, NEXT], ROW]
    _untouched(cells, b, x, False, faults, counters)
    held = cells[b, STATE]
    if first:
        _overwritten(cells, operands, b, x, faults, counters)
        _write(cells, b, x, result, offset, unit, faults, counters)
    elif held == LIVE:
        if result == LIVE and (cells[b, OFFSET] != offset or cells[b, UNIT] != unit):
            _fault(faults, counters, PARTIAL_MIXED, x, low, high, cells[b, OFFSET], offset)
            cells[b, STATE] = UNKNOWN
        elif result == UNKNOWN:
            cells[b, STATE] = UNKNOWN
    elif held == CLEARED:
        if result != CLEARED:
            _write(cells, b, x, result, offset, unit, faults, counters)
    elif held != UNKNOWN:
        code = ADD_TO_UNWRITTEN if held == EMPTY else PARTIAL_SPENT if held == SPENT else ALREADY_FINISHED
        _fault(faults, counters, code, x, low, high, cells[b, OFFSET], offset)
        _write(cells, b, x, UNKNOWN, offset, unit, faults, counters)


@jit
def _spend(cells: Ints, pieces: Ints, ptr: Ints, operands: Ints, x: int) -> None:
    """The partials of operand x have gone elsewhere; values stay."""
    end = operands[2, x] + operands[3, x]
    for piece in range(ptr[x], ptr[x + 1]):
        cell = pieces[0, piece]
        while cells[cell, ROW] < end:
            if cells[cell, STATE] == LIVE or cells[cell, STATE] == CLEARED:
                cells[cell, STATE] = SPENT
            cell = cells[cell, NEXT]


@jit
def _forget(cells: Ints, pieces: Ints, ptr: Ints, operands: Ints, x: int) -> None:
    """Nobody knows what arrives in the rows of x."""
    end = operands[2, x] + operands[3, x]
    for piece in range(ptr[x], ptr[x + 1]):
        cell = pieces[0, piece]
        while cells[cell, ROW] < end:
            cells[cell, STATE] = UNKNOWN
            cell = cells[cell, NEXT]


@jit
def _start_send(
    cells: Ints, pieces: Ints, ptr: Ints, operands: Ints, x: int, faults: Ints, counters: Ints
) -> None:
    _look(cells, pieces, ptr, operands, x, _VALUES | _PARTIALS, faults, counters)
    end = operands[2, x] + operands[3, x]
    for piece in range(ptr[x], ptr[x + 1]):
        cell = pieces[0, piece]
        while cells[cell, ROW] < end:
            linear = cells[cell, STATE] == LIVE or cells[cell, STATE] == CLEARED
            if linear and cells[cell, BUSY] >= ONE_SEND:
                low, high = cells[cell, ROW], cells[cells[cell, NEXT], ROW]
                _fault(faults, counters, PARTIAL_SPENT, x, low, high, cells[cell, OFFSET], NOWHERE)
            cells[cell, BUSY] += ONE_SEND
            cell = cells[cell, NEXT]


@jit
def _start_receive(
    cells: Ints, pieces: Ints, ptr: Ints, operands: Ints, x: int, faults: Ints, counters: Ints
) -> None:
    end = operands[2, x] + operands[3, x]
    for piece in range(ptr[x], ptr[x + 1]):
        cell = pieces[0, piece]
        while cells[cell, ROW] < end:
            _untouched(cells, cell, x, False, faults, counters)
            _overwritten(cells, operands, cell, x, faults, counters)
            cells[cell, STATE] = EMPTY
            cells[cell, BUSY] |= IN_FLIGHT
            cell = cells[cell, NEXT]


@jit
def _complete(cells: Ints, pieces: Ints, ptr: Ints, operands: Ints, x: int, send: int) -> None:
    end = operands[2, x] + operands[3, x]
    for piece in range(ptr[x], ptr[x + 1]):
        cell = pieces[0, piece]
        while cells[cell, ROW] < end:
            if send:
                cells[cell, BUSY] -= ONE_SEND
            else:
                cells[cell, BUSY] &= ~IN_FLIGHT
            cell = cells[cell, NEXT]


@jit
def _same_tokens(
    cells: Ints, pieces: Ints, ptr: Ints, operands: Ints, x: int, y: int, faults: Ints, counters: Ints
) -> None:
    """Row i of x and row i of y are one token, in every lane; what is unknown or cleared is let pass."""
    shift = operands[2, x] - operands[2, y]
    end = operands[2, y] + operands[3, y]
    lanes = max(ptr[x + 1] - ptr[x], ptr[y + 1] - ptr[y])
    for lane in range(lanes):
        a = pieces[0, ptr[x] + (lane if ptr[x + 1] - ptr[x] == lanes else 0)]
        b = pieces[0, ptr[y] + (lane if ptr[y + 1] - ptr[y] == lanes else 0)]
        row = operands[2, y]
        while row < end:
            known = (
                (_VALUES | (1 << LIVE)) >> cells[a, STATE] & (_VALUES | (1 << LIVE)) >> cells[b, STATE] & 1
            )
            a_end, b_end = cells[cells[a, NEXT], ROW] - shift, cells[cells[b, NEXT], ROW]
            stop = min(a_end, b_end)
            if known and cells[a, OFFSET] + shift != cells[b, OFFSET]:
                holds, wanted = cells[b, OFFSET], cells[a, OFFSET] + shift
                _fault(faults, counters, NOT_SAME_TOKENS, y, row, stop, holds, wanted)
                return
            if a_end == stop:
                a = cells[a, NEXT]
            if b_end == stop:
                b = cells[b, NEXT]
            row = stop


@jit
def _tokens_of(operands: Ints, x: int, offset: int) -> int:
    if offset in (_HIDDEN, NOWHERE):
        return NO_TOKEN
    return SEVERAL if offset == _MIXED else offset + operands[2, x]


@jit
def _place_task(
    cells: Ints,
    pieces: Ints,
    ptr: Ints,
    operands: Ints,
    q: int,
    kv: int,
    q_token: int,
    kv_token: int,
    item: int,
    tokens: Ints,
    runs: Ints,
    faults: Ints,
    counters: Ints,
) -> None:
    """Writes down the tokens of a task, run by run where they are not consecutive."""
    if q_token == NO_TOKEN or kv_token == NO_TOKEN:
        return
    if q_token >= 0 and kv_token >= 0:
        tokens[0, item], tokens[1, item] = q_token, kv_token
        return
    tokens[0, item], tokens[1, item] = SEVERAL, SEVERAL
    for x in (q, kv):
        for piece in range(ptr[x] + 1, ptr[x + 1]):
            _same_lane(cells, pieces, ptr[x], piece, operands, x, faults, counters)
    q_end, kv_end = operands[2, q] + operands[3, q], operands[2, kv] + operands[3, kv]
    a = pieces[0, ptr[q]]
    while cells[a, ROW] < q_end:
        b = pieces[0, ptr[kv]]
        while cells[b, ROW] < kv_end:
            if counters[_RUNS] == len(runs):
                counters[_FULL] = 1
                return
            run = runs[counters[_RUNS]]
            run[0] = item
            run[1], run[2] = cells[a, ROW] - operands[2, q], cells[cells[a, NEXT], ROW] - cells[a, ROW]
            run[3] = cells[a, ROW] + cells[a, OFFSET]
            run[4], run[5] = cells[b, ROW] - operands[2, kv], cells[cells[b, NEXT], ROW] - cells[b, ROW]
            run[6] = cells[b, ROW] + cells[b, OFFSET]
            counters[_RUNS] += 1
            b = cells[b, NEXT]
        a = cells[a, NEXT]


@jit
def _same_lane(
    cells: Ints, pieces: Ints, one: int, other: int, operands: Ints, x: int, faults: Ints, counters: Ints
) -> None:
    """Two lanes of one operand hold the same tokens row by row."""
    a, b = pieces[0, one], pieces[0, other]
    row, end = operands[2, x], operands[2, x] + operands[3, x]
    while row < end:
        stop = min(cells[cells[a, NEXT], ROW], cells[cells[b, NEXT], ROW])
        if cells[a, OFFSET] != cells[b, OFFSET]:
            _fault(faults, counters, NOT_SAME_TOKENS, x, row, stop, cells[b, OFFSET], cells[a, OFFSET])
            return
        if cells[cells[a, NEXT], ROW] == stop:
            a = cells[a, NEXT]
        if cells[cells[b, NEXT], ROW] == stop:
            b = cells[b, NEXT]
        row = stop


@jit
def _attend(
    cells: Ints,
    pieces: Ints,
    ptr: Ints,
    operands: Ints,
    tasks: Ints,
    base: int,
    item: int,
    tokens: Ints,
    runs: Ints,
    faults: Ints,
    counters: Ints,
) -> None:
    q, kv, o = base + tasks[0, item], base + tasks[1, item], base + tasks[2, item]
    q_token = _tokens_of(operands, q, _look(cells, pieces, ptr, operands, q, _VALUES, faults, counters))
    kv_token = _tokens_of(operands, kv, _look(cells, pieces, ptr, operands, kv, _VALUES, faults, counters))
    _place_task(cells, pieces, ptr, operands, q, kv, q_token, kv_token, item, tokens, runs, faults, counters)
    _move(cells, pieces, ptr, operands, q, o, True, tasks[5, item] != 0, False, faults, counters)


@jit
def _attend_grad(
    cells: Ints,
    pieces: Ints,
    ptr: Ints,
    operands: Ints,
    grads: Ints,
    base: int,
    item: int,
    tokens: Ints,
    runs: Ints,
    faults: Ints,
    counters: Ints,
) -> None:
    q, kv = base + grads[0, item], base + grads[1, item]
    q_token = _tokens_of(operands, q, _look(cells, pieces, ptr, operands, q, _VALUES, faults, counters))
    kv_token = _tokens_of(operands, kv, _look(cells, pieces, ptr, operands, kv, _VALUES, faults, counters))
    _place_task(cells, pieces, ptr, operands, q, kv, q_token, kv_token, item, tokens, runs, faults, counters)
    for column in (2, 3):
        x = base + grads[column, item]
        token = _tokens_of(operands, x, _look(cells, pieces, ptr, operands, x, _VALUES, faults, counters))
        if token != q_token or token < 0:
            _same_tokens(cells, pieces, ptr, operands, q, x, faults, counters)
    first = grads[8, item]
    dq, dkv = base + grads[4, item], base + grads[5, item]
    _move(cells, pieces, ptr, operands, q, dq, True, first & 1 != 0, False, faults, counters)
    _move(cells, pieces, ptr, operands, kv, dkv, True, first & 2 != 0, False, faults, counters)


@jit
def _row_op(
    cells: Ints,
    pieces: Ints,
    ptr: Ints,
    operands: Ints,
    rowops: Ints,
    base: int,
    item: int,
    op: int,
    faults: Ints,
    counters: Ints,
) -> None:
    a, b, c, d = (
        base + rowops[0, item],
        base + rowops[1, item],
        base + rowops[2, item],
        base + rowops[3, item],
    )
    first = rowops[4, item] != 0
    if op in (_MERGE, _ADD):
        _look(cells, pieces, ptr, operands, a, _PARTIALS, faults, counters)
        _move(cells, pieces, ptr, operands, a, c, True, first, False, faults, counters)
        _spend(cells, pieces, ptr, operands, a)
    elif op == _COPY:
        _look(cells, pieces, ptr, operands, a, _VALUES | _PARTIALS, faults, counters)
        _move(cells, pieces, ptr, operands, a, c, False, False, False, faults, counters)
        _spend(cells, pieces, ptr, operands, a)
    elif op == _DELTA:
        for x in (a, b):
            _look(cells, pieces, ptr, operands, x, _VALUES, faults, counters)
        _same_tokens(cells, pieces, ptr, operands, a, b, faults, counters)
        _once(cells, pieces, ptr, operands, c, faults, counters)
        _move(cells, pieces, ptr, operands, a, c, False, False, False, faults, counters)
    elif op == _PROJECT:
        _look(cells, pieces, ptr, operands, a, _VALUES, faults, counters)
        for x in (b, c):
            if x != base:
                _move(cells, pieces, ptr, operands, a, x, False, False, False, faults, counters)
    elif op == _PROJECT_GRAD:
        _look(cells, pieces, ptr, operands, a, _VALUES, faults, counters)
        for x in (b, c):
            if x != base:
                _look(cells, pieces, ptr, operands, x, _PARTIALS, faults, counters)
                _same_tokens(cells, pieces, ptr, operands, a, x, faults, counters)
                _spend(cells, pieces, ptr, operands, x)
        _move(cells, pieces, ptr, operands, a, d, True, first, False, faults, counters)
    else:
        _clear_or_finish(cells, pieces, ptr, operands, c, op == _CLEAR, faults, counters)


@jit
def _once(cells: Ints, pieces: Ints, ptr: Ints, operands: Ints, x: int, faults: Ints, counters: Ints) -> None:
    """Rows that are computed a single time, because a sum (the gradient of the sinks) is taken over them."""
    end = operands[2, x] + operands[3, x]
    for piece in range(ptr[x], ptr[x + 1]):
        cell = pieces[0, piece]
        while cells[cell, ROW] < end:
            if cells[cell, STATE] == VALUE:
                low, high = cells[cell, ROW], cells[cells[cell, NEXT], ROW]
                _fault(faults, counters, TWICE, x, low, high, cells[cell, OFFSET], NOWHERE)
            cell = cells[cell, NEXT]


@jit
def _clear_or_finish(
    cells: Ints, pieces: Ints, ptr: Ints, operands: Ints, x: int, clear: bool, faults: Ints, counters: Ints
) -> None:
    end = operands[2, x] + operands[3, x]
    if not clear:
        _look(cells, pieces, ptr, operands, x, _PARTIALS | _VALUES, faults, counters)
    for piece in range(ptr[x], ptr[x + 1]):
        cell = pieces[0, piece]
        while cells[cell, ROW] < end:
            low, high = cells[cell, ROW], cells[cells[cell, NEXT], ROW]
            _untouched(cells, cell, x, False, faults, counters)
            if clear:
                _overwritten(cells, operands, cell, x, faults, counters)
                _write(cells, cell, x, CLEARED, NOWHERE, pieces[1, piece], faults, counters)
            elif cells[cell, STATE] == VALUE:
                _fault(faults, counters, ALREADY_FINISHED, x, low, high, cells[cell, OFFSET], NOWHERE)
            elif cells[cell, STATE] != UNKNOWN:
                cells[cell, STATE] = VALUE
            cell = cells[cell, NEXT]
