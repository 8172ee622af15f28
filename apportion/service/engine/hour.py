"""The last hour by minute and by tenant, computed from the requests that the engine remembers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median, quantiles

from apportion.service.engine.entry import Entry, State

MINUTES = 60


@dataclass(frozen=True)
class Minute:
    """One minute. planned: plans made by workers; stored: plans found in the store; ahead: plans that were ready at its
    end but not yet requested by any rank; planning_s, waited_s: medians of worker time, and of the wait of the first
    rank that requested a plan; None if there was no plan."""

    planned: int
    stored: int
    ahead: int
    planning_s: float | None
    waited_s: float | None


@dataclass(frozen=True)
class Usage:
    """One tenant, or all: requests by state, seconds as in `Minute`. planning_99_s: the 99th percentile."""

    tenant: str
    waiting: int
    ready: int
    refused: int
    planning_s: float | None
    planning_99_s: float | None
    waited_s: float | None


def minutes(entries: Iterable[Entry], now: float) -> list[Minute]:
    """The `MINUTES` before `now`, the oldest first."""
    by_minute = defaultdict[int, list[Entry]](list)
    changes = [0] * (MINUTES + 1)  # changes of the number of plans ahead, by minute
    for entry in entries:
        if entry.state is not State.READY:
            continue
        by_minute[_minute(entry.ended, now)].append(entry)
        changes[max(_minute(entry.ended, now), 0)] += 1
        if entry.first_use is not None:
            changes[max(_minute(max(entry.first_use, entry.ended), now), 0)] -= 1
    result, ahead = [], 0
    for minute in range(MINUTES):
        ahead += changes[minute]
        times = [entry.seconds for entry in by_minute[minute] if entry.seconds]
        result.append(
            Minute(
                len(times),
                len(by_minute[minute]) - len(times),
                ahead,
                _median(times),
                _median(_waits(by_minute[minute])),
            )
        )
    return result


def usage(entries: Iterable[Entry], now: float) -> list[Usage]:
    """Requests of the last hour: a row for all tenants, with an empty name, then a row per tenant, sorted by name."""
    by_tenant: dict[str, list[Entry]] = {"": []}
    for entry in entries:
        if entry.state in (State.QUEUED, State.PLANNING) or _minute(entry.ended, now) >= 0:
            for tenant in {"", entry.tenant}:
                by_tenant.setdefault(tenant, []).append(entry)
    return [_usage(tenant, by_tenant[tenant]) for tenant in sorted(by_tenant)]


def _usage(tenant: str, entries: list[Entry]) -> Usage:
    times = [entry.seconds for entry in entries if entry.seconds]
    ready, refused = (
        sum(entry.state is state for entry in entries) for state in (State.READY, State.REFUSED)
    )
    slowest = quantiles(times, n=100, method="inclusive")[-1] if len(times) > 1 else _median(times)
    return Usage(
        tenant,
        len(entries) - ready - refused,
        ready,
        refused,
        _median(times),
        slowest,
        _median(_waits(entries)),
    )


def _minute(moment: float, now: float) -> int:
    """The index of a time among the `MINUTES` before now; negative for earlier times."""
    return MINUTES - 1 - int((now - moment) // 60)


def _waits(entries: Iterable[Entry]) -> list[float]:
    return [max(entry.ended - entry.first_use, 0.0) for entry in entries if entry.first_use is not None]


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
