"""The proof that programs are right: one walk over each rank.

It is what the rules `operands`, `transfers`, `heads`, `dataflow`, `delivery` and `results` are. Where one of them does
not hold, or a program has a form that is not followed (FORMAT.md names those), the walk of a rank ends there and notes
what it saw; `trace.py` and the folder `explain` make words of that.

Ranks are walked one after another, over the same scratch memory, or ranges of them by several threads. Where tasks are
many a range is settled as soon as it has been walked; one that hangs on ranks that were not is walked again when they
were. So what is noted of ranks is never kept of all of them.

    home rows    ranges whose heads are produced, cleared, finished or on their way: bits of heads. Home rows hold their
                 own tokens or none, so no tokens are noted
    work rows    ranges with one state and the token of a row: an address (`homes`) where it is known, else so many rows
                 into what a send s carries: (2 s + 2) << 40 plus the row, (2 s + 3) << 40 of a partial

What comes from home rows has a known address before anything runs. What comes from work rows is settled in the end:
additions and home rows that took tokens for granted wrote down which rows must be the same. A tile of several runs is
noted as such, run by run (`parcels`), and whoever holds rows of it is told then which they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.errors import CapacityError
from apportion.ir.isa import ALL_TO_ALL, RESULTS, TABLES, Op
from apportion.ir.loops.jit import inlined, lean, unlocked
from apportion.ir.loops.threads import spread
from apportion.ir.plan.tables import Table
from apportion.ir.tensors import HEADLESS, KV_SIDE, PARTIALS, Tensor
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.view import HOME, WORK, HeadSets, Program
from apportion.ir.verify.walk.lists import Lists, list_band

# Constants are compiled into the functions below and live beside them: a compiled function is cached until its own
# file changes.

# columns of a node, a range of rows; of work rows: the offset from row to token, its state, the number of its heads,
# the round that brings it, and from SENDING on rounds that send it: -1 for none, and behind that there are none
LO, HI, AFTER, BEFORE, OFFSET, STATE, HEADS, READY, SENDING = range(9)
NODE = 16
# of home rows, bits of heads: with contributions, cleared, finished, being received, sent, given results
LIVE_BITS, CLEARED_BITS, VALUE_BITS, FLIGHT_BITS, SENT_BITS, RESULT_BITS = range(4, 10)
EMPTY, CLEARED, LIVE, VALUE, SPENT = range(5)

# columns of a place, (tensor, space): its nodes are found through the one at every 2**SHIFT rows; whether there are
# any yet; its rows
SHIFT, OPEN, ROOM, FIRST_NEAR = range(4)
PLACES = 2 * (max(Tensor) + 1)
# columns of the line behind the places: nodes in use and the first out of use; lines in use of `places`, `conditions`
# and `parcels`, and the end of those that may be used; of the rank that is walked its number, first instruction, the
# address of its first home row, and the first and the end of what is sent to it; tensors whose home rows hold values,
# as bits; the first rank of the walk, and the end of those that were walked before it; what was wrong: its code, where
# (a place and rows), what they hold and what was wanted there, the instruction, -1 for the end, the row of its list;
# from two lines behind it on are the places of home rows for more heads than a word has bits
USED, FREE, PIECES, CONDITIONS, PARCELS, PARCELS_END, RANK, BEGIN, ADDRESS, SENT, SENT_END, GIVEN = range(12)
FIRST_RANK, WALKED = 12, 13
FAULT, PLACE, LOW, HIGH, HOLDS, WANTED, STEP, ITEM = range(14, 22)

# what is wrong; 0 where an operand does not fit its op, or sends and receives do not meet
(
    READ_UNWRITTEN,
    READ_IN_FLIGHT,
    READ_PARTIAL,
    READ_OTHER_HEADS,
    WRITE_SENDING,
    WRITE_IN_FLIGHT,
    WRITE_GIVEN,
    ADD_TO_UNWRITTEN,
    NOT_SAME_TOKENS,
    PARTIAL_SPENT,
    PARTIAL_LOST,
    PARTIAL_MIXED,
    PARTIAL_LEFT,
    PARTIAL_FROM_HOME,
    WRONG_HOME,
    WRITTEN_TWICE,
    NOT_FINISHED,
    NOT_PRODUCED,
    NO_RESULT,
    RESULT_TOUCHED,
    RESULT_HEADS,
    OTHER_KEYS,
    MANY_SENDS,
    MANY_RUNS,
) = range(1, 25)

# columns of a run: first row of the operand, rows, token, state
RUN_ROW, RUN_ROWS, RUN_TOKEN, RUN_STATE = range(4)

NOWHERE = -(2**62)
TILE_SHIFT = 40
_UNKNOWN = 2 << TILE_SHIFT  # the first token that is no address
_LIMIT = 2**30 - 1  # of all numbers in tables: sums of two fit 32 bits
_NEAR = 256
_LONGEST = 2**21  # rows of operands, tasks and rowops of a range of ranks: some 200 MB of scratch memory
_RUNS = 4096  # room for runs of an operand: two of them, and a third behind
_MOST_HEADS = 60
TOUCHED = 1 << _MOST_HEADS  # beside RESULT_BITS: something else than results and `finish` came to the rows
_ROWS_OF_TILE = (1 << TILE_SHIFT) - 1

_DIAGONALS = ("dmin", "dmax")  # columns whose numbers may be negative; `structure` has seen to the others
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
_FULL = NOWHERE - 1
UNSENT = NOWHERE - 2  # the token of a send whose rank has not been walked
ZEROS = NOWHERE - 3


class ZerosError(Exception):
    """Something was added to rows that another rank sent as zeros: ranges of ranks cannot be settled one by one."""


# columns of a send: its rank, round, tile (twice its number, and 1 where it leaves home rows), and the token of its
# first row, which of work rows is known when the rank was walked
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
def _open(m: Ints, near: Ints, place: int) -> bool:
    """Makes a place one node without contents; whether it is one."""
    if near[place, OPEN]:
        return True
    node, rows, shift, last = _new(m, near), near[place, ROOM], 0, near.shape[1] - FIRST_NEAR - 1
    if node < 0 or rows <= 0:
        return False
    while (rows - 1) >> shift > last:
        shift += 1
    for column in range(NODE):
        m[node, column] = 0
    m[node, LO], m[node, HI], m[node, AFTER], m[node, BEFORE] = 0, rows, -1, -1
    if place & 1:
        m[node, READY] = m[node, SENDING] = -1
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
    for column in range(NODE):
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


# ---------------------------------------------------------------------------------------------- what is wrong

_READS, _ADDS, _PUTS = range(3)


@lean
def _say(near: Ints, code: int, place: int, low: int, high: int, holds: int, wanted: int) -> bool:
    """Notes what is wrong with rows of a place; False."""
    near[PLACES, FAULT], near[PLACES, PLACE] = code, place
    near[PLACES, LOW], near[PLACES, HIGH] = low, high
    near[PLACES, HOLDS], near[PLACES, WANTED] = holds, wanted
    return False


@lean
def _blame(
    m: Ints, near: Ints, place: int, node: int, low: int, high: int, heads: int, use: int, rounds: Ints
) -> int:
    """Notes what is wrong with a node of work rows that is to be read, added to or overwritten; -1."""
    state, low, high = m[node, STATE], max(low, m[node, LO]), min(high, m[node, HI])
    holds, wanted = NOWHERE, NOWHERE
    if state == LIVE or state == VALUE:  # noqa: SIM109  a tuple costs three times as much
        holds = low + m[node, OFFSET]
    if not _over(rounds, m[node, READY], near[PLACES, BEGIN]):
        code = READ_IN_FLIGHT if use == _READS else WRITE_IN_FLIGHT
    elif use == _PUTS:
        code = PARTIAL_LOST if state == LIVE else WRITE_SENDING
    elif state == SPENT:
        code = PARTIAL_SPENT
    elif state == EMPTY:
        code = READ_UNWRITTEN if use == _READS else ADD_TO_UNWRITTEN
    elif m[node, HEADS] != heads:
        code, holds, wanted = READ_OTHER_HEADS, m[node, HEADS], heads
    else:
        code = READ_PARTIAL if use == _READS else WRITE_SENDING
    _say(near, code, place, low, high, holds, wanted)
    return -1


@lean
def _blame_home(
    m: Ints, near: Ints, tensor: int, node: int, low: int, high: int, bits: int, what: int
) -> bool:
    """Notes what is wrong with a node of home rows, to which something is to happen; False."""
    low, high = max(low, m[node, LO]), min(high, m[node, HI])
    reads = what in (_TO_READ, _TO_SEND)
    if m[node, FLIGHT_BITS] & bits:
        code = READ_IN_FLIGHT if reads else WRITE_IN_FLIGHT
    elif reads:
        code = READ_PARTIAL if m[node, LIVE_BITS] & bits else READ_UNWRITTEN
    elif (m[node, SENT_BITS] | m[node, VALUE_BITS]) & bits:
        code = WRITTEN_TWICE
    elif what == _TO_FINISH and m[node, RESULT_BITS] & ~TOUCHED:
        return _say(near, RESULT_HEADS, 2 * tensor, low, high, m[node, RESULT_BITS], bits)
    elif what == _TO_ADD:
        code = ADD_TO_UNWRITTEN
    elif what == _TO_FINISH or what == _TO_TAKE:  # noqa: SIM109  as above
        code = READ_UNWRITTEN
    else:
        code = PARTIAL_LOST
    return _say(near, code, 2 * tensor, low, high, near[PLACES, ADDRESS] + low, NOWHERE)


# ---------------------------------------------------------------------------------------------- work rows


@lean
def _over(rounds: Ints, number: int, begin: int) -> bool:
    """Whether a rank has waited for a round. rounds: int64 [2, rounds], the instruction that launched it last and the
    one that waited for it; begin: the rank's first."""
    return number < 0 or rounds[1, number] >= begin


