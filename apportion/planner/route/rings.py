"""Rings of ranks: over all ranks, or over the holders of a tile's sequences."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np

from apportion.ir.arrays import Ints, changes
from apportion.planner.route.routes import Site
from apportion.planner.tasks.tasks import Edges

#: a ring of all ranks, in which a rank's rows travel as one tile; or rings of the ranks with tokens of a tile's
#: sequences, in which neighbouring blocks of one ring travel as one tile
Over = Literal["ranks", "holders"]


class Rings(NamedTuple):
    """flat, first: the members of ring r are the ascending ranks flat[first[r] : first[r + 1]]; of: int64, the ring of
    each block, or of each edge of a star."""

    flat: Ints
    first: Ints
    of: Ints

    @property
    def sizes(self) -> Ints:
        """int64 [rings]: number of ranks."""
        return np.diff(self.first)


def on_rings(edges: Edges, site: Site, over: Over) -> tuple[Ints, Rings]:
    """The tile of each edge of a star, int64 [edges], and its ring."""
    if over == "ranks":
        ranks = np.arange(site.cluster.ranks)
        return edges.home, Rings(ranks, np.array([0, len(ranks)]), np.zeros(len(edges), np.int64))
    rings, order = find_rings(site), site.rows.order
    tile = np.empty(len(order), np.int64)
    tile[order] = np.cumsum(changes(site.rows.home[order], rings.of[order])) - 1
    return tile[edges.tile], rings._replace(of=rings.of[edges.tile])


def find_rings(site: Site) -> Rings:
    """The ring of each block: the ranks with tokens of its sequences. Equal rings are merged."""
    starts, home, sequences = site.rows.starts, site.rows.home, site.batch.starts
    # only a block's first and last sequence can extend to other blocks
    first = np.searchsorted(sequences, starts[:-1], "right") - 1
    last = np.searchsorted(sequences, starts[1:], "left") - 1
    members, ends = _members(first, last, home, len(sequences), site.rows.ranks)
    is_single = np.diff(ends) == 1
    shared = np.flatnonzero(~(is_single[first] & is_single[last]))
    spans, index = np.unique(first[shared] * len(sequences) + last[shared], return_inverse=True)
    numbers: dict[tuple[int, ...], int] = {(rank,): rank for rank in range(site.rows.ranks)}
    ring_numbers = [
        numbers.setdefault(ranks, len(numbers))
        for ranks in _unions(spans, len(sequences), members.tolist(), ends.tolist())
    ]
    ring = home.astype(np.int64)
    ring[shared] = np.array(ring_numbers, np.int64)[index]
    ring_ranks = np.fromiter(chain.from_iterable(numbers), np.int64)
    return Rings(ring_ranks, np.cumsum([0, *map(len, numbers)]), ring)


def _members(first: Ints, last: Ints, home: Ints, sequences: int, ranks: int) -> tuple[Ints, Ints]:
    """The ascending ranks of each sequence, concatenated, and the start of each."""
    keys = np.unique(np.concatenate([first * ranks + home, last * ranks + home]))
    return keys % ranks, np.searchsorted(keys, np.arange(sequences) * ranks)


def _unions(spans: Ints, sequences: int, members: list[int], ends: list[int]) -> Iterator[tuple[int, ...]]:
    """The ascending ranks of the two sequences of each span, which is encoded as first * sequences + last."""
    for span in spans.tolist():
        a, b = divmod(span, sequences)
        ranks = members[ends[a] : ends[a + 1]]
        yield tuple(ranks if a == b else sorted({*ranks, *members[ends[b] : ends[b + 1]]}))
