"""Order of recurrent layers over a sequence: the predecessor of each token under the mask.

A token follows the previous one, but the first of a document follows none, and the first of a branch follows the last
of its parent:

    tree           0 1 2 ┬ 3 4         branches   starts    0  3  5  7  8
                         └ 5 6 ┬ 7                parent   -1  0  0  2  2
                               └ 8                position  0  3  3  5  5

Masks that let tokens see later ones, or that list pairs or images, have no such order.
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
    """Ranges of the token axis in which each token follows the previous one and only the last has followers elsewhere.

    starts: int64 [n], ascending. parent: int64 [n], the branch whose last token precedes this one's first, or -1;
    always an earlier branch. position: int64 [n], number of tokens before it on the path from the root.
    """

    starts: Ints
    parent: Ints
    position: Ints

    def of(self, tokens: Ints) -> Ints:
        """int64 [m]: the branch of each global token."""
        return np.searchsorted(self.starts, tokens, "right") - 1

    def roots(self) -> Ints:
        """int64 [n]: the root of each branch, the start of its document or tree."""
        root = np.where(self.parent < 0, np.arange(len(self.parent)), self.parent)
        while not np.array_equal(parents := root[root], root):
            root = parents
        return root


def is_ordered(mask: Mask) -> bool:
    """True if a mask orders tokens: no token sees a later one, and the mask lists neither pairs nor images."""
    if isinstance(mask, Bands | ImageSpans | Slices):
        return False
    inner = getattr(mask, "mask", None)
    return all(dmin >= 0 for dmin, _ in mask.diagonals()) and (inner is None or is_ordered(inner))


def lower_links(mask: Mask, lengths: Ints, starts: Ints) -> Columns:
    """(tokens, predecessors) of sequences under an ordered mask: the tokens that do not follow the previous one,
    ascending, and their predecessors or -1."""
    if not mask.structured:
        return np.sort(starts), np.full(len(starts), NONE)
    return lower_columns(partial(_links, mask), lengths, starts, _shift)


def _shift(predecessors: Ints, offset: Ints) -> Ints:
    return np.where(predecessors < 0, NONE, predecessors + offset)


def _links(mask: Mask, length: int) -> Columns:
    if isinstance(mask, Documents):
        lengths = np.array(mask.lengths, np.int64)
        return lower_links(mask.mask, lengths, np.cumsum(lengths) - lengths)
    if isinstance(mask, SharedQuestion):
        end = np.cumsum([mask.prompt, *mask.answers])
        parent = np.append(NONE, np.zeros(len(mask.answers), np.int64))
    elif isinstance(mask, Tree):
        parent, size = np.array(mask.nodes, np.int64).T
        end = np.cumsum(size)
    else:
        return ZERO, ZERO + NONE
    start, previous = np.append(0, end[:-1]), np.where(parent < 0, NONE, end[parent] - 1)
    is_break = (previous != start - 1) | (start == 0)
    return start[is_break], previous[is_break]


def branches_of(tokens: Ints, predecessors: Ints, total: int) -> Branches:
    """The branches for links, as `lower_links` returns them, on an axis of `total` tokens."""
    successors = predecessors[predecessors >= 0] + 1
    starts = np.union1d(tokens, successors)
    previous = starts - 1
    previous[np.searchsorted(starts, tokens)] = predecessors
    parent = np.where(previous < 0, NONE, np.searchsorted(starts, previous, "right") - 1)
    length = np.diff(starts, append=total)
    ancestor, position = parent, np.where(parent < 0, 0, length[parent])
    while (ancestor >= 0).any():  # pointer doubling up the tree
        position = position + np.where(ancestor < 0, 0, position[ancestor])
        ancestor = np.where(ancestor < 0, NONE, ancestor[ancestor])
    return Branches(starts, parent, position)