@lean
def _is_still(m: Ints, node: int, rounds: Ints, begin: int) -> bool:
    """Whether a node of work rows is neither being received nor being sent."""
    if not _over(rounds, m[node, READY], begin):
        return False
    for column in range(SENDING, NODE):
        number = m[node, column]
        if number < 0:
            break
        if rounds[1, number] < begin:
            return False
    return True


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
) -> int:
    """Overwrites work rows, in which nothing may be needed or under way; the node, -1 where that is not so."""
    node, begin = _slice(m, near, place, low, high), near[PLACES, BEGIN]
    other = node
    while other >= 0 and m[other, LO] < high:
        if m[other, STATE] == LIVE or not _is_still(m, other, rounds, begin):
            return _blame(m, near, place, other, low, high, heads, _PUTS, rounds)
        other = m[other, AFTER]
    if node >= 0:
        _absorb(m, near, place, node, high)
        m[node, STATE], m[node, OFFSET], m[node, HEADS] = state, offset, heads
        m[node, READY] = m[node, SENDING] = -1
    return node


@lean
def _condition(near: Ints, conditions: Ints, source: int, target: int, rows: int) -> bool:
    """Takes it for granted that so many rows from two tokens on are the same. False where they are known to differ."""
    if source == target:
        return True
    line = near[PLACES, CONDITIONS]
    if max(source, target) < _UNKNOWN or line == conditions.shape[1]:
        return False
    conditions[0, line], conditions[1, line], conditions[2, line] = source, target, rows
    near[PLACES, CONDITIONS] = line + 1
    return True


@lean
def _doubt(token: int) -> int:
    """How little is known of a token: 0 where it is an address, 1 where a tile of values brings it, 2 where a partial
    does, which may turn out to be zeros."""
    return 0 if token < _UNKNOWN else 1 + ((token >> TILE_SHIFT) & 1)


@inlined
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
    conditions: Ints,
) -> bool:
    """Adds a contribution, of cleared rows nothing, to partials in work rows."""
    node, begin = _find(m, near, place, low), near[PLACES, BEGIN]
    while node >= 0 and m[node, LO] < high:
        held = m[node, STATE]
        if (
            m[node, HEADS] != heads
            or not _is_still(m, node, rounds, begin)
            or not (held == LIVE or held == CLEARED)  # noqa: SIM109  a tuple costs three times as much
        ):
            return _blame(m, near, place, node, low, high, heads, _ADDS, rounds) >= 0
        if held == CLEARED and state == LIVE:
            if m[node, LO] < low or m[node, HI] > high:
                node = _slice(m, near, place, low, min(high, m[node, HI]))
                if node < 0:
                    return False
            m[node, STATE], m[node, OFFSET] = LIVE, offset
        elif state == LIVE and m[node, OFFSET] != offset:
            token, its = low + offset, low + m[node, OFFSET]
            if _doubt(token) < _doubt(its) and m[node, LO] == low and m[node, HI] <= high:
                token, its = its, token
                m[node, OFFSET] = offset
            if not _condition(near, conditions, token, its, min(high, m[node, HI]) - low):
                end = min(high, m[node, HI])
                return _say(near, PARTIAL_MIXED, place, low, end, low + m[node, OFFSET], low + offset)
        low = m[node, HI]
        node = m[node, AFTER]
    return low >= high


@inlined
def _read(
    m: Ints,
    near: Ints,
    place: int,
    low: int,
    high: int,
    heads: int,
    values: bool,
    rounds: Ints,
    runs: Ints,
) -> int:
    """Fills `runs` with what work rows hold, values or partials, joined where tokens go on; their number, -1 where
    they hold something else or too many."""
    count, row, begin = 0, low, near[PLACES, BEGIN]
    node = _find(m, near, place, low)
    while row < high:
        state, stop = m[node, STATE], min(high, m[node, HI])
        if m[node, HEADS] != heads or not _over(rounds, m[node, READY], begin):
            return _blame(m, near, place, node, low, high, heads, _READS, rounds)
        if state != VALUE if values else not (state == LIVE or state == CLEARED):  # noqa: SIM109  as above
            return _blame(m, near, place, node, low, high, heads, _READS, rounds)
        token = row + m[node, OFFSET] if state != CLEARED else NOWHERE
        last = count - 1
        if count and runs[last, RUN_STATE] == state and token == _next_token(runs, last):
            runs[last, RUN_ROWS] += stop - row
        elif count == _RUNS // 2:
            _say(near, MANY_RUNS, place, low, high, NOWHERE, NOWHERE)
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
def _spend(m: Ints, near: Ints, place: int, low: int, high: int, rounds: Ints, number: int) -> bool:
    """Partials leave work rows, with the round of that number or -1; nothing else may be sending them."""
    node, begin = _slice(m, near, place, low, high), near[PLACES, BEGIN]
    if node < 0:
        return False
    other = node
    while other >= 0 and m[other, LO] < high:
        if not _is_still(m, other, rounds, begin):
            return False
        other = m[other, AFTER]
    _absorb(m, near, place, node, high)
    m[node, STATE], m[node, READY] = SPENT, -1
    m[node, SENDING], m[node, SENDING + 1] = number, -1
    return True


@lean
def _mark_sent(m: Ints, near: Ints, place: int, low: int, high: int, rounds: Ints, number: int) -> bool:
    """Values of work rows are sent in a round; False where too many send them at a time."""
    node, begin = _find(m, near, place, low), near[PLACES, BEGIN]
    while low < high:
        column = SENDING
        while column < NODE and m[node, column] != number and not _over(rounds, m[node, column], begin):
            column += 1
        if column == NODE:
            return _say(near, MANY_SENDS, place, low, high, NOWHERE, NOWHERE)
        if m[node, column] < 0 and column + 1 < NODE:
            m[node, column + 1] = -1
        m[node, column] = number
        low, node = m[node, HI], m[node, AFTER]
    return True


# ---------------------------------------------------------------------------------------------- home rows

# what happens to home rows: a partial is put or added, or the identity put; rows are received, have arrived; are
# finished; a partial is taken; values are read, or sent, or set; a result is put, or received
_TO_PUT, _TO_ADD, _TO_CLEAR, _TO_RECEIVE, _TO_ARRIVE, _TO_FINISH, _TO_TAKE, _TO_READ, _TO_SEND, _TO_SET = (
    range(10)
)
_TO_DELIVER, _TO_RECEIVE_RESULT = 10, 11


@lean
def _at_home(
    m: Ints, near: Ints, tensor: int, low: int, high: int, sets: Ints, heads: int, what: int
) -> bool:
    """Does something with rows of a tensor that is not given, and heads of a set; False where that is not proper."""
    if (_HEADLESS_BITS >> tensor) & 1:
        return _of_word(m, near, tensor, 0, low, high, 1, what)
    for word in range(len(sets) - 1):
        bits = _word(sets, word, (_KV_BITS >> tensor) & 1, heads)
        if bits and not _of_word(m, near, tensor, word, low, high, bits, what):
            return False
    return True


@lean
def _word(sets: Ints, word: int, side: int, heads: int) -> int:
    """The bits of the heads of a set, a word of them."""
    return sets[word + 1 if word else 0, side, heads]  # type: ignore[no-any-return]


@lean
def _home(tensor: int, word: int) -> int:
    """The place of a tensor's home rows, for the heads of a word."""
    return 2 * tensor if word == 0 else PLACES + 2 + (word - 1) * PLACES + 2 * tensor


