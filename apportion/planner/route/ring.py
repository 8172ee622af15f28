"""Ring attention: tiles pass from rank to rank around a ring of all ranks, or of those that hold their sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from apportion.ir.arrays import Ints, group_of
from apportion.ir.loops.jit import jit
from apportion.planner.route.routes import Routed, RoutePass, Site, hulls
from apportion.planner.tasks.tasks import Edges


@dataclass(frozen=True)
class Ring(RoutePass):
    """Tiles pass from rank to rank, each as far as the last rank that needs it.

    over: "ranks", a ring of all ranks, on which a rank's rows travel as one tile; or "holders", a ring of the ranks
    that hold tokens of the tile's sequences, on which neighbouring blocks of one ring travel as one tile.
    """

    over: Literal["ranks", "holders"] = "ranks"
    rings: ClassVar[bool] = True

    @property
    def by_block(self) -> bool:
        """Whether tiles must be blocks, because the ring is that of the block's sequences."""
        return self.over == "holders"

    def __call__(self, edges: Edges, site: Site) -> Routed:
        if not len(edges):
            return Routed(edges, np.zeros(0, np.int32), carry=True, ring=np.zeros(0, np.int32))
        if self.over == "ranks":
            members = np.arange(site.cluster.ranks)
            return _chains(edges, edges.home, np.zeros(site.cluster.ranks, np.int64), [members])
        tile, ring, rings = holders(site)
        return _chains(edges, tile[edges.tile], ring, rings)


def _chains(edges: Edges, tile: Ints, ring: Ints, rings: list[Ints]) -> Routed:
    """Chains of the tiles; tile: [edges] of the star; ring: [tiles] which of `rings` (sorted ranks) each is on."""
    ids, first, group = np.unique(tile, return_index=True, return_inverse=True)
    home = edges.home[first]
    low, rows = hulls(edges.row, edges.rows, group, len(ids))
    size = np.array([len(members) for members in rings])[ring[ids]]
    flat, base = np.concatenate(rings), np.cumsum([0, *(len(members) for members in rings)])[ring[ids]]
    start = np.array(
        [np.searchsorted(rings[r], h) for r, h in zip(ring[ids].tolist(), home.tolist(), strict=True)]
    )
    at = index_on_ring(flat, base[group], size[group], edges.dst)
    steps = (at - start[group]) % size[group]  # 1, 2, .. hops from home
    hops = largest(steps, group, len(ids))
    begin = np.cumsum(hops) - hops
    of = group_of(hops)
    hop = np.arange(len(of)) - begin[of]
    src, dst = (flat[base[of] + (start[of] + hop + step) % size[of]] for step in (0, 1))
    parent = np.where(hop == 0, -1, np.arange(len(of)) - 1)
    columns = (ids[of], home[of], low[of], rows[of], src, dst, parent, np.zeros_like(of))
    arrives = (begin[group] + steps - 1).astype(np.int32)
    routed = Edges(*(column.astype(np.int32) for column in columns))
    return Routed(routed, arrives, carry=True, ring=size[of].astype(np.int32))


@jit
def largest(values: Ints, group: Ints, groups: int) -> Ints:
    """int64 [groups]: the largest value of each group, 0 for none."""
    most = np.zeros(groups, np.int64)
    for edge in range(len(group)):
        most[group[edge]] = max(most[group[edge]], values[edge])
    return most


@jit
def index_on_ring(flat: Ints, base: Ints, size: Ints, rank: Ints) -> Ints:
    """Where `rank` stands on its ring, the sorted flat[base : base + size]."""
    index = np.empty(len(rank), np.int64)
    for i in range(len(rank)):
        index[i] = np.searchsorted(flat[base[i] : base[i] + size[i]], rank[i])
    return index


def holders(site: Site) -> tuple[Ints, Ints, list[Ints]]:
    """tile int64 [blocks]: neighbours in a rank's rows that are on one ring share a tile; ring int64 [tiles]; rings."""
    numbers: dict[tuple[int, ...], int] = {}
    ring = np.array([numbers.setdefault(members, len(numbers)) for members in _members(site)], np.int64)
    rows = site.rows
    order, home = rows.order, rows.home[rows.order]
    fresh = np.append(True, (home[1:] != home[:-1]) | (ring[order][1:] != ring[order][:-1]))
    tile = np.empty(len(order), np.int64)
    tile[order] = np.cumsum(fresh) - 1
    return tile, ring[order[fresh]], [np.array(members) for members in numbers]


def _members(site: Site) -> list[tuple[int, ...]]:
    """For each block the ranks that hold tokens of its sequences."""
    starts, home, sequences = site.rows.starts, site.rows.home.tolist(), site.batch.starts
    first = (np.searchsorted(sequences, starts[:-1], "right") - 1).tolist()
    last = (np.searchsorted(sequences, starts[1:], "left") - 1).tolist()
    held: dict[int, set[int]] = {}
    for block, rank in enumerate(home):
        # only a block's first and last sequence can reach into another
        for sequence in {first[block], last[block]}:
            held.setdefault(sequence, set()).add(rank)
    sorted_ranks = {sequence: tuple(sorted(ranks)) for sequence, ranks in held.items()}
    return [
        sorted_ranks[a] if a == b else tuple(sorted({*sorted_ranks[a], *sorted_ranks[b]}))
        for a, b in zip(first, last, strict=True)
    ]
