"""The service under load and faults, small: `benchmarks/soak.py` runs these cases in full."""

from __future__ import annotations

import pytest

from tests.service import load
from tests.support.sparse import sparse


@pytest.mark.parametrize("seed", sparse(range(3), 3))
def test_streams_bring_everything_once_and_in_order(seed: int) -> None:
    found = load.streams(seed, clients=24, iterations=8, tokens_per_rank=2048, ranks=8)
    assert found["frames"] == 24 * 8


@pytest.mark.slow
def test_clients_that_never_read_cost_little() -> None:
    found = load.never_reading(0, silent=20, reading=4, iterations=30)
    assert found["grown_mib"] <= 50


@pytest.mark.slow
def test_overload_is_refused_and_passes() -> None:
    found = load.overload(0, seconds=3, jobs=6)
    assert found["answers"].keys() <= {"201", "429", "503"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_server_loses_nothing(seed: int) -> None:
    assert load.server_kills(seed, kills=2, iterations=15)["kills"] == 2


def test_sigterm_drains() -> None:
    found = load.drain(0, iterations=12)
    assert found["exit"] == 0
    assert found["drain_s"] < 20


@pytest.mark.slow
def test_a_long_run_holds_nothing_back() -> None:
    found = load.long_run(0, iterations=300, keep_every=30)
    first, last = found["rss_mib"]
    assert last - first < 20
    assert found["descriptors"][1] <= found["descriptors"][0] + 4
