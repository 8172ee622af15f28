"""The order in which a recurrence goes through a sequence: the predecessor of each token, as masks have it.

A token comes after the one before it; the first of a document after none, the first of a branch after the last of
what it branches from:

    tree           0 1 2 ┬ 3 4         branches   starts    0  3  5  7
                         └ 5 6 ┬ 7                parent   -1  0  0  2
                               └ 8                position  0  3  3  5   (7 and 8: branches 3 and 4)

Where tokens see later ones, or a mask lists its pairs or images, there is no such order.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.masks.spec import ZERO, Columns, Mask, lower_columns
from apportion.ir.masks.structures import Bands, Documents, ImageSpans, SharedQuestion, Slices, Tree

NONE = -1


class Branches(NamedTuple):
    """Ranges of the token axis in which each token comes after the one before it, and none but the last comes before
    any other.

    starts: int64 [n], rising. parent: int64 [n], the branch whose last token comes before its first, or -1; it starts
    earlier. position: int64 [n], tokens that come before its first.
    """

    starts: Ints
    parent: Ints
    position: Ints

    def of(self, tokens: Ints) -> Ints:
        """int64 [m]: the branch of each global token."""
        return np.searchsorted(self.starts, tokens, "right") - 1

    def roots(self) -> Ints:
        """int64 [n]: the branch without parent that each hangs on: its document, or its tree."""
        root = np.where(self.parent < 0, np.arange(len(self.parent)), self.parent)
        while not np.array_equal(above := root[root], root):
            root = above
        return root


def is_ordered(mask: Mask) -> bool:
    """Whether a mask gives tokens an order: none sees a later one, and it is no list of pairs, nor of images."""
    if isinstance(mask, Bands | ImageSpans | Slices):
        return False
    inner = getattr(mask, "mask", None)
    return all(dmin >= 0 for dmin, _ in mask.diagonals()) and (inner is None or is_ordered(inner))


def lower_links(mask: Mask, lengths: Ints, starts: Ints) -> Columns:
    """(tokens, predecessors) of such sequences under an ordered mask: the tokens that do not come after the one before
    them, rising, and what they come after or -1."""
    if not mask.structured:
        return np.sort(starts), np.full(len(starts), NONE)
    return lower_columns(partial(_links, mask), lengths, starts, _moved)


def _moved(predecessors: Ints, offset: Ints) -> Ints:
    return np.where(predecessors < 0, NONE, predecessors + offset)


def _links(mask: Mask, length: int) -> Columns:
    if isinstance(mask, Documents):
        lengths = np.array(mask.lengths, np.int64)
        return lower_links(mask.mask, lengths, np.cumsum(lengths) - lengths)
    if isinstance(mask, SharedQuestion):
        stop = np.cumsum([mask.prompt, *mask.answers])
        parent = np.append(NONE, np.zeros(len(mask.answers), np.int64))
    elif isinstance(mask, Tree):
        parent, size = np.array(mask.nodes, np.int64).T
        stop = np.cumsum(size)
    else:
        return ZERO, ZERO + NONE
    start, before = np.append(0, stop[:-1]), np.where(parent < 0, NONE, stop[parent] - 1)
    apart = (before != start - 1) | (start == 0)
    return start[apart], before[apart]


def branches_of(tokens: Ints, predecessors: Ints, total: int) -> Branches:
    """The branches of links, as `lower_links` gives them, on an axis of `total` tokens."""
    followed = predecessors[predecessors >= 0] + 1
    starts = np.union1d(tokens, followed)
    before = starts - 1
    before[np.searchsorted(starts, tokens)] = predecessors
    parent = np.where(before < 0, NONE, np.searchsorted(starts, before, "right") - 1)
    length = np.diff(starts, append=total)
    above, position = parent, np.where(parent < 0, 0, length[parent])
    while (above >= 0).any():  # doubles how far up each has looked
        position = position + np.where(above < 0, 0, position[above])
        above = np.where(above < 0, NONE, above[above])
    return Branches(starts, parent, position)
