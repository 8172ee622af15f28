"""Metrics of the service: prometheus_client's objects, which `/metrics` prints and the page reads."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """Metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.plans = self._counter("plans", "finished requests, by state", "state")
        self.planning = self._histogram("planning_seconds", "worker time for a plan and its verification")
        self.readiness = self._histogram(
            "ready_seconds", "time from a request's arrival until its plan is ready"
        )
        self.deliveries = self._counter("deliveries", "slices sent to ranks")
        self.delivered = self._counter("delivered_bytes", "bytes of slices sent to ranks")
        self.problems = self._counter("problems", "requests answered with a problem, by its type", "type")
        self.deaths = self._counter("worker_deaths", "workers that died while planning")
        self.store_errors = self._counter("store_errors", "packs that could not be read or stored")
        self.stored = self._counter("store_hits", "requests whose plan was in the store")
        self.queued = self._gauge("queued", "requests waiting for a worker")
        self.running = self._gauge("running", "requests being planned")
        self.cached = self._gauge("cached_bytes", "bytes of packs in memory")
        self.streams = self._gauge("streams", "open streams")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"apportion_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"apportion_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"apportion_{name}", text, buckets=_SECONDS, registry=self.registry)
