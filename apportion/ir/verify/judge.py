"""A quick judge of programs: one walk over each rank, which says that all is right, or that it does not know.

It stands for the rules `operands`, `transfers`, `heads`, `dataflow` and `delivery` where it says yes. Where it says no
(something is wrong, or has a form that it does not follow) those rules run and explain. It shares nothing with their
interpreter (`machine.py`) but codes.

Ranks are walked one after another, over the same scratch memory:

    home rows    ranges whose heads are produced, cleared, finished or on their way: bits of heads. Home rows hold their
                 own tokens or none, so no tokens are noted
    work rows    ranges with one state and the token of a row: an address (`homes`) where it is known, else so many rows
                 into what a send s carries: (2 s + 2) << 40 plus the row, (2 s + 3) << 40 of a partial

What comes from home rows has a known address before anything runs. What comes from work rows is settled in the end:
additions and home rows that took tokens for granted wrote down which two must be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apportion.ir.isa import ALL_TO_ALL, HEADLESS, KV_SIDE, PARTIALS, TABLES, Op, Tensor
from apportion.ir.jit import inlined, lean
from apportion.ir.plan import Ints, Table
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.view import HOME, WORK, HeadSets, Program

# Constants are compiled into the functions below and live beside them: a compiled function is cached until its own
# file changes.

# columns of a node, a range of rows; of work rows: the offset from row to token, its state, the number of its heads,
# the round that brings it, and two that send it
LO, HI, AFTER, BEFORE, OFFSET, STATE, HEADS, READY, SENDING, SENDING_TOO = range(10)
# of home rows, bits of heads: with contributions, cleared, finished, being received, sent
LIVE_BITS, CLEARED_BITS, VALUE_BITS, FLIGHT_BITS, SENT_BITS = range(4, 9)
EMPTY, CLEARED, LIVE, VALUE = range(4)

# columns of a place, (tensor, space): its nodes are found through the one at every 2**SHIFT rows
SHIFT, OPEN, FIRST_NEAR = range(3)
PLACES = 2 * (max(Tensor) + 1)
# columns of the line behind the places
USED, FREE, PIECES, CONDITIONS, RESULTS_SEEN = range(5)

# columns of a run: first row of the operand, rows, token, state
RUN_ROW, RUN_ROWS, RUN_TOKEN, RUN_STATE = range(4)

NOWHERE = -(2**62)
TILE_SHIFT = 40
_UNKNOWN = 2 << TILE_SHIFT  # the first token that is no address
_LIMIT = 2**30 - 1  # of all numbers in tables: sums of two fit 32 bits
_NEAR = 256
_RUNS = 4096  # room for runs of an operand: two of them, and a third behind
_MOST_HEADS = 60

_PARTIAL_BITS = sum(1 << tensor for tensor in PARTIALS)
_HEADLESS_BITS, _KV_BITS = (sum(1 << tensor for tensor in some) for some in (HEADLESS, KV_SIDE))
_Q, _KV, _O, _X, _DX = int(Tensor.Q), int(Tensor.KV), int(Tensor.O), int(Tensor.X), int(Tensor.DX)
_DQ, _DKV, _DO, _DELTA = int(Tensor.DQ), int(Tensor.DKV), int(Tensor.DO), int(Tensor.DELTA)
_LAUNCH, _WAIT, _ATTEND, _GRAD = int(Op.LAUNCH), int(Op.WAIT), int(Op.ATTEND), int(Op.ATTEND_GRAD)
_DELTA_OP, _MERGE, _ADD, _COPY = int(Op.DELTA), int(Op.MERGE), int(Op.ADD), int(Op.COPY)
_CLEAR, _PROJECT, _PROJECT_GRAD = int(Op.CLEAR), int(Op.PROJECT), int(Op.PROJECT_GRAD)
_FINISH, _DELIVER = int(Op.FINISH), int(Op.DELIVER)
_SUM_BITS = (1 << _DQ) | (1 << _DKV) | (1 << _DX)
_DELIVERED_BITS = (1 << _O) | (1 << _DQ) | (1 << _DKV)

# columns of a send: its rank, round, tile, and the token of its first row
SENDER, ROUND, TILE, TOKEN = range(4)


# ---------------------------------------------------------------------------------------------- nodes


@lean
def _new(m: Ints, near: Ints) -> int:
    """A node out of use, -1 where there is none."""
    node = near[PLACES, FREE]
    if node >= 0:
        near[PLACES, FREE] = m[node, AFTER]
        return node  # type: ignore[no-any-return]
    node = near[PLACES, USED]
    if node == len(m):
        return -1
    near[PLACES, USED] = node + 1
    return node  # type: ignore[no-any-return]


@lean
def _open(m: Ints, near: Ints, place: int, rows: int) -> bool:
    """Makes a place one node without contents; whether it is one."""
    if near[place, OPEN]:
        return True
    node, shift, last = _new(m, near), 0, near.shape[1] - FIRST_NEAR - 1
    if node < 0 or rows <= 0:
        return False
    while (rows - 1) >> shift > last:
        shift += 1
    for column in range(m.shape[1]):
        m[node, column] = 0
    m[node, LO], m[node, HI], m[node, AFTER], m[node, BEFORE] = 0, rows, -1, -1
    if place & 1:
        m[node, READY] = m[node, SENDING] = m[node, SENDING_TOO] = -1
    near[place, SHIFT], near[place, OPEN] = shift, 1
    near[place, FIRST_NEAR : FIRST_NEAR + ((rows - 1) >> shift) + 1] = node
    return True


@lean
def _find(m: Ints, near: Ints, place: int, row: int) -> int:
    """The node of a place that has a row."""
    node = near[place, FIRST_NEAR + (row >> near[place, SHIFT])]
    while m[node, LO] > row:
        node = m[node, BEFORE]
    while m[node, HI] <= row:
        node = m[node, AFTER]
    return node  # type: ignore[no-any-return]


@lean
def _point(m: Ints, near: Ints, place: int, node: int, low: int, high: int) -> None:
    shift = near[place, SHIFT]
    for i in range(low >> shift, ((high - 1) >> shift) + 1):
        near[place, FIRST_NEAR + i] = node


@lean
def _split(m: Ints, near: Ints, place: int, node: int, row: int) -> int:
    """Cuts a node at a row; the left part, -1 where there is no room. The smaller part is the new node."""
    new = _new(m, near)
    if new < 0:
        return -1
    low, high = m[node, LO], m[node, HI]
    for column in range(m.shape[1]):
        m[new, column] = m[node, column]
    if row - low < high - row:
        m[new, HI], m[node, LO] = row, row
        if m[new, BEFORE] >= 0:
            m[m[new, BEFORE], AFTER] = new
        m[new, AFTER], m[node, BEFORE] = node, new
        _point(m, near, place, new, low, row)
        _point(m, near, place, node, row, row + 1)
        return new
    m[node, HI], m[new, LO] = row, row
    if m[new, AFTER] >= 0:
        m[m[new, AFTER], BEFORE] = new
    m[new, BEFORE], m[node, AFTER] = node, new
    _point(m, near, place, new, row, high)
    return node


@lean
def _slice(m: Ints, near: Ints, place: int, low: int, high: int) -> int:
    """The first of the nodes that are just the rows [low, high), cut where they have to be; -1 without room."""
    node = _find(m, near, place, low)
    if m[node, LO] < low:
        node = _split(m, near, place, node, low)
        if node < 0:
            return -1
        node = m[node, AFTER]
    last = node
    while m[last, HI] < high:
        last = m[last, AFTER]
    if m[last, HI] > high:
        left = _split(m, near, place, last, high)
        if left < 0:
            return -1
        if last == node:
            node = left
    return node


@lean
def _absorb(m: Ints, near: Ints, place: int, node: int, high: int) -> None:
    """Joins the nodes behind a node up to a row to it."""
    if m[node, HI] == high:
        return
    low, other = m[node, HI], m[node, AFTER]
    while other >= 0 and m[other, LO] < high:
        after = m[other, AFTER]
        m[other, AFTER] = near[PLACES, FREE]
        near[PLACES, FREE] = other
        other = after
    m[node, HI], m[node, AFTER] = high, other
    if other >= 0:
        m[other, BEFORE] = node
    _point(m, near, place, node, low, high)


# ---------------------------------------------------------------------------------------------- work rows


@lean
def _over(rounds: Ints, number: int, begin: int) -> bool:
    """Whether a rank has waited for a round. rounds: int64 [2, rounds], the instruction that launched it last and the
    one that waited for it; begin: the rank's first."""
    return number < 0 or rounds[1, number] >= begin


