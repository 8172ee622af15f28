"""Divisions: the parts of a phase in which communication for one overlaps computation of the one before (DCP, section
4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion._core import rounds as core
from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError
from apportion.planner.options import Count
from apportion.planner.route.routes import Routed, depths
from apportion.planner.schedule.rounds import Schedule, SchedulePass, degrees


@dataclass(frozen=True)
class Divisions(SchedulePass):
    """A round a division: a tile travels in the first division that needs it; relays follow, a round a level.

    count: T, divisions of a phase (DCP's evaluation uses 4). The first needs no tile. Where the placement says in
    which division each cell is computed, that decides; else the tiles of each pair of ranks are cut into T - 1 parts
    of about equal rows. buffers: divisions whose tiles are under way or in use at a time; with 2, those of the next
    travel while this one is computed. Raises ConfigError.
    """

    count: Count = 4
    buffers: Count = 2

    def __call__(self, routed: Routed, ranks: int) -> Schedule:
        edges = routed.edges
        division = self._even(routed, ranks) if routed.division is None else routed.division
        if len(edges) and int(division.max()) >= max(self.count, 2):
            raise ConfigError(
                "recipe.schedule.divisions.count",
                self.count,
                f"is less than the {int(division.max()) + 1} divisions of the placement",
                "give place and schedule the same number",
            )
        depth = depths(edges.parent)
        levels = 1 + int(depth.max(initial=0))
        keys, round_ = np.unique(division.astype(np.int64) * levels + depth, return_inverse=True)
        return Schedule(
            routed,
            round_.astype(np.int32),
            np.arange(len(keys)),
            np.zeros(len(keys), np.int64),
            degrees(edges, round_, np.arange(len(keys)), ranks),
            self.buffers,
            division=keys // levels,
        )

    def _even(self, routed: Routed, ranks: int) -> Ints:
        """int64 [edges]: divisions from 1 on where no placement gives any; a relay has that of its parent."""
        edges = routed.edges
        parts = max(1, self.count - 1)
        return core.even_parts(edges.parent, edges.src, edges.dst, edges.rows, ranks, parts)
