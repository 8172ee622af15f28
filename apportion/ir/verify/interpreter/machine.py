"""The dataflow of all ranks, executed on cells: which tokens each row holds, and where each partial result is.

Ranks run one after another. What a send carries is noted when it is launched and handed over at the receiver's wait;
where the sender has not come so far, the rows are PENDING, and the receiver goes on until something needs to know.
Rounds rise on every rank and `wait r` follows `launch r`, so the lowest unfinished round never has to stop. Most
plans send home rows that nothing changes, which are noted before anything runs, and add what returns to rows whose
tokens are known, which is promised and looked up in the end: then every rank runs through in one go.

The interpreter knows nothing of numbers, only of cells (`cells.py`):

    look      rows hold a value, or a partial, of the heads named, and are not in flight
    spend     the partial in some rows goes elsewhere
    fill      rows get a value or a partial: nothing live is overwritten, nothing being sent or received is touched;
              or a contribution is added to a partial of the same tokens

A broken promise becomes a row of `faults`; what it would have written is UNKNOWN, and UNKNOWN is never reported.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.isa import RULES, Op, Rule, Use
from apportion.ir.loops.jit import lean
from apportion.ir.plan.ops import LISTS
from apportion.ir.tensors import PARTIALS, Tensor

# Constants are compiled into the functions below and live beside them: a compiled function is cached until its own
# file changes.

# columns of a cell; a line is 64 bytes, one of a processor's cache
ROW, STOP, NEXT, OFFSET, UNIT, STATE, BUSY, HOME_OFFSET = range(8)

# columns of `Cells.slots`; an operand's first lane stands here, the others in `pieces` from PIECE on
CELL, PIECE, BEGIN, END, _UNIT, LANES, TENSOR = range(7)  # _UNIT is UNIT: the same column as in a cell

# the line of counters: lines in use of each kind, whether they ran out, and what is being executed
COUNTERS = 0
FAULTS, SUSPECTS, RUN_LINE, PART_LINE, PARTS, NEW_CELL, INSTRUCTION, ITEM = range(8)
# of line FULL_LINE; FREE: the first cut-off cell that is out of use, 0 for none; LAZY: whether cells stay uncut where
# a task reads some of their rows, and cleared rows are taken, all of a cell at once, for partials of the tokens of the
# first contribution: rows without any hold zeros, and zeros may be said to be of any tokens
FULL, PROMISES, FREE, TOUCHED, LAZY = range(5)
MOST_FAULTS = 32
FAULT_LINES, SUSPECT_LINES = 1, 1 + MOST_FAULTS
FULL_LINE = SUSPECT_LINES + MOST_FAULTS
HINT_LINES = FULL_LINE + 1  # [tensor]: the cell that was last brought back, where the next one is sought from
FIRST_CELL = HINT_LINES + (max(Tensor) + 8) // 8

# states
EMPTY = 0  # never written
SPENT = 1  # held a partial that was merged, added or sent
VALUE = 2  # holds the tensor's value for the tokens row + offset
LIVE = 3  # accumulator with at least one contribution
CLEARED = 4  # accumulator that holds the identity
UNKNOWN = 5  # written by something that broke a rule, which was reported
PENDING = 6  # received from a send that has not been looked at yet: OFFSET is its number

NOWHERE = -(2**62)  # offset of a cell without tokens
GONE = (
    -1
)  # STOP of a cell that is part of one before it; its NEXT is behind() a cell from where to look for that

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
_STUCK, _MIXED, _HIDDEN = NOWHERE - 1, NOWHERE + 1, NOWHERE + 2

# how rows are filled
_PUT, _ARRIVE, _ADD, _ADD_FIRST = range(4)

_ACCUMULATOR_BITS = sum(1 << tensor for tensor in PARTIALS)

#: so many cells are tried before a search
_NEAR = 16

_LAUNCH, _WAIT = int(Op.LAUNCH), int(Op.WAIT)
_TASKS, _GRADS = LISTS.index("tasks"), LISTS.index("grads")

# steps of an op, on the operand in a column of its list
_LOOK, _SETTLE, _LIKE, _PLACE, _FILL, _SPEND, _ONCE, _FINISH = range(8)

#: what a look accepts
_ACCEPTED = {
    Use.READ: _VALUES,
    Use.TAKE: _PARTIALS,
    Use.MOVE: _VALUES | _PARTIALS,
    Use.FINISH: _VALUES | _PARTIALS,
}

# columns of a step; OTHER: the operand that it is like or filled from, of a look the sum that a partial goes into, -1
# for none; DETAIL: what a look accepts, or the flag of `first`; AGAIN: whether a task that repeats `SAME` skips it
STEP, COLUMN, OTHER, DETAIL, AGAIN = range(5)
# columns of a frame: an op's steps; how many operands its rows name; the operands of attention that a task has in
# common with the one before where it is of the same queries
STEPS, STEPS_END, OPERANDS, SAME, _SAME_1, _SAME_2 = range(6)


def steps_of(rule: Rule) -> list[tuple[int, int, int, int, int]]:
    """Rows of `SCRIPT`. An operand that is none is passed over. Steps that may have to stop for a PENDING operand come
    first, and change nothing that a second time would not."""
    at, queries = {name: number for number, name in enumerate(rule.columns)}, _queries(rule)
    reads, writes = ([a for a in rule.arguments if a.use.reads == side] for side in (True, False))
    looked = [*reads, *(a for a in writes if a.use is Use.FINISH)]
    like = {a.column: at[a.like] if a.like else -1 for a in rule.arguments}
    into = {a.like: at[a.column] for a in writes if a.use is Use.ADD and rule.source(a)}
    filled = [a for a in writes if a.use is not Use.FINISH]
    steps = [(_SETTLE, at[a.column], 0, 0) for a in filled if a.use is not Use.ONCE]
    steps += [(_LOOK, at[a.column], into.get(a.column, -1), _ACCEPTED[a.use]) for a in looked]
    steps += [(_PLACE, 0, 1, 0)] * rule.is_attention
    steps += [(_LIKE, at[a.column], like[a.column], 0) for a in reads if a.like]
    steps += [(_ONCE, at[a.column], 0, 0) for a in writes if a.use is Use.ONCE]
    steps += [(_FILL, at[a.column], like[a.column], a.flag * (a.use is Use.ADD)) for a in filled]
    steps += [(_SPEND, at[a.column], 0, 0) for a in reads if a.use is not Use.READ]
    steps += [(_FINISH, at[a.column], 0, 0) for a in writes if a.use is Use.FINISH]
    return [(*step, int(step[0] in (_LOOK, _LIKE) and step[1] in queries)) for step in steps]


def _queries(rule: Rule) -> list[int]:
    """The columns of an attention op that hold its queries and what it reads beside them, three at most."""
    if not rule.is_attention:
        return []
    first, *others = rule.arguments
    beside = [a for a in others if a.use.reads and a.like == first.column]
    return [rule.columns.index(a.column) for a in (first, *beside)][:3]


def write_script(rules: Mapping[int, Rule]) -> tuple[Ints, Ints]:
    """int64 [steps, 5], the steps of all ops, and int64 [codes, 6], the frame of each."""
    script: list[tuple[int, int, int, int, int]] = []
    frames = np.zeros((max(rules) + 1, 6), np.int64)
    for op, rule in rules.items():
        begin = len(script)
        script += steps_of(rule) if rule.list not in (None, "transfers") else []
        frames[op] = begin, len(script), len(rule.columns), *(*_queries(rule), 0, 0, 0)[:3]
    return np.array(script, np.int64), frames


SCRIPT, FRAMES = write_script(RULES)

# `carried` of a send is (state, token of the first row), or (SEVERAL_RUNS, first run), or NOT_YET: zeros at the start
SEVERAL_RUNS, NOT_YET = -1, EMPTY
# column of a run: on the first of the runs that a send carries, their number
RUNS = 5


@lean
def interpret(
    m: Ints,
    instructions: Ints,
    ptr: Ints,
    starts: Ints,
    partner: Ints,
    bases: Ints,
    transfers: Ints,
    transfer_ptr: Ints,
    mate: Ints,
    constant: int,
    carried: Ints,
    promised: Ints,
    tasks: Ints,
    grads: Ints,
    rowops: Ints,
    list_of_op: Ints,
    script: Ints,
    frames: Ints,
    tokens: Ints,
    at: Ints,
    resume: Ints,
    found: Ints,
) -> None:
    """Runs every rank until its end, or until it must know what a rank still to come has sent; then again.

    m: `Cells.lines`. bases: where each rank's operands begin in `m`. constant:
    tensors, as bits, whose home rows hold values that nothing in the program changes. carried: int64 [transfers, 2],
    what each send carries. promised: int64 [rowops, 4], (send, token, instruction, operand) of additions that took
    it for granted. at, resume: the instruction of each rank that comes next, and the row of its list. found: what
    the last looks found, by column.

    Of the functions that this one calls, the first three do in place what is usual, that is, with an operand that is
    one cell in a proper state; all else is left to those further down, which do it in general.
    """
    for rank in range(len(ptr) - 1):
        for item in range(transfer_ptr[rank], transfer_ptr[rank + 1]):
            y = bases[rank] + transfers[2, item]
            cell = m[y, CELL]
            if transfers[0, item] and _is_fixed(m, y, constant):
                carried[item, 0], carried[item, 1] = VALUE, m[cell, HOME_OFFSET] + m[y, BEGIN]
    moved = True
    while moved:
        moved = False
        for rank in range(len(ptr) - 1):
            base, step = bases[rank], at[rank]
            while step < ptr[rank + 1]:
                op, listed = instructions[0, step], step
                m[COUNTERS, INSTRUCTION] = step
                if op == _WAIT:
                    launch = partner[step]
                    if launch < 0 or launch > step or partner[launch] != step:
                        step += 1  # the rule on transfers reports it
                        continue
                    listed = launch
                    m[COUNTERS, INSTRUCTION] = launch
                first = max(starts[listed], resume[rank])
                end = starts[listed] + instructions[4, listed]
                if op == _WAIT:
                    stuck = _wait(m, transfers, mate, carried, constant, base, first, end)
                elif op == _LAUNCH:
                    stuck = _launch(m, transfers, carried, constant, base, first, end)
                else:
                    number = list_of_op[op]
                    rows = tasks if number == _TASKS else grads if number == _GRADS else rowops
                    stuck = _work(
                        m,
                        rows,
                        constant,
                        base,
                        first,
                        end,
                        script,
                        frames[op],
                        found,
                        carried,
                        promised,
                        tokens,
                    )
                if stuck >= 0:
                    moved = moved or stuck > first
                    resume[rank] = stuck
                    break
                resume[rank] = 0
                step += 1
            moved = moved or step > at[rank]
            at[rank] = step


@lean
def _wait(
    m: Ints, transfers: Ints, mate: Ints, carried: Ints, constant: int, base: int, first: int, end: int
) -> int:
    """Rows are free again, and those received hold what was sent. Returns the transfer that must be waited for, -1
    for none."""
    stuck = -1
    m[FULL_LINE, TOUCHED] = _touch(m, transfers, 2, 3, base, first, end)
    for item in range(first, end):
        x = base + transfers[2, item]
        cell, sender = m[x, CELL], mate[item]
        plain = m[x, LANES] == 1 and m[cell, STOP] == m[x, END]
        m[COUNTERS, ITEM] = item
        if transfers[0, item] and _is_fixed(m, x, constant):
            continue
        if transfers[0, item] and plain:
            m[cell, BUSY] -= ONE_SEND
        elif transfers[0, item]:
            _end_send(m, x)
        elif sender >= 0 and plain and m[cell, HOME_OFFSET] == NOWHERE:
            m[cell, BUSY] = UNREAD
            m[cell, UNIT] = m[x, UNIT]
            m[cell, STATE], m[cell, OFFSET] = PENDING, sender
            if carried[sender, 0] > NOT_YET:  # and not SEVERAL_RUNS
                m[cell, STATE], m[cell, OFFSET] = carried[sender, 0], NOWHERE
                if carried[sender, 1] != NOWHERE:
                    m[cell, OFFSET] = carried[sender, 1] - m[x, BEGIN]
        elif (sender >= 0 and carried[sender, 0] == NOT_YET) or not _settle(m, x, carried):
            stuck = item
            break
        else:
            _end_receive(m, x, carried, sender)
    return stuck


@lean
def _launch(m: Ints, transfers: Ints, carried: Ints, constant: int, base: int, first: int, end: int) -> int:
    """Notes what is sent and marks what will be received. Returns where it must stop, -1 for nowhere."""
    stuck = -1
    m[FULL_LINE, TOUCHED] = _touch(m, transfers, 2, 3, base, first, end)
    for item in range(first, end):
        x = base + transfers[2, item]
        cell = m[x, CELL]
        plain = m[x, LANES] == 1 and m[cell, STOP] == m[x, END]
        state, busy = m[cell, STATE], m[cell, BUSY]
        m[COUNTERS, ITEM] = item
        if transfers[0, item] and _is_fixed(m, x, constant):
            continue  # what it carries is noted, and nobody writes to these rows
        if transfers[0, item]:
            plain = plain and m[cell, UNIT] == m[x, UNIT] and busy & IN_FLIGHT == 0
            if plain and (state == VALUE or state == LIVE):  # noqa: SIM109  a tuple costs three times as much
                carried[item, 0], carried[item, 1] = state, m[cell, OFFSET] + m[x, BEGIN]
                m[cell, BUSY] = (busy & ~UNREAD) + ONE_SEND
                m[cell, STATE] = VALUE if state == VALUE else SPENT
            elif plain and state == PENDING and _relays(m, x, cell, carried):
                sender = m[cell, OFFSET]
                carried[item, 0], carried[item, 1] = carried[sender, 0], carried[sender, 1]
                m[cell, BUSY] = (busy & ~UNREAD) + ONE_SEND
            elif not _start_send(m, x, carried, item):
                stuck = item
                break
        elif plain and busy == 0 and state < LIVE and m[cell, HOME_OFFSET] == NOWHERE:
            m[cell, STATE], m[cell, BUSY] = EMPTY, IN_FLIGHT
        elif _settle(m, x, carried):
            _start_receive(m, x)
        else:
            stuck = item
            break
    return stuck


@lean
def _is_fixed(m: Ints, x: int, constant: int) -> bool:
    """Whether operand x is home rows that hold values from the start and to the end."""
    return (constant >> m[x, TENSOR]) & 1 == 1 and m[m[x, CELL], HOME_OFFSET] != NOWHERE  # type: ignore[no-any-return]


@lean
def _work(
    m: Ints,
    rows: Ints,
    constant: int,
    base: int,
    first: int,
    end: int,
    script: Ints,
    frame: Ints,
    found: Ints,
    carried: Ints,
    promised: Ints,
    tokens: Ints,
) -> int:
    """The steps of an op for each row of its list. Returns where it must stop, -1 for nowhere."""
    stuck, flags = -1, len(rows) - 1  # `first` is the last column of tasks, grads and rowops
    q0, q1, q2 = frame[SAME], frame[_SAME_1], frame[_SAME_2]
    m[FULL_LINE, TOUCHED] = _touch(m, rows, 0, frame[OPERANDS], base, first, end)
    for item in range(first, end):
        m[COUNTERS, ITEM] = item
        again = item > first and rows[q0, item] == rows[q0, item - 1]
        again = again and rows[q1, item] == rows[q1, item - 1] and rows[q2, item] == rows[q2, item - 1]
        for k in range(frame[STEPS], frame[STEPS_END]):
            if again and script[k, AGAIN]:
                continue
            kind, column, other = script[k, STEP], script[k, COLUMN], script[k, OTHER]
            x = base + rows[column, item]
            if x == base:
                found[column] = _HIDDEN
                continue
            if kind == _LOOK and script[k, DETAIL] == _VALUES and _is_fixed(m, x, constant):
                found[column] = m[m[x, CELL], HOME_OFFSET]
                continue
            seeks = kind in (_SETTLE, _LOOK, _FILL, _SPEND)
            cell = _holder(m, x) if seeks else -1  # the cell that has all rows, if one does
            whole = cell >= 0 and m[cell, ROW] == m[x, BEGIN] and m[cell, STOP] == m[x, END]
            if kind == _SETTLE:
                if (cell < 0 or m[cell, STATE] == PENDING) and not _settle(m, x, carried):
                    stuck = item
                    break
                continue
            state, busy = (m[cell, STATE], m[cell, BUSY]) if cell >= 0 else (UNKNOWN, 0)
            fits = cell >= 0 and m[cell, UNIT] == m[x, UNIT]
            if kind == _LOOK:
                if fits and (script[k, DETAIL] >> state) & 1 and busy & IN_FLIGHT == 0:  # noqa: SIM102  as above
                    if whole or script[k, DETAIL] == _VALUES:
                        m[cell, BUSY] = busy & ~UNREAD
                        found[column] = m[cell, OFFSET]
                        continue
                if fits and whole and state == PENDING and other >= 0:  # noqa: SIM102  as above
                    if _take(m, x, base + rows[other, item], rows[flags, item], carried, promised):
                        break
                found[column] = _look(m, x, script[k, DETAIL], carried)
                if found[column] == _STUCK:
                    stuck = item
                    break
                continue
            y = base + rows[other, item] if other >= 0 else base
            if kind == _FILL:
                offset = found[max(other, 0)] + m[y, BEGIN] - m[x, BEGIN]
                how = (
                    _PUT
                    if script[k, DETAIL] == 0
                    else _ADD_FIRST
                    if rows[flags, item] & script[k, DETAIL]
                    else _ADD
                )
                fits = fits and other >= 0 and found[other] > _HIDDEN and busy & ~UNREAD == 0
                home = m[m[x, CELL], HOME_OFFSET]
                alien = home != NOWHERE and home != offset
                if fits and how == _ADD and state == LIVE and m[cell, OFFSET] == offset:
                    continue  # a contribution to a partial of the same tokens
                if fits and how == _ADD and state == CLEARED and not alien and (whole or m[FULL_LINE, LAZY]):
                    m[cell, STATE], m[cell, OFFSET] = LIVE, offset
                    continue
                if fits and how == _ADD_FIRST and state <= SPENT and not alien and whole:
                    m[cell, STATE], m[cell, OFFSET] = LIVE, offset
                    continue
                _settle(m, x, carried)
                if other < 0:
                    _fill(m, x, CLEARED, NOWHERE, _PUT)
                else:
                    _settle(m, y, carried)
                    _pass_on(m, y, found[other], x, how)
            elif kind == _PLACE:
                if found[0] > _HIDDEN and found[1] > _HIDDEN:
                    tokens[0, item], tokens[1, item] = found[0] + m[x, BEGIN], found[1] + m[y, BEGIN]
                else:
                    _settle(m, x, carried)
                    _settle(m, y, carried)
                    _place_task(m, tokens, x, y, found[0], found[1])
            elif kind == _LIKE:
                hidden = found[column] <= _HIDDEN or found[other] <= _HIDDEN
                if hidden or found[column] + m[x, BEGIN] != found[other] + m[y, BEGIN]:
                    _settle(m, x, carried)
                    _settle(m, y, carried)
                    _same_tokens(m, y, x)
            elif kind == _SPEND:
                if fits and whole and state == LIVE:
                    m[cell, STATE] = SPENT
                else:
                    _spend(m, x)
            elif kind == _ONCE:
                _settle(m, x, carried)
                _once(m, x)
            else:
                _finish(m, x)
        if stuck >= 0:
            break
    return stuck


@lean
def _holder(m: Ints, x: int) -> int:
    """The cell that has all rows of operand x, -1 where several have them. Where cells are not left uncut, one that is
    no more than these rows."""
    cell = m[x, CELL]
    if m[x, LANES] > 1:
        return -1
    if m[cell, STOP] == m[x, END]:
        return cell  # type: ignore[no-any-return]
    if not m[FULL_LINE, LAZY]:
        return -1
    if m[cell, STOP] == GONE:
        cell = _live_before(m, x, cell)
        while m[cell, STOP] <= m[x, BEGIN]:
            cell = m[cell, NEXT]
        if cell < m[COUNTERS, PART_LINE]:  # the next search begins here
            m[m[x, CELL], NEXT] = behind(cell)
            m[HINT_LINES + (m[x, TENSOR] >> 3), m[x, TENSOR] & 7] = cell
    return cell if m[cell, STOP] >= m[x, END] else -1


@lean
def _live_before(m: Ints, x: int, cell: int) -> int:
    """A cell at or above a cell that is gone, where operand x begins.

    Cells of the start are numbered lane after lane in the order of their rows: one a little before this one may be
    alive, or the cell of the same tensor found last is on the way.
    """
    before, near, tensor = cell, cell - 1, m[x, TENSOR]
    while m[before, STOP] == GONE:
        before = behind(m[before, NEXT])
    if m[before, STOP] > m[cell, ROW]:
        return before
    while m[near, STOP] == GONE and near > cell - _NEAR:
        near -= 1
    if m[near, STOP] != GONE and m[near, ROW] > m[before, ROW]:
        before = near
    hint = m[HINT_LINES + (tensor >> 3), tensor & 7]
    if before < hint < cell and m[hint, STOP] != GONE:
        before = hint
    return before


@lean
def _touch(m: Ints, rows: Ints, begin: int, stop: int, base: int, first: int, end: int) -> int:
    """Reads the operands in some columns of a list and their first cells, in no order, so that a processor fetches
    many of them at a time; one by one, as the steps need them, it would wait for each. Returns something that depends
    on all."""
    seen = 0
    for column in range(begin, stop):
        for item in range(first, end):
            seen ^= m[m[base + rows[column, item], CELL], STATE]
    return seen


# What follows is called for what is not usual: operands of several lanes or cells, partials, and faults.


@lean
def _settle(m: Ints, x: int, carried: Ints) -> bool:
    """Makes operand x a whole number of cells that know what they hold. False where a sender has not come so far."""
    for lane in range(m[x, LANES]):
        cell = _enter(m, x, lane, carried)
        if cell < 0:
            return False
        while cell >= 0:
            if not _prepare(m, x, cell, carried):
                return False
            cell = _next_cell(m, x, cell)
    return True


@lean
def _enter(m: Ints, x: int, lane: int, carried: Ints) -> int:
    """The first cell of operand x in a lane, cut out again where it has to be; -1 where that must wait."""
    cell = _first_cell(m, x, lane)
    return cell if m[cell, STOP] != GONE or _bring_back(m, x, cell, carried) else -1


@lean
def _prepare(m: Ints, x: int, cell: int, carried: Ints) -> bool:
    """Makes a cell on the way through operand x know what it holds and end where x does. False: that must wait."""
    if m[cell, STATE] == PENDING and not settle_cell(m, cell, carried):
        return False
    if m[cell, STOP] > m[x, END]:
        _split(m, cell, m[x, END])
    return True


@lean
def settle_cell(m: Ints, cell: int, carried: Ints) -> bool:
    """Gives a pending cell what was sent, cut into runs where these are several. False where nothing was sent yet."""
    sender = m[cell, OFFSET]
    if carried[sender, 0] == NOT_YET:
        return False
    if carried[sender, 0] == SEVERAL_RUNS:
        _settle_runs(m, cell, carried[sender, 1])
    else:
        token = carried[sender, 1]
        m[cell, STATE] = carried[sender, 0]
        m[cell, OFFSET] = NOWHERE if token == NOWHERE else token - m[cell, ROW]
    return True


@lean
def _settle_runs(m: Ints, cell: int, start: int) -> None:
    row, count = m[cell, ROW], m[start, RUNS]
    for run in range(start, start + count):
        end = row + m[run, 1] + m[run, 2]
        if m[cell, STOP] > end:
            _split(m, cell, end)
        token = m[run, 3]
        m[cell, STATE] = m[run, 4]
        m[cell, OFFSET] = NOWHERE if token == NOWHERE else token - m[cell, ROW]
        if run < start + count - 1:
            cell = m[cell, NEXT]


@lean
def _relays(m: Ints, x: int, cell: int, carried: Ints) -> bool:
    """Whether a pending cell can be sent on as it came, by the runs that its sender noted: a tile that goes round a
    ring is looked at where it is used. Partials cannot, for they leave the rows."""
    several: bool = carried[m[cell, OFFSET], 0] == SEVERAL_RUNS
    return several and (_ACCUMULATOR_BITS >> m[x, TENSOR]) & 1 == 0


@lean
def _take(m: Ints, x: int, y: int, first: int, carried: Ints, promised: Ints) -> bool:
    """Adds a pending partial x to y without a look at its rows, where that can be; whether it was done."""
    sender = m[m[x, CELL], OFFSET]
    if carried[sender, 0] == NOT_YET:
        return first == 0 and _promise(m, x, y, promised)
    return carried[sender, 0] == SEVERAL_RUNS and _take_runs(
        m, x, y, carried[sender, 1], _ADD_FIRST if first else _ADD, carried
    )


@lean
def _take_runs(m: Ints, x: int, y: int, start: int, how: int, carried: Ints) -> bool:
    """Adds the runs that a sender noted, all of them partials: x itself need never be cut into them."""
    cell, end = m[x, CELL], start + m[start, RUNS]
    if m[cell, BUSY] & ~UNREAD or not _settle(m, y, carried):
        return False
    for run in range(start, end):
        if not (_PARTIALS >> m[run, 4]) & 1:
            return False
    _fill_runs(m, y, start, end - start, how)
    m[cell, STATE], m[cell, OFFSET], m[cell, BUSY] = SPENT, NOWHERE, 0
    return True


@lean
def _promise(m: Ints, x: int, y: int, promised: Ints) -> bool:
    """Adds the pending partial x to y, a cell with a partial of known tokens, before it is known: the tokens that it
    must have are written down and compared in the end."""
    cell, target = m[x, CELL], _holder(m, y)
    known = target >= 0 and m[target, UNIT] == m[y, UNIT]
    if not known or m[target, STATE] != LIVE or m[target, BUSY] & ~UNREAD or m[cell, BUSY] & ~UNREAD:
        return False
    line = m[FULL_LINE, PROMISES]
    promised[line, 0], promised[line, 1] = m[cell, OFFSET], m[target, OFFSET] + m[y, BEGIN]
    promised[line, 2], promised[line, 3] = m[COUNTERS, INSTRUCTION], y
    m[FULL_LINE, PROMISES] = line + 1
    m[cell, STATE], m[cell, BUSY] = SPENT, 0
    return True


@lean
def _start_send(m: Ints, x: int, carried: Ints, item: int) -> bool:
    """Notes what the rows hold; a partial leaves them. False where that is not known yet."""
    found = _look(m, x, _VALUES | _PARTIALS, carried)
    if found == _STUCK:
        return False
    if found == _MIXED:
        start = m[COUNTERS, RUN_LINE]
        carried[item, 0], carried[item, 1] = SEVERAL_RUNS, start
        count = _note_runs(m, x)
        m[start, RUNS] = count
        m[COUNTERS, RUN_LINE] += count
    else:
        carried[item, 0] = UNKNOWN if found == _HIDDEN else m[m[x, CELL], STATE]
        carried[item, 1] = NOWHERE if found == NOWHERE else found + m[x, BEGIN]
    for lane in range(m[x, LANES]):
        cell = _first_cell(m, x, lane)
        while cell >= 0:
            if (_PARTIALS >> m[cell, STATE]) & 1:
                m[cell, STATE] = SPENT
            m[cell, BUSY] += ONE_SEND
            cell = _next_cell(m, x, cell)
    return True


@lean
def _start_receive(m: Ints, x: int) -> None:
    for lane in range(m[x, LANES]):
        first, last = _first_cell(m, x, lane), -1
        cell = first
        while cell >= 0:
            used = m[cell, STATE] != EMPTY
            _check_untouched(m, x, cell)
            _check_unneeded(m, x, cell)
            m[cell, STATE], m[cell, OFFSET], m[cell, UNIT] = EMPTY, NOWHERE, _unit_of(m, x, lane)
            m[cell, BUSY] |= IN_FLIGHT
            last = _join(m, first, last, cell) if used else cell
            cell = _next_cell(m, x, last)


@lean
def _end_send(m: Ints, x: int) -> None:
    for lane in range(m[x, LANES]):
        cell = _first_cell(m, x, lane)
        while cell >= 0:
            m[cell, BUSY] -= ONE_SEND
            cell = _next_cell(m, x, cell)


@lean
def _end_receive(m: Ints, x: int, carried: Ints, sender: int) -> None:
    """The rows get what the sender noted; where there is none, or the two sides differ, nobody knows."""
    for lane in range(m[x, LANES]):
        cell = _first_cell(m, x, lane)
        while cell >= 0:
            m[cell, BUSY] &= ~IN_FLIGHT
            cell = _next_cell(m, x, cell)
    if sender < 0:
        _fill(m, x, UNKNOWN, NOWHERE, _ARRIVE)
    elif carried[sender, 0] == SEVERAL_RUNS:
        _fill_runs(m, x, carried[sender, 1], m[carried[sender, 1], RUNS], _ARRIVE)
    else:
        _fill(m, x, carried[sender, 0], carried[sender, 1], _ARRIVE)


@lean
def _once(m: Ints, x: int) -> None:
    """Rows that are computed a single time, because a sum (the gradient of the sinks) is taken over them."""
    for lane in range(m[x, LANES]):
        cell = _first_cell(m, x, lane)
        while cell >= 0:
            if m[cell, STATE] == VALUE:
                _fault(m, TWICE, x, cell, m[cell, OFFSET], NOWHERE)
            cell = _next_cell(m, x, cell)


@lean
def _finish(m: Ints, x: int) -> None:
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


@lean
def _first_cell(m: Ints, x: int, lane: int) -> int:
    """The cell where operand x begins in one of its lanes."""
    if lane == 0:
        return m[x, CELL]  # type: ignore[no-any-return]
    piece = m[x, PIECE] + lane
    return m[piece >> 2, (piece & 3) * 2]  # type: ignore[no-any-return]


@lean
def _unit_of(m: Ints, x: int, lane: int) -> int:
    if lane == 0:
        return m[x, UNIT]  # type: ignore[no-any-return]
    piece = m[x, PIECE] + lane
    return m[piece >> 2, (piece & 3) * 2 + 1]  # type: ignore[no-any-return]


@lean
def _next_cell(m: Ints, x: int, cell: int) -> int:
    """The next cell of the operand in the same lane, -1 after the last."""
    return m[cell, NEXT] if m[cell, STOP] < m[x, END] else -1


@lean
def _fault(m: Ints, code: int, x: int, cell: int, holds: int, wanted: int) -> None:
    found = m[COUNTERS, FAULTS]
    if found < MOST_FAULTS:
        _note_fault(m, FAULT_LINES + found, code, x, cell, holds, wanted)
        m[COUNTERS, FAULTS] = found + 1


@lean
def _note_fault(m: Ints, line: int, code: int, x: int, cell: int, holds: int, wanted: int) -> None:
    m[line, CODE], m[line, OPERAND], m[line, HOLDS], m[line, WANTED] = code, x, holds, wanted
    m[line, AT], m[line, OF_ITEM] = m[COUNTERS, INSTRUCTION], m[COUNTERS, ITEM]
    m[line, LOW], m[line, HIGH] = m[cell, ROW], m[cell, STOP]


@lean
def _look(m: Ints, x: int, accepted: int, carried: Ints) -> int:
    """Reads operand x, whose states must be among `accepted`. Returns the offset of its rows where they have one and
    one state, NOWHERE where all are cleared, _MIXED where they differ, _HIDDEN where some are unknown, _STUCK where
    some are pending and nothing was sent yet."""
    found, state_found = NOWHERE, -1
    for lane in range(m[x, LANES]):
        cell, unit = _enter(m, x, lane, carried), _unit_of(m, x, lane)
        if cell < 0:
            return _STUCK
        while cell >= 0:
            if not _prepare(m, x, cell, carried):
                return _STUCK
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


@lean
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


@lean
def _spend(m: Ints, x: int) -> None:
    """The partials of operand x have gone elsewhere; values stay."""
    for lane in range(m[x, LANES]):
        cell = _first_cell(m, x, lane)
        while cell >= 0:
            if m[cell, STATE] in (LIVE, CLEARED):
                m[cell, STATE] = SPENT
            cell = _next_cell(m, x, cell)


@lean
def _pass_on(m: Ints, x: int, found: int, y: int, how: int) -> None:
    """Fills y with what a look at x found."""
    if found == _MIXED:
        _fill_alike(m, x, y, how)
    elif found == _HIDDEN:
        _fill(m, y, UNKNOWN, NOWHERE, how)
    else:
        token = NOWHERE if found == NOWHERE else found + m[x, BEGIN]
        _fill(m, y, m[m[x, CELL], STATE], token, how)


@lean
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


@lean
def _fill_runs(m: Ints, y: int, start: int, count: int, how: int) -> None:
    """Fills y run by run; runs of one lane (of X, which has no heads) go to every lane of y."""
    lanes = m[y, LANES]
    paired = count > 0 and m[start + count - 1, 0] == lanes - 1
    for lane in range(lanes):
        first, last, unit = _first_cell(m, y, lane), -1, _unit_of(m, y, lane)
        cell = first
        for run in range(start, start + count):
            if not paired or m[run, 0] == lane:
                row = m[y, BEGIN] + m[run, 1]
                offset = NOWHERE if m[run, 3] == NOWHERE else m[run, 3] - row
                while cell >= 0 and m[cell, ROW] < row + m[run, 2]:
                    if m[cell, STOP] > row + m[run, 2]:
                        _split(m, cell, row + m[run, 2])
                    _fill_cell(m, y, cell, m[run, 4], offset, unit, how)
                    last = _join(m, first, last, cell)
                    cell = _next_cell(m, y, last)


@lean
def _fill_alike(m: Ints, x: int, y: int, how: int) -> None:
    """Fills y with what x holds, row by row; the one lane of X, which has no heads, goes to every lane of y."""
    shift = m[y, BEGIN] - m[x, BEGIN]
    for lane in range(m[y, LANES]):
        source, unit = _first_cell(m, x, lane if m[x, LANES] > 1 else 0), _unit_of(m, y, lane)
        first, last = _first_cell(m, y, lane), -1
        cell = first
        while cell >= 0:
            stop = m[source, STOP] + shift
            if m[cell, STOP] > stop:
                _split(m, cell, stop)
            offset = NOWHERE if m[source, OFFSET] == NOWHERE else m[source, OFFSET] - shift
            _fill_cell(m, y, cell, m[source, STATE], offset, unit, how)
            if m[cell, STOP] >= stop:
                source = m[source, NEXT]
            last = _join(m, first, last, cell)
            cell = _next_cell(m, y, last)


@lean
def _split(m: Ints, cell: int, row: int) -> None:
    """Cuts a cell at `row`; the left part keeps the number. New cells are written from the end of `m` down."""
    new = m[FULL_LINE, FREE]
    if new:
        m[FULL_LINE, FREE] = behind(m[new, NEXT])
    else:
        new = m[COUNTERS, NEW_CELL]
        if new < m[COUNTERS, PART_LINE] + 2:
            m[FULL_LINE, FULL] = 1
            return
        m[COUNTERS, NEW_CELL] = new - 2
    for column in range(8):
        m[new, column] = m[cell, column]
    m[new + 1, 0] = cell if cell < m[COUNTERS, PART_LINE] else m[cell + 1, 0]
    m[new, ROW] = row
    m[cell, STOP] = row
    m[cell, NEXT] = new


@lean
def behind(cell: int) -> int:
    """A cell's number as NEXT of a cell that is gone: negative, as at the end of a lane. Its own inverse."""
    return -2 - cell


