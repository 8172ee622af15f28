"""Session-wide rank pools for tests with trainers of other packages: `make test-trainers`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ranks.rank_pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    ranks = Pool(timeout_s=240, size=4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def alone() -> Iterator[Any]:
    """A pool of one process, outside the distributed environment of `pool`, for the trainers' own runs."""
    process = Pool(timeout_s=240, size=1)
    yield process
    process.close()
