"""What a column most likely holds, told from what stands before: the format writes what differs (`ir.numbers`).

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
    LIKE        what the source of an operand holds (`ir.sources`); LAST without one
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

from apportion.ir.isa import LIMIT, Op
from apportion.ir.jit import jit, lean
from apportion.ir.plan import Ints

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


class Columns(NamedTuple):
    """A table while it is walked, column after column of each rank.

    values: int64 [columns, rows]. begins, ends: int64 [ranks], rows of each. kinds, a, b, within: int64 [columns], as
    in `Rule`. after: int64, -1 but while a column of a rank is walked. named: what its rows refer to; of operands,
    `first` is where their sources may be.
    """

    values: Ints
    begins: Ints
    ends: Ints
    kinds: Ints
    a: Ints
    b: Ints
    within: Ints
    after: Ints
    named: Named


def columns_of(
    values: Ints,
    begins: Ints,
    ends: Ints,
    rules: tuple[Rule, ...],
    ranks: int,
    named: Named,
) -> Columns:
    """The table as it is walked; ranks: of the plan."""
    kinds, a, b, within = _numbers(rules)
    within = np.where(within == RANKS, ranks, within)
    most = int(named.counts.max(initial=0)) if OPERANDS in within else 0
    after = np.full(max(int(within.max()), most), -1, np.int64)
    return Columns(values, begins, ends, kinds, a, b, within, after, named)


@cache
def _numbers(rules: tuple[Rule, ...]) -> tuple[Ints, Ints, Ints, Ints]:
    """int64 [columns] each: kinds, the numbers of columns a and b, and what numbers are within."""
    place = {rule.column: number for number, rule in enumerate(rules)}
    rows = [(rule.kind, place.get(rule.a, 0), place.get(rule.b, 0), rule.within) for rule in rules]
    kinds, a, b, within = np.array(rows, np.int64).T.copy()
    return kinds, a, b, within


#: what is read in place of a number that no plan can hold
BEYOND = LIMIT + 1


@jit
def walk(table: Columns, rank: int, column: int, numbers: Ints, reads: bool) -> None:
    """What a rank's rows of a column are above what was predicted, into `numbers` [rows]; where it `reads`, the other
    way round: from `numbers` what the rows hold, or `BEYOND`."""
    kind = table.kinds[column]
    if kind <= AFTER:
        _walk_steps(table, rank, column, numbers, reads)
    elif kind == PLACE:
        _walk_places(table, rank, column, numbers, reads)
    elif kind <= NEW:
        _walk_memory(table, rank, column, numbers, reads)
    elif kind <= KEYS:
        _walk_bounds(table, rank, column, numbers, reads)
    elif kind == BACK:
        _walk_sources(table, rank, column, numbers, reads)
    elif kind == LIKE:
        _walk_likes(table, rank, column, numbers, reads)
    else:
        _walk_rows(table, rank, column, numbers, reads)


@lean
def _settle(column: Ints, row: int, numbers: Ints, place: int, likely: int, reads: bool) -> None:
    """One row, whose number most likely is `likely`."""
    if not reads:
        numbers[place] = column[row] - likely
        return
    number = likely + numbers[place]
    column[row] = number if -LIMIT <= number <= LIMIT else BEYOND


@lean
def _walk_steps(table: Columns, rank: int, column: int, numbers: Ints, reads: bool) -> None:
    kind, own, a = table.kinds[column], table.values[column], table.values[table.a[column]]
    begin, last = table.begins[rank], 0
    for row in range(begin, table.ends[rank]):
        if kind == WITH:
            last += a[row] - (a[row - 1] if row > begin else 0)
        elif kind == AFTER and row > begin:
            last += a[row - 1]
        _settle(own, row, numbers, row - begin, last, reads)
        last = own[row]


@lean
def _walk_places(table: Columns, rank: int, column: int, numbers: Ints, reads: bool) -> None:
    own, a, b = table.values[column], table.values[table.a[column]], table.values[table.b[column]]
    begin = table.begins[rank]
    for row in range(begin, table.ends[rank]):
        follows = row > begin and b[row] == b[row - 1]
        likely = own[row - 1] + a[row] - a[row - 1] if follows else 0
        _settle(own, row, numbers, row - begin, likely, reads)


@lean
def _walk_memory(table: Columns, rank: int, column: int, numbers: Ints, reads: bool) -> None:
    kind, own, key_of = table.kinds[column], table.values[column], table.values[table.a[column]]
    after, named, begin = table.after, table.named, table.begins[rank]
    names = table.within[column] == OPERANDS
    within = named.counts[rank] if names else table.within[column]
    follows, last, newest = kind >= FOLLOW, 0, named.newest[rank]
    for row in range(begin, table.ends[rank]):
        key = last if follows else key_of[row]
        held = 0 <= key < within
        likely = after[key] if held else -1
        if not follows:
            likely = max(likely, 0) + (1 if kind == RISE and key <= _ROUNDS else 0)
        elif likely < 0:
            likely = (newest if kind == NEW else last) + 1
        _settle(own, row, numbers, row - begin, likely, reads)
        last = own[row]
        newest = max(newest, last)
        if held:
            after[key] = last
    if names:
        named.newest[rank] = newest
    last = 0
    for row in range(begin, table.ends[rank]):
        key = last if follows else key_of[row]
        last = own[row]
        if 0 <= key < within:
            after[key] = -1


@lean
def _walk_bounds(table: Columns, rank: int, column: int, numbers: Ints, reads: bool) -> None:
    own, operand, named = table.values[column], table.values[table.a[column]], table.named
    begin, sign = table.begins[rank], 1 if table.kinds[column] == QUERIES else -1
    first, count = named.first[rank], named.counts[rank]
    for row in range(begin, table.ends[rank]):
        rows = named.held[first + operand[row]] if 0 <= operand[row] < count else 0
        _settle(own, row, numbers, row - begin, sign * (rows - 1), reads)


@lean
def _walk_sources(table: Columns, rank: int, column: int, numbers: Ints, reads: bool) -> None:
    own, begin, last = table.values[column], table.begins[rank], 0
    for row in range(begin, table.ends[rank]):
        _settle(own, row, numbers, row - begin, last, reads)
        last = own[row]
        if not 0 <= last <= row - table.named.first[rank]:
            own[row] = BEYOND
            return


@lean
def _walk_likes(table: Columns, rank: int, column: int, numbers: Ints, reads: bool) -> None:
    own, source = table.values[column], table.values[SOURCE]
    begin, last = table.begins[rank], 0
    for row in range(begin, table.ends[rank]):
        likely = own[row - source[row]] if source[row] > 0 else last
        _settle(own, row, numbers, row - begin, likely, reads)
        last = own[row]


@lean
def _walk_rows(table: Columns, rank: int, column: int, numbers: Ints, reads: bool) -> None:
    own, values, begin = table.values[column], table.values, table.begins[rank]
    for row in range(begin, table.ends[rank]):
        back, likely = values[SOURCE, row], 0
        if back > 0 and values[SPACE, row - back] == values[SPACE, row]:
            likely = own[row - back]
            if row > begin and values[SOURCE, row - 1] == back:
                likely += own[row - 1] - own[row - back - 1]
        elif row > begin and _are_of_one_array(values, row - 1, row):
            likely = own[row - 1] + values[ROWS, row - 1]
        _settle(own, row, numbers, row - begin, likely, reads)


@lean
def _are_of_one_array(values: Ints, a: int, b: int) -> bool:
    return bool(values[TENSOR, a] == values[TENSOR, b] and values[SPACE, a] == values[SPACE, b])