@lean
def _join(m: Ints, first: int, last: int, cell: int) -> int:
    """Joins a cell of work rows to `last`, the one before it, where the two are alike; the cell that now ends there.

    Work rows are used for one tile after another, each cut in its own way: without this they would stay cut in all
    those ways. Rows being sent stay as they are until the end of it. first: the first cell of the operand, which is no
    cut-off one and so stays in its place.
    """
    if last < 0 or m[cell, HOME_OFFSET] != NOWHERE:
        return cell
    if m[last, STATE] != m[cell, STATE] or m[last, OFFSET] != m[cell, OFFSET]:
        return cell
    if m[last, BUSY] != m[cell, BUSY] or m[last, UNIT] != m[cell, UNIT] or m[cell, BUSY] >= ONE_SEND:
        return cell
    m[last, STOP], m[last, NEXT] = m[cell, STOP], m[cell, NEXT]
    _drop(m, cell, first)
    return last


@lean
def _drop(m: Ints, cell: int, first: int) -> None:
    m[cell, STOP], m[cell, NEXT] = GONE, behind(first)
    if cell >= m[COUNTERS, PART_LINE]:
        m[cell, NEXT] = behind(m[FULL_LINE, FREE])
        m[FULL_LINE, FREE] = cell


@lean
def _bring_back(m: Ints, x: int, cell: int, carried: Ints) -> bool:
    """Cuts the cell that now has its rows so that `cell`, where operand x begins, is one again. False where those
    rows are pending and nothing was sent yet."""
    row, tensor = m[cell, ROW], m[x, TENSOR]
    before, at = _seek(m, _live_before(m, x, cell), row)
    if m[at, STATE] == PENDING:
        if not settle_cell(m, at, carried):
            return False
        before, at = _seek(m, at, row)
    for column in range(NEXT, 8):
        m[cell, column] = m[at, column]
    m[cell, STOP] = m[at, STOP]
    if m[at, ROW] == row:  # one that was cut off here since
        m[before, NEXT] = cell
        _drop(m, at, cell)
    else:
        m[at, STOP], m[at, NEXT] = row, cell
    m[HINT_LINES + (tensor >> 3), tensor & 7] = cell
    return True


