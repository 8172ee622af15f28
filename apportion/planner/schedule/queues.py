"""Three queues in order: rings between nodes, rings inside a node, whole sequences (Zeppelin, section 3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from apportion.ir.errors import ConfigError
from apportion.planner.options import Count
from apportion.planner.route.queue_rings import Queued, QueueRings
from apportion.planner.route.routes import Routed
from apportion.planner.schedule.rounds import Local, Schedule, SchedulePass, degrees


@dataclass(frozen=True)
class Queues(SchedulePass):
    """Every rank runs its rings between nodes, then those inside its node, then its whole sequences, which need nothing
    from others. In a ring each hop is a round, computed while the next is under way; keys of the rank's own come first.

    proxies: in how many parts a hop between nodes is cut, each sent by another rank of the node, over all NICs: to
    these in a round before, and from their like to the receiver in a round after (section 3.3). All tiles are on their
    way at once, so a tile that crosses comes two rounds later and its followers come behind it, round by round.
    "auto": the GPUs of a node, the paper's x1 = x2, the smaller number of both nodes, which are alike; 1: no proxies. A
    part is at least a block, so the placement must cut finely enough (`zeppelin` has `parts`).
    local: when tasks run that need nothing from others: "last", in the order of the queues; or as in `matchings`, which
    hides rounds behind whole sequences.
    """

    proxies: Count | Literal["auto"] = "auto"
    local: Local = "last"

    @property
    def route(self) -> QueueRings:
        """Queues are rings, which are routes."""
        return QueueRings(self.proxies)

    def __call__(self, routed: Routed, ranks: int) -> Schedule:
        if not isinstance(routed, Queued):
            raise ConfigError(
                "recipe.steps.schedule", "queues", "needs tiles on rings", "leave the route out"
            )
        span = 1 + int(routed.depth.max(initial=0))
        keys, round_ = np.unique(routed.queue * span + routed.depth, return_inverse=True)
        slots = degrees(routed.edges, round_, np.arange(len(keys)), ranks)
        when, channel = np.arange(len(keys)), np.zeros(len(keys), np.int64)
        own = np.searchsorted(keys, [0, span, 2 * span])[routed.held] if self.local == "last" else None
        return Schedule(routed, round_.astype(np.int32), when, channel, slots, 2, self.local, own=own)
