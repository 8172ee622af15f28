"""Cutting a band into kernel calls, on integers: exact cover, no overlap, every row sees a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from apportion.backends.torch.kernels import cuts
from apportion.backends.torch.kernels.cuts import Call, cut_squares, cut_strips, cut_windows
from tests.ranks import flash_rule

INF = 2**62


def random_bands(count: int, largest: int, seed: int) -> Iterator[Call]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rows, keys = rng.integers(1, largest, 2).tolist()
        low, high = sorted(rng.integers(-keys - 3, rows + 3, 2).tolist())
        yield Call(0, rows, 0, keys, -INF if rng.random() < 0.3 else low, INF if rng.random() < 0.3 else high)


def dense(call: Call, shape: tuple[int, int]) -> NDArray[Any]:
    i, j = np.indices(shape)
    inside = (i >= call.q0) & (i < call.q1) & (j >= call.k0) & (j < call.k1)
    return inside & (i - j >= call.dmin) & (i - j <= call.dmax)


def windowed(call: Call, shape: tuple[int, int]) -> NDArray[Any]:
    """The pairs of the call's rectangle that FlashAttention-2 sees."""
    inside = np.zeros(shape, bool)
    rows, keys = call.q1 - call.q0, call.k1 - call.k0
    inside[call.q0 : call.q1, call.k0 : call.k1] = flash_rule.visible(rows, keys, *call.window)
    return inside


@pytest.fixture(autouse=True)
def _small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "STRIP_ROWS", 5)
    monkeypatch.setattr(cuts, "STRIP_KEYS", 7)


@pytest.mark.parametrize("cut", [cut_strips, cut_squares, cut_windows])
def test_calls_cover_the_band_once_and_every_row_sees_a_key(cut: Callable[..., Any]) -> None:
    for band in random_bands(400, 24, seed=1):
        shape = band.q1, band.k1
        covered = np.zeros(shape, int)
        for call in cut(band):
            allowed = dense(call, shape)
            assert allowed[call.q0 : call.q1, call.k0 : call.k1].any(axis=1).all(), (band, call)
            assert allowed[call.q0 : call.q1, call.k0 : call.k1].any(axis=0).all(), (band, call)
            covered += allowed
        np.testing.assert_array_equal(covered, dense(band, shape), str(band))


def test_squares_are_plain_causal_or_small() -> None:
    for band in random_bands(400, 24, seed=2):
        for call in cut_squares(band):
            small = call.q1 - call.q0 <= 5 and call.k1 - call.k0 <= 7
            assert call.is_plain or call.is_causal_square or small


def test_causal_bands_of_any_size_take_at_most_three_calls() -> None:
    assert len(list(cut_squares(Call(0, 10**6, 0, 10**6, 0, INF)))) == 1
    assert len(list(cut_squares(Call(0, 10**6, 0, 2 * 10**6, -50, INF)))) <= 3


def all_bands(largest: int) -> Iterator[Call]:
    """Every band of up to `largest` rows and keys, including bands whose diagonals lie outside."""
    for rows, keys in product(range(1, largest + 1), repeat=2):
        for dmin, dmax in product(range(-keys, rows + 2), repeat=2):
            yield Call(0, rows, 0, keys, dmin, dmax)


def test_windows_cover_every_small_band_once_by_the_rule_of_flash_attention() -> None:
    for band in all_bands(8):
        shape, calls = (band.q1, band.k1), list(cut_windows(band))
        visible_pairs = [windowed(call, shape) for call in calls]
        covered = np.sum(visible_pairs, axis=0, initial=0)
        np.testing.assert_array_equal(covered, dense(band, shape), str(band))
        assert len(calls) <= 3
        for call, pairs in zip(calls, visible_pairs, strict=True):
            assert min(call.window) >= -1
            assert pairs[call.q0 : call.q1].any(axis=1).all(), (band, call)


def test_windows_are_cut_once_more_only_where_one_call_would_hide_keys() -> None:
    assert len(list(cut_windows(Call(0, 500, 0, 499, -INF, 9)))) == 1
    assert len(list(cut_windows(Call(0, 501, 0, 499, -INF, 9)))) == 2
