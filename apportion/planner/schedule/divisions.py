"""Divisions: parts of a phase; communication for each overlaps computation of the previous one (DCP, section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion._core import rounds as core
from apportion.ir.arrays import Ints
from apportion.ir.errors import ConfigError
from apportion.planner.options import Count
from apportion.planner.route.routes import Routes, depths
from apportion.planner.schedule.rounds import Schedule, SchedulePass, rounds_by_turn


@dataclass(frozen=True)
class Divisions(SchedulePass):
    """One round per division: a tile travels in the first division that needs it; relays follow, one round per level.

    count: T, divisions of a phase (DCP's evaluation uses 4). The first needs no tile. The placement's divisions of
    cells are used if it has them; else the tiles of each pair of ranks are cut into T - 1 parts of similar size.
    buffers: divisions whose tiles are in flight or in use at a time; with 2, the next division's tiles travel while
    this one is computed. Raises ConfigError.
    """

    count: Count = 4
    buffers: Count = 2

    def __call__(self, routed: Routes, ranks: int) -> Schedule:
        edges = routed.edges
        division = self._even_divisions(routed, ranks) if routed.division is None else routed.division
        if len(edges) and int(division.max()) >= max(self.count, 2):
            raise ConfigError(
                "recipe.schedule.divisions.count",
                self.count,
                f"is less than the {int(division.max()) + 1} divisions of the placement",
                "give place and schedule the same number",
            )
        depth = depths(edges.parent)
        levels = 1 + int(depth.max(initial=0))
        turn = division.astype(np.int64) * levels + depth
        return rounds_by_turn(routed, turn, ranks, self.buffers, division=np.unique(turn) // levels)

    def _even_divisions(self, routed: Routes, ranks: int) -> Ints:
        """int64 [edges]: divisions from 1 on for placements without divisions; a relay has its parent's division."""
        edges = routed.edges
        parts = max(1, self.count - 1)
        return core.even_parts(edges.parent, edges.src, edges.dst, edges.rows, ranks, parts)
