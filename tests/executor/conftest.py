"""The session's pool of ranks."""

import pytest
from rank_pool import Pool


@pytest.fixture(scope="session")
def pool():
    ranks = Pool()
    yield ranks
    ranks.close()
