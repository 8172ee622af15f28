"""Parts of the verifier with their own oracles: areas and overlaps of bands. Mutated plans: `test_judge.py`."""

from __future__ import annotations

import numpy as np

from apportion._core import totals
from apportion.ir.masks.bands import area, dense, overlaps
from apportion.ir.verify import attended


def test_pairs_of_a_band_by_counting() -> None:
    draw = np.random.default_rng(0)
    bands, counted = np.zeros((6, 400), np.int64), []
    for band in bands.T:
        q0, k0 = (int(x) for x in draw.integers(0, 5, 2))
        q1, k1 = q0 + int(draw.integers(0, 8)), k0 + int(draw.integers(0, 8))
        dmin, dmax = sorted(int(x) for x in draw.integers(-12, 13, 2))
        band[:] = q0, q1, k0, k1, dmin, dmax
        counted.append(sum(dmin <= q - k <= dmax for q in range(q0, q1) for k in range(k0, k1)))
    areas, inside = attended.areas_inside(bands, np.array([[0, 20, 0, 20, -20, 20]]).T)
    assert areas.tolist() == inside.tolist() == counted


def test_pairs_of_a_task_are_the_area_of_its_band() -> None:
    draw = np.random.default_rng(0)
    for limit in (6, 40, 2**31):
        for _ in range(300):
            q, k = (int(draw.integers(1, limit)) for _ in range(2))
            dmin, dmax = sorted(int(draw.integers(1 - k, q)) for _ in range(2))
            assert totals.area_of(0, q, 0, k, dmin, dmax) == int(area([[0, q, 0, k, dmin, dmax]])[0])


def test_the_sweep_finds_the_overlaps_of_the_band_algebra() -> None:
    draw = np.random.default_rng(1)
    for _ in range(60):
        corners = draw.integers(0, 30, (6, 2))
        sizes = draw.integers(1, 8, (6, 2))
        dmin = corners[:, 0] - corners[:, 1] + draw.integers(-4, 2, 6)
        columns = [corners[:, 0], corners[:, 0] + sizes[:, 0], corners[:, 1], corners[:, 1] + sizes[:, 1]]
        bands = np.column_stack([*columns, dmin, dmin + draw.integers(0, 6, 6)]).astype(np.int64)
        found = attended.overlaps(np.ascontiguousarray(bands.T))
        pairs_found = sorted(map(tuple, found[:, :2].tolist()))
        assert pairs_found == sorted(map(tuple, overlaps(bands).tolist()))
        for i, j, shared in found.tolist():
            assert shared == (dense(bands[i], 40, 40) & dense(bands[j], 40, 40)).sum()
