"""The dataflow of all ranks, executed on cells: which tokens each row holds, and where each partial result is.

Rounds rise on every rank and `wait r` follows `launch r`, so the ranks can be run one after another, each until it
waits for a round that somebody has still to launch: the lowest unfinished round is never such a one. What a send
carries is noted when it is launched and handed over at the receiver's wait.

The interpreter knows nothing of numbers, only of cells (`cells.py`):

    look      rows hold a value, or a partial, of the heads named, and are not in flight
    spend     the partial in some rows goes elsewhere
    fill      rows get a value or a partial: nothing live is overwritten, nothing being sent or received is touched;
              or a contribution is added to a partial of the same tokens

A broken promise becomes a row of `faults`; what it would have written is UNKNOWN, and UNKNOWN is never reported.
"""

from __future__ import annotations

from apportion.ir.isa import Op, Tensor
from apportion.ir.jit import jit
from apportion.ir.plan import Ints

# Constants are compiled into the functions below and live beside them: a compiled function is cached until its own
# file changes.

# columns of a cell; a line is 32 bytes, so that two of them share one of a processor's cache
ROW, STOP, NEXT, OFFSET, UNIT, STATE, BUSY, HOME_OFFSET = range(8)

# columns of `Cells.slots`; an operand's first lane stands here, the others in `pieces` from PIECE on
CELL, PIECE, BEGIN, END, _UNIT, LANES, TENSOR = range(7)  # _UNIT is UNIT: the same column as in a cell

# the line of counters: lines in use of each kind, whether they ran out, and what is being executed
COUNTERS = 0
FAULTS, SUSPECTS, RUN_LINE, PART_LINE, PARTS, NEW_CELL, INSTRUCTION, ITEM = range(8)
FULL = 0  # of line FULL_LINE
MOST_FAULTS = 32
FAULT_LINES, SUSPECT_LINES = 1, 1 + MOST_FAULTS
FULL_LINE = SUSPECT_LINES + MOST_FAULTS
FIRST_CELL = FULL_LINE + 1

# states
EMPTY = 0  # never written
SPENT = 1  # held a partial that was merged, added or sent
VALUE = 2  # holds the tensor's value for the tokens row + offset
LIVE = 3  # accumulator with at least one contribution
CLEARED = 4  # accumulator that holds the identity
UNKNOWN = 5  # written by something that broke a rule, which was reported

NOWHERE = -(2**31)  # offset of a cell without tokens

# BUSY: bit 0 a receive into the cell is in flight, bit 1 nobody has read it yet; above, sends in flight
IN_FLIGHT, UNREAD, ONE_SEND = 1, 2, 4

# fault codes
READ_UNWRITTEN = 1
READ_IN_FLIGHT = 2
READ_OTHER_HEADS = 3
READ_PARTIAL = 4
WRITE_SENDING = 5
WRITE_IN_FLIGHT = 6
NOT_SAME_TOKENS = 7
ADD_TO_UNWRITTEN = 8
PARTIAL_SPENT = 9
PARTIAL_LOST = 10
PARTIAL_MIXED = 11
NOT_A_PARTIAL = 12
WRONG_HOME = 13
ALREADY_FINISHED = 14
TWICE = 15
UNREAD_LOST = 16

#: columns of a fault: rows [LOW, HIGH) of the operand, the offset of the tokens that they hold and that they should
CODE, AT, OF_ITEM, OPERAND, LOW, HIGH, HOLDS, WANTED = range(8)

#: token of a task operand that has no single one
SEVERAL, NO_TOKEN = -1, -2

# what a look may find, as bits of states
_VALUES = 1 << VALUE
_PARTIALS = (1 << LIVE) | (1 << CLEARED)

# what a look finds where it is not one offset; NOWHERE: all rows are cleared
_MIXED, _HIDDEN = NOWHERE + 1, NOWHERE + 2

# how rows are filled
_PUT, _ARRIVE, _ADD, _ADD_FIRST = range(4)

_ACCUMULATOR_BITS = (1 << Tensor.O) | (1 << Tensor.DX) | (1 << Tensor.DQ) | (1 << Tensor.DKV)