@lean
def _of_word(m: Ints, near: Ints, tensor: int, word: int, low: int, high: int, bits: int, what: int) -> bool:
    """The same, with the heads of a word."""
    place = _home(tensor, word)
    if not _open(m, near, place):
        return False
    partial, mark = (_PARTIAL_BITS >> tensor) & 1 == 1, TOUCHED
    if what >= _TO_DELIVER:
        mark = bits
    elif what == _TO_ARRIVE or what == _TO_FINISH:  # noqa: SIM109  a tuple costs three times as much
        mark = 0
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
        m[node, RESULT_BITS] |= mark
        if m[node, RESULT_BITS] > TOUCHED:
            return _say(near, RESULT_TOUCHED, 2 * tensor, low, high, NOWHERE, NOWHERE)
        if what == _TO_ARRIVE:
            m[node, FLIGHT_BITS] &= ~bits
            if partial:
                m[node, LIVE_BITS] |= bits
            else:
                m[node, VALUE_BITS] |= bits
        elif what == _TO_READ or what == _TO_SEND:  # noqa: SIM109  as above
            if value != bits or flight:
                return _blame_home(m, near, tensor, node, low, high, bits, what)
            if what == _TO_SEND:
                m[node, SENT_BITS] |= bits
        elif flight or sent or value:
            return _blame_home(m, near, tensor, node, low, high, bits, what)
        elif what == _TO_ADD or what == _TO_FINISH or what == _TO_TAKE:  # noqa: SIM109  as above
            if live | cleared != bits:
                return _blame_home(m, near, tensor, node, low, high, bits, what)
            m[node, CLEARED_BITS] &= ~bits
            m[node, LIVE_BITS] &= ~bits
            if what == _TO_ADD:
                m[node, LIVE_BITS] |= bits
            elif what == _TO_FINISH:
                m[node, VALUE_BITS] |= bits
        else:
            if live:
                return _blame_home(m, near, tensor, node, low, high, bits, what)
            m[node, CLEARED_BITS] &= ~bits
            if what == _TO_PUT or what == _TO_DELIVER:  # noqa: SIM109  as above
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
    m: Ints, near: Ints, operands: Ints, x: int, values: bool, sets: Ints, rounds: Ints, runs: Ints
) -> int:
    """Fills `runs` with what an operand holds: values, which stay, or partials, which at home are taken; their number,
    -1 where it holds something else. sets: int64 [2, 2, sets], bits and number of the heads of each."""
    tensor, low, rows = int(operands[0, x]), int(operands[2, x]), int(operands[3, x])
    side = (_KV_BITS >> tensor) & 1
    if operands[1, x] != HOME:
        place, heads = 2 * tensor + 1, sets[1, side, operands[5, x]]
        if not near[place, OPEN]:
            _say(near, READ_UNWRITTEN, place, low, low + rows, NOWHERE, NOWHERE)
            return -1
        return _read(m, near, place, low, low + rows, heads, values, rounds, runs)
    given = (near[PLACES, GIVEN] >> tensor) & 1 == 1
    if not (values and given):
        what = _TO_READ if values else _TO_TAKE
        if given or not _at_home(m, near, tensor, low, low + rows, sets, operands[5, x], what):
            return -1
    runs[0, RUN_ROW], runs[0, RUN_ROWS], runs[0, RUN_TOKEN] = 0, rows, near[PLACES, ADDRESS] + low
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
    at_home: int,
    sets: Ints,
    rounds: Ints,
    conditions: Ints,
) -> bool:
    """Puts runs into an operand, as partials or values, or adds them to it; cleared ones stay cleared. at_home: what
    happens where that is home rows; _TO_ADD adds."""
    tensor, first = int(operands[0, x]), int(operands[2, x])
    side = (_KV_BITS >> tensor) & 1
    if operands[1, x] == HOME:
        if (near[PLACES, GIVEN] >> tensor) & 1:
            last = first + operands[3, x]
            return _say(near, WRITE_GIVEN, 2 * tensor, first, last, NOWHERE, NOWHERE)
        for run in range(count):
            low, rows = first + runs[run, RUN_ROW], runs[run, RUN_ROWS]
            token, wanted = runs[run, RUN_TOKEN], near[PLACES, ADDRESS] + low
            if token != NOWHERE and not _condition(near, conditions, token, wanted, rows):
                code = PARTIAL_MIXED if at_home == _TO_ADD else WRONG_HOME
                return _say(near, code, 2 * tensor, low, low + rows, wanted, token)
        return _at_home(m, near, tensor, first, first + operands[3, x], sets, operands[5, x], at_home)
    place, heads = 2 * tensor + 1, sets[1, side, operands[5, x]]
    if not _open(m, near, place):
        return False
    for run in range(count):
        low = first + runs[run, RUN_ROW]
        high = low + runs[run, RUN_ROWS]
        cleared = runs[run, RUN_STATE] == CLEARED
        state = CLEARED if cleared else LIVE if partial else VALUE
        offset = NOWHERE if cleared else runs[run, RUN_TOKEN] - low
        if at_home == _TO_ADD:
            if not _add(m, near, place, low, high, state, offset, heads, rounds, conditions):
                return False
        elif _put(m, near, place, low, high, state, offset, heads, rounds) < 0:
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
def _hold_alike(
    runs: Ints, count: int, other: Ints, others: int, near: Ints, operands: Ints, x: int, conditions: Ints
) -> bool:
    """Whether an operand, and x with other runs, hold the same tokens row by row; what is cleared fits all."""
    i, j, row = 0, 0, 0
    while i < count and j < others:
        token, its = runs[i, RUN_TOKEN], other[j, RUN_TOKEN]
        end, its_end = runs[i, RUN_ROW] + runs[i, RUN_ROWS], other[j, RUN_ROW] + other[j, RUN_ROWS]
        stop = min(end, its_end)
        if token != NOWHERE and its != NOWHERE:
            token, its = token + row - runs[i, RUN_ROW], its + row - other[j, RUN_ROW]
            if not _condition(near, conditions, token, its, stop - row):
                place, first = 2 * operands[0, x] + operands[1, x], operands[2, x]
                return _say(near, NOT_SAME_TOKENS, place, first + row, first + stop, its, token)
        row, i, j = stop, i + (end == stop), j + (its_end == stop)
    return i == count and j == others and count > 0


# ---------------------------------------------------------------------------------------------- ops


@lean
def _tile_token(near: Ints, runs: Ints, count: int, rows: int, parcels: Ints) -> int:
    """What a send of these runs carries: the token of its first row, where their tokens go on, NOWHERE for zeros; else
    -1 less the line of `parcels` from where its runs stand; _FULL where there is no room. Zeros end a run: what is
    added to them may be of any tokens."""
    same, run = True, 1
    while same and run < count:
        same, run = runs[run, RUN_TOKEN] == _next_token(runs, run - 1), run + 1
    if same:
        return runs[0, RUN_TOKEN] if count else NOWHERE
    line = near[PLACES, PARCELS]
    if line + count + 2 > near[PLACES, PARCELS_END]:
        return _FULL
    parcels[0, line] = count
    for run in range(count):
        parcels[0, line + 1 + run], parcels[1, line + 1 + run] = runs[run, RUN_ROW], runs[run, RUN_TOKEN]
    parcels[0, line + 1 + count] = rows
    near[PLACES, PARCELS] = line + count + 2
    return -1 - line  # type: ignore[no-any-return]


@lean
def _send(
    m: Ints,
    near: Ints,
    operands: Ints,
    x: int,
    number: int,
    results: bool,
    sets: Ints,
    rounds: Ints,
    parcels: Ints,
    sends: Ints,
    send: int,
    runs: Ints,
) -> bool:
    """A tile leaves in a round."""
    tensor, low, rows = int(operands[0, x]), int(operands[2, x]), int(operands[3, x])
    partial = (_PARTIAL_BITS >> tensor) & 1 == 1
    if operands[1, x] == HOME:
        if partial or results:
            code = NO_RESULT if results else PARTIAL_FROM_HOME
            return _say(near, code, 2 * tensor, low, low + rows, NOWHERE, NOWHERE)
        fixed = (near[PLACES, GIVEN] >> tensor) & 1 == 1
        return fixed or _at_home(m, near, tensor, low, low + rows, sets, operands[5, x], _TO_SEND)
    count = _gather(m, near, operands, x, not partial, sets, rounds, runs)
    if count < 1:
        return False
    token = _tile_token(near, runs, count, rows, parcels)
    if token == _FULL:
        return _say(near, MANY_RUNS, 2 * tensor + 1, low, low + rows, NOWHERE, NOWHERE)
    sends[send, TOKEN] = token
    place = 2 * tensor + 1
    if partial:
        return _spend(m, near, place, low, low + rows, rounds, number)
    return _mark_sent(m, near, place, low, low + rows, rounds, number)


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
    results: bool,
    sets: Ints,
    rounds: Ints,
    conditions: Ints,
    parcels: Ints,
    sends: Ints,
    slots: Ints,
    next_send: Ints,
    runs: Ints,
) -> bool:
    """Sends and receives of a round. next_send: int64 [ranks], the next send of each rank to this one."""
    for t in range(first, end):
        peer, x = transfers[1, t], base + transfers[2, t]
        tensor, low, rows = int(operands[0, x]), int(operands[2, x]), int(operands[3, x])
        side, partial = (_KV_BITS >> tensor) & 1, (_PARTIAL_BITS >> tensor) & 1
        near[PLACES, ITEM] = t
        if tensor == 0:
            return False
        if results and not (_DELIVERED_BITS >> tensor) & 1:
            place = 2 * tensor + operands[1, x]
            return _say(near, NO_RESULT, place, low, low + rows, NOWHERE, NOWHERE)
        if transfers[0, t]:
            if not _send(m, near, operands, x, number, results, sets, rounds, parcels, sends, slots[t], runs):
                return False
            continue
        send, heads = next_send[peer], sets[1, side, operands[5, x]]
        if send < near[PLACES, SENT] or send >= near[PLACES, SENT_END]:
            return False
        if sends[send, SENDER] != peer or sends[send, ROUND] != number:
            return False
        if sends[send, TILE] >> 1 != (rows * PLACES + tensor) * sets.shape[2] + heads:
            return False
        next_send[peer] = send + 1
        token, walked = NOWHERE, near[PLACES, FIRST_RANK] <= peer < near[PLACES, RANK]
        if walked or peer < near[PLACES, WALKED] or sends[send, TILE] & 1:  # no other thread writes it
            token = sends[send, TOKEN]
        if token < 0 or token >= _UNKNOWN:
            token = (2 * send + 2 + partial) << TILE_SHIFT
        if operands[1, x] == HOME:
            wanted = near[PLACES, ADDRESS] + low
            if (near[PLACES, GIVEN] >> tensor) & 1:
                return _say(near, WRITE_GIVEN, 2 * tensor, low, low + rows, NOWHERE, NOWHERE)
            if not _condition(near, conditions, token, wanted, rows):
                return _say(near, WRONG_HOME, 2 * tensor, low, low + rows, wanted, token)
            what = _TO_RECEIVE_RESULT if results else _TO_RECEIVE
            if not _at_home(m, near, tensor, low, low + rows, sets, operands[5, x], what):
                return False
            rounds[2, number] = near[PLACES, BEGIN]
        else:
            place, state = 2 * tensor + 1, LIVE if partial else VALUE
            if results:
                return _say(near, NO_RESULT, place, low, low + rows, NOWHERE, NOWHERE)
            if not _open(m, near, place):
                return False
            node = _put(m, near, place, low, low + rows, state, token - low, heads, rounds)
            if node < 0:
                return False
            m[node, READY] = number
    return True


