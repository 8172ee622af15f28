"""Cutting a band into kernel calls, on integers: exact cover, no overlap, every row sees a key."""

import numpy as np
import pytest

from apportion.backends.torch import cuts
from apportion.backends.torch.cuts import Call, cut_squares, cut_strips, cut_windows

INF = 2**62


def random_bands(count, largest, seed):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        rows, keys = rng.integers(1, largest, 2).tolist()
        low, high = sorted(rng.integers(-keys - 3, rows + 3, 2).tolist())
        yield Call(0, rows, 0, keys, -INF if rng.random() < 0.3 else low, INF if rng.random() < 0.3 else high)


def dense(call, shape):
    i, j = np.indices(shape)
    inside = (i >= call.q0) & (i < call.q1) & (j >= call.k0) & (j < call.k1)
    return inside & (i - j >= call.dmin) & (i - j <= call.dmax)


def windowed(call, shape):
    """What FlashAttention's bottom-right window allows of the call's rectangle."""
    left, right = call.window
    i, j = np.indices(shape)
    corner = i - call.q1 - (j - call.k1)
    inside = (i >= call.q0) & (i < call.q1) & (j >= call.k0) & (j < call.k1)
    return inside & ((corner <= left) | (left < 0)) & ((-corner <= right) | (right < 0))


@pytest.fixture(autouse=True)
def _small_strips(monkeypatch):
    monkeypatch.setattr(cuts, "STRIP_ROWS", 5)
    monkeypatch.setattr(cuts, "STRIP_KEYS", 7)


@pytest.mark.parametrize("cut", [cut_strips, cut_squares, cut_windows])
def test_calls_cover_the_band_once_and_every_row_sees_a_key(cut):
    for band in random_bands(400, 24, seed=1):
        shape = band.q1, band.k1
        covered = np.zeros(shape, int)
        for call in cut(band):
            allowed = dense(call, shape)
            assert allowed[call.q0 : call.q1, call.k0 : call.k1].any(axis=1).all(), (band, call)
            assert allowed[call.q0 : call.q1, call.k0 : call.k1].any(axis=0).all(), (band, call)
            covered += allowed
        np.testing.assert_array_equal(covered, dense(band, shape), str(band))


def test_squares_are_plain_causal_or_small():
    for band in random_bands(400, 24, seed=2):
        for call in cut_squares(band):
            small = call.q1 - call.q0 <= 5 and call.k1 - call.k0 <= 7
            assert call.is_plain or call.is_causal_square or small


def test_causal_bands_of_any_size_take_at_most_three_calls():
    assert len(list(cut_squares(Call(0, 10**6, 0, 10**6, 0, INF)))) == 1
    assert len(list(cut_squares(Call(0, 10**6, 0, 2 * 10**6, -50, INF)))) <= 3


def test_windows_are_what_flash_attention_takes():
    for band in random_bands(400, 24, seed=3):
        calls = list(cut_windows(band))
        assert len(calls) <= 2
        for call in calls:
            assert min(call.window) >= -1
            shape = band.q1, band.k1
            np.testing.assert_array_equal(windowed(call, shape), dense(call, shape), str((band, call)))


def test_nothing_allowed_gives_no_calls():
    for cut in (cut_strips, cut_squares, cut_windows):
        assert list(cut(Call(0, 4, 0, 4, 9, INF))) == []
