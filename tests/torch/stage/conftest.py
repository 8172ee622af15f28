"""Ranks whose kernels run in Triton's interpreter."""

import pytest
from rank_pool import Pool


def pytest_addoption(parser):
    parser.addoption(
        "--full", action="store_true", help="every strategy with every mask on the stage kernels"
    )


@pytest.fixture(scope="session")
def interpreted():
    ranks = Pool(timeout_s=120, TRITON_INTERPRET="1")
    yield ranks
    ranks.close()
