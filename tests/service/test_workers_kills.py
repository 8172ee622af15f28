"""Workers, zygotes and servers that are killed. `benchmarks/soak.py` runs the same at length."""

import pytest

from tests.service import worker_cases as cases
from tests.support.sparse import sparse

SEEDS = pytest.mark.parametrize("seed", sparse(range(3), 3))


@SEEDS
def test_killed_workers_change_no_result(seed: int) -> None:
    assert cases.killed_workers(seed, seconds=5.0)["kills"] >= 2


@SEEDS
def test_a_killed_zygote_is_replaced(seed: int) -> None:
    cases.killed_zygotes(seed, kills=2)


@SEEDS
def test_nothing_outlives_a_killed_server(seed: int) -> None:
    cases.killed_server(seed)


@pytest.mark.slow
def test_memory_and_descriptors_stay() -> None:
    cases.long_run(0, tasks=200)
