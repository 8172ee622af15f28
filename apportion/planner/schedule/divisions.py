"""Divisions: the parts of a phase in which communication for one overlaps computation of the one before (DCP, section
4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Bools, Ints
from apportion.ir.errors import ConfigError
from apportion.ir.loops.jit import jit
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
        root = edges.parent < 0
        pair = edges.src.astype(np.int64) * ranks + edges.dst
        division = _parts(np.unique(pair, return_inverse=True)[1], edges.rows, root, max(1, self.count - 1))
        for edge in np.flatnonzero(~root):
            division[edge] = division[edges.parent[edge]]
        return division


@jit
def _parts(pair: Ints, rows: Ints, root: Bools, parts: int) -> Ints:
    """int64 [edges]: in which of so many equal parts of its pair's rows each edge begins, from 1 on."""
    total, before = np.zeros(len(pair), np.int64), np.zeros(len(pair), np.int64)
    for edge in range(len(pair)):
        if root[edge]:
            total[pair[edge]] += rows[edge]
    division = np.ones(len(pair), np.int64)
    for edge in range(len(pair)):
        if root[edge]:
            division[edge] = 1 + before[pair[edge]] * parts // total[pair[edge]]
            before[pair[edge]] += rows[edge]
    return division