@lean
def _seek(m: Ints, cell: int, row: int) -> tuple[int, int]:
    """(the cell before it, the cell that has a row), sought from a cell that begins at or above it."""
    before = cell
    while m[cell, STOP] <= row:
        before, cell = cell, m[cell, NEXT]
    return before, cell


@lean
def _fill(m: Ints, y: int, state: int, token: int, how: int) -> None:
    """Fills y with consecutive tokens from `token`."""
    offset = NOWHERE if token == NOWHERE else token - m[y, BEGIN]
    for lane in range(m[y, LANES]):
        first, last, unit = _first_cell(m, y, lane), -1, _unit_of(m, y, lane)
        cell = first
        while cell >= 0:
            _fill_cell(m, y, cell, state, offset, unit, how)
            last = _join(m, first, last, cell)
            cell = _next_cell(m, y, last)


@lean
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


@lean
def _check_untouched(m: Ints, x: int, cell: int) -> None:
    """A cell that is written is neither being sent nor being received."""
    busy = m[cell, BUSY]
    if busy >= ONE_SEND:
        _fault(m, WRITE_SENDING, x, cell, NOWHERE, NOWHERE)
    if busy & IN_FLIGHT:
        _fault(m, WRITE_IN_FLIGHT, x, cell, NOWHERE, NOWHERE)


