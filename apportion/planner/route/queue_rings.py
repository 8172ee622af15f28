"""Rings of the ranks that hold a sequence, and proxies for their hops between nodes (Zeppelin, sections 3.2 and 3.3).

    hop inside a node        u ─────────────────────► v
    hop between nodes        u ──► a ══ NIC ══► b ──► v       a part of the rows over each NIC of the node:
                             dispatch   transfer   combine    a: u and its neighbours, b: v and its neighbours

Neighbouring rows of a rank that pass around the same ring are one tile, or one for each proxy. Gradients go on with
their tile, through the same proxies, and home from its last rank, as in ring attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, NamedTuple

import numpy as np

from apportion.ir.arrays import Ints, changes
from apportion.ir.loops.jit import jit
from apportion.planner.route.routes import Routed, RoutePass, Site
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Edges

#: queues in the order in which they run: rings over several nodes, rings inside a node, whole sequences
INTER, INTRA, LOCAL = range(3)


@dataclass(frozen=True, kw_only=True)
class Queued(Routed):
    """queue: int32 [edges]; depth: int32 [edges], how many edges each one's tile has travelled before; held: int32
    [blocks], the queue of each block's ring."""

    queue: Ints
    depth: Ints
    held: Ints


class Rings(NamedTuple):
    """flat, first: the members of ring r are the rising ranks flat[first[r] : first[r + 1]]; of: int64 [blocks], the
    ring of each block; queue: int64 [rings]."""

    flat: Ints
    first: Ints
    of: Ints
    queue: Ints


@dataclass(frozen=True)
class QueueRings(RoutePass):
    """proxies: how many ranks of a node share what one sends to another node."""

    proxies: int = 1
    rings: ClassVar[bool] = True

    @property
    def by_block(self) -> bool:
        return True

    def __call__(self, edges: Edges, site: Site) -> Queued:
        rings, parts = find_rings(site), min(self.proxies, site.cluster.ranks_per_node)
        held = rings.queue[rings.of].astype(np.int32)
        if not len(edges):
            none = np.zeros(0, np.int32)
            return Queued(edges, none, True, none, queue=none, depth=none, held=held)
        numbers, tile = np.unique(_tiles(site.rows, rings, parts)[edges.tile], return_inverse=True)
        star = (edges.home, edges.row, edges.rows, edges.dst, edges.tile)
        per_node, part = site.cluster.ranks_per_node, numbers % parts
        hops, arrives = _chains(star, tile, part, parts, rings.of, rings.flat, rings.first, per_node)
        columns = (*hops[:7], np.zeros_like(hops[0]))
        size, queue = (values.astype(np.int32)[hops[8]] for values in (np.diff(rings.first), rings.queue))
        return Queued(Edges(*columns), arrives, True, size, queue=queue, depth=hops[7], held=held)


def find_rings(site: Site) -> Rings:
    """The ring of a block: the ranks that hold tokens of its sequences. Equal rings are one."""
    starts, home, sequences = site.rows.starts, site.rows.home, site.batch.starts
    # only a block's first and last sequence can reach into another
    first = np.searchsorted(sequences, starts[:-1], "right") - 1
    last = np.searchsorted(sequences, starts[1:], "left") - 1
    members, ends = _members(first, last, home, len(sequences), site.rows.ranks)
    lone = np.diff(ends) == 1
    shared = np.flatnonzero(~(lone[first] & lone[last]))
    spans, place = np.unique(first[shared] * len(sequences) + last[shared], return_inverse=True)
    names: dict[tuple[int, ...], int] = {(rank,): rank for rank in range(site.rows.ranks)}
    of_span = [
        names.setdefault(held, len(names))
        for held in _unions(spans, len(sequences), members.tolist(), ends.tolist())
    ]
    ring = home.astype(np.int64)
    ring[shared] = np.array(of_span, np.int64)[place]
    bounds = np.cumsum([0, *map(len, names)])
    flat = np.fromiter(chain.from_iterable(names), np.int64, int(bounds[-1]))
    node = site.cluster.node_of(flat)
    crosses = node[bounds[:-1]] != node[bounds[1:] - 1]
    return Rings(flat, bounds, ring, np.where(crosses, INTER, np.where(np.diff(bounds) > 1, INTRA, LOCAL)))


def _members(first: Ints, last: Ints, home: Ints, sequences: int, ranks: int) -> tuple[Ints, Ints]:
    """The rising ranks of each sequence, one after another, and where those of each begin."""
    keys = np.unique(np.concatenate([first * ranks + home, last * ranks + home]))
    return keys % ranks, np.searchsorted(keys, np.arange(sequences) * ranks)


