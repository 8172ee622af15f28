"""Distinct keys of lanes against numpy's own, compiled and not."""

import numpy as np
import pytest

from apportion.ir.loops import jit, sorting


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("spread", [1, 7, 1 << 31, 1 << 61])
def test_keys_of_each_lane_are_distinct_ascending_and_numbered(
    monkeypatch: pytest.MonkeyPatch, compiled: bool, spread: int
) -> None:
    monkeypatch.setattr(sorting, "HAS_NUMBA", compiled and jit.HAS_NUMBA)
    rng = np.random.default_rng(spread % 1000)
    for size, lanes in [(0, 0), (0, 3), (1, 1), (40, 9), (300, 2), (3000, 5)]:
        lane = rng.integers(0, max(lanes - 1, 1), size)  # the last one has no keys
        key = rng.integers(0, 4, size) * spread % (1 << 62) + rng.integers(0, 40, size)
        found, ptr, number = sorting.distinct_in_lanes(lane, key, lanes)
        assert len(ptr) == lanes + 1
        assert ptr[-1] == len(found)
        for one in range(lanes):
            assert found[ptr[one] : ptr[one + 1]].tolist() == sorted(set(key[lane == one].tolist()))
        owner = np.repeat(np.arange(lanes), np.diff(ptr))
        assert (found[number] == key).all()
        assert (owner[number] == lane).all()