@lean
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


@lean
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


@lean
def _write(m: Ints, x: int, cell: int, state: int, offset: int, unit: int) -> None:
    """Home rows hold their own tokens and no others."""
    home = m[cell, HOME_OFFSET]
    if home != NOWHERE and state == CLEARED:
        offset = home
    if home != NOWHERE and offset != home and state != UNKNOWN:
        _fault(m, WRONG_HOME, x, cell, home, offset)
        state = UNKNOWN
    m[cell, STATE], m[cell, OFFSET], m[cell, UNIT] = state, offset, unit


@lean
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


@lean
def _place_task(m: Ints, tokens: Ints, q: int, kv: int, queries: int, keys: int) -> None:
    """Writes down the tokens of a task that has several runs of them, run by run."""
    item = m[COUNTERS, ITEM]
    if _HIDDEN not in (queries, keys):
        tokens[0, item], tokens[1, item] = SEVERAL, SEVERAL
        _check_lanes(m, q)
        _check_lanes(m, kv)
        _place_parts(m, item, q, kv)


@lean
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


@lean
def _place_parts(m: Ints, item: int, q: int, kv: int) -> None:
    a = _first_cell(m, q, 0)
    while a >= 0:
        a_last, b = _run_end(m, q, a), _first_cell(m, kv, 0)
        while b >= 0:
            b_last = _run_end(m, kv, b)
            line = m[COUNTERS, PART_LINE] - m[COUNTERS, PARTS] - 1
            if line < m[COUNTERS, RUN_LINE]:
                m[FULL_LINE, FULL] = 1
                return
            m[COUNTERS, PARTS] += 1
            m[line, 0] = item
            _note_part(m, line, 1, q, a, a_last)
            _note_part(m, line, 4, kv, b, b_last)
            b = _next_cell(m, kv, b_last)
        a = _next_cell(m, q, a_last)


