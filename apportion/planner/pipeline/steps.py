"""The passes of a recipe, ready to run."""

from __future__ import annotations

from dataclasses import dataclass

from apportion.planner.inner.groups import InnerPass
from apportion.planner.pods import PodsPass
from apportion.planner.problem import PlacePass, ShardPass
from apportion.planner.remap import RemapPass
from apportion.planner.route.routes import RoutePass
from apportion.planner.schedule.rounds import SchedulePass


@dataclass(frozen=True)
class Passes:
    """One pass per step of a plan; reshuffle: True if the loader's rows differ from attention's."""

    inner: InnerPass | None
    pods: PodsPass | None
    shard: ShardPass
    place: PlacePass
    route: RoutePass
    schedule: SchedulePass
    reshuffle: bool
    remap: RemapPass | None
