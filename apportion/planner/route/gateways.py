"""Node routing: a tile is sent to every node once, and a gateway there forwards it inside the node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion._core import routes as core
from apportion.planner.route.routes import RoutePass, Routes, Site
from apportion.planner.route.trees import Star
from apportion.planner.tasks.tasks import Edges


@dataclass(frozen=True)
class Node(RoutePass):
    """A tile is sent to every node once; the rank that receives it there, the gateway, forwards it inside the node.

    proxies: True if a rank that does not need the tile may be its gateway, so that the NICs of a node share the traffic
    of one busy rank (as Zeppelin, section 3.3, routes through proxies). The gateway is the rank with the fewest
    received rows so far; among ranks within one tile of that number, preferably one that needs the tile.
    """

    proxies: bool = True

    def __call__(self, edges: Edges, site: Site) -> Routes:
        if not len(edges):
            return Routes(edges, np.zeros(0, np.int32))
        if site.cluster.nodes == 1:
            return Star()(edges, site)
        nodes = site.cluster.ranks, site.cluster.ranks_per_node
        columns, arrives = core.through_gateways(edges.star, nodes, self.proxies)
        return Routes(Edges(*columns), arrives)
