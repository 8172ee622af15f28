"""The package's functions refuse arguments of a wrong type before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import apportion as ap

BATCH, CLUSTER, MODEL = ap.Batch.from_lengths([8, 8]), ap.Cluster(1, 2), ap.Model(4, 2, 8, layers=1)
CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: ap.Batch.from_sequences(None), "sequences = None: must be a list of Sequence objects"),
    (lambda: ap.Batch.from_sequences("x"), r"sequences\[0\] = 'x': must be a Sequence"),
    (lambda: ap.Batch.from_sequences([3]), r"sequences\[0\] = 3: must be a Sequence"),  # type: ignore[list-item]
    (lambda: ap.verify(None), "plan = None: must be a Plan"),
    (lambda: ap.simulate(None), "plan = None: must be a Plan"),
    (lambda: ap.simulate_pair(None, None), "ping = None: must be a Plan"),
    (lambda: ap.compare(None, CLUSTER, MODEL), "batches = None: must be a list of Batch objects"),
    (lambda: ap.compare([None], CLUSTER, MODEL, ["fcp"]), r"batches\[0\] = None: must be a Batch"),
    (lambda: ap.compare(BATCH, None, MODEL), "cluster = None: must be a Cluster"),
    (lambda: ap.compare(BATCH, CLUSTER, None), "model = None: must be a Model"),
    (lambda: ap.compare(BATCH, CLUSTER, MODEL, seed="x"), "seed = 'x': must be an integer"),
    (lambda: ap.compare(BATCH, CLUSTER, MODEL, verify="x"), "verify = 'x': must be true or false"),
    (lambda: ap.plan(BATCH, CLUSTER, MODEL, timings="x"), "timings = 'x': must be a dict"),
    (lambda: ap.plan(BATCH, CLUSTER, MODEL, verify="x"), "verify = 'x': must be true or false"),
    (lambda: ap.plan(None, CLUSTER, MODEL), "batch = None: must be a Batch"),
    (lambda: ap.plan_iteration(BATCH, CLUSTER, MODEL, verify="x"), "verify = 'x': must be true or false"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_an_argument_of_another_type_is_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ap.ConfigError, match=f"^{message}"):
        call()
