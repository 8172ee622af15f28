"""Steps in random combinations: every plan that is not refused verifies, equals dense attention, and simulates."""

from __future__ import annotations

import pytest

import apportion as ap
from tests.support.matrix import compare
from tests.support.mixtures import plan_of
from tests.support.sparse import sparse


@pytest.mark.parametrize("start", sparse(range(0, 160, 16), 4))
def test_random_mixtures_equal_dense_attention(start: int) -> None:
    made = [found for found in map(plan_of, range(start, start + 16)) if found is not None]
    assert len(made) >= 8
    for plan, layer in made:
        compare(plan, "default", layer, start)
        assert ap.simulate(plan).forward_ms > 0
        assert all(bound["gap"] is None or bound["gap"] >= 1 for bound in plan.report["bounds"].values())
