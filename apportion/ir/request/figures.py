"""Inputs of time predictions: single numbers with their sources, and grids of attention task times."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from apportion.ir.arrays import Floats, Ints
from apportion.ir.errors import ConfigError
from apportion.ir.structs import Amount, Text, to_data

LEAST, MOST = 1e-6, 1e12  # bounds of times and positive figures: sums of products stay finite
#: largest ratio of a causal task's time to a full task's: kernels without masks split it into three calls
MOST_CAUSAL = 3.0

Share = Annotated[float, Meta(ge=LEAST, le=1)]
Time = Annotated[float, Meta(ge=0, le=MOST)]
Rows = tuple[tuple[Annotated[float, Meta(ge=LEAST, le=MOST)], ...], ...]


@dataclass(frozen=True)
class Figure:
    """A number and its source. assumed: True if neither measured nor published for this hardware. interval: lower and
    upper bound of the true value, if known. Raises ConfigError."""

    value: Amount
    source: Text
    assumed: bool = False
    interval: tuple[Amount, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))  # 8 and 8.0 have the same digest
        if self.interval is None:
            return
        object.__setattr__(self, "interval", tuple(map(float, self.interval)))
        if len(self.interval) != 2 or not self.interval[0] <= self.value <= self.interval[1]:
            rule = f"must be two numbers, one at or below the value {self.value:g} and one at or above it"
            raise ConfigError(
                "hardware.figures.interval", list(self.interval), rule, "give the lower and the upper bound"
            )

    def to_data(self) -> dict[str, Any]:
        data = to_data(self)
        if self.interval is None:
            del data["interval"]
        return data


@dataclass(frozen=True)
class MessageRates:
    """Fraction of the inter-node bandwidth that messages reach, by size, excluding latency.

    bytes: sizes, ascending. share: the fraction at each size; low, high: its interval. Between sizes, shares are linear
    in the logarithm of the size; beyond the ends they are constant. Raises ConfigError.
    """

    bytes: tuple[Annotated[int, Meta(ge=1, le=2**40)], ...]
    share: tuple[Share, ...]
    low: tuple[Share, ...]
    high: tuple[Share, ...]
    source: Text
    assumed: bool = False

    def __post_init__(self) -> None:
        if not self.bytes or any(size >= larger for size, larger in pairwise(self.bytes)):
            rule = "must be one or more ascending sizes"
            raise ConfigError(
                "hardware.message_rates.bytes", list(self.bytes), rule, "sort them without duplicates"
            )
        for name in ("share", "low", "high"):
            if len(getattr(self, name)) != len(self.bytes):
                rule = f"must have {len(self.bytes)} numbers, one for each of bytes"
                field = f"hardware.message_rates.{name}"
                raise ConfigError(field, len(getattr(self, name)), rule, "add or drop numbers")
        for i, (low, share, high) in enumerate(zip(self.low, self.share, self.high, strict=True)):
            if not low <= share <= high:
                rule = f"must be between low, {low:g}, and high, {high:g}"
                raise ConfigError(f"hardware.message_rates.share[{i}]", share, rule, "widen the interval")

    def of(self, message_bytes: Ints) -> Floats:
        """float64, shaped like `message_bytes`: the share of each message."""
        sizes = np.log2(np.maximum(message_bytes, 1))
        return np.interp(sizes, np.log2(self.bytes), self.share)


#: default for hardware files without the bandwidth between a rank and its host's memory
HOST = Figure(
    50.0,
    "PCIe 5.0 x16, 64 GB/s each way by NVIDIA's H100 data sheet; four fifths of it for large copies",
    True,
)


@dataclass(frozen=True)
class Grid:
    """Microseconds of one attention task within an instruction, in one phase.

    full, causal: [axis][axis], rows of queries by rows of keys, each result written once in the dtype of the grids. Of
    rows x keys pairs, `causal` allows all but the corner triangle of side min(rows, keys) - 1 (dmin = min(0, rows -
    keys)). Times never decrease along an axis. `causal` times may be up to `MOST_CAUSAL` times the `full` ones, since a
    kernel that splits a task into calls may take longer for fewer pairs. launch_us: per kernel. tile_us: time of one
    kernel tile on one multiprocessor, for the longest chain of tiles of an instruction; 0 if the grids include it.
    window_us: extra time per query row if dmax also hides early keys, on top of interpolation between the causal grid
    and a band one tile wide: kernels without windows compute strips of rows under a mask, including hidden pairs.
    """

    full: Rows
    causal: Rows
    launch_us: Time
    tile_us: Time
    source: Text
    assumed: bool = False
    window_us: Time = 0.0

    def check(self, field: str, points: int) -> None:
        """Raises ConfigError if times are not [points][points], decrease along an axis, or exceed `MOST_CAUSAL`."""
        for kind in ("full", "causal"):
            _check_times(f"{field}.{kind}", getattr(self, kind), points)
        full, causal = np.array(self.full), np.array(self.causal)
        violations = np.argwhere(causal > MOST_CAUSAL * full * (1 + 1e-9))
        if len(violations):
            i, j = violations[0].tolist()
            raise ConfigError(
                f"{field}.causal[{i}][{j}]",
                float(causal[i, j]),
                f"is more than {MOST_CAUSAL:g} times {field}.full[{i}][{j}] = {full[i, j]:g}",
                "measure both again, or lower it to that",
            )

    def to_data(self) -> dict[str, Any]:
        data = to_data(self)
        if not self.window_us:  # omitted when 0, so that older files keep their digests
            del data["window_us"]
        return data


def _check_times(field: str, rows: Rows, points: int) -> None:
    if len(rows) != points:
        rule = f"must have {points} rows, one per point of the axis"
        raise ConfigError(field, len(rows), rule, "add or drop rows")
    for i, row in enumerate(rows):
        if len(row) != points:
            rule = f"must have {points} times, one per point of the axis"
            raise ConfigError(f"{field}[{i}]", len(row), rule, "add or drop times")
    grid = np.array(rows)
    for axis in (0, 1):
        decreases = np.argwhere(np.diff(grid, axis=axis) < 0)
        if len(decreases):
            i, j = (decreases[0] + (axis == 0, axis == 1)).tolist()
            raise ConfigError(
                f"{field}[{i}][{j}]",
                float(grid[i, j]),
                "is less than for fewer rows or keys",
                "measure it again, or raise it to its neighbour's time",
            )