@inlined
def _arrive(
    m: Ints, near: Ints, operands: Ints, base: int, transfers: Ints, first: int, end: int, sets: Ints
) -> None:
    """What home rows received in a round is there."""
    for t in range(first, end):
        x = base + transfers[2, t]
        tensor, low = int(operands[0, x]), int(operands[2, x])
        if transfers[0, t] == 0 and operands[1, x] == HOME:
            _at_home(m, near, tensor, low, low + operands[3, x], sets, operands[5, x], _TO_ARRIVE)


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
    sets: Ints,
    rounds: Ints,
    conditions: Ints,
    places: Ints,
    runs: Ints,
) -> bool:
    """Tasks of an instruction. pairs: whether query heads of one set find their keys in another. Writes to `places`
    what a task's rows are of: its queries where they are others than before, marked -1 less their head set; and its
    keys, marked with its row."""
    flags, last, count = len(tasks) - 1, -1, 0
    keys, others = runs[_RUNS // 2 :], runs[_RUNS:]
    for i in range(first, end):
        xq, xk, xo = base + tasks[0, i], base + tasks[1, i], base + tasks[4 if backward else 2, i]
        low, high, flag = tasks[flags - 2, i], tasks[flags - 1, i], tasks[flags, i]
        near[PLACES, ITEM] = i
        if low < 1 - operands[3, xk] or high > operands[3, xq] - 1 or low > high:
            return False
        if operands[0, xk] != _KV or operands[0, xq] != _Q:
            return False
        if not pairs[operands[5, xq], operands[5, xk]]:
            first, place = operands[2, xk], 2 * _KV + operands[1, xk]
            return _say(
                near, OTHER_KEYS, place, first, first + operands[3, xk], operands[5, xk], operands[5, xq]
            )
        if xq != last:
            count = _gather(m, near, operands, xq, True, sets, rounds, runs)
            if count < 0:
                return False
            _note(near, runs, count, -1 - operands[5, xq], places)
        if operands[0, xo] != (_DQ if backward else _O) or not _alike(operands, xo, xq, sets):
            return False
        for column in range(2, 4 if backward else 2):
            x = base + tasks[column, i]
            if operands[0, x] != (_DO if column == 2 else _DELTA):
                return False
            if xq == last and tasks[column, i] == tasks[column, i - 1]:
                continue
            found = _gather(m, near, operands, x, True, sets, rounds, others)
            if not _alike(operands, x, xq, sets):
                return False
            if not _hold_alike(runs, count, others, found, near, operands, x, conditions):
                return False
        last = xq
        key_runs = _gather(m, near, operands, xk, True, sets, rounds, keys)
        if key_runs < 0:
            return False
        how = _TO_PUT if flag & 1 else _TO_ADD
        if not _write(m, near, operands, xo, runs, count, True, how, sets, rounds, conditions):
            return False
        if backward:
            x, how = base + tasks[5, i], _TO_PUT if flag & 2 else _TO_ADD
            if operands[0, x] != _DKV or not _alike(operands, x, xk, sets):
                return False
            if not _write(m, near, operands, x, keys, key_runs, True, how, sets, rounds, conditions):
                return False
        _note(near, keys, key_runs, i, places)
    return True


@lean
def _note(near: Ints, runs: Ints, count: int, mark: int, places: Ints) -> None:
    """Writes runs down with a mark, where there is room."""
    first = near[PLACES, PIECES]
    near[PLACES, PIECES] = first + count
    for run in range(min(count, len(places) - first)):
        places[first + run, 0], places[first + run, 1] = mark, runs[run, RUN_ROW]
        places[first + run, 2], places[first + run, 3] = runs[run, RUN_ROWS], runs[run, RUN_TOKEN]


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
def _home_op(
    m: Ints,
    near: Ints,
    operands: Ints,
    base: int,
    rowops: Ints,
    row: int,
    op: int,
    backward: bool,
    sets: Ints,
) -> bool:
    """A row of `finish` or `delta`."""
    a, b, d = rowops[0, row], rowops[1, row], rowops[3, row]
    xa, xb, xc = base + a, base + b, base + rowops[2, row]
    tensor, low = int(operands[0, xc]), int(operands[2, xc])
    heads = int(operands[5, xc])
    if d or operands[1, xc] != HOME or backward == (op == _FINISH):
        return False
    if op == _FINISH:
        proper = not a and not b and tensor == _O
        return proper and _at_home(m, near, tensor, low, low + operands[3, xc], sets, heads, _TO_FINISH)
    given = near[PLACES, GIVEN]
    if (
        operands[0, xa] != _DO
        or operands[0, xb] != _O
        or tensor != _DELTA
        or not (given >> _DO) & (given >> _O) & 1
    ):
        return False
    if operands[1, xa] != HOME or operands[1, xb] != HOME:
        return False
    for x in (xa, xb):
        its = int(operands[2, x])
        if its != low:
            address, place = near[PLACES, ADDRESS], 2 * operands[0, x]
            return _say(near, NOT_SAME_TOKENS, place, its, its + operands[3, x], address + its, address + low)
    if not _alike(operands, xb, xa, sets) or not _alike(operands, xc, xa, sets):
        return False
    return _at_home(m, near, tensor, low, low + operands[3, xc], sets, heads, _TO_SET)


@inlined
def _project(
    m: Ints,
    near: Ints,
    operands: Ints,
    base: int,
    rowops: Ints,
    row: int,
    backward: bool,
    sets: Ints,
    rounds: Ints,
    conditions: Ints,
    runs: Ints,
) -> bool:
    """A row of `project_grad` where `backward` says so, else of `project`: a holds X, b and c what is made of it or
    its gradients, and d the sum of the latter."""
    xa, others = base + rowops[0, row], runs[_RUNS:]
    count = _gather(m, near, operands, xa, True, sets, rounds, runs)
    if operands[0, xa] != _X or count < 0:
        return False
    for column in range(1, 3):
        x = base + rowops[column, row]
        if x == base:
            continue
        if operands[3, x] != operands[3, xa]:
            return False
        if not backward:
            if operands[0, x] != (_Q if column == 1 else _KV):
                return False
            if not _write(m, near, operands, x, runs, count, False, _TO_SET, sets, rounds, conditions):
                return False
            continue
        found = _gather(m, near, operands, x, False, sets, rounds, others)
        if operands[0, x] != (_DQ if column == 1 else _DKV):
            return False
        if not _hold_alike(runs, count, others, found, near, operands, x, conditions):
            return False
        low, last = int(operands[2, x]), operands[2, x] + operands[3, x]
        if operands[1, x] == WORK and not _spend(m, near, 2 * operands[0, x] + 1, low, last, rounds, -1):
            return False
    x = base + rowops[3, row]
    if not backward:
        return x == base  # type: ignore[no-any-return]
    if operands[0, x] != _DX or operands[3, x] != operands[3, xa]:
        return False
    how = _TO_PUT if rowops[4, row] & 1 else _TO_ADD
    return _write(m, near, operands, x, runs, count, True, how, sets, rounds, conditions)


@inlined
def _move(
    m: Ints,
    near: Ints,
    operands: Ints,
    base: int,
    rowops: Ints,
    row: int,
    op: int,
    backward: bool,
    sets: Ints,
    rounds: Ints,
    conditions: Ints,
    runs: Ints,
) -> bool:
    """A row of `clear`, or of what moves the rows of a into c: `merge`, `add`, `copy`, `deliver`. Each has a case:
    what its operands must be, what is read, where it goes."""
    xa, xc = base + rowops[0, row], base + rowops[2, row]
    tensor, space, low = int(operands[0, xc]), operands[1, xc], int(operands[2, xa])
    partial, count = (_PARTIAL_BITS >> tensor) & 1 == 1, 1
    if rowops[1, row] or rowops[3, row]:
        return False
    if op == _CLEAR:
        if xa != base or not partial:
            return False
        runs[0, RUN_ROW], runs[0, RUN_ROWS] = 0, operands[3, xc]
        runs[0, RUN_TOKEN], runs[0, RUN_STATE] = NOWHERE, CLEARED
        return _write(m, near, operands, xc, runs, 1, True, _TO_CLEAR, sets, rounds, conditions)
    if xa == base or not _may_move(operands, xa, xc, sets):
        return False
    if op == _MERGE and (tensor != _O or backward):
        return False
    if op == _ADD and (not (_SUM_BITS >> tensor) & 1 or not backward):
        return False
    if op == _DELIVER:
        if not (_DELIVERED_BITS >> tensor) & 1 or space != HOME or operands[1, xa] != WORK:
            return False
        how = _TO_DELIVER
    else:
        adds = (op == _MERGE or op == _ADD) and rowops[4, row] & 1 == 0  # noqa: SIM109  a tuple costs three times as much
        how = _TO_ADD if adds else _TO_PUT if partial else _TO_SET
    values = op == _COPY and not partial
    if op == _COPY and partial and operands[1, xa] == HOME:
        last = low + operands[3, xa]  # a copy of finished rows of a sum, or of partials at home
        return _say(near, PARTIAL_FROM_HOME, 2 * tensor, low, last, NOWHERE, NOWHERE)
    count = _gather(m, near, operands, xa, values, sets, rounds, runs)
    if count < 0:
        return False
    if not values and operands[1, xa] == WORK:  # noqa: SIM102  two conditions, one of them done
        if not _spend(m, near, 2 * tensor + 1, low, low + operands[3, xa], rounds, -1):
            return False
    return _write(m, near, operands, xc, runs, count, partial, how, sets, rounds, conditions)


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
    sets: Ints,
    rounds: Ints,
    conditions: Ints,
    runs: Ints,
) -> bool:
    """A row of `rowops`."""
    if op == _FINISH or op == _DELTA_OP:  # noqa: SIM109  a tuple costs three times as much
        return _home_op(m, near, operands, base, rowops, row, op, backward, sets)
    if op == _PROJECT or op == _PROJECT_GRAD:  # noqa: SIM109  as above
        grad = op == _PROJECT_GRAD
        return (backward or not grad) and _project(
            m, near, operands, base, rowops, row, grad, sets, rounds, conditions, runs
        )
    return _move(m, near, operands, base, rowops, row, op, backward, sets, rounds, conditions, runs)


