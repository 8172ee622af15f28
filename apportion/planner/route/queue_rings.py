"""Rings of the ranks of a sequence, with proxies for hops between nodes (Zeppelin, sections 3.2 and 3.3).

    hop inside a node        u ─────────────────────► v
    hop between nodes        u ──► a ══ NIC ══► b ──► v       a part of the rows over each NIC of the node:
                             dispatch   transfer   combine    a: u and its neighbours, b: v and its neighbours

Neighbouring rows of a rank that pass around the same ring are one tile, or one for each proxy. Gradients continue with
their tile, through the same proxies, and return home from its last rank, as in ring attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from apportion._core import routes as core
from apportion.ir.arrays import Ints, changes
from apportion.planner.problem import Departure
from apportion.planner.route.rings import Rings, find_rings
from apportion.planner.route.routes import RoutePass, Routes, Site
from apportion.planner.tasks.rows import Rows
from apportion.planner.tasks.tasks import Edges

#: queues in execution order: rings over several nodes, rings inside a node, whole sequences
INTER, INTRA, LOCAL = range(3)


@dataclass(frozen=True, kw_only=True)
class QueueRoutes(Routes):
    """Routes in queues. queue: int32 [edges]; depth: int32 [edges], number of earlier edges of the tile; queue_of:
    int32 [blocks], the queue of each block's ring."""

    queue: Ints
    depth: Ints
    queue_of: Ints


@dataclass(frozen=True)
class QueueRings(RoutePass):
    """proxies: number of ranks of a node that share in sending one rank's rows to another node; "auto": all."""

    proxies: int | Literal["auto"] = "auto"
    rings: ClassVar[bool] = True

    @property
    def by_block(self) -> bool:
        return True

    def __call__(self, edges: Edges, site: Site) -> QueueRoutes:
        rings, per_node = find_rings(site), site.cluster.ranks_per_node
        parts = per_node if self.proxies == "auto" else min(self.proxies, per_node)
        queues = _queues(rings, site)
        queue_of = queues[rings.of].astype(np.int32)
        if not len(edges):
            empty = np.zeros(0, np.int32)
            return QueueRoutes(edges, empty, True, empty, queue=empty, depth=empty, queue_of=queue_of)
        tiles = _tiles(site.rows, rings, queues, parts)
        departures = self._departures(tiles[queues[rings.of] == INTER], parts)
        tile, ring = tiles[edges.tile], rings.of[edges.tile]
        (*columns, depth, ring), arrives = core.chains(
            edges.star, tile, ring, parts, (rings.flat, rings.first), per_node
        )
        size, queue = (values.astype(np.int32)[ring] for values in (rings.sizes, queues))
        return QueueRoutes(
            Edges(*columns),
            arrives,
            True,
            size,
            queue=queue,
            depth=depth,
            queue_of=queue_of,
            departures=departures,
        )

    def _departures(self, tiles: Ints, parts: int) -> tuple[Departure, ...]:
        """Departures from the requested number of proxies. tiles: int64 [blocks], of blocks that cross nodes."""
        if self.proxies == "auto" or not len(tiles):
            return ()
        count = len(np.unique(tiles % parts))
        reason = "nodes have no more ranks, or blocks are too coarse"
        departure = Departure("recipe.schedule.queues.proxies", self.proxies, count, reason)
        return (departure,) if count < self.proxies else ()


def _queues(rings: Rings, site: Site) -> Ints:
    """int64 [rings]: the queue of each ring."""
    node = site.cluster.node_of(rings.flat)
    is_inter = node[rings.first[:-1]] != node[rings.first[1:] - 1]
    return np.where(is_inter, INTER, np.where(rings.sizes > 1, INTRA, LOCAL))


def _tiles(rows: Rows, rings: Rings, queues: Ints, parts: int) -> Ints:
    """int64 [blocks]: the tile of each block; adjacent blocks on one rank and ring share one. Tiles of rings between
    nodes are divided into up to `parts` of similar size, tile t being part t % parts."""
    order = rows.order
    home, ring, lengths = rows.home[order], rings.of[order], rows.lengths[order]
    is_first = changes(home, ring)
    first, run = np.flatnonzero(is_first), np.cumsum(is_first) - 1
    middle = np.cumsum(lengths) - (lengths + 1) // 2
    tile_row = np.cumsum(lengths)[first] - lengths[first]
    total = np.add.reduceat(lengths, first)
    part = np.where(queues[ring] == INTER, (middle - tile_row[run]) * parts // total[run], 0)
    tile = np.empty(len(order), np.int64)
    tile[order] = run * parts + part
    return tile
