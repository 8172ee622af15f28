"""Bands: rectangles of (query, key) pairs cut by two diagonals, the canonical form of every mask.

    band = (q0, q1, k0, k1, dmin, dmax)     q in [q0, q1), k in [k0, k1), dmin <= q - k <= dmax

             k0          k1
          q0 ┌──────╲─────┐      the upper diagonal is q - k = dmin (keys after it are not seen yet),
             │ ╲ seen╲    │      the lower one q - k = dmax (keys before it are no longer seen)
             │   ╲    ╲   │
          q1 └─────╲───╲──┘

Bands are rows of an int64 array [n, 6]. An unbounded diagonal is -INF or INF. Token coordinates stay below
2**31, so every number of pairs fits 64 bits; all functions are exact and vectorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from apportion._core import verify as core
from apportion.ir.arrays import Bools, Ints
from apportion.ir.errors import CapacityError, ConfigError, UnknownNameError

INF = 2**62
MAX_TOKENS = 2**31 - 1
MAX_DIAGONALS = 8  # limit on the diagonals recorded for a kind: more would not help to identify its layers

# slice types as in MagiAttention
FULL, CAUSAL, INVCAUSAL, BICAUSAL = 0, 1, 2, 3
SLICE_TYPES = ("FULL", "CAUSAL", "INVCAUSAL", "BICAUSAL")  # type names by number

_DENSE_CELLS = 2**26
_MOST = 2**16  # limit on the overlaps to find
_FREE_STEPS, _STEPS_PER_BAND = 2**26, 512  # limit on comparisons of two bands: a fixed part, and one per band


def columns(bands: ArrayLike) -> Ints:
    """Returns `bands` as an int64 array [n, 6]."""
    return np.asarray(bands, np.int64).reshape(-1, 6)


def describe(band: ArrayLike) -> str:
    """Describes one band in words."""
    q0, q1, k0, k1, dmin, dmax = (int(x) for x in np.asarray(band))
    lower = "" if dmin <= -INF else f"{dmin} <= "
    upper = "" if dmax >= INF else f" <= {dmax}"
    diagonals = f", {lower}q - k{upper}" if lower or upper else ""
    return f"queries [{q0}, {q1}) x keys [{k0}, {k1}){diagonals}"


def area(bands: ArrayLike) -> Ints:
    """[n] int64: the exact number of pairs of each band.

    With a = q - q0 and b = k1 - 1 - k, the pairs with q - k <= d are those with a + b < m = d + k1 - q0: a
    triangle of side m, less its parts beyond the Q x K rectangle, a >= Q and b >= K (disjoint, since m <= Q + K).
    """
    b = columns(bands)
    q, k = np.maximum(b[:, 1] - b[:, 0], 0), np.maximum(b[:, 3] - b[:, 2], 0)
    offset = b[:, 3] - b[:, 0]
    upto = _pairs_below(q, k, b[:, 5] + offset)
    areas: Ints = np.maximum(upto - _pairs_below(q, k, b[:, 4] - 1 + offset), 0)
    return areas


def _pairs_below(q: Ints, k: Ints, m: Ints) -> Ints:
    m = np.clip(m, 0, q + k)
    return _triangle(m) - _triangle(m - q) - _triangle(m - k)


def _triangle(side: Ints) -> Ints:
    side = np.maximum(side, 0)
    return (side + 1) // 2 * (side | 1)  # the even factor is halved first: side may be 2**32 - 2


def intersect(bands: ArrayLike, rects: ArrayLike, tight: bool = False) -> Ints:
    """[n, 6]: each band intersected with the rectangle (q0, q1, k0, k1) of its row; `rects` [n, 4] or broadcastable.

    tight: shrink the results to their bounding rectangles; empty results become rows of zeros.
    """
    b, r = columns(bands), np.asarray(rects, np.int64)
    shape = (np.broadcast_shapes(b.shape[:1], r.shape[:-1])[0], 6)
    cut = np.array(np.broadcast_to(b, shape))
    cut[:, 0:4:2] = np.maximum(cut[:, 0:4:2], r[..., 0::2])
    cut[:, 1:4:2] = np.minimum(cut[:, 1:4:2], r[..., 1::2])
    return tighten(cut) if tight else cut


def tighten(bands: ArrayLike) -> Ints:
    """[n, 6]: each band shrunk to the bounding rectangle of its pairs, diagonals unchanged; zeros if empty."""
    b = columns(bands)
    q0, q1, k0, k1, dmin, dmax = b.T
    result = np.stack(
        [
            np.maximum(q0, k0 + dmin),
            np.minimum(q1, k1 + dmax),
            np.maximum(k0, q0 - dmax),
            np.minimum(k1, q1 - dmin),
            dmin,
            dmax,
        ],
        axis=1,
    )
    result[(q0 >= q1) | (k0 >= k1) | (result[:, 0] >= result[:, 1]) | (dmin > dmax)] = 0
    return result


def clip(bands: ArrayLike) -> Ints:
    """[n, 6]: the same bands with diagonals outside the rectangle moved to its corners."""
    b = columns(bands).copy()
    b[:, 4] = np.maximum(b[:, 4], b[:, 0] - b[:, 3] + 1)
    b[:, 5] = np.minimum(b[:, 5], b[:, 1] - 1 - b[:, 2])
    return b


def shift(bands: ArrayLike, q: ArrayLike, k: ArrayLike) -> Ints:
    """[n, 6]: bands translated by `q` query and `k` key tokens (scalars or [n]), finite diagonals included."""
    b, q, k = columns(bands), np.asarray(q, np.int64), np.asarray(k, np.int64)
    result = np.empty((np.broadcast_shapes(b.shape[:1], q.shape, k.shape)[0], 6), np.int64)
    result[:, 0:2] = b[:, 0:2] + q[..., None]
    result[:, 2:4] = b[:, 2:4] + k[..., None]
    diagonals = b[:, 4:6]
    result[:, 4:6] = np.where(np.abs(diagonals) >= INF, diagonals, diagonals + (q - k)[..., None])
    return result


def diagonals(bands: ArrayLike) -> tuple[tuple[int, int], ...]:
    """The distinct (dmin, dmax), sorted; dmin clamped to at least 0 for bands whose keys all precede the queries."""
    b = columns(bands)
    dmin = np.where(b[:, 3] <= b[:, 0], np.maximum(b[:, 4], 0), b[:, 4])
    pairs = np.unique(np.stack([dmin, b[:, 5]], axis=1), axis=0)
    return tuple((low, high) for low, high in pairs.tolist())


def from_slices(slices: ArrayLike) -> Ints:
    """[n, 6]: the bands of slices (q0, q1, k0, k1, type).

    Types: 0 FULL, 1 CAUSAL (aligned bottom-right: the last query sees up to the last key), 2 INVCAUSAL
    (top-left: the first query sees from the first key on), 3 BICAUSAL (both); by number, or by name in lists.
    Raises UnknownNameError for an unknown type.
    """
    s = np.asarray(number_types("slices", slices), np.int64).reshape(-1, 5)
    check_types("slices", s)
    dmin = np.where(s[:, 4] & CAUSAL, s[:, 1] - s[:, 3], -INF)
    dmax = np.where(s[:, 4] & INVCAUSAL, s[:, 0] - s[:, 2], INF)
    return np.column_stack([s[:, :4], dmin, dmax])


def number_types(field: str, slices: Any) -> Any:
    """Converts type names in the rows of `slices` to numbers; leaves everything else unchanged."""
    if not isinstance(slices, list | tuple):
        return slices
    return [[*row[:4], _number(field, i, row[4])] if _is_named(row) else row for i, row in enumerate(slices)]


def _is_named(row: Any) -> bool:
    return isinstance(row, list | tuple) and len(row) == 5 and isinstance(row[4], str)


def _number(field: str, i: int, name: str) -> int:
    if name not in SLICE_TYPES:
        raise _unknown_type_error(field, i, name)
    return SLICE_TYPES.index(name)


def check_types(field: str, slices: Ints) -> None:
    """Raises UnknownNameError if a row of `slices` [n, 5] has an unknown type."""
    for i in np.flatnonzero((slices[:, 4] < FULL) | (slices[:, 4] > BICAUSAL)):
        raise _unknown_type_error(field, int(i), int(slices[i, 4]))


def _unknown_type_error(field: str, i: int, value: object) -> UnknownNameError:
    known_types = ", ".join(f"{name} ({number})" for number, name in enumerate(SLICE_TYPES))
    return UnknownNameError(f"{field}[{i}] type", value, "unknown slice type", f"write one of {known_types}")


def to_slices(bands: ArrayLike) -> Ints:
    """[m, 5]: slices (q0, q1, k0, k1, type) of exactly the same pairs, in the order of the bands.

    A diagonal must meet a corner of its slice, so a band is cut at most twice: below the last row shortened by the
    upper diagonal and above the first row shortened by the lower one.
    """
    b = tighten(bands)
    q0, q1, k0, k1, dmin, dmax = b.T
    upper, lower = np.clip(k1 + dmin, q0, q1), np.clip(k0 + dmax, q0, q1)
    edges = np.stack([q0, np.minimum(upper, lower), np.maximum(upper, lower), q1], axis=1)
    pieces = np.repeat(b, 3, axis=0)
    pieces[:, 0], pieces[:, 1] = edges[:, :3].ravel(), edges[:, 1:].ravel()
    pieces = tighten(pieces)
    pieces = pieces[pieces[:, 0] < pieces[:, 1]]
    cut_above = pieces[:, 0] - pieces[:, 3] + 1 < pieces[:, 4]
    cut_below = pieces[:, 1] - 1 - pieces[:, 2] > pieces[:, 5]
    return np.column_stack([pieces[:, :4], CAUSAL * cut_above + INVCAUSAL * cut_below])


def dense(bands: ArrayLike, tokens_q: int, tokens_k: int) -> Bools:
    """[tokens_q, tokens_k] bool, True where a pair lies in a band. For tests and small oracles.

    Raises CapacityError beyond 2**26 cells.
    """
    if tokens_q * tokens_k > _DENSE_CELLS:
        raise CapacityError(f"a dense mask of {tokens_q} x {tokens_k} has more than {_DENSE_CELLS} cells")
    mask = np.zeros((tokens_q, tokens_k), np.bool_)
    for q0, q1, k0, k1, dmin, dmax in columns(bands):
        q, k = np.arange(tokens_q)[q0:q1, None], np.arange(tokens_k)[None, k0:k1]
        mask[q0:q1, k0:k1] |= (q - k >= dmin) & (q - k <= dmax)
    return mask


def overlaps(bands: ArrayLike) -> Ints:
    """[m, 2]: index pairs i < j of bands that share a (query, key) pair, in ascending order; the first 2**16 found.

    Raises CapacityError for more than 2**26 + 512 n comparisons of two bands.
    """
    tight = tighten(bands)
    nonempty = np.flatnonzero(tight[:, 0] < tight[:, 1])
    tight = tight[nonempty]
    order = np.lexsort((tight[:, 2], tight[:, 0]))
    pairs = core.sweep(
        np.ascontiguousarray(tight.T), order, _FREE_STEPS + _STEPS_PER_BAND * len(tight), _MOST
    )
    if pairs is None:
        raise CapacityError(f"{len(tight)} bands have too many overlapping rectangles to decide")
    return np.unique(nonempty[pairs[:2].T], axis=0)


def check_disjoint(field: str, bands: ArrayLike) -> None:
    """Raises ConfigError, naming both bands, if two of `bands` share a (query, key) pair."""
    pairs = overlaps(bands)
    if len(pairs):
        i, j = (int(x) for x in pairs[0])
        first, second = (describe(columns(bands)[x]) for x in (i, j))
        raise ConfigError(
            f"{field}[{j}]",
            second,
            f"shares (query, key) pairs with {field}[{i}], {first}",
            "cut one of the two so that every pair is in only one band",
        )


def merge_adjacent(bands: Ints) -> Ints:
    """int64 [m, 6]: the bands, with full bands of adjacent queries and equal keys (answers to one question) merged; the
    order changes."""
    if not len(bands):
        return bands
    q0, q1, k0, k1, dmin, dmax = bands.T
    is_full = (dmin <= q0 - k1 + 1) & (dmax >= q1 - 1 - k0)
    order = np.lexsort((q0, k1, k0, is_full))
    sorted_ = bands[order]
    joins = np.zeros(len(bands), bool)
    joins[1:] = (
        is_full[order][1:]
        & is_full[order][:-1]
        & (sorted_[1:, 2:4] == sorted_[:-1, 2:4]).all(axis=1)
        & (sorted_[1:, 0] == sorted_[:-1, 1])
    )
    first = np.flatnonzero(~joins)
    last = np.append(first[1:], len(bands)) - 1
    result = sorted_[first]
    result[:, 1] = sorted_[last, 1]
    is_merged = last > first
    result[is_merged, 4] = result[is_merged, 0] - result[is_merged, 3] + 1
    result[is_merged, 5] = result[is_merged, 1] - 1 - result[is_merged, 2]
    return result