# ---------------------------------------------------------------------------------------------- the walk


@lean
def _post(
    sets: Ints,
    home_first: Ints,
    ways: Ints,
    sends: Ints,
    sends_ptr: Ints,
    next_send: Ints,
    slots: Ints,
    tiles: Ints,
    tile_ptr: Ints,
    instructions: Ints,
    instruction_ptr: Ints,
    transfers: Ints,
    transfer_ptr: Ints,
) -> bool:
    """Writes down every send where its receiver looks: of each receiver, by sender, in their order. ways: int64
    [3, rounds], channel and mode of each round, -1 at first, and how many ranks launch it; tiles: int32 [columns,
    operands], by rank as `tile_ptr` says, or [columns, transfers], the operand of each, and no `tile_ptr`. False where
    ranks differ in a round, one sends to itself, or there are more or fewer sends than receives."""
    ranks = len(transfer_ptr) - 1
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
        t = transfer_ptr[rank]
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
                    peer = transfers[1, t]
                    send = next_send[peer]
                    next_send[peer] = send + 1
                    slots[t] = send
                    at = tile_ptr[rank] + transfers[2, t] if len(tile_ptr) else t
                    tensor, side = tiles[0, at], (_KV_BITS >> tiles[0, at]) & 1
                    heads = sets[1, side, tiles[5, at]]
                    sends[send, SENDER], sends[send, ROUND] = rank, number
                    at_home = tiles[1, at] == HOME
                    tile = (int(tiles[3, at]) * PLACES + tensor) * sets.shape[2] + heads
                    sends[send, TILE] = 2 * tile + (1 if at_home else 0)
                    sends[send, TOKEN] = home_first[rank] + tiles[2, at] if at_home else UNSENT
                t += 1
    for number in range(ways.shape[1]):
        if ways[0, number] >= 0 and ways[1, number] & ALL_TO_ALL and ways[2, number] != ranks:
            return False
    return True