_LAUNCH, _WAIT, _ATTEND, _ATTEND_GRAD = int(Op.LAUNCH), int(Op.WAIT), int(Op.ATTEND), int(Op.ATTEND_GRAD)
_DELTA, _MERGE, _SUM, _COPY = int(Op.DELTA), int(Op.MERGE), int(Op.ADD), int(Op.COPY)
_CLEAR, _PROJECT, _PROJECT_GRAD = int(Op.CLEAR), int(Op.PROJECT), int(Op.PROJECT_GRAD)

# A send that carries several runs of tokens: `carried` is this, the first run and their number instead of the state
# and the first row's token.
_SEVERAL_RUNS = -1


@jit
def interpret(
    m: Ints,
    instructions: Ints,
    ptr: Ints,
    starts: Ints,
    partner: Ints,
    turn: Ints,
    waiting: Ints,
    bases: Ints,
    transfers: Ints,
    mate: Ints,
    carried: Ints,
    tasks: Ints,
    grads: Ints,
    rowops: Ints,
    tokens: Ints,
) -> None:
    """Runs the ranks by turns, each until it waits for a round that somebody has still to launch.

    m: `Cells.lines`. turn: the index of each instruction's round; waiting: how many ranks have still to launch each
    round. bases: where each rank's operands begin in `m`. carried: what each send carries, filled here.
    """
    at = ptr[:-1].copy()
    moved = True
    while moved:
        moved = False
        for rank in range(len(ptr) - 1):
            base, step = bases[rank], at[rank]
            while step < ptr[rank + 1]:
                op = instructions[0, step]
                first, end = starts[step], starts[step] + instructions[4, step]
                m[COUNTERS, INSTRUCTION] = step
                if op == _WAIT:
                    launch = partner[step]
                    if launch >= 0 and waiting[turn[step]] > 0:
                        break
                    if (
                        0 <= launch < step and partner[launch] == step
                    ):  # else the rule on transfers reports it
                        m[COUNTERS, INSTRUCTION] = launch
                        for item in range(starts[launch], starts[launch] + instructions[4, launch]):
                            m[COUNTERS, ITEM] = item
                            if transfers[0, item]:
                                _end_send(m, base + transfers[2, item])
                            else:
                                _end_receive(m, base + transfers[2, item], carried, mate[item])
                elif op == _LAUNCH:
                    waiting[turn[step]] -= 1
                    for item in range(first, end):
                        m[COUNTERS, ITEM] = item
                        if transfers[0, item]:
                            _start_send(m, base + transfers[2, item], carried, item)
                        else:
                            _start_receive(m, base + transfers[2, item])
                elif op == _ATTEND:
                    for item in range(first, end):
                        m[COUNTERS, ITEM] = item
                        q, kv, o = base + tasks[0, item], base + tasks[1, item], base + tasks[2, item]
                        _attend(m, tokens, q, kv, o, tasks[5, item])
                elif op == _ATTEND_GRAD:
                    for item in range(first, end):
                        m[COUNTERS, ITEM] = item
                        q, kv, do = base + grads[0, item], base + grads[1, item], base + grads[2, item]
                        delta, dq, dkv = base + grads[3, item], base + grads[4, item], base + grads[5, item]
                        _attend_grad(m, tokens, q, kv, do, delta, dq, dkv, grads[8, item])
                else:
                    for item in range(first, end):
                        m[COUNTERS, ITEM] = item
                        a, b = base + rowops[0, item], base + rowops[1, item]
                        c, d = base + rowops[2, item], base + rowops[3, item]
                        _row_op(m, op, a, b, c, d, base, _ADD_FIRST if rowops[4, item] else _ADD)
                step += 1
            moved = moved or step > at[rank]
            at[rank] = step


# ---------------------------------------------------------------------------------------------- ops


@jit
def _attend(m: Ints, tokens: Ints, q: int, kv: int, o: int, first: int) -> None:
    queries, keys = _look(m, q, _VALUES), _look(m, kv, _VALUES)
    _place_task(m, tokens, q, kv, queries, keys)
    _pass_on(m, q, queries, o, _ADD_FIRST if first else _ADD)


