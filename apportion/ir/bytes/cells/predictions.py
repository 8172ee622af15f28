"""What a column most likely holds, told from what stands before: `ir.bytes.cells.numbers` writes what differs.

    LAST        what the row before holds
    WITH a      that, changed by as much as column a changed
    AFTER a     that, and column a of the row before: a range begins where the last one ends
    PLACE a, b  as WITH a where column b is unchanged, else 0
    BY a        what the last row with the same number in column a holds
    RISE a      that; one more where an instruction has a round
    FOLLOW      what followed the last time when the row before held what it holds; if it never did, one more
    NEW         likewise; else the first operand that no row has named so far
    QUERIES a   the largest diagonal of a task whose query rows are operand a: its rows less one
    KEYS a      the smallest of one whose key rows are operand a: minus its rows, and one
    LIKE        what the source of an operand holds (`ir.bytes.cells.sources`); LAST without one
    ROW         the row behind the last one's source; else the row behind the last operand
    BACK        as LAST: how many operands before an operand its source stands

In the first row, what the row before held is 0. FOLLOW, NEW and BY look no farther than a column's numbers may reach:
ranks, operands of the rank, or `CODES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.isa import LIMIT, Op
from apportion.ir.loops.jit import inlined, jit

# `walk` goes by their order: kinds of one loop stand side by side
LAST, WITH, AFTER, PLACE, BY, RISE, FOLLOW, NEW, QUERIES, KEYS, BACK, LIKE, ROW = range(13)
#: numbers of ops and flags are below
CODES = 256
#: what bounds a column's numbers, where it is no number: the plan's ranks, the rank's operands
RANKS, OPERANDS = -1, -2
_ROUNDS = int(Op.WAIT)  # the last op with a round


class Rule(NamedTuple):
    """A column and how it is predicted: from itself, and from columns `a` and `b`. within: what its numbers, or those
    that it is looked up by, are below."""

    column: str
    kind: int
    a: str = ""
    b: str = ""
    within: int = 0


def _new(*columns: str) -> tuple[Rule, ...]:
    return tuple(Rule(column, NEW, within=OPERANDS) for column in columns)


def _with(a: str, *columns: str) -> tuple[Rule, ...]:
    return tuple(Rule(column, WITH, a) for column in columns)


_BAND = (Rule("dmin", KEYS, "kv"), Rule("dmax", QUERIES, "q"))

#: table -> its columns in the order in which they are written; "source" is no column of a plan
RULES: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        "arenas": (Rule("tensor", LAST), Rule("rows", LAST), Rule("heads", LAST)),
        "operands": (
            Rule("source", BACK),
            Rule("tensor", LAST),
            Rule("space", LAST),
            Rule("rows", LIKE),
            Rule("row", ROW),
            Rule("col", LIKE),
            Rule("heads", LIKE),
        ),
        "instructions": (
            Rule("op", FOLLOW, within=CODES),
            Rule("round", RISE, "op", within=CODES),
            Rule("channel", BY, "op", within=CODES),
            Rule("mode", BY, "op", within=CODES),
            Rule("count", BY, "op", within=CODES),
        ),
        "transfers": (Rule("send", LAST), Rule("peer", FOLLOW, within=RANKS), *_new("operand")),
        "tasks": (*_new("q", "kv"), *_with("q", "o"), *_BAND, Rule("first", LAST)),
        "grads": (
            *_new("q", "kv"),
            *_with("q", "do", "delta", "dq"),
            *_new("dkv"),
            *_BAND,
            Rule("first", FOLLOW, within=CODES),
        ),
        "rowops": (
            Rule("a", FOLLOW, within=OPERANDS),
            Rule("b", LAST),
            *_new("c"),
            Rule("d", LAST),
            Rule("first", LAST),
        ),
        "spans": (
            Rule("length", LAST),
            Rule("row", AFTER, "length"),
            Rule("token", AFTER, "length"),
            Rule("sequence", LAST),
            Rule("position", PLACE, "token", "sequence"),
        ),
        "moves": (
            Rule("send", LAST),
            Rule("peer", FOLLOW, within=RANKS),
            Rule("rows", LAST),
            Rule("row", AFTER, "rows"),
        ),
    }
)
#: where operands have these columns, as they are written
SOURCE, TENSOR, SPACE, ROWS = range(4)


def rules_of(columns: tuple[str, ...]) -> tuple[Rule, ...]:
    """LAST, for columns of which nothing is known."""
    return tuple(Rule(column, LAST) for column in columns)


class Named(NamedTuple):
    """What the lists of a program refer to. held: int64, rows of operands; first, counts: int64 [ranks], which of these
    each rank has; newest: int64 [ranks], the highest that a list has named so far, which every list raises."""

    held: Ints
    first: Ints
    counts: Ints
    newest: Ints


def no_operands(ranks: int) -> Named:
    """For tables that refer to none."""
    return Named(np.zeros(0, np.int64), *np.zeros((3, ranks), np.int64))


@cache
def numbered(rules: tuple[Rule, ...]) -> Ints:
    """int64 [columns, 4], read-only: kinds, the numbers of columns a and b, and what numbers are within."""
    place = {rule.column: number for number, rule in enumerate(rules)}
    rows = [(rule.kind, place.get(rule.a, 0), place.get(rule.b, 0), rule.within) for rule in rules]
    found = np.array(rows, np.int64)
    found.setflags(write=False)
    return found


@jit
def memory_for(ranks: int, operands: int) -> Ints:
    """int64 [1 + numbers, 2], what followed each and when that was: room for what FOLLOW, NEW and BY remember; the
    first row is for numbers that are not remembered. ranks: of the plan; operands: of a rank in a program, at most."""
    return np.zeros((1 + max(CODES, ranks, operands), 2), np.int64)


class WalkedRows(NamedTuple):
    """A rank's rows of a table while they are walked, column after column.

    values: int64, its columns end to end, `total` rows each, from `base` on; begin, end: the rank's. rules: as
    `numbered`; ranks: of the plan. first: of operands, where their sources may be. held: int64, rows of the operands
    that the rows refer to; newest: int64, the highest that a list has named so far is at `program`, where it is raised.
    memory: as `memory_for`; turn: the first column's mark in it, the next one's being one more: none has been there.
    places, departs: int64, one more than rows: those that are not as predicted, rising, and what they are above that.
    """

    values: Ints
    base: int
    total: int
    begin: int
    end: int
    rules: Ints
    ranks: int
    first: int
    held: Ints
    newest: Ints
    program: int
    memory: Ints
    turn: int
    places: Ints
    departs: Ints


@inlined
def walk(rows: WalkedRows, column: int, reads: bool) -> int:
    """Notes where a column departs from what was predicted, and returns how often; where it `reads`, the other way
    round: writes the column from such notes, behind which there is a place of -1. It then returns -1 at a number that
    no plan can hold."""
    kind = rows.rules[column, 0]
    if kind <= AFTER:
        return _walk_steps(rows, column, reads)
    if kind == PLACE:
        return _walk_places(rows, column, reads)
    if kind <= NEW:
        return _walk_memory(rows, column, reads)
    if kind <= KEYS:
        return _walk_bounds(rows, column, reads)
    if kind == BACK:
        return _walk_sources(rows, column, reads)
    if kind == LIKE:
        return _walk_likes(rows, column, reads)
    return _walk_rows(rows, column, reads)


@inlined
def _at(rows: WalkedRows, column: int) -> int:
    """Where a column is."""
    return rows.base + column * rows.total


@inlined
def _settle(rows: WalkedRows, own: Ints, row: int, place: int, likely: int, found: int, reads: bool) -> int:
    """One row, whose number most likely is `likely`; found: departures before it. Returns those with it, or -1."""
    if not reads:
        if own[row] != likely:
            rows.places[found], rows.departs[found] = place, own[row] - likely
            found += 1
        return found
    if rows.places[found] == place:
        likely += rows.departs[found]
        found += 1
    own[row] = likely
    return found if -LIMIT <= likely <= LIMIT else -1


@inlined
def _walk_steps(rows: WalkedRows, column: int, reads: bool) -> int:
    kind, at, at_a = rows.rules[column, 0], _at(rows, column), _at(rows, rows.rules[column, 1])
    own = rows.values[at + rows.begin : at + rows.end]
    a = rows.values[at_a + rows.begin : at_a + rows.end]
    found, last, before = 0, 0, 0
    for row in range(len(own)):
        if kind == WITH:
            last += a[row] - before
            before = a[row]
        elif kind == AFTER:
            last += before
            before = a[row]
        found = _settle(rows, own, row, row, last, found, reads)
        if reads and found < 0:
            return -1
        last = own[row]
    return found


@inlined
def _walk_places(rows: WalkedRows, column: int, reads: bool) -> int:
    at, at_a, at_b = _at(rows, column), _at(rows, rows.rules[column, 1]), _at(rows, rows.rules[column, 2])
    own = rows.values[at + rows.begin : at + rows.end]
    a = rows.values[at_a + rows.begin : at_a + rows.end]
    b = rows.values[at_b + rows.begin : at_b + rows.end]
    found = 0
    for row in range(len(own)):
        follows = row > 0 and b[row] == b[row - 1]
        likely = own[row - 1] + a[row] - a[row - 1] if follows else 0
        found = _settle(rows, own, row, row, likely, found, reads)
        if reads and found < 0:
            return -1
    return found


@inlined
def _walk_memory(rows: WalkedRows, column: int, reads: bool) -> int:
    kind, at, at_a = rows.rules[column, 0], _at(rows, column), _at(rows, rows.rules[column, 1])
    own = rows.values[at + rows.begin : at + rows.end]
    key_of = rows.values[at_a + rows.begin : at_a + rows.end]
    memory, turn, within = rows.memory, rows.turn + column, rows.rules[column, 3]
    names = within == OPERANDS
    if within < 0:
        within = len(rows.held) if names else rows.ranks
    follows, found, last, newest = kind >= FOLLOW, 0, 0, rows.newest[rows.program]
    for row in range(len(own)):
        key = last if follows else key_of[row]
        slot = max(key + 1, 0) if key < within else 0
        likely = memory[slot, 0] if memory[slot, 1] == turn else -1
        if not follows:
            likely = max(likely, 0) + (1 if kind == RISE and key <= _ROUNDS else 0)
        elif likely < 0:
            likely = (newest if kind == NEW else last) + 1
        found = _settle(rows, own, row, row, likely, found, reads)
        if reads and found < 0:
            return -1
        last = own[row]
        newest = max(newest, last)
        memory[slot, 0], memory[slot, 1] = last, turn if slot > 0 else 0
    if names:
        rows.newest[rows.program] = newest
    return found


@inlined
def _walk_bounds(rows: WalkedRows, column: int, reads: bool) -> int:
    at, at_a, held = _at(rows, column), _at(rows, rows.rules[column, 1]), rows.held
    own = rows.values[at + rows.begin : at + rows.end]
    operand = rows.values[at_a + rows.begin : at_a + rows.end]
    found, sign = 0, 1 if rows.rules[column, 0] == QUERIES else -1
    for row in range(len(own)):
        size = held[operand[row]] if 0 <= operand[row] < len(held) else 0
        found = _settle(rows, own, row, row, sign * (size - 1), found, reads)
        if reads and found < 0:
            return -1
    return found


@inlined
def _walk_sources(rows: WalkedRows, column: int, reads: bool) -> int:
    found, last, own = 0, 0, rows.values[_at(rows, column) : _at(rows, column + 1)]
    for row in range(rows.begin, rows.end):
        found = _settle(rows, own, row, row - rows.begin, last, found, reads)
        last = own[row]
        if reads and (found < 0 or not 0 <= last <= row - rows.first):
            return -1
    return found


@inlined
def _walk_likes(rows: WalkedRows, column: int, reads: bool) -> int:
    own = rows.values[_at(rows, column) : _at(rows, column + 1)]
    source = rows.values[_at(rows, SOURCE) : _at(rows, SOURCE + 1)]
    begin, found = rows.begin, 0
    for row in range(begin, rows.end):
        if source[row] > 0:
            if not reads:
                continue  # `ir.bytes.cells.sources` takes none that is not alike
            likely = own[row - source[row]]
        else:
            likely = own[row - 1] if row > begin else 0
        found = _settle(rows, own, row, row - begin, likely, found, reads)
        if reads and found < 0:
            return -1
    return found


@inlined
def _walk_rows(rows: WalkedRows, column: int, reads: bool) -> int:
    own = rows.values[_at(rows, column) : _at(rows, column + 1)]
    source = rows.values[_at(rows, SOURCE) : _at(rows, SOURCE + 1)]
    tensor = rows.values[_at(rows, TENSOR) : _at(rows, TENSOR + 1)]
    space = rows.values[_at(rows, SPACE) : _at(rows, SPACE + 1)]
    size = rows.values[_at(rows, ROWS) : _at(rows, ROWS + 1)]
    found, row = 0, rows.begin
    while row < rows.end:
        begin, back, shift = row, source[row], 0
        while row < rows.end and source[row] == back:
            row += 1
        mine, like = own[begin:row], own[begin - back : row - back]
        here, there = space[begin:row], space[begin - back : row - back]
        for n in range(row - begin):
            likely = like[n] + shift
            if back == 0 or here[n] != there[n]:
                at = begin + n
                follows = at > rows.begin and tensor[at - 1] == tensor[at] and space[at - 1] == space[at]
                likely = own[at - 1] + size[at - 1] if follows else 0
            found = _settle(rows, mine, n, begin + n - rows.begin, likely, found, reads)
            if reads and found < 0:
                return -1
            shift = mine[n] - like[n]
    return found
