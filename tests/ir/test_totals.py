"""Totals of programs, compared with the figures of planning and the areas of bands."""

from __future__ import annotations

import numpy as np
import pytest

import apportion as ap
from apportion._core import totals as core
from apportion.ir.masks import bands
from apportion.ir.plan.totals import communication_volumes, loads, sum_volumes
from apportion.ir.request.policy import Policy, Recipe
from tests.support.strategies import STRATEGIES, cluster

RNG = np.random.default_rng(0)


def test_pairs_of_a_task_are_the_area_of_its_band() -> None:
    most = 2**31
    for limit in (6, 40, most):
        for _ in range(300):
            q, k = (int(RNG.integers(1, limit)) for _ in range(2))
            dmin, dmax = sorted(int(RNG.integers(1 - k, q)) for _ in range(2))
            expected = int(bands.area([[0, q, 0, k, dmin, dmax]])[0])
            assert core.area_of(0, q, 0, k, dmin, dmax) == expected


@pytest.mark.parametrize("recipe", [*STRATEGIES][::4])
def test_programs_compute_all_pairs_and_move_the_reported_bytes(recipe: str) -> None:
    batch = ap.Batch.from_lengths([900, 500, 300, 100], mask=ap.masks.causal())
    model = ap.Model(8, 4, 16, dtype="fp64", layers=3)
    policy = Policy(Recipe(recipe, STRATEGIES[recipe]), token_cap=batch.tokens)
    plan = ap.plan(batch, cluster(4), model, policy=policy, verify=False)
    for phase in ("forward", "backward"):
        pairs = loads(plan, phase)
        assert pairs.sum() == pytest.approx(3 * batch.area("default"))
    volumes = communication_volumes(plan.programs, plan.header.head_sets, model, plan.request.cluster)
    volume = sum_volumes(volumes.values())
    assert int(volume.sent.sum()) == int(volume.received.sum())
    assert volume.summary() == plan.report["bytes"]
