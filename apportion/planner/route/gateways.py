"""Node routing: a tile crosses to every node once, and a gateway there passes it on inside the node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Ints
from apportion.ir.loops.jit import jit, lean, unlocked
from apportion.ir.loops.sorting import counting_order, sort_order
from apportion.planner.route.routes import Routed, RoutePass, Site
from apportion.planner.route.trees import Star
from apportion.planner.tasks.tasks import Edges


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