@jit
def _attend_grad(
    m: Ints, tokens: Ints, q: int, kv: int, do: int, delta: int, dq: int, dkv: int, first: int
) -> None:
    queries, keys = _look(m, q, _VALUES), _look(m, kv, _VALUES)
    _place_task(m, tokens, q, kv, queries, keys)
    _look_alike(m, do, q, queries)
    _look_alike(m, delta, q, queries)
    _pass_on(m, q, queries, dq, _ADD_FIRST if first & 1 else _ADD)
    _pass_on(m, kv, keys, dkv, _ADD_FIRST if first & 2 else _ADD)


@jit
def _look_alike(m: Ints, x: int, q: int, queries: int) -> None:
    """Reads x, whose rows are the tokens of q."""
    found = _look(m, x, _VALUES)
    if found <= _HIDDEN or found + m[x, BEGIN] != queries + m[q, BEGIN]:
        _same_tokens(m, q, x)


@jit
def _row_op(m: Ints, op: int, a: int, b: int, c: int, d: int, none: int, adding: int) -> None:
    if op in (_MERGE, _SUM):
        _pass_on(m, a, _look(m, a, _PARTIALS), c, adding)
        _spend(m, a)
    elif op == _COPY:
        _pass_on(m, a, _look(m, a, _VALUES | _PARTIALS), c, _PUT)
        _spend(m, a)
    elif op == _DELTA:
        found = _look(m, a, _VALUES)
        _look(m, b, _VALUES)
        _same_tokens(m, a, b)
        _once(m, c)
        _pass_on(m, a, found, c, _PUT)
    elif op == _PROJECT:
        found = _look(m, a, _VALUES)
        for x in (b, c):
            if x != none:
                _pass_on(m, a, found, x, _PUT)
    elif op == _PROJECT_GRAD:
        found = _look(m, a, _VALUES)
        for x in (b, c):
            if x != none:
                _look(m, x, _PARTIALS)
                _same_tokens(m, a, x)
                _spend(m, x)
        _pass_on(m, a, found, d, adding)
    elif op == _CLEAR:
        _fill(m, c, CLEARED, NOWHERE, _PUT)
    else:
        _finish(m, c)


@jit
def _start_send(m: Ints, x: int, carried: Ints, item: int) -> None:
    """Notes what the rows hold; a partial leaves them."""
    found = _look(m, x, _VALUES | _PARTIALS)
    if found == _MIXED:
        carried[item, 0], carried[item, 1] = _SEVERAL_RUNS, m[COUNTERS, RUN_LINE]
        carried[item, 2] = _note_runs(m, x)
        m[COUNTERS, RUN_LINE] += carried[item, 2]
    else:
        carried[item, 0] = UNKNOWN if found == _HIDDEN else m[m[x, CELL], STATE]
        carried[item, 1] = NOWHERE if found == NOWHERE else found + m[x, BEGIN]
    for lane in range(m[x, LANES]):
        cell = _first_cell(m, x, lane)
        while cell >= 0:
            if m[cell, STATE] in (LIVE, CLEARED):
                m[cell, STATE] = SPENT
            m[cell, BUSY] += ONE_SEND
            cell = _next_cell(m, x, cell)


@jit
def _end_send(m: Ints, x: int) -> None:
    for lane in range(m[x, LANES]):
        cell = _first_cell(m, x, lane)
        while cell >= 0:
            m[cell, BUSY] -= ONE_SEND
            cell = _next_cell(m, x, cell)


@jit
def _start_receive(m: Ints, x: int) -> None:
    for lane in range(m[x, LANES]):
        cell = _first_cell(m, x, lane)
        while cell >= 0:
            _check_untouched(m, x, cell)
            _check_unneeded(m, x, cell)
            m[cell, STATE] = EMPTY
            m[cell, BUSY] |= IN_FLIGHT
            cell = _next_cell(m, x, cell)


