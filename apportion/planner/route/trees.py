"""How a tile travels: a tree from its home to the ranks that need it.

    star        home ─► every rank that needs it
    node        home ─► one rank of every other node that needs it ─► the others of that node
    tree        home ─► fanout ranks ─► fanout ranks each ─► …
    ring        home ─► next ─► next ─► …                      ring attention: a tile passes through its neighbours

Gradients of a tile come back by the reverse of its tree and are added up on the way (a reduction tree), or, on a
ring, go on with the tile to its last rank and home from there.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal, Protocol

import numpy as np

from apportion.ir.arrays import Ints, changes, group_of
from apportion.ir.loops.jit import jit, lean, unlocked
from apportion.ir.loops.sorting import counting_order, sort_order
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.planner.options import Count
from apportion.planner.problem import Pass
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Edges, joined


@dataclass(frozen=True)
class Site:
    """Where tiles travel: the attention rows, the sequences in them, and the ranks."""

    rows: Rows
    batch: Batch
    cluster: Cluster


@dataclass(frozen=True)
class Routed:
    """edges: with relays, parents before their children. arrives: int32, for each edge of the star the one that now
    brings its rows. carry: gradients go on along the ring. ring: int32 [edges] members of each edge's ring, where it
    is one. division: int32 [edges], the first part of the phase that needs each edge's rows, where placement has parts.
    onward: int32 [edges], where gradients go on and a tile branches: the edge to whose tile's those of each edge's tile
    are added, -1: to its home rows.
    """

    edges: Edges
    arrives: Ints
    carry: bool = False
    ring: Ints | None = None
    division: Ints | None = None
    onward: Ints | None = None

    @cached_property
    def returns_to(self) -> Ints:
        """int32 [edges]: the edge to whose tile what each edge's tile adds up is added; -1: to its home rows."""
        if not self.carry:
            return self.edges.parent
        if self.onward is not None:
            return self.onward
        following, relays = np.full(len(self.edges), -1, np.int32), np.flatnonzero(self.edges.parent >= 0)
        following[self.edges.parent[relays]] = relays
        return following

    def take(self, order: Ints) -> Routed:
        """The same with its edges in another order, in which parents come before their children."""
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        ring, division = (None if held is None else held[order] for held in (self.ring, self.division))
        onward = self.onward
        if onward is not None:
            onward = np.append(place, np.int32(-1))[onward[order]]  # -1 is the last
        return Routed(self.edges.take(order), place[self.arrives], self.carry, ring, division, onward)


def join(edges: Edges, whole: bool) -> Routed:
    """The star with one tile for rows that lie side by side at home and go to the same rank; whole: with one tile a
    rank, the hull of all rows that leave it."""
    if whole and len(edges):
        leaving = edges.lane * np.int64(int(edges.home.max()) + 1) + edges.home
        key = leaving * (int(edges.dst.max()) + 1) + edges.dst
        _, first, group = np.unique(key, return_index=True, return_inverse=True)
        tiles = _as_tiles(replace(edges, tile=leaving), _numbered(leaving))
        return Routed(tiles.take(first), group.astype(np.int32))
    order = np.lexsort((edges.row, edges.lane, edges.dst, edges.home))
    by = edges.take(order)
    fresh = np.ones(len(order), bool)
    fresh[1:] = (by.home[1:] != by.home[:-1]) | (by.dst[1:] != by.dst[:-1])
    fresh[1:] |= (by.row[1:] != by.row[:-1] + by.rows[:-1]) | (by.lane[1:] != by.lane[:-1])
    first = np.flatnonzero(fresh)
    rows = np.add.reduceat(by.rows, first) if len(first) else by.rows
    joined = replace(by.take(first), tile=np.arange(len(first), dtype=np.int32), rows=rows)
    arrives = np.empty(len(order), np.int32)
    arrives[order] = np.cumsum(fresh) - 1
    return Routed(joined, arrives)


def _numbered(keys: Ints) -> Ints:
    """int64 [n]: equal keys have equal numbers, from 0."""
    return np.unique(keys, return_inverse=True)[1]


class RoutePass(Pass, Protocol):
    """Says how tiles travel. edges: the star, home -> every rank that needs rows, in the order of their tiles.

    rings: tiles go around rings, which bring keys alone. relays: several ranks may share a tile that one of them passes
    on. by_block: tiles must be blocks, whatever the schedule would make of them."""

    rings: ClassVar[bool] = False
    relays: ClassVar[bool] = True

    @property
    def by_block(self) -> bool:
        return False

    @abstractmethod
    def __call__(self, edges: Edges, site: Site) -> Routed: ...