@lean
def _ends_well(m: Ints, near: Ints, owed: int, finished: int, sets: Ints) -> bool:
    """Whether a rank ends with all home rows that it owes, and no partial elsewhere; and rows that got results got them
    in all heads, and nothing else. finished: tensors of `owed` that must be values."""
    for tensor in range(1, PLACES // 2):
        headless, place = (_HEADLESS_BITS >> tensor) & 1, 2 * tensor + 1
        node = _find(m, near, place, 0) if near[place, OPEN] and (_PARTIAL_BITS >> tensor) & 1 else -1
        while node >= 0:
            low, high = m[node, LO], m[node, HI]
            if m[node, STATE] == LIVE:
                return _say(near, PARTIAL_LEFT, place, low, high, low + m[node, OFFSET], NOWHERE)
            node = m[node, AFTER]
        for word in range(1 if headless else len(sets) - 1):
            bits = 1 if headless else _word(sets, word, (_KV_BITS >> tensor) & 1, 0)
            if bits and not _word_ends_well(m, near, tensor, word, bits, owed, finished):
                return False
            if bits and word and not _have_results_alike(m, near, tensor, word, bits):
                return False
    return True


@lean
def _word_ends_well(m: Ints, near: Ints, tensor: int, word: int, bits: int, owed: int, finished: int) -> bool:
    """The same, of home rows and the heads of a word."""
    place, rows = _home(tensor, word), near[2 * tensor, ROOM]
    owes = (owed >> tensor) & 1 and rows > 0
    if owes and not near[place, OPEN]:
        return _say(near, NOT_PRODUCED, 2 * tensor, 0, rows, near[PLACES, ADDRESS], NOWHERE)
    node = _find(m, near, place, 0) if near[place, OPEN] else -1
    while node >= 0:
        low, high, live, code = m[node, LO], m[node, HI], m[node, LIVE_BITS], 0
        if m[node, RESULT_BITS] & ~TOUCHED and m[node, RESULT_BITS] != bits:
            return _say(near, RESULT_HEADS, 2 * tensor, low, high, m[node, RESULT_BITS], bits)
        if not owes:
            code = PARTIAL_LEFT if live else 0
        elif (finished >> tensor) & 1:
            if m[node, VALUE_BITS] != bits:
                code = NOT_FINISHED if live else NOT_PRODUCED
        elif live | m[node, CLEARED_BITS] != bits:
            code = NOT_PRODUCED
        if code:
            return _say(near, code, 2 * tensor, low, high, near[PLACES, ADDRESS] + low, NOWHERE)
        node = m[node, AFTER]
    return True


@lean
def _have_results_alike(m: Ints, near: Ints, tensor: int, word: int, bits: int) -> bool:
    """Whether the same home rows got results in the heads of a word as in those of the first."""
    place, other = 2 * tensor, _home(tensor, word)
    if not (near[place, OPEN] or near[other, OPEN]):
        return True
    if not (_open(m, near, place) and _open(m, near, other)):
        return False
    node, its = _find(m, near, place, 0), _find(m, near, other, 0)
    while node >= 0 and its >= 0:
        ours, theirs = m[node, RESULT_BITS] & ~TOUCHED, m[its, RESULT_BITS] & ~TOUCHED
        end, its_end = m[node, HI], m[its, HI]
        if (ours == 0) != (theirs == 0):
            low = max(m[node, LO], m[its, LO])
            return _say(near, RESULT_HEADS, 2 * tensor, low, min(end, its_end), ours | theirs, bits)
        if end <= its_end:
            node = m[node, AFTER]
        if its_end <= end:
            its = m[its, AFTER]
    return True


@lean
def address_of(sends: Ints, parcels: Ints, token: int, rows: int) -> tuple[int, int]:
    """The address that a token has, NOWHERE where its rows were sent as zeros, UNSENT where that is not known yet; and
    for how many of so many rows it goes on from there."""
    root, start, whole = token, token, True
    while root >= _UNKNOWN:
        source, row = sends[(root >> TILE_SHIFT + 1) - 1, TOKEN], root & _ROWS_OF_TILE
        if source <= NOWHERE:
            return source, rows
        if source < 0:
            part, whole = _part_of(parcels, -1 - source, row), False
            rows = min(rows, parcels[0, part + 1] - row)
            if parcels[1, part] == NOWHERE:
                return NOWHERE, rows
            source = parcels[1, part] - parcels[0, part]
        root = source + row
    while whole and start >= _UNKNOWN:  # the next one finds it at once
        line, row = (start >> TILE_SHIFT + 1) - 1, start & _ROWS_OF_TILE
        start = sends[line, TOKEN] + row
        sends[line, TOKEN] += root - start
    return root, rows


@lean
def _part_of(parcels: Ints, line: int, row: int) -> int:
    """The line of the run that a row of a tile is in; line: where the tile's begin, behind their number."""
    low, high = line + 1, line + 1 + parcels[0, line]
    while high - low > 1:
        middle = (low + high) // 2
        if parcels[0, middle] <= row:
            low = middle
        else:
            high = middle
    return low


@lean
def _claim(sends: Ints, parcels: Ints, token: int, address: int) -> bool:
    """Has the zeros that a token is of hold the tokens from an address on, as something of these is added to them.
    Partials are used once: nobody else holds these zeros. False where they cannot be told to hold any."""
    root = token
    while root >= _UNKNOWN:
        line, row = (root >> TILE_SHIFT + 1) - 1, root & _ROWS_OF_TILE
        source = sends[line, TOKEN]
        if source == NOWHERE and address >= row:
            sends[line, TOKEN] = address - row
            return True
        if source <= NOWHERE:
            return False
        if source < 0:
            part = _part_of(parcels, -1 - source, row)
            if parcels[1, part] == NOWHERE:
                parcels[1, part] = address - row + parcels[0, part]
                return True
            source = parcels[1, part] - parcels[0, part]
        root = source + row
    return False


@lean
def _settle(sends: Ints, parcels: Ints, conditions: Ints, number: int, whole: bool, claims: bool) -> int:
    """Of so many conditions the first whose rows are not the same, `number` where all are; UNSENT where that is not
    known yet, unless `whole`: then such a condition holds. Zeros may be added anywhere. What is added to zeros claims
    them: all conditions are looked at again then, ZEROS where not `claims`."""
    again = True
    while again:
        again = False
        for i in range(number):
            source, target, left = conditions[0, i], conditions[1, i], conditions[2, i]
            while left > 0:
                token, rows = address_of(sends, parcels, source, left)
                its, rows = address_of(sends, parcels, target, rows)
                if token == UNSENT or its == UNSENT:
                    if whole:
                        break
                    return UNSENT
                if token != its and token != NOWHERE:
                    if its == NOWHERE and not claims:
                        return ZEROS
                    if its != NOWHERE or not _claim(sends, parcels, target, token):
                        return i
                    again = True
                source, target, left = source + rows, target + rows, left - rows
    return number


@lean
def _are_known(sends: Ints, parcels: Ints, places: Ints, number: int) -> bool:
    """Whether ranks were walked that so many places hang on."""
    for line in range(number):
        left, token = places[line, 2], places[line, 3]
        while left > 0 and token >= _UNKNOWN:
            address, rows = address_of(sends, parcels, token, left)
            if address == UNSENT:
                return False
            token, left = token + rows, left - rows
    return True


@lean
def _list_all(
    sends: Ints,
    parcels: Ints,
    places: Ints,
    number: int,
    traced: bool,
    told: Ints,
    runs: Ints,
    tasks: Ints,
    pieces: Ints,
    lists: Ints,
    follows: Ints,
    marks: Ints,
) -> int:
    """Lists what tasks attend to: so many places are noted. told: int64 [5], where to go on: the line, of the queries
    of its task the head set and their runs in `runs`, how many bands of it were listed, and 1 where tasks were passed
    over. 1; 0 where rows were sent as zeros or are of too many runs; -1 where there is no room for more.

    traced: pieces are listed one by one, each with its task and head set; what is not known is passed over."""
    end, heads, queries, listed = told[0], told[1], told[2], told[3]
    keys = runs[_RUNS:]
    while end < number:
        line, task = end, places[end, 0]
        while end < number and places[end, 0] == task:
            end += 1
        if task < 0:
            heads, queries = -1 - task, _known(sends, parcels, places, line, end, runs)
            if queries < 0:
                told[4] = 1
                if not traced:
                    return 0
            continue
        several = _known(sends, parcels, places, line, end, keys)
        if several < 0:
            told[4] = 1
            if not traced:
                return 0
        seen = 0
        for a in range(queries):
            q, away = runs[a, RUN_TOKEN], runs[a, RUN_TOKEN] - runs[a, RUN_ROW]
            q_end = q + runs[a, RUN_ROWS]
            for b in range(several):
                k = keys[b, RUN_TOKEN]
                k_end, move = k + keys[b, RUN_ROWS], away - (k - keys[b, RUN_ROW])
                low = max(tasks[len(tasks) - 3, task] + move, q - k_end + 1)
                high = min(tasks[len(tasks) - 2, task] + move, q_end - 1 - k)
                if max(k, q - high) >= min(k_end, q_end - low):
                    continue  # these queries see none of these keys
                seen += 1
                if seen <= listed:
                    continue
                if traced:
                    kept = _trace_band(q, q_end, k, k_end, low, high, task, heads, pieces, marks)
                else:
                    kept = list_band(q, q_end, k, k_end, low, high, heads, pieces, lists, follows, marks)
                if not kept:
                    told[0], told[1], told[2], told[3] = line, heads, queries, seen - 1
                    return -1
        listed = 0
    return 1


@lean
def _trace_band(
    q0: int, q1: int, k0: int, k1: int, dmin: int, dmax: int, task: int, heads: int, pieces: Ints, marks: Ints
) -> bool:
    """Lists a band of a task; False where there is no room."""
    at = marks[0]
    if at == len(pieces):
        return False
    marks[0] = at + 1
    pieces[at, 0], pieces[at, 1], pieces[at, 2], pieces[at, 3] = q0, q1, k0, k1
    pieces[at, 4], pieces[at, 5], pieces[at, 6], pieces[at, 7] = dmin, dmax, task, heads
    return True


@lean
def _known(sends: Ints, parcels: Ints, places: Ints, first: int, end: int, runs: Ints) -> int:
    """Fills `runs` with the addresses of some places, joined where they go on; their number, -1 as in `_list_all`."""
    count = 0
    for line in range(first, end):
        row, left, token = places[line, 1], places[line, 2], places[line, 3]
        while left > 0:
            address, rows = token, left
            if token >= _UNKNOWN:
                address, rows = address_of(sends, parcels, token, left)
            last = count - 1
            if address <= NOWHERE or count == _RUNS:
                return -1
            if count and runs[last, RUN_TOKEN] + runs[last, RUN_ROWS] == address:
                runs[last, RUN_ROWS] += rows
            else:
                runs[count, RUN_ROW], runs[count, RUN_ROWS], runs[count, RUN_TOKEN] = row, rows, address
                count += 1
            row, token, left = row + rows, token + rows, left - rows
    return count


@lean
def _set_up(
    rank: int,
    begin: int,
    rows: int,
    address: int,
    arena_rows: Ints,
    sends: Ints,
    sends_ptr: Ints,
    next_send: Ints,
    near: Ints,
) -> None:
    """Sets up the scratch memory for a rank: nothing is open, and the next of each rank's sends to it is the first."""
    near[PLACES, USED], near[PLACES, FREE] = 0, -1
    near[PLACES, RANK], near[PLACES, BEGIN], near[PLACES, ADDRESS] = rank, begin, address
    near[PLACES, FAULT], near[PLACES, STEP] = 0, -1
    near[PLACES, SENT], near[PLACES, SENT_END] = sends_ptr[rank], sends_ptr[rank + 1]
    for place in range(PLACES):
        near[place, OPEN], near[place, ROOM] = 0, arena_rows[place // 2] if place & 1 else rows
    for place in range(PLACES + 1, len(near)):
        near[place, OPEN], near[place, ROOM] = 0, rows
    for send in range(sends_ptr[rank + 1] - 1, sends_ptr[rank] - 1, -1):
        next_send[sends[send, SENDER]] = send


@unlocked
def _walk(
    first_rank: int,
    end_rank: int,
    backward: bool,
    owed: int,
    finished: int,
    foreign: int,
    sets: Ints,
    size: Ints,
    pairs: Ints,
    home_rows: Ints,
    home_first: Ints,
    arena_rows: Ints,
    arena_heads: Ints,
    sends: Ints,
    sends_ptr: Ints,
    slots: Ints,
    next_send: Ints,
    rounds: Ints,
    m: Ints,
    near: Ints,
    runs: Ints,
    conditions: Ints,
    parcels: Ints,
    places: Ints,
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
) -> bool:
    """Walks a range of ranks; whether all is right.

    rounds: int64 [4, rounds], -1 at first: the instructions that launched a round last and that waited for it, the
    first of the rank that last received home rows in it, and the first transfer.
    """
    for rank in range(first_rank, end_rank):
        base, begin, rows, address = (
            operand_ptr[rank],
            instruction_ptr[rank],
            home_rows[rank],
            home_first[rank],
        )
        t, task, row, last, under_way = transfer_ptr[rank], task_ptr[rank], rowop_ptr[rank], -1, 0
        _set_up(rank, begin, rows, address, arena_rows[rank], sends, sends_ptr, next_send, near)
        end, room, heads = operand_ptr[rank + 1], arena_rows[rank], arena_heads[rank]
        if not _are_placed(operands, base, end, rows, room, heads, size, foreign):
            return False
        for step in range(begin, instruction_ptr[rank + 1]):
            op, number, count = instructions[0, step], instructions[1, step], instructions[4, step]
            proper, near[PLACES, STEP] = True, step
            if op == _LAUNCH:
                if number <= last:
                    return False
                last, under_way = number, under_way + 1
                rounds[0, number], rounds[3, number] = step, t
                results = instructions[3, step] & RESULTS > 0
                proper = _launch(
                    m,
                    near,
                    operands,
                    base,
                    transfers,
                    t,
                    t + count,
                    number,
                    results,
                    sets,
                    rounds,
                    conditions,
                    parcels,
                    sends,
                    slots,
                    next_send,
                    runs,
                )
                t += count
            elif op == _WAIT:
                if rounds[0, number] < begin or rounds[1, number] >= begin:
                    return False
                rounds[1, number], under_way = step, under_way - 1
                if rounds[2, number] == begin:
                    stop = rounds[3, number] + instructions[4, rounds[0, number]]
                    _arrive(m, near, operands, base, transfers, rounds[3, number], stop, sets)
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
                    sets,
                    rounds,
                    conditions,
                    places,
                    runs,
                )
                task += count
            else:
                for item in range(row, row + count):
                    near[PLACES, ITEM] = item
                    if not _rowop(
                        m, near, operands, base, rowops, item, op, backward, sets, rounds, conditions, runs
                    ):
                        return False
                row += count
            if not proper:
                return False
        received, near[PLACES, STEP] = 0, -1
        for item in range(transfer_ptr[rank], transfer_ptr[rank + 1]):
            received += 1 - transfers[0, item]
        if under_way or received != sends_ptr[rank + 1] - sends_ptr[rank]:
            return False
        if not _ends_well(m, near, owed, finished, sets):
            return False
    return True


# ---------------------------------------------------------------------------------------------- of a program


_TOO_LARGE = "a number of its {} is beyond 2^30 - 1, the most that is followed"


def _matrix(name: str, table: Table, out: Ints | None = None) -> Ints:
    """int32 [columns, rows]: the table's own where it is that, else in `out` where there is one. Raises CapacityError
    where a number is beyond `_LIMIT`."""
    values, names = table.values, TABLES[name]
    if values.size:
        signed = [names.index(column) for column in _DIAGONALS if column in names]
        if values.max() > _LIMIT or any(values[i].min() < -_LIMIT for i in signed):
            raise CapacityError(_TOO_LARGE.format(name))
    if values.dtype == np.int32 and values.flags.c_contiguous:
        return _fixed(values)
    flat: Ints = np.empty(values.size, np.int32) if out is None else out[: values.size]
    found = flat.reshape(values.shape)
    found[:] = values
    return _fixed(found)


def _fixed(numbers: Ints) -> Ints:
    """The same, contiguous and read-only, as a plan's are: loops are compiled for one kind of array."""
    found = np.ascontiguousarray(numbers).view()
    found.setflags(write=False)
    return found


def _members(sets: HeadSets) -> Bools:
    """bool [sets, heads]: whether each has each head; what goes beyond the heads has none."""
    member = np.zeros((len(sets.members), sets.heads), bool)
    for number, one in enumerate(sets.members):
        member[number, one[one < sets.heads]] = True
    return member


def _bits(member: Bools, words: int) -> Ints:
    """int64 [words, sets], a bit for each group of heads, so many to a word."""
    found = np.zeros((words, len(member)), np.int64)
    for group in range(member.shape[1]):
        found[group // _MOST_HEADS] |= member[:, group].astype(np.int64) << (group % _MOST_HEADS)
    return found


@dataclass(frozen=True, eq=False)
class Sets:
    """The head sets of a plan. table: int64 [words + 1, 2, sets], of query and key side the first word of bits of
    each, its number, and the other words; size: int64 [2, sets]; pairs: int8 [sets, sets], whether the query heads of
    one find all their keys in the other."""

    table: Ints
    size: Ints
    pairs: Ints


def sets_of(q: HeadSets, kv: HeadSets) -> Sets:
    """Where heads are many, those that only occur together share a bit."""
    queries, keys = _members(q), _members(kv)
    together = [one if one.shape[1] <= _MOST_HEADS else np.unique(one, axis=1) for one in (queries, keys)]
    words = -(-max(one.shape[1] for one in together) // _MOST_HEADS)
    bits = np.stack([_bits(one, words) for one in together], axis=1)
    own: Bools = np.any(queries.reshape(len(queries), kv.heads, -1), axis=2)
    lacking = (own[:, None] & ~keys[None]).any(axis=2)
    pairs: Ints = np.logical_not(lacking).astype(np.int8)
    table = np.concatenate([bits[:1], [[q.canonical, kv.canonical]], bits[1:]])
    return Sets(np.ascontiguousarray(table), np.array([q.size, kv.size]), pairs)


@dataclass(frozen=True, eq=False)
class Posted:
    """A program as the loops take it, and its sends where their receivers look for them. instructions, transfers: int32
    [columns, rows]; ptrs: int64 [ranks + 1], where each rank's rows begin, of operands, instructions, transfers, the
    phase's tasks and rowops; rounds: how many; slots: int64 [transfers], the line of `sends` of each send."""

    program: Program
    homes: Homes
    sets: Sets
    given: int  # tensors whose home rows hold values at the start, as bits
    instructions: Ints
    transfers: Ints
    ptrs: tuple[Ints, ...]
    rounds: int
    sends: Ints
    sends_ptr: Ints
    slots: Ints
    parcels: Ints
    operands: Ints | None  # as a matrix, where it is not too long

    def parcels_before(self, rank: int) -> int:
        """Lines of `parcels` that the ranks before one may fill."""
        return _parcels_before(self.ptrs, rank)

    def rows(self, ranks: range) -> list[int]:
        """Of each list, how many rows the ranks have."""
        return [int(ptr[ranks.stop] - ptr[ranks.start]) for ptr in self.ptrs]


def _parcels_before(ptrs: Sequence[Ints], rank: int) -> int:
    return int(4 * (ptrs[2][rank] + ptrs[3][rank])) + 64 * rank


def _lists_of(program: Program) -> tuple[str, ...]:
    return "operands", "instructions", "transfers", program.task_list, "rowops"


def post(program: Program, homes: Homes, sets: Sets, given: frozenset[Tensor]) -> Posted | None:
    """None where sends and receives do not meet. Raises CapacityError where numbers are too large."""
    tables = [program.source[name] for name in _lists_of(program)]
    instructions, transfers = (_matrix(name, program.source[name]) for name in ("instructions", "transfers"))
    ptrs = tuple(_fixed(np.asarray(table.ptr, np.int64)) for table in tables)
    ranks = program.ranks
    rounds = int(instructions[1].max(initial=0)) + 1
    of_another_phase = len(program.source["tasks"]) + len(program.source["grads"]) > len(tables[3])
    if of_another_phase:
        return None
    if rounds > 8 * instructions.shape[1] + 1024:
        raise CapacityError(f"its rounds are numbered up to {rounds - 1}, with gaps too wide to follow")
    whole = len(tables[0]) + len(tables[3]) + len(tables[4]) <= _LONGEST
    tiles = _matrix("operands", tables[0] if whole else _rows_of(tables[0], _operands_of(transfers, ptrs)))
    tile_ptr = ptrs[0] if whole else _fixed(np.zeros(0, np.int64))
    ways = np.full((3, rounds), -1, np.int64)
    ways[2] = 0
    sends, sends_ptr = np.empty((transfers.shape[1] // 2 + 1, 4), np.int64), np.zeros(ranks + 1, np.int64)
    next_send, slots = np.zeros(ranks, np.int64), np.zeros(transfers.shape[1], np.int64)
    both = _paired((instructions, transfers), ptrs[1:3])
    if 2 * int(np.count_nonzero(transfers[0])) != transfers.shape[1] or not _post(
        sets.table, _fixed(homes.first), ways, sends, sends_ptr, next_send, slots, tiles, tile_ptr, *both
    ):
        return None
    parcels = np.empty((2, _parcels_before(ptrs, ranks)), np.int64)
    found = program, homes, sets, _bits_of(given), instructions, transfers, ptrs, rounds
    return Posted(*found, sends, sends_ptr, slots, parcels, tiles if whole else None)


def _operands_of(transfers: Ints, ptrs: Sequence[Ints]) -> Ints:
    """int64 [transfers]: the row of the operand of each."""
    found: Ints = transfers[2] + np.repeat(ptrs[0][:-1], np.diff(ptrs[2]))
    return found


def _rows_of(table: Table, rows: Ints) -> Table:
    """Some rows of a table, as if one rank had them."""
    return table.take(rows, np.array([0, len(rows)]))


def _paired(tables: Sequence[Ints], ptrs: Sequence[Ints]) -> Iterator[Ints]:
    """Each table with its offsets, as loops take them."""
    return (one for pair in zip(tables, ptrs, strict=True) for one in pair)


class Scratch:
    """The memory of a walk over a range of ranks, and of the next one. What a range leaves there to be settled are its
    tasks as a matrix, and lines of `conditions` and `places`, `taken` and `noted` of them."""

    def __init__(self, posted: Posted, ranges: Sequence[range]) -> None:
        self.posted, self.alone = posted, len(ranges) == 1
        most = [max(rows) for rows in zip(*map(posted.rows, ranges), strict=True)]
        names, (_, _, transfers, tasks, rowops) = _lists_of(posted.program), most
        sizes = [len(TABLES[name]) * rows for name, rows in zip(names, most, strict=True)]
        self.tables = {i: np.empty(sizes[i], np.int32) for i in (0, 3, 4)}
        self.conditions = np.empty((3, 4 * (rowops + transfers + tasks) + 64), np.int64)
        self.places = np.empty((2 * tasks + transfers + 64, 4), np.int64)
        longest = int(np.diff(posted.ptrs[0]).max(initial=0))
        words = len(posted.sets.table) - 1
        self.nodes = np.empty((words * (8 * longest + 4096), NODE), np.int64)
        self.runs = np.empty((2 * _RUNS, 4), np.int64)
        self.tasks: Ints = self.nodes
        self.taken = self.noted = 0
        self.near: Ints = self.nodes

    def walk(self, ranks: range, walked: int) -> bool:
        """The walk over a range; whether all is right so far. walked: the end of the ranks that were walked before.
        Ranges may be walked in any order, or at once: what a rank of another one sends from work rows is only looked at
        when all of these are done."""
        posted, first, end = self.posted, ranks.start, ranks.stop
        program, tables, ptrs = posted.program, [], list(posted.ptrs)
        for i, name in enumerate(_lists_of(program)):
            if i == 0 and posted.operands is not None and (first, end) == (0, program.ranks):
                table = posted.operands
            elif i in self.tables:
                table = _matrix(name, program.source[name].ranks_between(first, end), self.tables[i])
                ptrs[i] = _fixed(ptrs[i] - ptrs[i][first])
            else:
                table = posted.instructions if i == 1 else posted.transfers
            tables.append(table)
        while True:
            words = len(posted.sets.table) - 1
            near = np.zeros((PLACES + 2 + (words - 1) * PLACES, FIRST_NEAR + _NEAR), np.int64)
            near[PLACES, GIVEN], near[PLACES, FIRST_RANK], near[PLACES, WALKED] = posted.given, first, walked
            near[PLACES, PARCELS], near[PLACES, PARCELS_END] = map(posted.parcels_before, (first, end))
            self.near = near
            proper = _walk(
                first,
                end,
                program.phase == "backward",
                _bits_of(program.owed),
                _bits_of((Tensor.O, Tensor.DELTA)),
                _bits_of(tensor for tensor in Tensor if program.phase not in tensor.contents.phases),
                posted.sets.table,
                posted.sets.size,
                posted.sets.pairs,
                _fixed(posted.homes.rows),
                _fixed(posted.homes.first),
                _fixed(program.arena_rows),
                _fixed(program.arena_heads),
                posted.sends,
                posted.sends_ptr,
                posted.slots,
                np.zeros(program.ranks, np.int64),
                np.full((4, posted.rounds), -1, np.int64),
                self.nodes,
                near,
                self.runs,
                self.conditions,
                posted.parcels,
                self.places,
                *_paired(tables, ptrs),
            )
            self.tasks, self.taken = tables[3], int(near[PLACES, CONDITIONS])
            self.noted = int(near[PLACES, PIECES])
            if self.noted <= len(self.places):
                return bool(proper)
            self.places = np.empty((self.noted, 4), np.int64)

    def settle(self, lists: Lists, whole: bool) -> int:
        """Settles the range that was walked, and lists what its tasks attend to: 1; 0 where something is wrong or not
        sure; UNSENT, and nothing is listed, where it hangs on ranks that were not walked. whole: all ranks were."""
        posted = self.posted
        ways = posted.sends, posted.parcels
        held = int(_settle(*ways, self.conditions, self.taken, False, self.alone))
        if held == ZEROS:
            raise ZerosError
        if 0 <= held < self.taken:
            return 0
        if held == UNSENT or (not whole and not _are_known(*ways, self.places, self.noted)):
            return UNSENT
        told = np.zeros(5, np.int64)
        found = -1
        while found < 0:
            columns = lists.columns
            found = int(
                _list_all(*ways, self.places, self.noted, False, told, self.runs, self.tasks, *columns)
            )
            if found < 0:
                lists.grow()
        return found

    def settle_traced(self) -> tuple[int, Ints, bool]:
        """Of the range that was walked: the first condition that does not hold, their number where all do; the bands
        of addresses of its tasks, int32 [pieces, 8], with their task and head set; and whether these are all."""
        posted = self.posted
        ways, told = (posted.sends, posted.parcels), np.zeros(5, np.int64)
        held = int(_settle(*ways, self.conditions, self.taken, True, True))
        pieces, marks, none = np.empty((2 * self.noted + 64, 8), np.int32), np.zeros(2, np.int64), _NO_LISTS
        while (
            _list_all(
                *ways, self.places, self.noted, True, told, self.runs, self.tasks, pieces, none, none, marks
            )
            < 0
        ):
            pieces = np.concatenate([pieces, np.empty_like(pieces)])
        marked = self.places[: self.noted, 0]
        every = len(np.unique(marked[marked >= 0])) == self.tasks.shape[1] and not told[4]
        return held, pieces[: marks[0]], every


_NO_LISTS = np.zeros((0, 4), np.int64)


def _bits_of(tensors: Iterable[Tensor]) -> int:
    return sum(1 << tensor for tensor in tensors)


def _ranges(posted: Posted, threads: int) -> list[range]:
    """The ranks in ranges of much the same number of rows, as many as threads and no longer than `_LONGEST`."""
    rows = posted.ptrs[0] + posted.ptrs[3] + posted.ptrs[4]
    count = threads * (1 + int(rows[-1]) // (threads * _LONGEST))
    if count == 1:
        return [range(len(rows) - 1)]
    cuts = np.searchsorted(rows, np.arange(1, count) * int(rows[-1]) // count).tolist()
    ends = [0, *cuts, len(rows) - 1]
    return [range(first, end) for first, end in pairwise(ends) if first < end]


def judge(
    program: Program,
    homes: Homes,
    sets: Sets,
    given: frozenset[Tensor],
    lists: Lists,
    threads: int = 1,
    together: bool = False,
) -> bool:
    """Whether all is right with a program: then what its tasks attend to is in `lists`, where it has begun and is to
    end. Raises CapacityError for what is too large to follow, ZerosError unless ranks are walked `together`.

    homes: of the home rows. given: tensors whose home rows hold values at the start. threads: how many walk ranges of
    ranks at a time.
    """
    posted = post(program, homes, sets, given)
    if posted is None:
        return False
    ranges = [range(program.ranks)] if together else _ranges(posted, threads)
    memory = [Scratch(posted, ranges) for _ in ranges[:threads]]
    hanging: list[range] = []
    for batch in _batches(ranges, threads):
        states = _settled(memory, batch, lists, batch[-1].stop == program.ranks)
        if 0 in states:
            return False
        hanging += [ranks for ranks, state in zip(batch, states, strict=True) if state == UNSENT]
    for batch in _batches(hanging, threads):
        if any(state != 1 for state in _settled(memory, batch, lists, True)):
            return False
    return True


def _batches(ranges: Sequence[range], threads: int) -> list[Sequence[range]]:
    return [ranges[first : first + threads] for first in range(0, len(ranges), threads)]


def _settled(memory: Sequence[Scratch], batch: Sequence[range], lists: Lists, whole: bool) -> list[int]:
    """Walks ranges at once, and settles them one after another: what `settle` says of each, up to what is wrong. whole:
    with these, all ranks were walked."""
    pairs = list(zip(memory, batch, strict=False))
    right = spread(lambda pair: pair[0].walk(pair[1], batch[0].start), pairs, len(memory))
    if not all(right):
        return [0]
    states: list[int] = []
    for one, _ in pairs:
        states.append(one.settle(lists, whole))
        if states[-1] == 0:
            return [0]
    return states
