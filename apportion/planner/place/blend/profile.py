"""How much work the rows of a batch are, up to any row: what a pass needs that cuts anywhere.

pairs of row q      ╱│    ╱│ ____        linear between the rows where a band begins, bends or ends,
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
    have below[i] in all. int64 [segments]; the first segment begins at row 0."""

    at: Ints
    value: Ints
    slope: Ints
    below: Ints

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        """In the order of the fields."""
        return self.at, self.value, self.slope, self.below

    def upto(self, rows: Ints) -> Ints:
        """int64: pairs of all rows before each of `rows`."""
        i = np.searchsorted(self.at, rows, "right") - 1
        n = rows - self.at[i]
        pairs: Ints = self.below[i] + self.value[i] * n + self.slope[i] * (n * (n - 1) // 2)
        return pairs


def profile(bands: Mapping[str, Ints], factor: Mapping[str, int | Ints]) -> Profile:
    """Of bands int64 [n, 6] of each kind, whose pairs count `factor` times, all alike or each band's, int64 [n]."""
    events = [_events(held, factor[kind]) for kind, held in bands.items()]
    events.append(np.zeros((1, 3), np.int64))
    flat = np.concatenate(events)
    order = np.argsort(flat[:, 0], kind="stable")
    row, slope, constant = flat[order].T
    slope, constant = np.cumsum(slope), np.cumsum(constant)
    last = np.append(row[1:] > row[:-1], True)
    at, slope = row[last], slope[last]
    value = constant[last] + slope * at
    rows = np.diff(at)
    pairs = value[:-1] * rows + slope[:-1] * (rows * (rows - 1) // 2)
    return Profile(at, value, slope, offsets(pairs))


def _events(bands: Ints, factor: int | Ints) -> Ints:
    """int64 [events, 3]: the row from which on rows have slope * q + constant pairs more, slope, and constant; each
    pair counts `factor` times.

    Row q of a band sees the keys from max(k0, q - dmax) up to min(k1, q - dmin + 1).
    """
    q0, q1, k0, k1, dmin, dmax = band_algebra.clip(band_algebra.tighten(bands)).T
    bend, drop = np.clip(k1 + dmin - 1, q0, q1), np.clip(k0 + dmax, q0, q1)
    one = np.ones_like(q0)
    begin = np.stack([q0, one, 1 - dmin - k0])
    bent = np.stack([bend, -one, k1 + dmin - 1])
    dropped = np.stack([drop, -one, k0 + dmax])
    end = np.stack([q1, *-(begin + bent + dropped)[1:]])  # takes back what the others added
    events = np.stack([begin, bent, dropped, end])
    events[:, 1:] *= factor
    return np.ascontiguousarray(events.transpose(2, 0, 1)).reshape(-1, 3)
