"""Three queues in order: rings between nodes, rings inside a node, whole sequences (Zeppelin, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from apportion.ir.errors import ConfigError
from apportion.planner.options import Count
from apportion.planner.route.queue_rings import QueueRings, QueueRoutes
from apportion.planner.route.routes import Routes
from apportion.planner.schedule.rounds import Local, Schedule, SchedulePass, rounds_by_turn


@dataclass(frozen=True)
class Queues(SchedulePass):
    """Every rank runs its rings between nodes, then those inside its node, then, without communication, its whole
    sequences. In a ring each hop is a round, computed while the next is in flight; the rank's own keys come first.

    proxies: number of parts of a hop between nodes, each sent by a different rank of the node, over all NICs. Parts go
    to the proxies one round before, and from their counterparts to the receiver one round after (section 3.3). All
    tiles travel at once, so a tile from another node arrives two rounds later, and those after it round by round.
    "auto": the GPUs of a node, the paper's x1 = x2; 1: no proxies. A part is at least a block, so the placement must
    cut finely enough (`parts` of `zeppelin`). local: when tasks without remote inputs run: "last", in the order of the
    queues; or as in `matchings`, which hides rounds behind whole sequences.
    """

    proxies: Count | Literal["auto"] = "auto"
    local: Local = "last"

    @property
    def route(self) -> QueueRings:
        """The route of the queues: rings."""
        return QueueRings(self.proxies)

    def __call__(self, routed: Routes, ranks: int) -> Schedule:
        if not isinstance(routed, QueueRoutes):
            raise ConfigError("recipe.schedule", "queues", "needs tiles on rings", "leave the route out")
        span = 1 + int(routed.depth.max(initial=0))
        turn = routed.queue * span + routed.depth
        first = np.searchsorted(np.unique(turn), [0, span, 2 * span])
        home_rounds = first[routed.queue_of] if self.local == "last" else None
        return rounds_by_turn(routed, turn, ranks, 2, self.local, own=home_rounds)