@lean
def _is_still(m: Ints, node: int, rounds: Ints, begin: int) -> bool:
    """Whether a node of work rows is neither being received nor being sent."""
    return (
        _over(rounds, m[node, READY], begin)
        and _over(rounds, m[node, SENDING], begin)
        and _over(rounds, m[node, SENDING_TOO], begin)
    )


@lean
def _put(
    m: Ints,
    near: Ints,
    place: int,
    low: int,
    high: int,
    state: int,
    offset: int,
    heads: int,
    rounds: Ints,
    begin: int,
) -> int:
    """Overwrites work rows, in which nothing may be needed or under way; the node, -1 where that is not so."""
    node = _slice(m, near, place, low, high)
    other = node
    while other >= 0 and m[other, LO] < high:
        if m[other, STATE] == LIVE or not _is_still(m, other, rounds, begin):
            return -1
        other = m[other, AFTER]
    if node >= 0:
        _absorb(m, near, place, node, high)
        m[node, STATE], m[node, OFFSET], m[node, HEADS] = state, offset, heads
        m[node, READY] = m[node, SENDING] = m[node, SENDING_TOO] = -1
    return node


@lean
def _condition(near: Ints, conditions: Ints, source: int, target: int) -> bool:
    """Takes it for granted that two tokens are one. False where they are known to be two."""
    if source == target:
        return True
    line = near[PLACES, CONDITIONS]
    if max(source, target) < _UNKNOWN or line == conditions.shape[1]:
        return False
    conditions[0, line], conditions[1, line] = source, target
    near[PLACES, CONDITIONS] = line + 1
    return True


@lean
def _doubt(token: int) -> int:
    """How little is known of a token: 0 where it is an address, 1 where a tile of values brings it, 2 where a partial
    does, which may turn out to be zeros."""
    return 0 if token < _UNKNOWN else 1 + ((token >> TILE_SHIFT) & 1)


@lean
def _add(
    m: Ints,
    near: Ints,
    place: int,
    low: int,
    high: int,
    state: int,
    offset: int,
    heads: int,
    rounds: Ints,
    begin: int,
    conditions: Ints,
) -> bool:
    """Adds a contribution, of cleared rows nothing, to partials in work rows."""
    node = _find(m, near, place, low)
    if m[node, STATE] == CLEARED and state == LIVE:
        node = _slice(m, near, place, low, high)
    while node >= 0 and m[node, LO] < high:
        held = m[node, STATE]
        if (
            m[node, HEADS] != heads
            or not _is_still(m, node, rounds, begin)
            or not (held == LIVE or held == CLEARED)  # noqa: SIM109  a tuple costs three times as much
        ):
            return False
        if held == CLEARED and state == LIVE:
            if m[node, LO] < low or m[node, HI] > high:
                return False
            m[node, STATE], m[node, OFFSET] = LIVE, offset
        elif state == LIVE and m[node, OFFSET] != offset:
            token, its = low + offset, low + m[node, OFFSET]
            if _doubt(token) < _doubt(its) and m[node, LO] == low and m[node, HI] <= high:
                token, its = its, token
                m[node, OFFSET] = offset
            if not _condition(near, conditions, token, its):
                return False
        low = m[node, HI]
        node = m[node, AFTER]
    return low >= high


@lean
def _read(
    m: Ints,
    near: Ints,
    place: int,
    low: int,
    high: int,
    heads: int,
    values: bool,
    rounds: Ints,
    begin: int,
    runs: Ints,
) -> int:
    """Fills `runs` with what work rows hold, values or partials, joined where tokens go on; their number, -1 where
    they hold something else or too many."""
    count, row = 0, low
    node = _find(m, near, place, low)
    while row < high:
        state, stop = m[node, STATE], min(high, m[node, HI])
        if m[node, HEADS] != heads or not _over(rounds, m[node, READY], begin):
            return -1
        if state != VALUE if values else not (state == LIVE or state == CLEARED):  # noqa: SIM109  as above
            return -1
        token = row + m[node, OFFSET] if state != CLEARED else NOWHERE
        last = count - 1
        if count and runs[last, RUN_STATE] == state and token == _next_token(runs, last):
            runs[last, RUN_ROWS] += stop - row
        elif count == _RUNS // 2:
            return -1
        else:
            runs[count, RUN_ROW], runs[count, RUN_ROWS] = row - low, stop - row
            runs[count, RUN_TOKEN], runs[count, RUN_STATE] = token, state
            count += 1
        row, node = stop, m[node, AFTER]
    return count


