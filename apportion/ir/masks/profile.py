"""Cumulative attention work of a batch up to any row, for cuts at any row and sums over ranges of rows.

pairs of row q      ╱│    ╱│ ____        linear between rows at which a band begins, bends or ends,
                   ╱ │   ╱ │╱    │       so the pairs of rows [a, b) are a difference of two parabolas
rows            ──┴──┴──┴──┴─────┴──►
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from apportion.ir.arrays import Ints, offsets
from apportion.ir.masks import bands as band_algebra


@dataclass(frozen=True, eq=False)
class Profile:
    """Row q of segment i, at[i] <= q < at[i + 1], has value[i] + slope[i] * (q - at[i]) pairs; the rows before at[i]
    have below[i] in total. int64 [segments]; the first segment begins at row 0."""

    at: Ints
    value: Ints
    slope: Ints
    below: Ints

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        """The fields in order."""
        return self.at, self.value, self.slope, self.below

    def pairs_before(self, rows: Ints) -> Ints:
        """int64: total pairs of the rows before each of `rows`."""
        i = np.searchsorted(self.at, rows, "right") - 1
        n = rows - self.at[i]
        pairs: Ints = self.below[i] + self.value[i] * n + self.slope[i] * (n * (n - 1) // 2)
        return pairs

    def between(self, first: Ints, end: Ints) -> Ints:
        """int64: pairs of the rows [first, end)."""
        pairs: Ints = self.pairs_before(end) - self.pairs_before(first)
        return pairs

    def capped(self, keys: int) -> Profile:
        """The profile with at most `keys` pairs per row."""
        sloped = np.flatnonzero(self.slope[:-1])
        at, excess, slope = self.at[sloped], self.value[sloped] - keys, self.slope[sloped]
        # the first row above the cap or, in descending segments, the first row not above it
        crossings = at + np.where(slope > 0, -excess // slope + 1, -(-excess // -slope))
        rows = np.union1d(self.at, crossings[(at < crossings) & (crossings < self.at[sloped + 1])])
        value, slope = self._lines(rows)
        return _profile(rows, np.minimum(value, keys), np.where(value > keys, 0, slope))

    def plus(self, other: Profile, times: int) -> Profile:
        """Adds another profile, its pairs counted `times` times."""
        at = np.union1d(self.at, other.at)
        (value, slope), (other_value, other_slope) = self._lines(at), other._lines(at)
        return _profile(at, value + times * other_value, slope + times * other_slope)

    def _lines(self, rows: Ints) -> tuple[Ints, Ints]:
        """Value and slope at each of the rows."""
        i = np.searchsorted(self.at, rows, "right") - 1
        return self.value[i] + self.slope[i] * (rows - self.at[i]), self.slope[i]


def profile(bands: Mapping[str, Ints], factor: Mapping[str, int | Ints]) -> Profile:
    """The profile of bands. bands: kind -> int64 [n, 6]; factor: kind -> how many times a pair counts, one number or
    int64 [n], one per band."""
    events = [_events(kind_bands, factor[kind]) for kind, kind_bands in bands.items()]
    events.append(np.zeros((1, 3), np.int64))
    flat = np.concatenate(events)
    order = np.argsort(flat[:, 0], kind="stable")
    row, slope, constant = flat[order].T
    slope, constant = np.cumsum(slope), np.cumsum(constant)
    last = np.append(row[1:] > row[:-1], True)
    at, slope = row[last], slope[last]
    return _profile(at, constant[last] + slope * at, slope)


def _profile(at: Ints, value: Ints, slope: Ints) -> Profile:
    rows = np.diff(at)
    pairs = value[:-1] * rows + slope[:-1] * (rows * (rows - 1) // 2)
    return Profile(at, value, slope, offsets(pairs))


def _events(bands: Ints, factor: int | Ints) -> Ints:
    """int64 [events, 3]: (row, slope, constant): from that row on, rows have slope * q + constant more pairs, each
    counted `factor` times.

    Row q of a band sees the keys [max(k0, q - dmax), min(k1, q - dmin + 1)).
    """
    q0, q1, k0, k1, dmin, dmax = band_algebra.clip(band_algebra.tighten(bands)).T
    bend, drop = np.clip(k1 + dmin - 1, q0, q1), np.clip(k0 + dmax, q0, q1)
    ones = np.ones_like(q0)
    begin = np.stack([q0, ones, 1 - dmin - k0])
    last_key = np.stack([bend, -ones, k1 + dmin - 1])
    first_key = np.stack([drop, -ones, k0 + dmax])
    end = np.stack([q1, *-(begin + last_key + first_key)[1:]])  # cancels the other events
    events = np.stack([begin, last_key, first_key, end])
    events[:, 1:] *= factor
    return np.ascontiguousarray(events.transpose(2, 0, 1)).reshape(-1, 3)
