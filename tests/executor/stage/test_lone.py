"""Tasks of the stage engine run one by one, as a profile times them."""

from __future__ import annotations

import pytest

from tests.ranks import jobs_profile
from tests.ranks.rank_pool import Pool


def test_a_lone_task_equals_attention(interpreted: Pool) -> None:
    (errors,) = interpreted.run(jobs_profile.lone_task, 1)
    assert max(errors) < 1e-5


@pytest.mark.slow
def test_a_profile_times_the_stage_engine(interpreted: Pool) -> None:
    ((grid, engine),) = interpreted.run(jobs_profile.stage_profile, 1)
    assert 0 < grid[0][0] <= grid[1][1]
    assert engine == "stage"