@lean
def _next_token(runs: Ints, run: int) -> int:
    token = runs[run, RUN_TOKEN]
    return token if token == NOWHERE else token + runs[run, RUN_ROWS]  # type: ignore[no-any-return]


@lean
def _spend(
    m: Ints, near: Ints, place: int, low: int, high: int, rounds: Ints, begin: int, number: int
) -> bool:
    """Partials leave work rows, with the round of that number or -1; nothing else may be sending them."""
    node = _slice(m, near, place, low, high)
    if node < 0:
        return False
    other = node
    while other >= 0 and m[other, LO] < high:
        if not _is_still(m, other, rounds, begin):
            return False
        other = m[other, AFTER]
    _absorb(m, near, place, node, high)
    m[node, STATE], m[node, SENDING] = EMPTY, number
    m[node, READY] = m[node, SENDING_TOO] = -1
    return True


@lean
def _mark_sent(
    m: Ints, near: Ints, place: int, low: int, high: int, rounds: Ints, begin: int, number: int
) -> bool:
    """Values of work rows are sent in a round, in two at a time at most."""
    node = _find(m, near, place, low)
    while low < high:
        if m[node, SENDING] == number or _over(rounds, m[node, SENDING], begin):
            m[node, SENDING] = number
        elif m[node, SENDING_TOO] == number or _over(rounds, m[node, SENDING_TOO], begin):
            m[node, SENDING_TOO] = number
        else:
            return False
        low, node = m[node, HI], m[node, AFTER]
    return True


# ---------------------------------------------------------------------------------------------- home rows

# what happens to home rows: a partial is put or added, or the identity put; rows are received, have arrived; are
# finished; a partial is taken; values are read, or sent
_TO_PUT, _TO_ADD, _TO_CLEAR, _TO_RECEIVE, _TO_ARRIVE, _TO_FINISH, _TO_TAKE, _TO_READ, _TO_SEND, _TO_SET = (
    range(10)
)


@lean
def _at_home(m: Ints, near: Ints, tensor: int, low: int, high: int, rows: int, bits: int, what: int) -> bool:
    """Does something with rows of a tensor that is not given, and those heads; False where that is not proper.
    rows: of the rank."""
    place = 2 * tensor
    if not _open(m, near, place, rows):
        return False
    partial = (_PARTIAL_BITS >> tensor) & 1 == 1
    node = _find(m, near, place, low) if what == _TO_READ else _slice(m, near, place, low, high)
    if node < 0:
        return False
    while node >= 0 and m[node, LO] < high:
        live, cleared, value = (
            m[node, LIVE_BITS] & bits,
            m[node, CLEARED_BITS] & bits,
            m[node, VALUE_BITS] & bits,
        )
        flight, sent = m[node, FLIGHT_BITS] & bits, m[node, SENT_BITS] & bits
        if what == _TO_ARRIVE:
            m[node, FLIGHT_BITS] &= ~bits
            if partial:
                m[node, LIVE_BITS] |= bits
            else:
                m[node, VALUE_BITS] |= bits
        elif what == _TO_READ or what == _TO_SEND:  # noqa: SIM109  as above
            if value != bits or flight:
                return False
            if what == _TO_SEND:
                m[node, SENT_BITS] |= bits
        elif flight or sent or value:
            return False
        elif what == _TO_ADD or what == _TO_FINISH or what == _TO_TAKE:  # noqa: SIM109  as above
            if live | cleared != bits:
                return False
            m[node, CLEARED_BITS] &= ~bits
            m[node, LIVE_BITS] &= ~bits
            if what == _TO_ADD:
                m[node, LIVE_BITS] |= bits
            elif what == _TO_FINISH:
                m[node, VALUE_BITS] |= bits
        else:
            if live:
                return False
            m[node, CLEARED_BITS] &= ~bits
            if what == _TO_PUT:
                m[node, LIVE_BITS] |= bits
            elif what == _TO_CLEAR:
                m[node, CLEARED_BITS] |= bits
            elif what == _TO_SET:
                m[node, VALUE_BITS] |= bits
            else:
                m[node, FLIGHT_BITS] |= bits
        node = m[node, AFTER]
    return True


# ---------------------------------------------------------------------------------------------- operands


@lean
def _are_placed(
    operands: Ints,
    begin: int,
    end: int,
    rows: int,
    arena_rows: Ints,
    arena_heads: Ints,
    size: Ints,
    foreign: int,
) -> bool:
    """Whether the operands of a rank lie inside its rows, those of arenas in the first columns. foreign: tensors of
    another phase, as bits."""
    for x in range(begin + 1, end):
        tensor, space, last, heads = (
            operands[0, x],
            operands[1, x],
            operands[2, x] + operands[3, x],
            operands[5, x],
        )
        headless, side = (_HEADLESS_BITS >> tensor) & 1, (_KV_BITS >> tensor) & 1
        if operands[4, x] != 0 or (foreign >> tensor) & 1 or (headless and heads):
            return False
        if space == HOME:
            if last > rows:
                return False
        elif last > arena_rows[tensor] or (not headless and size[side, heads] > arena_heads[tensor]):
            return False
    return True


@lean
def _gather(
    m: Ints,
    near: Ints,
    operands: Ints,
    x: int,
    values: bool,
    given: int,
    sets: Ints,
    home: Ints,
    rounds: Ints,
    begin: int,
    runs: Ints,
) -> int:
    """Fills `runs` with what an operand holds: values, which stay, or partials, which at home are taken; their number,
    -1 where it holds something else. sets: int64 [2, 2, sets], bits and number of the heads of each; home: the rank's
    rows and the address of the first."""
    tensor, low, rows = int(operands[0, x]), int(operands[2, x]), int(operands[3, x])
    side = (_KV_BITS >> tensor) & 1
    if operands[1, x] != HOME:
        place = 2 * tensor + 1
        if not near[place, OPEN]:
            return -1
        return _read(
            m, near, place, low, low + rows, sets[1, side, operands[5, x]], values, rounds, begin, runs
        )
    if not (values and (given >> tensor) & 1):
        bits = 1 if (_HEADLESS_BITS >> tensor) & 1 else sets[0, side, operands[5, x]]
        what = _TO_READ if values else _TO_TAKE
        if (given >> tensor) & 1 or not _at_home(m, near, tensor, low, low + rows, home[0], bits, what):
            return -1
    runs[0, RUN_ROW], runs[0, RUN_ROWS], runs[0, RUN_TOKEN] = 0, rows, home[1] + low
    runs[0, RUN_STATE] = VALUE if values else LIVE
    return 1


