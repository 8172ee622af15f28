"""The band algebra, compared with dense masks and at full size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion.ir.errors import CapacityError, ConfigError
from apportion.ir.masks import bands as algebra
from apportion.ir.masks.bands import INF

SIDE = 10
property_test = settings(max_examples=150, derandomize=True, deadline=None, database=None)


def ranges() -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(0, SIDE), st.integers(0, SIDE)).map(lambda x: (min(x), max(x)))


def diagonals() -> st.SearchStrategy[tuple[int, int]]:
    bound = st.integers(-SIDE - 2, SIDE + 2)
    return st.tuples(bound | st.just(-INF), bound | st.just(INF))


bands = st.tuples(ranges(), ranges(), diagonals()).map(lambda x: (*x[0], *x[1], *x[2]))
slices = st.tuples(ranges(), ranges(), st.integers(0, 3)).map(lambda x: (*x[0], *x[1], x[2]))


def oracle(band: tuple[int, ...]) -> np.ndarray:
    """The band's definition, pair by pair."""
    q0, q1, k0, k1, dmin, dmax = band
    q, k = np.indices((SIDE, SIDE))
    return (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1) & (dmin <= q - k) & (q - k <= dmax)


def dense(table: np.ndarray) -> np.ndarray:
    return algebra.dense(table, SIDE, SIDE)


@property_test
@given(bands, st.integers(0, 4), st.integers(0, 4))
def test_operations_on_a_band_follow_its_definition(band: tuple[int, ...], down: int, right: int) -> None:
    allowed = oracle(band)
    assert np.array_equal(dense([band]), allowed)
    assert algebra.area([band]).tolist() == [allowed.sum()]
    q, k = np.nonzero(allowed)
    box = [q.min(), q.max() + 1, k.min(), k.max() + 1, *band[4:]] if len(q) else [0] * 6
    assert algebra.tighten([band]).tolist() == [box]
    clipped = algebra.clip(algebra.tighten([band]))
    assert np.array_equal(dense(clipped), allowed)
    assert np.abs(clipped[:, 4:]).max() <= SIDE or not allowed.any()
    moved = algebra.dense(algebra.shift([band], down, right), SIDE + down, SIDE + right)
    assert np.array_equal(moved[down:, right:], allowed)
    assert moved.sum() == allowed.sum()


@property_test
@given(bands, ranges(), ranges())
def test_a_band_cut_by_a_rectangle_is_a_band(
    band: tuple, rows: tuple[int, int], cols: tuple[int, int]
) -> None:
    rect = oracle((*rows, *cols, -INF, INF))
    for tight in (False, True):
        assert np.array_equal(dense(algebra.intersect([band], [(*rows, *cols)], tight)), oracle(band) & rect)


@property_test
@given(slices)
def test_slices_are_aligned_by_their_type(piece: tuple[int, ...]) -> None:
    q0, q1, k0, k1, kind = piece
    q, k = np.indices((SIDE, SIDE))
    inside = (q0 <= q) & (q < q1) & (k0 <= k) & (k < k1)
    causal = (k - k1 <= q - q1) | (kind not in (1, 3))
    inverse = (k - k0 >= q - q0) | (kind not in (2, 3))
    assert np.array_equal(dense(algebra.from_slices([piece])), inside & causal & inverse)


@property_test
@given(st.lists(bands, max_size=5))
def test_slices_of_bands_hold_the_same_pairs(table: list[tuple[int, ...]]) -> None:
    back = algebra.from_slices(algebra.to_slices(table))
    assert np.array_equal(dense(back), dense(table))
    assert algebra.area(back).sum() == algebra.area(table).sum()
    assert len(back) <= 3 * len(table)


@property_test
@given(st.lists(bands, max_size=14))
def test_overlaps_are_all_pairs_that_share_a_cell(table: list[tuple[int, ...]]) -> None:
    masks = [oracle(band) for band in table]
    expected = [
        [i, j] for i in range(len(table)) for j in range(i + 1, len(table)) if (masks[i] & masks[j]).any()
    ]
    assert algebra.overlaps(table).tolist() == expected


def test_areas_are_exact_at_16_million_tokens_and_beyond() -> None:
    n = 2**24
    assert algebra.area([[0, n, 0, n, 0, INF]]).tolist() == [n * (n + 1) // 2]
    assert algebra.area([[0, n, 0, n, 0, 1023]]).tolist() == [1024 * n - 1024 * 1023 // 2]
    longest = algebra.MAX_TOKENS
    assert algebra.area([[0, longest, 0, longest, -INF, INF]]).tolist() == [longest**2]
    assert algebra.area([[0, longest, 0, longest, 0, INF]]).tolist() == [longest * (longest + 1) // 2]


def test_overlaps_of_many_bands_need_few_comparisons() -> None:
    """A grid of 32,896 touching blocks and the stripes of 10,000 windows: rectangles touch, pairs do not."""
    pairs = [(256 * i, 256 * j) for i in range(256) for j in range(i + 1)]
    grid = np.array([(q, q + 256, k, k + 256, 0, INF) for q, k in pairs])
    assert len(algebra.overlaps(grid)) == 0
    start = 64 * np.arange(10_000)
    first, zero = np.maximum(start - 63, 0), 0 * start
    stripes = np.stack([start, start + 64, first, start + 64, zero, zero + 63], 1)
    assert len(algebra.overlaps(stripes)) == 0
    assert algebra.overlaps(np.concatenate([stripes, stripes[5000:5001]])).tolist() == [[5000, 10_000]]


def test_too_many_comparisons_are_refused_with_the_number() -> None:
    """Diagonal stripes of one square: every rectangle intersects every other, but no pair is shared."""
    n = 20_000
    stripes = np.stack([0 * np.arange(n), n + 0 * np.arange(n), 0 * np.arange(n), n + 0 * np.arange(n)], 1)
    diagonal = np.arange(n)[:, None]
    with pytest.raises(CapacityError, match="20000 bands have"):
        algebra.overlaps(np.concatenate([stripes, diagonal, diagonal], 1))


def test_an_overlap_error_names_both_bands() -> None:
    table = [[0, 4, 0, 4, 0, INF], [4, 8, 0, 8, -INF, INF], [3, 5, 0, 1, -INF, 7]]
    with pytest.raises(ConfigError) as caught:
        algebra.check_disjoint("bands", table)
    message = str(caught.value)
    assert "bands[2] = 'queries [3, 5) x keys [0, 1), q - k <= 7'" in message
    assert "bands[0], queries [0, 4) x keys [0, 4), 0 <= q - k" in message


def test_dense_refuses_large_masks() -> None:
    with pytest.raises(CapacityError, match="8193 x 8193"):
        algebra.dense([[0, 1, 0, 1, 0, 0]], 8193, 8193)


def test_no_bands_at_all() -> None:
    none = np.zeros((0, 6), np.int64)
    assert len(algebra.area(none)) == len(algebra.overlaps(none)) == len(algebra.to_slices(none)) == 0
    assert algebra.tighten(none).shape == algebra.shift(none, 1, 1).shape == (0, 6)