@dataclass(frozen=True)
class Star(RoutePass):
    """Every tile goes straight from its home to each rank that needs it."""

    relays: ClassVar[bool] = False

    def __call__(self, edges: Edges, site: Site) -> Routed:
        return Routed(edges, np.arange(len(edges), dtype=np.int32))


@dataclass(frozen=True)
class KeysOnly(RoutePass):
    """KV rows by a route, query rows, which nobody shares, straight to where they are needed."""

    route: RoutePass

    def __call__(self, edges: Edges, site: Site) -> Routed:
        queries = edges.lane & 1 == 1
        keys, straight = np.flatnonzero(~queries), np.flatnonzero(queries)
        routed = self.route(edges.take(keys), site)
        arrives = np.empty(len(edges), np.int32)
        arrives[keys] = routed.arrives
        arrives[straight] = len(routed.edges) + np.arange(len(straight))
        return Routed(joined(routed.edges, edges.take(straight)), arrives)


@dataclass(frozen=True)
class Node(RoutePass):
    """A tile crosses to every node once; the rank that receives it there, the gateway, passes it on inside the node.

    proxies: whether a rank that does not need the tile may be its gateway, so that the NICs of a node share what one
    busy rank needs (as Zeppelin, section 3.3, routes through proxies). The gateway is the rank that has received the
    fewest rows so, and among ranks within one tile of it one that needs the tile.
    """

    proxies: bool = True

    def __call__(self, edges: Edges, site: Site) -> Routed:
        if not len(edges):
            return Routed(edges, np.zeros(0, np.int32))
        if site.cluster.nodes == 1:
            return Star()(edges, site)
        # tiles keep their order; inside a tile the edges of one node lie side by side
        order = sort_order(edges.dst, site.cluster.ranks)
        order = order[sort_order(edges.tile[order], int(edges.tile.max()) + 1)]
        columns, arrives = _through_gateways(
            order,
            edges.tile,
            edges.home,
            edges.row,
            edges.rows,
            edges.dst,
            edges.lane,
            site.cluster.ranks,
            site.cluster.ranks_per_node,
            self.proxies,
        )
        return Routed(Edges(*columns), arrives)


@unlocked
def _through_gateways(
    order: Ints,
    tile: Ints,
    home: Ints,
    row: Ints,
    rows: Ints,
    dst: Ints,
    lane: Ints,
    ranks: int,
    ranks_per_node: int,
    proxies: bool,
) -> tuple[Ints, Ints]:
    """int32 [8, edges], the columns of `Edges`: those from home, in which one to each gateway carries what its group
    needs, then those that go on from there; int32 [star], which of these each edge of the star is now.

    order: of the star's edges, by tile and receiver. A group is those of one tile to one node."""
    count, groups = len(order), 0
    first, group = np.empty(count + 1, np.int64), np.empty(count, np.int64)
    low, high = np.empty(count, np.int64), np.empty(count, np.int64)
    for at in range(count):
        edge, before = order[at], order[at - 1]
        same = at > 0 and tile[edge] == tile[before]
        if not same or dst[edge] // ranks_per_node != dst[before] // ranks_per_node:
            first[groups], low[groups], high[groups] = at, row[edge], row[edge]
            groups += 1
        group[at] = groups - 1
        low[groups - 1] = min(low[groups - 1], row[edge])
        high[groups - 1] = max(high[groups - 1], row[edge] + rows[edge])
    first[groups] = count
    gate = _gateways(order, first[: groups + 1], home, dst, low, high, ranks, ranks_per_node, proxies)
    # what brings the tile to each gateway: an edge of the star, or behind all from home one to a proxy
    entry, roots, relay = np.full(groups, -1, np.int64), 0, 0
    for at in range(count):
        if gate[group[at]] == dst[order[at]]:
            entry[group[at]] = roots
        roots += gate[group[at]] < 0 or gate[group[at]] == dst[order[at]]
    relay = roots
    for one in range(groups):
        if gate[one] >= 0 and entry[one] < 0:
            entry[one] = relay
            relay += 1
    found, arrives, root = np.empty((8, count + relay - roots), np.int32), np.empty(count, np.int32), 0
    for one in range(groups):
        edge, to = order[first[one]], gate[one]
        if to >= 0 and entry[one] >= roots:
            _put(
                found, entry[one], tile[edge], home[edge], low[one], high[one], home[edge], to, -1, lane[edge]
            )
        for at in range(first[one], first[one + 1]):
            edge = order[at]
            begin, end = row[edge], row[edge] + rows[edge]
            if to >= 0 and to != dst[edge]:
                place, src, parent = relay, to, entry[one]
                relay += 1
            else:
                place, src, parent = root, home[edge], -1
                root += 1
                if to >= 0:
                    begin, end = low[one], high[one]
            _put(found, place, tile[edge], home[edge], begin, end, src, dst[edge], parent, lane[edge])
            arrives[edge] = place
    return found, arrives