@jit
def _end_receive(m: Ints, x: int, carried: Ints, mate: int) -> None:
    """The rows get what the sender noted; where there is none, or the two differ, nobody knows."""
    for lane in range(m[x, LANES]):
        cell = _first_cell(m, x, lane)
        while cell >= 0:
            m[cell, BUSY] &= ~IN_FLIGHT
            cell = _next_cell(m, x, cell)
    if mate < 0:
        _fill(m, x, UNKNOWN, NOWHERE, _ARRIVE)
    elif carried[mate, 0] == _SEVERAL_RUNS:
        _fill_runs(m, x, carried[mate, 1], carried[mate, 2], _ARRIVE)
    else:
        _fill(m, x, carried[mate, 0], carried[mate, 1], _ARRIVE)


@jit
def _once(m: Ints, x: int) -> None:
    """Rows that are computed a single time, because a sum (the gradient of the sinks) is taken over them."""
    for lane in range(m[x, LANES]):
        cell = _first_cell(m, x, lane)
        while cell >= 0:
            if m[cell, STATE] == VALUE:
                _fault(m, TWICE, x, cell, m[cell, OFFSET], NOWHERE)
            cell = _next_cell(m, x, cell)


@jit
def _finish(m: Ints, x: int) -> None:
    _look(m, x, _PARTIALS | _VALUES)
    for lane in range(m[x, LANES]):
        cell = _first_cell(m, x, lane)
        while cell >= 0:
            _check_untouched(m, x, cell)
            if m[cell, STATE] == VALUE:
                _fault(m, ALREADY_FINISHED, x, cell, m[cell, OFFSET], NOWHERE)
            elif m[cell, STATE] != UNKNOWN:
                m[cell, STATE] = VALUE
            cell = _next_cell(m, x, cell)


# ---------------------------------------------------------------------------------------------- cells


@jit
def _first_cell(m: Ints, x: int, lane: int) -> int:
    """The cell where operand x begins in one of its lanes."""
    if lane == 0:
        return m[x, CELL]  # type: ignore[no-any-return]
    piece = m[x, PIECE] + lane
    return m[piece >> 2, (piece & 3) * 2]  # type: ignore[no-any-return]


@jit
def _unit_of(m: Ints, x: int, lane: int) -> int:
    if lane == 0:
        return m[x, UNIT]  # type: ignore[no-any-return]
    piece = m[x, PIECE] + lane
    return m[piece >> 2, (piece & 3) * 2 + 1]  # type: ignore[no-any-return]


@jit
def _next_cell(m: Ints, x: int, cell: int) -> int:
    """The next cell of the operand in the same lane, -1 after the last."""
    return m[cell, NEXT] if m[cell, STOP] < m[x, END] else -1


@jit
def _fault(m: Ints, code: int, x: int, cell: int, holds: int, wanted: int) -> None:
    found = m[COUNTERS, FAULTS]
    if found < MOST_FAULTS:
        _note_fault(m, FAULT_LINES + found, code, x, cell, holds, wanted)
        m[COUNTERS, FAULTS] = found + 1


@jit
def _note_fault(m: Ints, line: int, code: int, x: int, cell: int, holds: int, wanted: int) -> None:
    m[line, CODE], m[line, OPERAND], m[line, HOLDS], m[line, WANTED] = code, x, holds, wanted
    m[line, AT], m[line, OF_ITEM] = m[COUNTERS, INSTRUCTION], m[COUNTERS, ITEM]
    m[line, LOW], m[line, HIGH] = m[cell, ROW], m[cell, STOP]


@jit
def _look(m: Ints, x: int, accepted: int) -> int:
    """Reads operand x, whose states must be among `accepted`. Returns the offset of its rows where they have one and
    one state, NOWHERE where all are cleared, _MIXED where they differ, _HIDDEN where some are unknown."""
    found, state_found = NOWHERE, -1
    for lane in range(m[x, LANES]):
        cell, unit = _first_cell(m, x, lane), _unit_of(m, x, lane)
        while cell >= 0:
            state, offset = m[cell, STATE], m[cell, OFFSET]
            if not (accepted >> state) & 1 or m[cell, UNIT] != unit or m[cell, BUSY] & IN_FLIGHT:
                _refuse(m, x, cell, unit, accepted)
                found, state_found = _HIDDEN, UNKNOWN
            elif state_found < 0:
                found, state_found = offset, state
            elif found != _HIDDEN and (found != offset or state_found != state):
                found = _MIXED
            m[cell, BUSY] &= ~UNREAD
            cell = _next_cell(m, x, cell)
    return found


