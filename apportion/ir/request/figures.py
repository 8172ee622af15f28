"""What times are predicted from: single numbers with their sources, and grids of times of attention tasks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from apportion.ir.arrays import Floats
from apportion.ir.errors import ConfigError
from apportion.ir.fields import flag, known, number, sequence

Rows = tuple[tuple[float, ...], ...]


LEAST, MOST = 1e-6, 1e12  # of times and figures that must be above 0: sums of products stay finite
#: a causal task's time over the full one's, at most: kernels without a mask of their own cut it into three calls
MOST_CAUSAL = 3.0


MAX_TEXT = 400


@dataclass(frozen=True)
class Figure:
    """One number with where it comes from; `assumed`: nobody measured or published it for this hardware."""

    value: float
    source: str
    assumed: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", float(self.value))  # 8 and 8.0 have one digest

    @staticmethod
    def from_data(field: str, data: Any) -> Figure:
        data = known(field, data, ("value", "source", "assumed"), ("value", "source"))
        value = number(f"{field}.value", data["value"])
        source = described(f"{field}.source", data["source"])
        return Figure(value, source, flag(f"{field}.assumed", data.get("assumed", False)))


#: of hardware files that do not say what lies between a rank and its host's memory
HOST = Figure(
    50.0,
    "PCIe 5.0 x16, 64 GB/s each way by NVIDIA's H100 data sheet; four fifths of it for large copies",
    True,
)


@dataclass(frozen=True)
class Grid:
    """Microseconds of one attention task inside an instruction, of one phase.

    full, causal: [axis][axis], rows of queries by rows of keys, each result written once in the dtype of the grids. Of
    rows x keys pairs, `causal` allows all but the corner triangle of side min(rows, keys) - 1 (dmin = min(0, rows -
    keys)). No time falls along an axis. Those in `causal` may be above those in `full`, up to `MOST_CAUSAL` times: a
    kernel that cuts a task into calls may take longer for fewer pairs.
    launch_us: once a kernel. tile_us: one kernel tile on one multiprocessor, of which an instruction's
    longest chain is made; 0 where the grids hold it already.
    window_us: what each query row of a task takes longer that its band hides early keys from too (dmax cuts it), than
    what lies between the causal grid and a band one tile wide: kernels without windows of their own compute strips of
    rows under a mask, and pairs that it hides.
    """

    full: Rows
    causal: Rows
    launch_us: float
    tile_us: float
    source: str
    assumed: bool = False
    window_us: float = 0.0

    @staticmethod
    def from_data(field: str, data: Any, points: int) -> Grid:
        data = known(field, data, [item.name for item in fields(Grid)], [f.name for f in fields(Grid)[:5]])
        full, causal = (_rows(f"{field}.{kind}", data[kind], points) for kind in ("full", "causal"))
        _check_causal(field, causal, full)
        return Grid(
            _tuples(full),
            _tuples(causal),
            figure_in(f"{field}.launch_us", data["launch_us"]),
            figure_in(f"{field}.tile_us", data["tile_us"]),
            described(f"{field}.source", data["source"]),
            flag(f"{field}.assumed", data.get("assumed", False)),
            figure_in(f"{field}.window_us", data.get("window_us", 0.0)),
        )


def _rows(field: str, data: Any, points: int) -> Floats:
    """float64 [points, points], positive, falling along neither axis."""
    lines = sequence(field, data)
    if len(lines) != points:
        raise ConfigError(field, len(lines), f"must have {points} rows, as the axis has", "add or drop rows")
    grid = np.array([_line(f"{field}[{i}]", line, points) for i, line in enumerate(lines)], np.float64)
    for axis in (0, 1):
        falls = np.argwhere(np.diff(grid, axis=axis) < 0)
        if len(falls):
            i, j = (falls[0] + (axis == 0, axis == 1)).tolist()
            raise ConfigError(
                f"{field}[{i}][{j}]",
                float(grid[i, j]),
                "is less than for fewer rows or keys",
                "measure it again, or raise it to its neighbour's time",
            )
    return grid


def _line(field: str, data: Any, points: int) -> list[float]:
    line = sequence(field, data)
    if len(line) != points:
        raise ConfigError(field, len(line), f"must have {points} times, as the axis has", "add or drop times")
    return [figure_in(f"{field}[{j}]", time, LEAST) for j, time in enumerate(line)]


def _check_causal(field: str, causal: Floats, full: Floats) -> None:
    above = np.argwhere(causal > MOST_CAUSAL * full * (1 + 1e-9))
    if len(above):
        i, j = above[0].tolist()
        raise ConfigError(
            f"{field}.causal[{i}][{j}]",
            float(causal[i, j]),
            f"is more than {MOST_CAUSAL:g} times {field}.full[{i}][{j}] = {full[i, j]:g}",
            "measure both again, or lower it to that",
        )


def _tuples(grid: Floats) -> Rows:
    return tuple(map(tuple, grid.tolist()))


def figure_in(field: str, value: Any, least: float = 0.0, most: float = MOST) -> float:
    checked = number(field, value)
    if not least <= checked <= most:
        raise ConfigError(field, value, f"must be in [{least:g}, {most:g}]", "check its unit")
    return checked


def described(field: str, value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise ConfigError(field, value, f"must be a text of 1 to {MAX_TEXT} characters", "say it shortly")
    return value