@lean
def _write(
    m: Ints,
    near: Ints,
    operands: Ints,
    x: int,
    runs: Ints,
    count: int,
    partial: bool,
    adds: bool,
    given: int,
    sets: Ints,
    home: Ints,
    arena_rows: Ints,
    rounds: Ints,
    begin: int,
    conditions: Ints,
) -> bool:
    """Puts runs into an operand or adds them to it, as partials or values; cleared ones stay cleared."""
    tensor, first, space = int(operands[0, x]), int(operands[2, x]), operands[1, x]
    side = (_KV_BITS >> tensor) & 1
    if space == HOME:
        if (given >> tensor) & 1:
            return False
        for run in range(count):
            token = runs[run, RUN_TOKEN]
            wanted = home[1] + first + runs[run, RUN_ROW]
            if token != NOWHERE and not _condition(near, conditions, token, wanted):
                return False
        bits = 1 if (_HEADLESS_BITS >> tensor) & 1 else sets[0, side, operands[5, x]]
        what = _TO_ADD if adds else _TO_PUT if partial else _TO_SET
        return _at_home(m, near, tensor, first, first + operands[3, x], home[0], bits, what)
    place, heads = 2 * tensor + 1, sets[1, side, operands[5, x]]
    if not _open(m, near, place, arena_rows[tensor]):
        return False
    for run in range(count):
        low = first + runs[run, RUN_ROW]
        high = low + runs[run, RUN_ROWS]
        cleared = runs[run, RUN_STATE] == CLEARED
        state = CLEARED if cleared else LIVE if partial else VALUE
        offset = NOWHERE if cleared else runs[run, RUN_TOKEN] - low
        if adds:
            if not _add(m, near, place, low, high, state, offset, heads, rounds, begin, conditions):
                return False
        elif _put(m, near, place, low, high, state, offset, heads, rounds, begin) < 0:
            return False
    return True


@lean
def _alike(operands: Ints, x: int, y: int, sets: Ints) -> bool:
    """Whether two operands have as many rows and, where y's tensor has heads, the same ones."""
    tensor, other = operands[0, x], operands[0, y]
    if operands[3, x] != operands[3, y]:
        return False
    if (_HEADLESS_BITS >> other) & 1:
        return True
    mine, its = (_KV_BITS >> tensor) & 1, (_KV_BITS >> other) & 1
    return sets[1, mine, operands[5, x]] == sets[1, its, operands[5, y]]  # type: ignore[no-any-return]


@lean
def _hold_alike(runs: Ints, count: int, other: Ints, others: int, near: Ints, conditions: Ints) -> bool:
    """Whether two operands hold the same tokens row by row; what is cleared fits all."""
    i, j, row = 0, 0, 0
    while i < count and j < others:
        token, its = runs[i, RUN_TOKEN], other[j, RUN_TOKEN]
        if token != NOWHERE and its != NOWHERE:
            token, its = token + row - runs[i, RUN_ROW], its + row - other[j, RUN_ROW]
            if not _condition(near, conditions, token, its):
                return False
        end, its_end = runs[i, RUN_ROW] + runs[i, RUN_ROWS], other[j, RUN_ROW] + other[j, RUN_ROWS]
        row = min(end, its_end)
        i, j = i + (end == row), j + (its_end == row)
    return i == count and j == others and count > 0


# ---------------------------------------------------------------------------------------------- ops


@inlined
def _launch(
    m: Ints,
    near: Ints,
    operands: Ints,
    base: int,
    transfers: Ints,
    first: int,
    end: int,
    number: int,
    tile_sets: int,
    given: int,
    sets: Ints,
    home: Ints,
    arena_rows: Ints,
    rounds: Ints,
    begin: int,
    conditions: Ints,
    sends: Ints,
    slots: Ints,
    next_send: Ints,
    limits: Ints,
    runs: Ints,
) -> bool:
    """Sends and receives of a round. next_send: int64 [ranks], the next send of each rank to this one; limits: the
    first of its sends and the end of them."""
    for t in range(first, end):
        peer, x = transfers[1, t], base + transfers[2, t]
        tensor, low, high = int(operands[0, x]), int(operands[2, x]), operands[2, x] + operands[3, x]
        side, partial, at_home = (
            (_KV_BITS >> tensor) & 1,
            (_PARTIAL_BITS >> tensor) & 1,
            operands[1, x] == HOME,
        )
        headless, place = (_HEADLESS_BITS >> tensor) & 1, 2 * tensor + 1
        if tensor == 0:
            return False
        bits = 1 if headless else sets[0, side, operands[5, x]]
        if transfers[0, t]:
            if at_home:
                if partial:
                    return False
                fixed = (given >> tensor) & 1 == 1
                if not fixed and not _at_home(m, near, tensor, low, high, home[0], bits, _TO_SEND):
                    return False
                continue
            count = _gather(m, near, operands, x, not partial, given, sets, home, rounds, begin, runs)
            token = NOWHERE
            for run in range(count):
                if runs[run, RUN_STATE] != CLEARED:
                    at = runs[run, RUN_TOKEN] - runs[run, RUN_ROW]
                    if token != NOWHERE and _doubt(token) > _doubt(at):
                        token, at = at, token
                    if token != NOWHERE and not _condition(near, conditions, at, token):
                        return False
                    token = at if token == NOWHERE else token
            if count < 1:
                return False
            sends[slots[t], TOKEN] = token
            if partial:
                if not _spend(m, near, place, low, high, rounds, begin, number):
                    return False
            elif not _mark_sent(m, near, place, low, high, rounds, begin, number):
                return False
            continue
        send = next_send[peer]
        if (
            send < limits[0]
            or send >= limits[1]
            or sends[send, SENDER] != peer
            or sends[send, ROUND] != number
        ):
            return False
        tile = (int(operands[3, x]) * PLACES + tensor) * tile_sets + sets[1, side, operands[5, x]]
        if sends[send, TILE] != tile:
            return False
        next_send[peer] = send + 1
        token = sends[send, TOKEN]
        cleared = partial and peer < limits[2] and token == NOWHERE
        if token < 0 or token >= _UNKNOWN:
            token = (2 * send + 2 + partial) << TILE_SHIFT
        if at_home:
            if (given >> tensor) & 1 or not (cleared or _condition(near, conditions, token, home[1] + low)):
                return False
            if not _at_home(m, near, tensor, low, high, home[0], bits, _TO_RECEIVE):
                return False
            rounds[2, number] = begin
        else:
            if not _open(m, near, place, arena_rows[tensor]):
                return False
            state, heads = CLEARED if cleared else LIVE if partial else VALUE, sets[1, side, operands[5, x]]
            node = _put(m, near, place, low, high, state, token - low, heads, rounds, begin)
            if node < 0:
                return False
            m[node, READY] = number
    return True


