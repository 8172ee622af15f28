"""Ring attention: tiles pass from rank to rank around a ring of all ranks, or of their sequences' holders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from apportion._core import routes as core
from apportion.planner.route.rings import Over, on_rings
from apportion.planner.route.routes import RoutePass, Routes, Site
from apportion.planner.tasks.tasks import Edges


@dataclass(frozen=True)
class Ring(RoutePass):
    """Tiles pass from rank to rank, each as far as the last rank that needs it.

    over: "ranks", a ring of all ranks, in which a rank's rows travel as one tile; or "holders", a ring of the ranks
    with tokens of the tile's sequences, in which neighbouring blocks of one ring travel as one tile.
    """

    over: Over = "ranks"
    rings: ClassVar[bool] = True

    @property
    def by_block(self) -> bool:
        """True if tiles must be blocks, because rings depend on the block's sequences."""
        return self.over == "holders"

    def __call__(self, edges: Edges, site: Site) -> Routes:
        if not len(edges):
            return Routes(edges, np.zeros(0, np.int32), carry=True, ring=np.zeros(0, np.int32))
        tile, rings = on_rings(edges, site, self.over)
        per_node = site.cluster.ranks_per_node
        (*columns, _, ring), arrives = core.chains(
            edges.star, tile, rings.of, 1, (rings.flat, rings.first), per_node
        )
        return Routes(Edges(*columns), arrives, carry=True, ring=rings.sizes.astype(np.int32)[ring])