@jit
def _refuse(m: Ints, x: int, cell: int, unit: int, accepted: int) -> None:
    """Reports why a cell cannot be read, once."""
    state = m[cell, STATE]
    if m[cell, BUSY] & IN_FLIGHT:
        _fault(m, READ_IN_FLIGHT, x, cell, NOWHERE, NOWHERE)
    elif state == UNKNOWN:
        return
    elif (accepted >> state) & 1:
        _fault(m, READ_OTHER_HEADS, x, cell, m[cell, UNIT], unit)
    elif state == EMPTY:
        _fault(m, READ_UNWRITTEN, x, cell, NOWHERE, NOWHERE)
    elif state == SPENT:
        _fault(m, PARTIAL_SPENT, x, cell, m[cell, OFFSET], NOWHERE)
    else:
        _fault(m, NOT_A_PARTIAL if state == VALUE else READ_PARTIAL, x, cell, m[cell, OFFSET], NOWHERE)
    m[cell, STATE] = UNKNOWN


@jit
def _spend(m: Ints, x: int) -> None:
    """The partials of operand x have gone elsewhere; values stay."""
    for lane in range(m[x, LANES]):
        cell = _first_cell(m, x, lane)
        while cell >= 0:
            if m[cell, STATE] in (LIVE, CLEARED):
                m[cell, STATE] = SPENT
            cell = _next_cell(m, x, cell)


@jit
def _pass_on(m: Ints, x: int, found: int, y: int, how: int) -> None:
    """Fills y with what a look at x found."""
    if found == _MIXED:
        _fill_runs(m, y, m[COUNTERS, RUN_LINE], _note_runs(m, x), how)
    elif found == _HIDDEN:
        _fill(m, y, UNKNOWN, NOWHERE, how)
    else:
        token = NOWHERE if found == NOWHERE else found + m[x, BEGIN]
        _fill(m, y, m[m[x, CELL], STATE], token, how)


@jit
def _note_runs(m: Ints, x: int) -> int:
    """Writes the runs of operand x, (lane, first row, rows, token, state), behind those in use; their number."""
    start, count = m[COUNTERS, RUN_LINE], 0
    for lane in range(m[x, LANES]):
        cell, joins = _first_cell(m, x, lane), False
        while cell >= 0:
            row, stop, state = m[cell, ROW], m[cell, STOP], m[cell, STATE]
            token = NOWHERE if m[cell, OFFSET] == NOWHERE else row + m[cell, OFFSET]
            last, line = start + count - 1, start + count
            if joins and m[last, 4] == state and token in (NOWHERE, m[last, 3] + m[last, 2]):
                m[last, 2] += stop - row
            elif line == m[COUNTERS, PART_LINE] - m[COUNTERS, PARTS]:
                m[FULL_LINE, FULL] = 1
                return 0
            else:
                m[line, 0], m[line, 1], m[line, 2] = lane, row - m[x, BEGIN], stop - row
                m[line, 3], m[line, 4] = token, state
                count, joins = count + 1, True
            cell = _next_cell(m, x, cell)
    return count


@jit
def _fill_runs(m: Ints, y: int, start: int, count: int, how: int) -> None:
    """Fills y run by run; runs of one lane (of X, which has no heads) go to every lane of y."""
    lanes = m[y, LANES]
    paired = count > 0 and m[start + count - 1, 0] == lanes - 1
    for lane in range(lanes):
        cell, unit = _first_cell(m, y, lane), _unit_of(m, y, lane)
        for run in range(start, start + count):
            if not paired or m[run, 0] == lane:
                row = m[y, BEGIN] + m[run, 1]
                offset = NOWHERE if m[run, 3] == NOWHERE else m[run, 3] - row
                while cell >= 0 and m[cell, ROW] < row + m[run, 2]:
                    if m[cell, STOP] > row + m[run, 2]:
                        _split(m, cell, row + m[run, 2])
                    _fill_cell(m, y, cell, m[run, 4], offset, unit, how)
                    cell = _next_cell(m, y, cell)