@lean
def _put(
    edge: Ints, at: int, tile: int, home: int, row: int, end: int, src: int, dst: int, parent: int, lane: int
) -> None:
    """Writes one of the columns of `Edges`."""
    edge[0, at], edge[1, at], edge[2, at], edge[3, at] = tile, home, row, end - row
    edge[4, at], edge[5, at], edge[6, at], edge[7, at] = src, dst, parent, lane


@jit
def _gateways(
    order: Ints,
    first: Ints,
    home: Ints,
    dst: Ints,
    low: Ints,
    high: Ints,
    ranks: int,
    ranks_per_node: int,
    proxies: bool,
) -> Ints:
    """int64 [groups]: the gateway of each group, the edges order[first[g] : first[g + 1]] of one tile to one node, -1
    where that is its home's; low, high: [g] rows of the tile. Groups of few are served first: where only one rank can
    be the gateway, others must not have used up its turn."""
    gates, sizes = np.full(len(first) - 1, -1, np.int64), first[1:] - first[:-1]
    received = np.zeros(ranks, np.int64)
    for group in counting_order(sizes, sizes.max() + 1):
        begin, end = first[group], first[group + 1]
        gate = dst[order[begin]]
        node = gate // ranks_per_node
        if home[order[begin]] // ranks_per_node == node:
            continue
        for at in range(begin, end):
            if received[dst[order[at]]] < received[gate]:
                gate = dst[order[at]]
        if proxies:
            idle = node * ranks_per_node
            for rank in range(idle, idle + ranks_per_node):
                if received[rank] < received[idle]:
                    idle = rank
            if received[idle] + high[group] - low[group] < received[gate]:
                gate = idle
        gates[group] = gate
        received[gate] += high[group] - low[group]
    return gates


def _relayed(edges: Edges, order: Ints) -> Routed:
    """The edges, roots first; order: the star's edge of each of the first."""
    parent = edges.parent
    relayed = replace(edges, src=np.where(parent < 0, edges.home, edges.dst[parent]).astype(np.int32))
    arrives = np.empty(len(order), np.int32)
    arrives[order] = np.arange(len(order), dtype=np.int32)
    return Routed(relayed, arrives).take(np.argsort(depths(parent), kind="stable"))


@jit
def depths(parent: Ints) -> Ints:
    """int64 [edges]: how many relays each edge comes after; none comes before its parent."""
    depth = np.zeros(len(parent), np.int64)
    for edge in range(len(parent)):
        if parent[edge] >= 0:
            depth[edge] = depth[parent[edge]] + 1
    return depth


@dataclass(frozen=True)
class Tree(RoutePass):
    """Every tile spreads along a tree in which each rank passes it on to `fanout` others: those that need it, in the
    order of ranks from its home on. Parents carry what their children need."""

    fanout: Count = 2

    def __call__(self, edges: Edges, site: Site) -> Routed:
        if not len(edges):
            return Routed(edges, np.zeros(0, np.int32))
        ahead = (edges.dst - edges.home) % site.cluster.ranks
        order = np.lexsort((ahead, edges.tile))
        spread = edges.take(order)
        new = changes(spread.tile)
        first = np.flatnonzero(new)[np.cumsum(new) - 1]
        place = np.arange(len(order)) - first  # 0, 1, .. behind the home
        parent = np.where(place < self.fanout, -1, first + (place - self.fanout) // self.fanout)
        tiles = _as_tiles(spread, np.cumsum(new) - 1)
        return _relayed(replace(tiles, parent=parent.astype(np.int32)), order)


def _as_tiles(edges: Edges, group: Ints) -> Edges:
    """Each edge carries the hull of its group's rows."""
    low, rows = hulls(edges.row, edges.rows, group, int(group.max()) + 1)
    columns = (
        edges.tile,
        edges.home,
        low[group],
        rows[group],
        edges.src,
        edges.dst,
        edges.parent,
        edges.lane,
    )
    return Edges(*(column.astype(np.int32) for column in columns))


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
def hulls(row: Ints, rows: Ints, group: Ints, groups: int) -> tuple[Ints, Ints]:
    """row, rows int64 [groups]: the hull of each group's rows."""
    low, high = np.full(groups, np.int64(2**62)), np.zeros(groups, np.int64)
    for edge in range(len(group)):
        low[group[edge]] = min(low[group[edge]], row[edge])
        high[group[edge]] = max(high[group[edge]], row[edge] + rows[edge])
    return low, high - low


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
