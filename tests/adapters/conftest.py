"""The session's ranks, for tests with trainers of other packages: `make test-trainers`."""

import pytest

from tests.ranks.rank_pool import Pool


@pytest.fixture(scope="session")
def pool():
    ranks = Pool(timeout_s=240, size=4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def alone():
    """A process without torch.distributed's environment: the trainers' own runs."""
    process = Pool(timeout_s=240, size=1)
    yield process
    process.close()
