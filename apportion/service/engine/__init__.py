"""Which plan is made when, who waits for it, and what a restarted server knows."""

from apportion.service.engine.engine import Engine
from apportion.service.engine.kept.library import Body
from apportion.service.engine.kept.records import JobKey
from apportion.service.engine.kept.state import IterationState, JobState
from apportion.service.engine.metrics import Counters, Histogram, Snapshot, StreamGauges
from apportion.service.engine.planning import PlanSource
from apportion.service.engine.watch import BusyView, FailedView, JobView

__all__ = [
    "Body",
    "BusyView",
    "Counters",
    "Engine",
    "FailedView",
    "Histogram",
    "IterationState",
    "JobKey",
    "JobState",
    "JobView",
    "Snapshot",
    "PlanSource",
    "StreamGauges",
]
