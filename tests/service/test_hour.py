"""The last hour of an engine, by minute and by tenant."""

from __future__ import annotations

import asyncio
from typing import Any

from apportion.service.engine.entry import Entry, State
from apportion.service.engine.hour import minutes, usage
from apportion.service.workers import plan_pack

NOW = 10_000.0


def entry(
    ended: float, first_use: Any, seconds: float, state: State = State.READY, tenant: str = "a"
) -> Entry:
    done = Entry(b"", plan_pack, b"", b"", 1, tenant, 0.0, 0.0, state, seconds=seconds, done=asyncio.Event())
    done.ended, done.first_use = ended, first_use
    return done


ENTRIES = [
    entry(NOW - 30 * 60 - 1, NOW - 1, 2.0),  # ready half an hour ago, first requested in the last minute
    entry(NOW - 50, NOW - 63, 4.0),  # a rank waited for it, from the minute before
    entry(NOW - 40, None, 0.0, tenant="b"),  # from the store, not requested yet
    entry(NOW - 3700, None, 1.0),  # ready before the hour, not requested yet
    entry(NOW - 20, None, 0.0, State.REFUSED, "b"),
    entry(0.0, None, 0.0, State.QUEUED, "b"),
]


def test_minutes_have_medians_and_the_number_of_plans_ahead() -> None:
    hour = minutes(ENTRIES, NOW)
    assert len(hour) == 60
    assert [minute.ahead for minute in (hour[0], hour[28], hour[29], hour[58], hour[59])] == [1, 1, 2, 2, 2]
    assert (hour[29].planned, hour[29].planning_s, hour[29].waited_s) == (1, 2.0, 0.0)
    last = hour[59]
    assert (last.planned, last.stored, last.planning_s, last.waited_s) == (1, 1, 4.0, 13.0)
    assert (hour[10].planned, hour[10].planning_s, hour[10].waited_s) == (0, None, None)


def test_each_tenant_has_a_row() -> None:
    all_, a, b = usage(ENTRIES, NOW)
    assert (all_.tenant, all_.waiting, all_.ready, all_.refused) == ("", 1, 3, 1)
    assert (a.ready, a.planning_s, a.planning_99_s, a.waited_s) == (2, 3.0, 3.98, 6.5)
    assert (b.tenant, b.waiting, b.ready, b.refused, b.planning_s) == ("b", 1, 1, 1, None)
    assert [row.tenant for row in usage([], NOW)] == [""]