def _unions(spans: Ints, sequences: int, members: list[int], ends: list[int]) -> Iterator[tuple[int, ...]]:
    """The rising ranks of the two sequences of each span, which is first * sequences + last."""
    for span in spans.tolist():
        a, b = divmod(span, sequences)
        held = members[ends[a] : ends[a + 1]]
        yield tuple(held if a == b else sorted({*held, *members[ends[b] : ends[b + 1]]}))


def _tiles(rows: Rows, rings: Rings, parts: int) -> Ints:
    """int64 [blocks]: the tile of each, one for neighbours in a rank's rows that are on one ring. Those on rings
    between nodes are divided into up to `parts` of about as many rows, tile t being part t % parts."""
    order = rows.order
    home, ring, lengths = rows.home[order], rings.of[order], rows.lengths[order]
    fresh = changes(home, ring)
    first, run = np.flatnonzero(fresh), np.cumsum(fresh) - 1
    middle = np.cumsum(lengths) - (lengths + 1) // 2
    begin = np.cumsum(lengths)[first] - lengths[first]
    total = np.add.reduceat(lengths, first)
    part = np.where(rings.queue[ring] == INTER, (middle - begin[run]) * parts // total[run], 0)
    tile = np.empty(len(order), np.int64)
    tile[order] = run * parts + part
    return tile


@jit
def _chains(
    star: tuple[Ints, Ints, Ints, Ints, Ints],
    tile: Ints,
    part: Ints,
    parts: int,
    ring: Ints,
    flat: Ints,
    first: Ints,
    ranks_per_node: int,
) -> tuple[Ints, Ints]:
    """The way of every tile around its ring, as far as the last rank that needs it: int32 [9, edges], the columns of
    `Edges` but for the lane, then depth and ring; and int32 [star], the edge that now brings each edge of the star.

    star: home, row, rows, dst, block of its edges; tile: [star]; part: [tiles]; ring: [blocks].
    """
    tiles = len(part)
    ends, ahead = _reach(star, tile, tiles, ring, flat, first)
    edges = np.empty((9, 3 * ends[2].sum()), np.int32)
    arrival = np.empty((tiles, ends[2].max() + 1), np.int32)
    count = 0
    for t in range(tiles):
        low, high, hops, home, r = ends[:, t]
        members = flat[first[r] : first[r + 1]]
        at, parent, depth = np.searchsorted(members, home), -1, 0
        for hop in range(hops):
            u, v = members[(at + hop) % len(members)], members[(at + hop + 1) % len(members)]
            path = _path(u, v, ranks_per_node, part[t], parts)
            for step in range(3):
                if path[step] == path[step + 1]:
                    continue
                edges[0, count], edges[1, count], edges[2, count], edges[3, count] = t, home, low, high - low
                edges[4, count], edges[5, count], edges[6, count] = path[step], path[step + 1], parent
                edges[7, count], edges[8, count] = depth, r
                parent, depth, count = count, depth + 1, count + 1
            arrival[t, hop + 1] = parent
    arrives = np.empty(len(tile), np.int32)
    for edge in range(len(tile)):
        arrives[edge] = arrival[tile[edge], ahead[edge]]
    return edges[:, :count].copy(), arrives


@jit
def _reach(
    star: tuple[Ints, Ints, Ints, Ints, Ints], tile: Ints, tiles: int, ring: Ints, flat: Ints, first: Ints
) -> tuple[Ints, Ints]:
    """int64 [5, tiles]: the hull of each tile's rows, its hops, home and ring; int64 [star]: hops to each receiver."""
    ends, ahead = np.zeros((5, tiles), np.int64), np.zeros(len(tile), np.int64)
    ends[0] = 2**62
    for edge in range(len(tile)):
        t, r = tile[edge], ring[star[4][edge]]
        members = flat[first[r] : first[r + 1]]
        steps = np.searchsorted(members, star[3][edge]) - np.searchsorted(members, star[0][edge])
        ahead[edge] = steps % len(members)
        ends[0, t] = min(ends[0, t], star[1][edge])
        ends[1, t] = max(ends[1, t], star[1][edge] + star[2][edge])
        ends[2, t] = max(ends[2, t], ahead[edge])
        ends[3, t], ends[4, t] = star[0][edge], r
    return ends, ahead


@jit
def _path(u: int, v: int, ranks_per_node: int, part: int, parts: int) -> tuple[int, int, int, int]:
    """The ranks that a part passes on a hop: u, a, b, v (see above); where u and v share a node, u, u, v, v."""
    if u // ranks_per_node == v // ranks_per_node:
        return u, u, v, v
    ahead = part * ranks_per_node // parts
    a = u - u % ranks_per_node + (u + ahead) % ranks_per_node
    b = v - v % ranks_per_node + (v + ahead) % ranks_per_node
    return u, a, b, v
