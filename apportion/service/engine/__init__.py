"""The engine of the service: queues requests, plans each once for all callers, caches packs in memory."""

from __future__ import annotations

from apportion.service.engine.engine import Engine, Limits
from apportion.service.engine.entry import Entry, PlanRequest, State
from apportion.service.engine.metrics import Metrics

__all__ = ["Engine", "Entry", "Limits", "Metrics", "PlanRequest", "State"]
