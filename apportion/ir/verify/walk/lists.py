"""What tasks attend to, as lists of bands: of each head set one, and equal ones kept once.

    set 0   A B C D ..          list 0   A B C D ..
    set 1   A B C D ..    ──►   set 0 ── list 0, set 1 ── list 0, set 2 ── list 1
    set 2   A B X ..            list 1   A B X ..

The members of a group that splits heads attend to the same bands, and backward to those of forward. So a set *follows*
a list, band by band, as long as it goes on alike, and its bands are not kept again: what a plan of many tasks takes is
what one member has of them. A set that goes on otherwise gets a list of its own, from its first band on.

Bands are of addresses (`homes.py`), and cut into runs of tokens when a program ends: those of new lists only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.loops.jit import inlined, lean
from apportion.ir.masks import bands as algebra
from apportion.ir.verify.attended import Tasks, cut_bands, is_exact
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.view import HeadSets

# columns of a piece behind its band: the next of its list, -1 behind the last; the list
NEXT, OF_LIST = 6, 7
# columns of a list: its first and last piece, how many it has
FIRST, LAST, LENGTH = range(3)
# columns of a head set: its list, -1 for none; the last piece of it that was met and how many; 1 where it goes on there
LIST, AT, MET, OWNS = range(4)
# marks: pieces and lists in use
PIECES, LISTS = range(2)

MOST_TOKENS = 2**30 - 1  # bands are kept as int32, and sums of two fit
_ROOM, _MOST_ROOM = 2**14, 2**21  # of pieces, at first


@dataclass(eq=False)
class Lists:
    """Those of the programs of one kind, by address (`homes.py`). sets: of the query side; pieces: int32 [room, 8];
    lists: int64 [lists, 3]; follows: int64 [sets, 4]; marks: int64 [2]; cut: int64 [8, pieces], those of the programs
    so far by token, NEXT and OF_LIST behind them."""

    sets: HeadSets
    homes: Homes
    mask: Ints  # int64 [bands, 6]
    _pieces: Ints = field(default_factory=lambda: np.empty((_ROOM, 8), np.int32))
    _cut: Ints = field(default_factory=lambda: np.empty((8, 0), np.int64))
    _exact: set[tuple[int, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        sets = len(self.sets.members)
        self._lists = np.zeros((4 * sets, 3), np.int64)
        self._follows = np.full((sets, 4), -1, np.int64)
        self._marks = np.zeros(2, np.int64)
        self._pieces_cut = 0

    @property
    def columns(self) -> tuple[Ints, ...]:
        """What `list_band` takes, in its order."""
        return self._pieces, self._lists, self._follows, self._marks

    @property
    def following(self) -> Ints:
        """int64 [sets]: the list of each set, -1 for none."""
        return self._follows[:, LIST].copy()

    def begin(self, tasks: int) -> None:
        """A program of so many tasks begins: each set is expected to have what it had in the one before."""
        if not self._marks[PIECES] and tasks > len(self._pieces):
            self._pieces = np.empty((min(tasks, _MOST_ROOM), 8), np.int32)
        follows = self._follows
        follows[:, AT], follows[:, MET], follows[:, OWNS] = -1, 0, 0
        if self._marks[LISTS] + len(follows) > len(self._lists):
            self._lists = np.concatenate([self._lists, np.zeros_like(self._lists)])

    def grow(self, more: int = 1) -> None:
        """Makes room for so many pieces more, and some."""
        used = int(self._marks[PIECES])
        pieces = np.empty((2 * used + more + _ROOM, 8), np.int32)
        pieces[:used] = self._pieces[:used]
        self._pieces = pieces

    def end(self, tasks: int) -> None:
        """A program of so many tasks ends: what a set has is a whole list. Raises CapacityError where they have too
        many pieces."""
        follows = self._follows
        follows[follows[:, MET] == 0, LIST] = -1
        for one in np.flatnonzero((follows[:, LIST] >= 0) & (follows[:, OWNS] == 0)).tolist():
            if follows[one, MET] < self._lists[follows[one, LIST], LENGTH]:
                self.grow(int(follows[one, MET]))
                fork(self._pieces, self._lists, follows, self._marks, one)
        first, self._pieces_cut = self._pieces_cut, int(self._marks[PIECES])
        if first < self._pieces_cut:
            cut = cut_bands(self._pieces[first : self._pieces_cut], self.homes, tasks)
            self._cut = np.concatenate([self._cut, cut], axis=1) if first else cut

    @property
    def times(self) -> Ints:
        """int64 [lists, heads]: how often each head has each list."""
        times = np.zeros((int(self._marks[LISTS]), self.sets.heads), np.int64)
        for one in np.flatnonzero(self._follows[:, LIST] >= 0).tolist():
            times[self._follows[one, LIST], self.sets.members[one]] += 1
        return times

    @cached_property
    def _allowed(self) -> tuple[Ints, int]:
        """The mask, int64 [6, bands], and its pairs."""
        return np.ascontiguousarray(self.mask.T), int(algebra.area(self.mask).sum())

    def are_exact(self) -> bool:
        """Whether the tasks of each head cover the mask exactly. Raises CapacityError for too many bands."""
        times, (mask, area) = self.times, self._allowed
        if not len(times):
            return area == 0
        for column in {tuple(column) for column in times.T.tolist()}:
            numbers = tuple(number for number, often in enumerate(column) for _ in range(often))
            if numbers not in self._exact:
                if not is_exact(self.bands(numbers), mask, area):
                    return False
                self._exact.add(numbers)
        return True

    def bands(self, numbers: tuple[int, ...]) -> Ints:
        """int64 [6, pieces] of some lists, by token."""
        if numbers == (0,) and self._marks[LISTS] == 1:
            return self._cut[:NEXT]
        chosen = [self._cut[:NEXT, self._cut[OF_LIST] == number] for number in numbers]
        return np.concatenate([self._cut[:NEXT, :0], *chosen], axis=1)

    def tasks(self) -> Tasks:
        """The pieces of all lists, which heads have in turn."""
        return Tasks(self._cut[:NEXT], np.zeros(0, np.int64), self._cut[OF_LIST], True, self.times)


@inlined
def list_band(
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
    """Lists a band of addresses of a head set; False where there is no room."""
    number, at = follows[heads, LIST], follows[heads, AT]
    if at >= 0:
        at = pieces[at, NEXT]  # of a list that goes on there, none
    elif number >= 0:
        at = lists[number, FIRST]
    if at >= 0 and _is(pieces, at, q0, q1, k0, k1, dmin, dmax):
        follows[heads, AT] = at
        follows[heads, MET] += 1
        return True
    if marks[PIECES] == len(pieces):
        return False
    if number >= 0 and not follows[heads, OWNS]:
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
    follows[heads, AT] = at
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
    follows[heads, LIST], follows[heads, AT], follows[heads, OWNS] = number, marks[PIECES] - 1, 1
    return True
