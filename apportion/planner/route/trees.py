"""Tree routes of tiles from their homes to the ranks that need them.

    star        home ─► every rank that needs it
    node        home ─► one rank of every other node that needs it ─► the others of that node   (`gateways`)
    tree        home ─► fanout ranks ─► fanout ranks each ─► …
    ring        home ─► next ─► next ─► …      ring attention: a tile passes through its neighbours   (`ring`)

Gradients of a tile return along the reversed tree and are summed on the way (a reduction tree), or, in a ring, continue
with the tile to its last rank and return home from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from apportion.ir.arrays import Ints, changes
from apportion.planner.options import Count
from apportion.planner.route.routes import RoutePass, Routes, Site, as_tiles, depths
from apportion.planner.tasks.tasks import Edges, join_edges


@dataclass(frozen=True)
class Star(RoutePass):
    """Every tile goes straight from its home to each rank that needs it."""

    relays: ClassVar[bool] = False

    def __call__(self, edges: Edges, site: Site) -> Routes:
        return Routes(edges, np.arange(len(edges), dtype=np.int32))


@dataclass(frozen=True)
class KeyRoutes(RoutePass):
    """Routes KV rows by another pass; query rows, which are never shared, go straight to their destinations."""

    route: RoutePass

    def __call__(self, edges: Edges, site: Site) -> Routes:
        queries = edges.lane & 1 == 1
        keys, query_index = np.flatnonzero(~queries), np.flatnonzero(queries)
        routes = self.route(edges.take(keys), site)
        arrives = np.empty(len(edges), np.int32)
        arrives[keys] = routes.arrives
        arrives[query_index] = len(routes.edges) + np.arange(len(query_index))
        return Routes(join_edges(routes.edges, edges.take(query_index)), arrives)


def _add_relays(edges: Edges, order: Ints) -> Routes:
    """Routes with relays, roots first. order: for each edge, the star's edge whose rows it delivers."""
    parent = edges.parent
    relayed = replace(edges, src=np.where(parent < 0, edges.home, edges.dst[parent]).astype(np.int32))
    arrives = np.empty(len(order), np.int32)
    arrives[order] = np.arange(len(order), dtype=np.int32)
    return Routes(relayed, arrives).take(np.argsort(depths(parent), kind="stable"))


@dataclass(frozen=True)
class Tree(RoutePass):
    """Every tile spreads along a tree of the ranks that need it, in rank order from its home on, in which each rank
    forwards it to `fanout` others. Edges also carry the rows that descendants need."""

    fanout: Count = 2

    def __call__(self, edges: Edges, site: Site) -> Routes:
        if not len(edges):
            return Routes(edges, np.zeros(0, np.int32))
        distance = (edges.dst - edges.home) % site.cluster.ranks
        order = np.lexsort((distance, edges.tile))
        sorted_edges = edges.take(order)
        is_first = changes(sorted_edges.tile)
        first = np.flatnonzero(is_first)[np.cumsum(is_first) - 1]
        position = np.arange(len(order)) - first  # 0, 1, .. after the home
        parent = np.where(position < self.fanout, -1, first + (position - self.fanout) // self.fanout)
        tiles = as_tiles(sorted_edges, np.cumsum(is_first) - 1)
        return _add_relays(replace(tiles, parent=parent.astype(np.int32)), order)