@jit
def _split(m: Ints, cell: int, row: int) -> None:
    """Cuts a cell at `row`; the left part keeps the number. New cells are written from the end of `m` down."""
    new = m[COUNTERS, NEW_CELL]
    if new < m[COUNTERS, PART_LINE] + 2:
        m[FULL_LINE, FULL] = 1
        return
    m[COUNTERS, NEW_CELL] = new - 2
    m[new] = m[cell]
    m[new + 1, 0] = cell if cell < m[COUNTERS, PART_LINE] else m[cell + 1, 0]
    m[new, ROW] = row
    m[cell, STOP] = row
    m[cell, NEXT] = new


@jit
def _fill(m: Ints, y: int, state: int, token: int, how: int) -> None:
    """Fills y with consecutive tokens from `token`."""
    offset = NOWHERE if token == NOWHERE else token - m[y, BEGIN]
    for lane in range(m[y, LANES]):
        cell, unit = _first_cell(m, y, lane), _unit_of(m, y, lane)
        while cell >= 0:
            _fill_cell(m, y, cell, state, offset, unit, how)
            cell = _next_cell(m, y, cell)


@jit
def _fill_cell(m: Ints, y: int, cell: int, state: int, offset: int, unit: int, how: int) -> None:
    if how != _ARRIVE:  # a receive was checked when it was launched
        _check_untouched(m, y, cell)
    if how in (_PUT, _ADD_FIRST):
        _check_unneeded(m, y, cell)
    if how == _ADD:
        _add(m, y, cell, state, offset, unit)
    elif how == _ADD_FIRST and state == VALUE:
        _write(m, y, cell, LIVE, offset, unit)
    else:
        _write(m, y, cell, state, offset, unit)
        m[cell, BUSY] |= UNREAD


@jit
def _check_untouched(m: Ints, x: int, cell: int) -> None:
    """A cell that is written is neither being sent nor being received."""
    busy = m[cell, BUSY]
    if busy >= ONE_SEND:
        _fault(m, WRITE_SENDING, x, cell, NOWHERE, NOWHERE)
    if busy & IN_FLIGHT:
        _fault(m, WRITE_IN_FLIGHT, x, cell, NOWHERE, NOWHERE)


@jit
def _check_unneeded(m: Ints, x: int, cell: int) -> None:
    """A cell that is overwritten holds nothing that is needed."""
    state, offset = m[cell, STATE], m[cell, OFFSET]
    if state == LIVE:
        _fault(m, PARTIAL_LOST, x, cell, offset, NOWHERE)
    elif state == VALUE and m[cell, HOME_OFFSET] != NOWHERE:
        if (_ACCUMULATOR_BITS >> m[x, TENSOR]) & 1:
            _fault(m, ALREADY_FINISHED, x, cell, offset, NOWHERE)
    elif state == VALUE and m[cell, BUSY] & UNREAD:
        found = m[COUNTERS, SUSPECTS]
        if found < MOST_FAULTS:
            _note_fault(m, SUSPECT_LINES + found, UNREAD_LOST, x, cell, offset, NOWHERE)
            m[COUNTERS, SUSPECTS] = found + 1


@jit
def _add(m: Ints, x: int, cell: int, state: int, offset: int, unit: int) -> None:
    """Adds a contribution of tokens row + offset to a cell: a task's result (VALUE) or a partial."""
    held, result = m[cell, STATE], LIVE if state == VALUE else state
    if held == LIVE:
        if result == LIVE and (m[cell, OFFSET] != offset or m[cell, UNIT] != unit):
            _fault(m, PARTIAL_MIXED, x, cell, m[cell, OFFSET], offset)
            result = UNKNOWN
        if result == UNKNOWN:
            m[cell, STATE] = UNKNOWN
    elif held == CLEARED:
        if result != CLEARED:
            _write(m, x, cell, result, offset, unit)
    elif held != UNKNOWN:
        code = ADD_TO_UNWRITTEN if held == EMPTY else PARTIAL_SPENT if held == SPENT else ALREADY_FINISHED
        _fault(m, code, x, cell, m[cell, OFFSET], offset)
        m[cell, STATE] = UNKNOWN