@lean
def _run_end(m: Ints, x: int, cell: int) -> int:
    """The last of the cells from `cell` on that hold consecutive tokens."""
    after = _next_cell(m, x, cell)
    while after >= 0 and m[after, OFFSET] == m[cell, OFFSET]:
        cell, after = after, _next_cell(m, x, after)
    return cell


@lean
def _note_part(m: Ints, line: int, column: int, x: int, first: int, last: int) -> None:
    m[line, column] = m[first, ROW] - m[x, BEGIN]
    m[line, column + 1] = m[last, STOP] - m[first, ROW]
    m[line, column + 2] = m[first, ROW] + m[first, OFFSET]


@lean
def settle_rest(m: Ints, cells: int, carried: Ints) -> None:
    """Settles what was received and never used. cells: how many there were at the start."""
    for cell in range(FIRST_CELL, FIRST_CELL + cells):
        pending = m[cell, STATE] == PENDING and m[cell, STOP] != GONE
        if pending and not settle_cell(m, cell, carried):
            m[cell, STATE], m[cell, OFFSET] = UNKNOWN, NOWHERE


@lean
def find_undelivered(
    lines: Ints, at: Ints, lanes: Ints, columns: int, places: int, owed: int, found: Ints
) -> int:
    """Cells that end in the wrong state: a partial outside the home rows that are owed, or owed rows not produced.

    at: the lines of cells; lanes: the lane of each. owed: tensors, as bits. Fills `found` with indexes into `at`, as
    far as it reaches; their number.
    """
    count = 0
    finished = owed & ((1 << Tensor.O) | (1 << Tensor.DELTA))
    lane, tensor, home = -1, 0, False
    for i in range(len(at)):
        if lanes[i] != lane:
            lane = lanes[i]
            place = lane // columns % places
            tensor, home = place >> 1, place & 1 == 0
        cell = at[i]
        state = lines[cell, STATE]
        if lines[cell, NEXT] < 0 or state == UNKNOWN:
            continue
        if not (owed >> tensor) & 1 or not home:
            wrong = state == LIVE and (_ACCUMULATOR_BITS >> tensor) & 1 == 1
        elif (finished >> tensor) & 1:
            wrong = state != VALUE
        else:
            wrong = state != LIVE and state != CLEARED
        if wrong and count < len(found):
            found[count] = i
            count += 1
    return count
