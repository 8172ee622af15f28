"""Pairs of tasks, compared with the areas of bands. `test_sent_gradients.py` compares transferred bytes."""

from __future__ import annotations

import numpy as np

from apportion._core import totals as core
from apportion.ir.masks import bands

RNG = np.random.default_rng(0)


def test_pairs_of_a_task_are_the_area_of_its_band() -> None:
    most = 2**31
    for limit in (6, 40, most):
        for _ in range(300):
            q, k = (int(RNG.integers(1, limit)) for _ in range(2))
            dmin, dmax = sorted(int(RNG.integers(1 - k, q)) for _ in range(2))
            expected = int(bands.area([[0, q, 0, k, dmin, dmax]])[0])
            assert core.area_of(0, q, 0, k, dmin, dmax) == expected
