"""Requests on their way to plans: queued, planned once for all who ask, kept while memory lasts."""

from __future__ import annotations

from apportion.service.engine.engine import Engine, Limits
from apportion.service.engine.entry import Entry, State
from apportion.service.engine.metrics import Metrics

__all__ = ["Engine", "Entry", "Limits", "Metrics", "State"]