@jit
def _write(m: Ints, x: int, cell: int, state: int, offset: int, unit: int) -> None:
    """Home rows hold their own tokens and no others."""
    home = m[cell, HOME_OFFSET]
    if home != NOWHERE and state == CLEARED:
        offset = home
    if home != NOWHERE and offset != home and state != UNKNOWN:
        _fault(m, WRONG_HOME, x, cell, home, offset)
        state = UNKNOWN
    m[cell, STATE], m[cell, OFFSET], m[cell, UNIT] = state, offset, unit


@jit
def _same_tokens(m: Ints, x: int, y: int) -> None:
    """Row i of x and row i of y are one token, in every lane; what is unknown or cleared is let pass."""
    shift = m[x, BEGIN] - m[y, BEGIN]
    x_lanes, y_lanes = m[x, LANES], m[y, LANES]
    for lane in range(max(x_lanes, y_lanes)):
        a = _first_cell(m, x, lane if x_lanes > 1 else 0)
        b = _first_cell(m, y, lane if y_lanes > 1 else 0)
        while a >= 0 and b >= 0:
            known = m[a, STATE] in (VALUE, LIVE) and m[b, STATE] in (VALUE, LIVE)
            if known and m[a, OFFSET] + shift != m[b, OFFSET]:
                _fault(m, NOT_SAME_TOKENS, y, b, m[b, OFFSET], m[a, OFFSET] + shift)
                return
            a_stop, b_stop = m[a, STOP] - shift, m[b, STOP]
            if a_stop <= b_stop:
                a = _next_cell(m, x, a)
            if b_stop <= a_stop:
                b = _next_cell(m, y, b)


@jit
def _place_task(m: Ints, tokens: Ints, q: int, kv: int, queries: int, keys: int) -> None:
    """Writes down the tokens of a task, run by run where they are not consecutive."""
    item = m[COUNTERS, ITEM]
    if queries > _HIDDEN and keys > _HIDDEN:
        tokens[0, item] = queries + m[q, BEGIN]
        tokens[1, item] = keys + m[kv, BEGIN]
    elif _HIDDEN not in (queries, keys):
        tokens[0, item], tokens[1, item] = SEVERAL, SEVERAL
        _check_lanes(m, q)
        _check_lanes(m, kv)
        _place_parts(m, item, q, kv)


@jit
def _check_lanes(m: Ints, x: int) -> None:
    """All lanes of an operand hold the same tokens row by row."""
    for lane in range(1, m[x, LANES]):
        a, b = _first_cell(m, x, 0), _first_cell(m, x, lane)
        while a >= 0 and b >= 0:
            if m[a, OFFSET] != m[b, OFFSET]:
                _fault(m, NOT_SAME_TOKENS, x, b, m[b, OFFSET], m[a, OFFSET])
                return
            a_stop, b_stop = m[a, STOP], m[b, STOP]
            if a_stop <= b_stop:
                a = _next_cell(m, x, a)
            if b_stop <= a_stop:
                b = _next_cell(m, x, b)


@jit
def _place_parts(m: Ints, item: int, q: int, kv: int) -> None:
    a = _first_cell(m, q, 0)
    while a >= 0:
        b = _first_cell(m, kv, 0)
        while b >= 0:
            line = m[COUNTERS, PART_LINE] - m[COUNTERS, PARTS] - 1
            if line < m[COUNTERS, RUN_LINE]:
                m[FULL_LINE, FULL] = 1
                return
            m[COUNTERS, PARTS] += 1
            m[line, 0] = item
            _note_part(m, line, 1, q, a)
            _note_part(m, line, 4, kv, b)
            b = _next_cell(m, kv, b)
        a = _next_cell(m, q, a)


@jit
def _note_part(m: Ints, line: int, column: int, x: int, cell: int) -> None:
    m[line, column] = m[cell, ROW] - m[x, BEGIN]
    m[line, column + 1] = m[cell, STOP] - m[cell, ROW]
    m[line, column + 2] = m[cell, ROW] + m[cell, OFFSET]
