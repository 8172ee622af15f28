"""What tasks attend to, as lists of bands: of each head set one, and equal ones kept once.

    set 0   A B C D ..          list 0   A B C D ..
    set 1   A B C D ..    ──►   set 0 ── list 0, set 1 ── list 0, set 2 ── list 1
    set 2   A B X ..            list 1   A B X ..

The members of a group that splits heads attend to the same bands, and backward to those of forward. So a set *follows*
a list, band by band, as long as it goes on alike, and its bands are not kept again: what a plan of many tasks takes is
what one member has of them. A set that goes on otherwise gets a list of its own, from its first band on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from apportion.ir import bands as algebra
from apportion.ir.jit import inlined, lean
from apportion.ir.plan import Ints
from apportion.ir.verify.coverage import Tasks, check_pieces, is_exact, run_of
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.view import HeadSets

# columns of a piece behind its band: the next of its list, -1 behind the last; the list
NEXT, OF_LIST = 6, 7
# columns of a list: its first and last piece, how many it has
FIRST, LAST, LENGTH = range(3)
# columns of a head set: its list, -1 for none; the last piece of it that was met and how many; 1 where it goes on there
LIST, AT, MET, OWNS = range(4)
# marks: pieces and lists in use, pieces of the program; runs of home rows that were found last, of queries and of keys;
# pieces of the task that were seen, and that were listed already
PIECES, LISTS, COUNT, QUERY_RUN, KEY_RUN, SEEN, DONE = range(7)

MOST_TOKENS = 2**31 - 1  # bands are kept as int32
_ROOM = 2**14


@dataclass(eq=False)
class Lists:
    """Those of the programs of one kind. sets: of the query side; pieces: int32 [room, 8]; lists: int64 [lists, 3];
    follows: int64 [sets, 4]; marks: int64 [7]."""

    sets: HeadSets
    homes: Homes
    mask: Ints  # int64 [bands, 6]
    _pieces: Ints = field(default_factory=lambda: np.empty((_ROOM, 8), np.int32))
    _exact: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        sets = len(self.sets.members)
        self._lists = np.zeros((4 * sets, 3), np.int64)
        self._follows = np.full((sets, 4), -1, np.int64)
        self._marks = np.zeros(7, np.int64)

    @property
    def columns(self) -> tuple[Ints, ...]:
        """What `list_bands` takes, in its order: the axis of home rows, and the lists."""
        homes = self.homes.starts, self.homes.tokens
        return *homes, self._pieces, self._lists, self._follows, self._marks

    @property
    def following(self) -> Ints:
        """int64 [sets]: the list of each set, -1 for none."""
        return self._follows[:, LIST].copy()

    def check(self, tasks: int) -> None:
        """Raises CapacityError where so many tasks have too many pieces."""
        check_pieces(int(self._marks[COUNT]), tasks)

    def begin(self) -> None:
        """A program begins: each set is expected to have what it had in the one before."""
        self._marks[COUNT] = self._marks[SEEN] = self._marks[DONE] = 0
        self._follows[:, AT], self._follows[:, MET], self._follows[:, OWNS] = -1, 0, 0
        if self._marks[LISTS] + len(self._follows) > len(self._lists):
            self._lists = np.concatenate([self._lists, np.zeros_like(self._lists)])

    def grow(self, more: int = 1) -> None:
        """Makes room for so many pieces more, and some."""
        used = int(self._marks[PIECES])
        pieces = np.empty((2 * used + more + _ROOM, 8), np.int32)
        pieces[:used] = self._pieces[:used]
        self._pieces = pieces

    def end(self) -> None:
        """A program ends: what a set has is a whole list."""
        follows = self._follows
        follows[follows[:, MET] == 0, LIST] = -1
        for one in np.flatnonzero((follows[:, LIST] >= 0) & (follows[:, OWNS] == 0)).tolist():
            if follows[one, MET] < self._lists[follows[one, LIST], LENGTH]:
                self.grow(int(follows[one, MET]))
                fork(self._pieces, self._lists, follows, self._marks, one)

    @property
    def times(self) -> Ints:
        """int64 [lists, heads]: how often each head has each list."""
        times = np.zeros((int(self._marks[LISTS]), self.sets.heads), np.int64)
        for one in np.flatnonzero(self._follows[:, LIST] >= 0).tolist():
            times[self._follows[one, LIST], self.sets.members[one]] += 1
        return times

    def are_exact(self) -> bool:
        """Whether the tasks of each head cover the mask exactly. Raises CapacityError for too many bands."""
        mask, area, times = np.ascontiguousarray(self.mask.T), int(algebra.area(self.mask).sum()), self.times
        if not len(times):
            return area == 0
        for column in np.unique(times, axis=1).T:
            key = tuple(np.repeat(np.arange(len(column)), column).tolist())
            if key not in self._exact:
                if not is_exact(self.bands(key), mask, area):
                    return False
                self._exact.add(key)
        return True

    def bands(self, numbers: tuple[int, ...]) -> Ints:
        """int64 [6, pieces] of some lists."""
        lengths = self._lists[list(numbers), LENGTH]
        found, end = np.empty((6, int(lengths.sum())), np.int64), 0
        for number in numbers:
            end = unroll(self._pieces, int(self._lists[number, FIRST]), found, end)
        return found

    def tasks(self) -> Tasks:
        """The pieces of all lists, which heads have in turn."""
        pieces = self._pieces[: int(self._marks[PIECES])]
        return Tasks(pieces[:, :NEXT].T, np.zeros(0, np.int64), pieces[:, OF_LIST], True, self.times)


@inlined
def list_bands(
    row: int,
    rows: int,
    q: int,
    key_row: int,
    keys: int,
    k: int,
    dmin: int,
    dmax: int,
    heads: int,
    starts: Ints,
    tokens: Ints,
    pieces: Ints,
    lists: Ints,
    follows: Ints,
    marks: Ints,
) -> bool:
    """Lists what queries of a task, from a row of its on, at so many addresses, see of keys, run by run of tokens.
    dmin, dmax: in rows of the task. False where there is no room: then the same, with more, goes on from there."""
    low, high = dmin + q - k + key_row - row, dmax + q - k + key_row - row
    run = run_of(starts, q, marks[QUERY_RUN])
    marks[QUERY_RUN] = run
    while starts[run] < q + rows:
        q0, q1 = max(starts[run], q), min(starts[run + 1], q + rows)
        k0, k1 = max(k, q0 - high), min(k + keys, q1 - low)  # that these queries see, by address
        if k0 < k1:
            other, shift = run_of(starts, k0, marks[KEY_RUN]), tokens[run] - starts[run]
            marks[KEY_RUN] = other
            while starts[other] < k1:
                marks[SEEN] += 1
                if marks[SEEN] > marks[DONE]:
                    away = tokens[other] - starts[other]
                    first, end = max(starts[other], k) + away, min(starts[other + 1], k + keys) + away
                    least = max(low + shift - away, q0 + shift - end + 1)
                    most = min(high + shift - away, q1 + shift - first - 1)
                    if not _list(
                        q0 + shift, q1 + shift, first, end, least, most, heads, pieces, lists, follows, marks
                    ):
                        return False
                    marks[DONE] += 1
                    marks[COUNT] += 1
                other += 1
        run += 1
    return True


@lean
def _list(
    q0: int,
    q1: int,
    k0: int,
    k1: int,
    dmin: int,
    dmax: int,
    heads: int,
    pieces: Ints,
    lists: Ints,
    follows: Ints,
    marks: Ints,
) -> bool:
    """A band of a head set; False where there is no room."""
    if marks[PIECES] == len(pieces):
        return False
    number = follows[heads, LIST]
    if number >= 0 and not follows[heads, OWNS]:
        at = follows[heads, AT]
        at = lists[number, FIRST] if at < 0 else pieces[at, NEXT]
        if at >= 0 and _is(pieces, at, q0, q1, k0, k1, dmin, dmax):
            follows[heads, AT] = at
            follows[heads, MET] += 1
            return True
        if not follows[heads, MET]:
            number = -1
        elif not fork(pieces, lists, follows, marks, heads) or marks[PIECES] == len(pieces):
            return False
        else:
            number = follows[heads, LIST]
    if number < 0:
        number = 0
        while number < marks[LISTS] and not _is(pieces, lists[number, FIRST], q0, q1, k0, k1, dmin, dmax):
            number += 1
        follows[heads, LIST], follows[heads, MET] = number, 0
        if number < marks[LISTS]:
            follows[heads, AT], follows[heads, MET] = lists[number, FIRST], 1
            return True
        marks[LISTS] = number + 1
        lists[number, FIRST], lists[number, LAST], lists[number, LENGTH] = -1, -1, 0
        follows[heads, OWNS] = 1
    at = marks[PIECES]
    marks[PIECES] = at + 1
    pieces[at, 0], pieces[at, 1], pieces[at, 2], pieces[at, 3] = q0, q1, k0, k1
    pieces[at, 4], pieces[at, 5], pieces[at, NEXT], pieces[at, OF_LIST] = dmin, dmax, -1, number
    _link(pieces, lists, number, at)
    follows[heads, MET] += 1
    return True


@lean
def _is(pieces: Ints, at: int, q0: int, q1: int, k0: int, k1: int, dmin: int, dmax: int) -> bool:
    return (  # type: ignore[no-any-return]
        pieces[at, 0] == q0
        and pieces[at, 1] == q1
        and pieces[at, 2] == k0
        and pieces[at, 3] == k1
        and pieces[at, 4] == dmin
        and pieces[at, 5] == dmax
    )


@lean
def _link(pieces: Ints, lists: Ints, number: int, at: int) -> None:
    """A piece is the last of a list."""
    if lists[number, LENGTH]:
        pieces[lists[number, LAST], NEXT] = at
    else:
        lists[number, FIRST] = at
    lists[number, LAST] = at
    lists[number, LENGTH] += 1


@lean
def fork(pieces: Ints, lists: Ints, follows: Ints, marks: Ints, heads: int) -> bool:
    """A head set gets a list of its own, of what it has met; False where there is no room."""
    used, number, at = marks[PIECES], marks[LISTS], lists[follows[heads, LIST], FIRST]
    if used + follows[heads, MET] > len(pieces):
        return False
    marks[LISTS], marks[PIECES] = number + 1, used + follows[heads, MET]
    lists[number, FIRST], lists[number, LAST], lists[number, LENGTH] = -1, -1, 0
    for new in range(used, marks[PIECES]):
        for column in range(NEXT):
            pieces[new, column] = pieces[at, column]
        pieces[new, NEXT], pieces[new, OF_LIST] = -1, number
        _link(pieces, lists, number, new)
        at = pieces[at, NEXT]
    follows[heads, LIST], follows[heads, OWNS] = number, 1
    return True


@lean
def unroll(pieces: Ints, first: int, bands: Ints, end: int) -> int:
    """Writes the bands of a list, from a piece on, into the columns of `bands` from `end` on; where they end."""
    at = first
    while at >= 0:
        for column in range(NEXT):
            bands[column, end] = pieces[at, column]
        at, end = pieces[at, NEXT], end + 1
    return end
