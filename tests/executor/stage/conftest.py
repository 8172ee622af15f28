"""Ranks whose kernels run in Triton's interpreter, or with --gpu on this machine's GPU, which all share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.rank_pool import Pool


@pytest.fixture(scope="session")
def interpreted(request: pytest.FixtureRequest) -> Iterator[Pool]:
    gpu = request.config.getoption("--gpu")
    ranks = Pool(**({"APPORTION_TEST_DEVICE": "cuda:0"} if gpu else {"TRITON_INTERPRET": "1"}))
    yield ranks
    ranks.close()
