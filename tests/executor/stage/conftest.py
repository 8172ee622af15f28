"""Ranks whose kernels run in Triton's interpreter."""

import pytest
from rank_pool import Pool


@pytest.fixture(scope="session")
def interpreted():
    ranks = Pool(TRITON_INTERPRET="1")
    yield ranks
    ranks.close()
