"""Attention of tasks as lists of bands, one per head set; equal lists are stored once.

The walk (`core/ir/verify/lists.hpp`) builds the lists from addresses (`homes.py`). At the end of a program its new
lists are cut into runs of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from apportion._core import verify
from apportion.ir.arrays import Ints
from apportion.ir.masks import bands as algebra
from apportion.ir.verify.attended import Tasks, is_exact, most_pieces, too_many_pieces_error
from apportion.ir.verify.homes import Homes
from apportion.ir.verify.view import HeadSets

_BAND, _LIST = 6, 7  # rows of the array of pieces: the first six are the band, row 7 is the list

MOST_TOKENS = 2**30 - 1  # bands are stored as int32, and sums of two numbers must fit


@dataclass(eq=False)
class Lists:
    """Lists of all programs of one kind. sets: head sets of the query side; mask: int64 [bands, 6]."""

    sets: HeadSets
    homes: Homes
    mask: Ints
    # pieces in global tokens, from all programs so far
    _cut: Ints = field(default_factory=lambda: np.empty((8, 0), np.int64))
    _exact: set[tuple[int, ...]] = field(default_factory=set)

    @cached_property
    def core(self) -> verify.Lists:
        """The compiled collector of the walk."""
        return verify.Lists(len(self.sets.members))

    @property
    def list_of_set(self) -> Ints:
        """int64 [sets]: the list of each set, or -1."""
        return verify.following(self.core)

    def begin(self, tasks: int) -> None:
        """Begins a program of `tasks` tasks; each set is expected to repeat its list from the previous program."""
        self.core.begin(tasks)

    def end(self, tasks: int) -> None:
        """Ends a program of `tasks` tasks and closes the list of each set. Raises CapacityError if lists have too many
        pieces."""
        limit = most_pieces(tasks)
        cut = verify.end(self.core, self.homes.starts, self.homes.tokens, limit)
        if cut is None:
            raise too_many_pieces_error(limit)
        if cut.shape[1]:
            self._cut = np.concatenate([self._cut, cut], axis=1) if self._cut.shape[1] else cut

    @property
    def multiplicities(self) -> Ints:
        """int64 [lists, heads]: the multiplicity of each list in each head."""
        times, following = np.zeros((self.core.count, self.sets.heads), np.int64), self.list_of_set
        for number in np.flatnonzero(following >= 0).tolist():
            times[following[number], self.sets.members[number]] += 1
        return times

    @cached_property
    def _mask_and_area(self) -> tuple[Ints, int]:
        """The mask, int64 [6, bands], and its number of pairs."""
        return np.ascontiguousarray(self.mask.T), int(algebra.area(self.mask).sum())

    def are_exact(self) -> bool:
        """True if the tasks of each head cover the mask exactly. Raises CapacityError for too many bands."""
        times, (mask, area) = self.multiplicities, self._mask_and_area
        if not len(times):
            return area == 0
        for column in {tuple(column) for column in times.T.tolist()}:
            numbers = tuple(number for number, count in enumerate(column) for _ in range(count))
            if numbers not in self._exact:
                if not is_exact(self.bands(numbers), mask, area):
                    return False
                self._exact.add(numbers)
        return True

    def bands(self, numbers: tuple[int, ...]) -> Ints:
        """int64 [6, pieces]: the bands of some lists, in global tokens."""
        if numbers == (0,) and self.core.count == 1:
            return self._cut[:_BAND]
        parts = [self._cut[:_BAND, self._cut[_LIST] == number] for number in numbers]
        return np.concatenate([self._cut[:_BAND, :0], *parts], axis=1)

    def tasks(self) -> Tasks:
        """The pieces of all lists, numbered by list."""
        return Tasks(self._cut[:_BAND], np.zeros(0, np.int64), self._cut[_LIST], True, self.multiplicities)