@inlined
def _arrive(
    m: Ints,
    near: Ints,
    operands: Ints,
    base: int,
    transfers: Ints,
    first: int,
    end: int,
    sets: Ints,
    rows: int,
) -> None:
    """What home rows received in a round is there."""
    for t in range(first, end):
        x = base + transfers[2, t]
        tensor, low = int(operands[0, x]), int(operands[2, x])
        if transfers[0, t] == 0 and operands[1, x] == HOME:
            side = (_KV_BITS >> tensor) & 1
            bits = 1 if (_HEADLESS_BITS >> tensor) & 1 else sets[0, side, operands[5, x]]
            _at_home(m, near, tensor, low, low + operands[3, x], rows, bits, _TO_ARRIVE)


@inlined
def _attend(
    m: Ints,
    near: Ints,
    operands: Ints,
    base: int,
    tasks: Ints,
    first: int,
    end: int,
    backward: bool,
    pairs: Ints,
    used: Ints,
    given: int,
    sets: Ints,
    home: Ints,
    arena_rows: Ints,
    rounds: Ints,
    begin: int,
    conditions: Ints,
    places: Ints,
    runs: Ints,
) -> bool:
    """Tasks of an instruction. pairs: whether query heads of one set find their keys in another; used: bool [sets],
    marked here. Writes what a task's rows are of to `places`, as in `Flow.parts`."""
    flags, last, count = len(tasks) - 1, -1, 0
    keys, others = runs[_RUNS // 2 :], runs[_RUNS:]
    for i in range(first, end):
        xq, xk, xo = base + tasks[0, i], base + tasks[1, i], base + tasks[4 if backward else 2, i]
        low, high, flag = tasks[flags - 2, i], tasks[flags - 1, i], tasks[flags, i]
        if low < 1 - operands[3, xk] or high > operands[3, xq] - 1 or low > high:
            return False
        if operands[0, xk] != _KV or not pairs[operands[5, xq], operands[5, xk]]:
            return False
        if xq != last:
            count = _gather(m, near, operands, xq, True, given, sets, home, rounds, begin, runs)
            if operands[0, xq] != _Q or count < 0:
                return False
            used[operands[5, xq]] = 1
        if operands[0, xo] != (_DQ if backward else _O) or not _alike(operands, xo, xq, sets):
            return False
        if backward:
            for column in range(2, 4):
                x = base + tasks[column, i]
                if operands[0, x] != (_DO if column == 2 else _DELTA):
                    return False
                if xq == last and tasks[column, i] == tasks[column, i - 1]:
                    continue
                found = _gather(m, near, operands, x, True, given, sets, home, rounds, begin, others)
                if not _alike(operands, x, xq, sets) or not _hold_alike(
                    runs, count, others, found, near, conditions
                ):
                    return False
        last = xq
        key_runs = _gather(m, near, operands, xk, True, given, sets, home, rounds, begin, keys)
        if key_runs < 0:
            return False
        if not _write(
            m,
            near,
            operands,
            xo,
            runs,
            count,
            True,
            flag & 1 == 0,
            given,
            sets,
            home,
            arena_rows,
            rounds,
            begin,
            conditions,
        ):
            return False
        if backward:
            x = base + tasks[5, i]
            if operands[0, x] != _DKV or not _alike(operands, x, xk, sets):
                return False
            if not _write(
                m,
                near,
                operands,
                x,
                keys,
                key_runs,
                True,
                flag & 2 == 0,
                given,
                sets,
                home,
                arena_rows,
                rounds,
                begin,
                conditions,
            ):
                return False
        for a in range(count):
            for b in range(key_runs):
                at = near[PLACES, PIECES]
                near[PLACES, PIECES] = at + 1
                if at < places.shape[1]:
                    places[0, at] = i
                    places[1, at], places[2, at], places[3, at] = (
                        runs[a, RUN_ROW],
                        runs[a, RUN_ROWS],
                        runs[a, RUN_TOKEN],
                    )
                    places[4, at], places[5, at], places[6, at] = (
                        keys[b, RUN_ROW],
                        keys[b, RUN_ROWS],
                        keys[b, RUN_TOKEN],
                    )
    return True


@lean
def _may_move(operands: Ints, x: int, y: int, sets: Ints) -> bool:
    """Whether the rows of one operand may go into another: of one tensor, alike, and elsewhere."""
    if operands[0, x] != operands[0, y] or not _alike(operands, y, x, sets):
        return False
    apart = (
        operands[2, x] >= operands[2, y] + operands[3, y] or operands[2, y] >= operands[2, x] + operands[3, x]
    )
    return operands[1, x] != operands[1, y] or apart  # type: ignore[no-any-return]


@inlined
def _rowop(
    m: Ints,
    near: Ints,
    operands: Ints,
    base: int,
    rowops: Ints,
    row: int,
    op: int,
    backward: bool,
    given: int,
    sets: Ints,
    home: Ints,
    arena_rows: Ints,
    rounds: Ints,
    begin: int,
    conditions: Ints,
    runs: Ints,
) -> bool:
    """A row of `rowops`. Each op has a case: what its operands must be, what is read, where it goes."""
    a, b, c, d = rowops[0, row], rowops[1, row], rowops[2, row], rowops[3, row]
    xa, xb, xc, xd = base + a, base + b, base + c, base + d
    of_a, of_b, of_c, of_d = operands[0, xa], operands[0, xb], operands[0, xc], operands[0, xd]
    others = runs[_RUNS:]
    low = int(operands[2, xc])
    high, count, adds, partial = low + operands[3, xc], 1, rowops[4, row] & 1 == 0, True
    bits = sets[0, (_KV_BITS >> of_c) & 1, operands[5, xc]] if of_c != _DX else 1
    if op == _CLEAR:
        if a or b or d or not (_PARTIAL_BITS >> of_c) & 1:
            return False
        if operands[1, xc] == HOME:
            put = (given >> of_c) & 1 == 0
            return put and _at_home(m, near, of_c, low, high, home[0], bits, _TO_CLEAR)
        runs[0, RUN_ROW], runs[0, RUN_ROWS] = 0, operands[3, xc]
        runs[0, RUN_TOKEN], runs[0, RUN_STATE], adds = NOWHERE, CLEARED, False
    elif op == _FINISH:
        proper = not a and not b and not d and of_c == _O and operands[1, xc] == HOME and not backward
        return proper and _at_home(m, near, of_c, low, high, home[0], bits, _TO_FINISH)
    elif op == _DELTA_OP:
        if d or of_a != _DO or of_b != _O or of_c != _DELTA or not backward:
            return False
        if operands[1, xa] != HOME or operands[1, xb] != HOME or operands[1, xc] != HOME:
            return False
        if not (given >> _DO) & (given >> _O) & 1 or operands[2, xa] != low or operands[2, xb] != low:
            return False
        if not _alike(operands, xb, xa, sets) or not _alike(operands, xc, xa, sets):
            return False
        return _at_home(m, near, of_c, low, high, home[0], bits, _TO_SET)
    elif op == _PROJECT:
        if d or of_a != _X or (b and of_b != _Q) or (c and of_c != _KV):
            return False
        count = _gather(m, near, operands, xa, True, given, sets, home, rounds, begin, runs)
        if count < 0:
            return False
        adds, partial = False, False
        if b and operands[3, xb] != operands[3, xa]:
            return False
        if b and not _write(
            m,
            near,
            operands,
            xb,
            runs,
            count,
            False,
            False,
            given,
            sets,
            home,
            arena_rows,
            rounds,
            begin,
            conditions,
        ):
            return False
        if not c:
            return True
        if operands[3, xc] != operands[3, xa]:
            return False
    elif op == _PROJECT_GRAD:
        if not backward or of_a != _X or (b and of_b != _DQ) or (c and of_c != _DKV) or of_d != _DX:
            return False
        count = _gather(m, near, operands, xa, True, given, sets, home, rounds, begin, runs)
        for way in range(2):
            x = xc if way else xb
            if x == base:
                continue
            if operands[3, x] != operands[3, xa]:
                return False
            found = _gather(m, near, operands, x, False, given, sets, home, rounds, begin, others)
            if not _hold_alike(runs, count, others, found, near, conditions):
                return False
            if operands[1, x] == WORK:
                last = operands[2, x] + operands[3, x]
                if not _spend(m, near, 2 * operands[0, x] + 1, int(operands[2, x]), last, rounds, begin, -1):
                    return False
        xc = xd
        if count < 0 or operands[3, xd] != operands[3, xa]:
            return False
    else:
        moves = op == _COPY
        if b or d or a == 0 or not _may_move(operands, xa, xc, sets):
            return False
        if op == _MERGE and (of_a != _O or backward):
            return False
        if op == _ADD and (not (_SUM_BITS >> of_a) & 1 or not backward):
            return False
        if op == _DELIVER and not ((_DELIVERED_BITS >> of_a) & 1 and operands[1, xc] == HOME):
            return False
        adds = adds and op in (_MERGE, _ADD)
        partial = (_PARTIAL_BITS >> of_a) & 1 == 1
        values = moves and not (partial and operands[1, xa] == WORK)
        if moves and values and partial:
            return False  # a copy of finished rows of a sum, or of partials at home
        count = _gather(m, near, operands, xa, values, given, sets, home, rounds, begin, runs)
        if count < 0:
            return False
        low, high = int(operands[2, xa]), operands[2, xa] + operands[3, xa]
        if not values and operands[1, xa] == WORK:  # noqa: SIM102  two conditions, one of them done
            if not _spend(m, near, 2 * of_a + 1, low, high, rounds, begin, -1):
                return False
    return _write(
        m,
        near,
        operands,
        xc,
        runs,
        count,
        partial,
        adds,
        given,
        sets,
        home,
        arena_rows,
        rounds,
        begin,
        conditions,
    )


# ---------------------------------------------------------------------------------------------- the walk


@lean
def _post(
    operands: Ints,
    operand_ptr: Ints,
    instructions: Ints,
    instruction_ptr: Ints,
    transfers: Ints,
    transfer_ptr: Ints,
    sets: Ints,
    home_first: Ints,
    ways: Ints,
    sends: Ints,
    sends_ptr: Ints,
    next_send: Ints,
    slots: Ints,
) -> bool:
    """Writes down every send where its receiver looks: of each receiver, by sender, in their order. ways: int64
    [3, rounds], channel and mode of each round, -1 at first, and how many ranks launch it. False where ranks differ in
    a round, one sends to itself, or there are more or fewer sends than receives."""
    ranks = len(operand_ptr) - 1
    for rank in range(ranks):
        for t in range(transfer_ptr[rank], transfer_ptr[rank + 1]):
            if transfers[1, t] == rank:
                return False
            if transfers[0, t]:
                sends_ptr[transfers[1, t] + 1] += 1
    for rank in range(ranks):
        sends_ptr[rank + 1] += sends_ptr[rank]
        next_send[rank] = sends_ptr[rank]
    if 2 * sends_ptr[ranks] != transfers.shape[1]:
        return False
    for rank in range(ranks):
        t, base = transfer_ptr[rank], operand_ptr[rank]
        for step in range(instruction_ptr[rank], instruction_ptr[rank + 1]):
            if instructions[0, step] != _LAUNCH:
                continue
            number, channel, mode = instructions[1, step], instructions[2, step], instructions[3, step]
            if ways[0, number] < 0:
                ways[0, number], ways[1, number] = channel, mode
            if ways[0, number] != channel or ways[1, number] != mode:
                return False
            ways[2, number] += 1
            if instructions[4, step] == 0 and mode & ALL_TO_ALL == 0:
                return False
            end = t + instructions[4, step]
            while t < end:
                if transfers[0, t]:
                    peer, x = transfers[1, t], base + transfers[2, t]
                    send = next_send[peer]
                    next_send[peer] = send + 1
                    slots[t] = send
                    tensor, side = operands[0, x], (_KV_BITS >> operands[0, x]) & 1
                    heads = sets[1, side, operands[5, x]]
                    sends[send, SENDER], sends[send, ROUND] = rank, number
                    sends[send, TILE] = (int(operands[3, x]) * PLACES + tensor) * sets.shape[2] + heads
                    sends[send, TOKEN] = (
                        home_first[rank] + operands[2, x] if operands[1, x] == HOME else NOWHERE
                    )
                t += 1
    for number in range(ways.shape[1]):
        if ways[0, number] >= 0 and ways[1, number] & ALL_TO_ALL and ways[2, number] != ranks:
            return False
    return True


@lean
def _ends_well(m: Ints, near: Ints, given: int, owed: int, finished: int, sets: Ints, rows: int) -> bool:
    """Whether a rank ends with all home rows that it owes, and no partial elsewhere. finished: tensors of `owed` that
    must be values."""
    for tensor in range(1, PLACES // 2):
        bits = 1 if (_HEADLESS_BITS >> tensor) & 1 else sets[0, (_KV_BITS >> tensor) & 1, 0]
        owes = (owed >> tensor) & 1 and rows > 0
        if owes and not near[2 * tensor, OPEN]:
            return False
        for place in range(2 * tensor, 2 * tensor + 2):
            node = _find(m, near, place, 0) if near[place, OPEN] else -1
            while node >= 0:
                if place & 1:
                    if (_PARTIAL_BITS >> tensor) & 1 and m[node, STATE] == LIVE:
                        return False
                elif not owes:
                    if m[node, LIVE_BITS]:
                        return False
                elif (finished >> tensor) & 1:
                    if m[node, VALUE_BITS] != bits:
                        return False
                elif m[node, LIVE_BITS] | m[node, CLEARED_BITS] != bits:
                    return False
                node = m[node, AFTER]
    return True


@lean
def _token(sends: Ints, token: int) -> int:
    """The address that a token has; NOWHERE where its rows were sent as zeros."""
    start, root = token, token
    while root >= _UNKNOWN:
        source = sends[(root >> TILE_SHIFT + 1) - 1, TOKEN]
        if source == NOWHERE:
            return NOWHERE
        root = source + (root & ((1 << TILE_SHIFT) - 1))
    while start >= _UNKNOWN:  # the next one finds it at once
        line, row = (start >> TILE_SHIFT + 1) - 1, start & ((1 << TILE_SHIFT) - 1)
        start = sends[line, TOKEN] + row
        sends[line, TOKEN] += root - start
    return root


@lean
def _settle(sends: Ints, conditions: Ints, places: Ints) -> bool:
    """Gives all tokens their addresses; whether those that were taken for one are one. Zeros may be added anywhere."""
    for i in range(conditions.shape[1]):
        source, target = _token(sends, conditions[0, i]), _token(sends, conditions[1, i])
        if source != target and (source != NOWHERE or target == NOWHERE):
            return False
    for i in range(places.shape[1]):
        for column in range(3, 7, 3):
            token = _token(sends, places[column, i])
            if token == NOWHERE:
                return False
            places[column, i] = token
    return True


@lean
def _walk(
    backward: bool,
    given: int,
    owed: int,
    finished: int,
    foreign: int,
    operands: Ints,
    operand_ptr: Ints,
    instructions: Ints,
    instruction_ptr: Ints,
    transfers: Ints,
    transfer_ptr: Ints,
    tasks: Ints,
    task_ptr: Ints,
    rowops: Ints,
    rowop_ptr: Ints,
    sets: Ints,
    size: Ints,
    pairs: Ints,
    used: Ints,
    home_rows: Ints,
    home_first: Ints,
    arena_rows: Ints,
    arena_heads: Ints,
    sends: Ints,
    sends_ptr: Ints,
    slots: Ints,
    next_send: Ints,
    rounds: Ints,
    home: Ints,
    m: Ints,
    near: Ints,
    runs: Ints,
    conditions: Ints,
    places: Ints,
) -> int:
    """Walks every rank; the instruction at which it does not know, or the number of instructions: all is right.

    rounds: int64 [4, rounds], -1 at first: the instructions that launched a round last and that waited for it, the
    first of the rank that last received home rows in it, and the first transfer.
    """
    for rank in range(len(operand_ptr) - 1):
        base, begin, rows = operand_ptr[rank], instruction_ptr[rank], home_rows[rank]
        t, task, row, last, under_way = transfer_ptr[rank], task_ptr[rank], rowop_ptr[rank], -1, 0
        home[0], home[1] = rows, home_first[rank]
        home[2], home[3], home[4] = sends_ptr[rank], sends_ptr[rank + 1], rank
        near[:PLACES, OPEN] = 0
        near[PLACES, USED], near[PLACES, FREE] = 0, -1
        if not _are_placed(
            operands, base, operand_ptr[rank + 1], rows, arena_rows[rank], arena_heads[rank], size, foreign
        ):
            return begin  # type: ignore[no-any-return]
        for send in range(sends_ptr[rank + 1] - 1, sends_ptr[rank] - 1, -1):
            next_send[sends[send, SENDER]] = send
        received = 0
        for step in range(begin, instruction_ptr[rank + 1]):
            op, number, count = instructions[0, step], instructions[1, step], instructions[4, step]
            proper = True
            if op == _LAUNCH:
                if number <= last:
                    return step
                last, under_way = number, under_way + 1
                rounds[0, number], rounds[3, number] = step, t
                proper = _launch(
                    m,
                    near,
                    operands,
                    base,
                    transfers,
                    t,
                    t + count,
                    number,
                    sets.shape[2],
                    given,
                    sets,
                    home,
                    arena_rows[rank],
                    rounds,
                    begin,
                    conditions,
                    sends,
                    slots,
                    next_send,
                    home[2:],
                    runs,
                )
                t += count
            elif op == _WAIT:
                if rounds[0, number] < begin or rounds[1, number] >= begin:
                    return step
                rounds[1, number], under_way = step, under_way - 1
                if rounds[2, number] == begin:
                    end = rounds[3, number] + instructions[4, rounds[0, number]]
                    _arrive(m, near, operands, base, transfers, rounds[3, number], end, sets, rows)
            elif op == _ATTEND or op == _GRAD:  # noqa: SIM109  as above
                proper = backward == (op == _GRAD) and _attend(
                    m,
                    near,
                    operands,
                    base,
                    tasks,
                    task,
                    task + count,
                    backward,
                    pairs,
                    used,
                    given,
                    sets,
                    home,
                    arena_rows[rank],
                    rounds,
                    begin,
                    conditions,
                    places,
                    runs,
                )
                task += count
            else:
                for item in range(row, row + count):
                    proper = proper and _rowop(
                        m,
                        near,
                        operands,
                        base,
                        rowops,
                        item,
                        op,
                        backward,
                        given,
                        sets,
                        home,
                        arena_rows[rank],
                        rounds,
                        begin,
                        conditions,
                        runs,
                    )
                row += count
            if not proper:
                return step
        for item in range(transfer_ptr[rank], transfer_ptr[rank + 1]):
            received += 1 - transfers[0, item]
        if under_way or received != sends_ptr[rank + 1] - sends_ptr[rank]:
            return begin  # type: ignore[no-any-return]
        if not _ends_well(m, near, given, owed, finished, sets, rows):
            return begin  # type: ignore[no-any-return]
    return instructions.shape[1]  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------------------------- of a program


def _matrix(name: str, table: Table) -> Ints | None:
    """int32 [columns, rows]; None where a number is beyond `_LIMIT`."""
    columns = [table[column] for column in TABLES[name]]
    found = np.empty((len(columns), len(table)), np.int32)
    for i, column in enumerate(columns):
        wide = column.dtype.itemsize > 4 and len(column) > 0
        if wide and max(-int(column.min()), int(column.max())) > _LIMIT:
            return None
        found[i] = column
    if found.size and max(-int(found.min()), int(found.max())) > _LIMIT:
        return None
    return _fixed(found)


def _fixed(numbers: Ints) -> Ints:
    """The same, contiguous and read-only, as a plan's are: loops are compiled for one kind of array."""
    found = np.ascontiguousarray(numbers).view()
    found.setflags(write=False)
    return found


def _heads(sets: HeadSets) -> Sequence[int] | None:
    """Bits of the heads of each set, one for all heads that only occur together; None for too many."""
    member = np.zeros((len(sets.members), sets.heads), bool)
    for number, one in enumerate(sets.members):
        member[number, one[one < sets.heads]] = True
    together = np.unique(member, axis=1)
    if together.shape[1] > _MOST_HEADS:
        return None
    bits: list[int] = (together << np.arange(together.shape[1])).sum(axis=1).tolist()
    return bits


@dataclass(frozen=True, eq=False)
class Sets:
    """The head sets of a plan. table: int64 [2, 2, sets], of query and key side the bits and the number of each; size:
    int64 [2, sets]; pairs: int8 [sets, sets], whether the query heads of one find all their keys in the other."""

    table: Ints
    size: Ints
    pairs: Ints


def sets_of(q: HeadSets, kv: HeadSets) -> Sets | None:
    """None for more heads than are followed."""
    bits = [_heads(side) for side in (q, kv)]
    if bits[0] is None or bits[1] is None:
        return None
    table = np.array([bits, [q.canonical, kv.canonical]], np.int64)
    own, held = np.zeros((2, len(q.members), kv.heads), bool)
    for number, (heads, keys) in enumerate(zip(q.members, kv.members, strict=True)):
        own[number, heads // (q.heads // kv.heads)] = True
        held[number, keys[keys < kv.heads]] = True
    lacking = (own[:, None] & ~held[None]).any(axis=2)
    pairs: Ints = np.logical_not(lacking).astype(np.int8)
    return Sets(table, np.array([q.size, kv.size], np.int64), pairs)


def judge(program: Program, homes: Homes, sets: Sets, given: frozenset[Tensor], masked: bool) -> Ints | None:
    """What the tasks of a program with which all is right attend to, int64 [7, parts] as `Flow.parts`; None where
    that is not sure.

    homes: of the home rows. given: tensors whose home rows hold values at the start. masked: whether the mask allows
    anything.
    """
    names = ("operands", "instructions", "transfers", program.task_list, "rowops")
    tables = {name: _matrix(name, program.source[name]) for name in names}
    ptrs = {name: _fixed(np.asarray(program.source[name].ptr, np.int64)) for name in names}
    if any(table is None for table in tables.values()) or len(
        program.source["grads" if program.task_list == "tasks" else "tasks"]
    ):
        return None
    operands, instructions, transfers, tasks, rowops = (
        table for table in tables.values() if table is not None
    )
    number = int(instructions[1].max(initial=0)) + 1
    if number > 8 * instructions.shape[1] + 1024:
        return None
    ranks, longest = program.ranks, int(np.diff(ptrs["operands"]).max(initial=0))
    ways = np.full((3, number), -1, np.int64)
    ways[2] = 0
    sends, sends_ptr = np.empty((transfers.shape[1] // 2 + 1, 4), np.int64), np.zeros(ranks + 1, np.int64)
    next_send, slots = np.zeros(ranks, np.int64), np.zeros(transfers.shape[1], np.int64)
    both = operands, ptrs["operands"], instructions, ptrs["instructions"], transfers, ptrs["transfers"]
    if 2 * int(np.count_nonzero(transfers[0])) != transfers.shape[1] or not _post(
        *both, sets.table, _fixed(homes.first), ways, sends, sends_ptr, next_send, slots
    ):
        return None
    foreign = sum(1 << tensor for tensor in Tensor if program.phase not in tensor.contents.phases)
    owed = sum(1 << tensor for tensor in program.owed)
    room, conditions = 2 * tasks.shape[1] + transfers.shape[1] + 64, rowops.shape[1] + transfers.shape[1] + 64
    conditions += tasks.shape[1]
    used = np.zeros(sets.size.shape[1], np.int8)
    for _ in range(2):
        near, found = (
            np.zeros((PLACES + 1, FIRST_NEAR + _NEAR), np.int64),
            np.empty((2, conditions), np.int64),
        )
        places = np.empty((7, room), np.int64)
        done = _walk(
            program.phase == "backward",
            sum(1 << tensor for tensor in given),
            owed,
            (1 << Tensor.O) | (1 << Tensor.DELTA),
            foreign,
            *both,
            tasks,
            ptrs[program.task_list],
            rowops,
            ptrs["rowops"],
            sets.table,
            sets.size,
            sets.pairs,
            used,
            _fixed(homes.rows),
            _fixed(homes.first),
            _fixed(program.arena_rows),
            _fixed(program.arena_heads),
            sends,
            sends_ptr,
            slots,
            next_send,
            np.full((4, number), -1, np.int64),
            np.zeros(5, np.int64),
            np.empty((8 * longest + 4096, 10), np.int64),
            near,
            np.empty((2 * _RUNS, 4), np.int64),
            found,
            places,
        )
        if done < instructions.shape[1]:
            return None
        if near[PLACES, PIECES] <= room:
            break
        room = int(near[PLACES, PIECES])
    places = places[:, : near[PLACES, PIECES]]
    if not _settle(sends, found[:, : near[PLACES, CONDITIONS]], places):
        return None
    covered = np.zeros(program.q_sets.heads, bool)
    for one in np.flatnonzero(used).tolist():
        covered[program.q_sets.members[one]] = True
    return places if covered.all() or not masked else None
