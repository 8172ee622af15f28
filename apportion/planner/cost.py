"""What work costs: microseconds of attention tasks, row operations and linear layers on a hardware.

A task of `pairs` allowed pairs in a rectangle of rows x keys is priced from the two grids of its phase, by the
share of the rectangle that it computes:

    pairs   max(rows, keys)      causal(rows, keys)          rows x keys
            one tile a row   ──►  the causal grid  ─────────►  the full grid        straight lines between

Grids are interpolated bilinearly in rows and keys (DistCA, section 4.2), not in their logarithms: time is a sum of
terms in rows x keys, rows, keys and 1, which straight lines reproduce. A cell on the diagonal of the causal grid,
where rows = keys bends, is split along it. Beyond the grid, the time a pair of the nearest edge holds: saturation.
Both rules keep what the grids have: no time falls when rows or keys are added, and where no causal time of the grids is
above the full one, none is anywhere. Where some are, as of kernels that cut causal tasks into several calls, all are at
most so many times the full one as the worst of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from apportion.ir.arrays import Floats, Ints
from apportion.ir.fields import choice
from apportion.ir.layer_work import linear_parameters
from apportion.ir.masks.bands import area, tighten
from apportion.ir.request.figures import Grid
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model

Count = int | Ints

PHASES = ("forward", "backward")
_PRODUCTS = {"forward": (1, 1), "backward": (3, 2)}  # QK; PV. QK again, dQ, dK; dP, dV
CHUNK = 16384  # tasks priced at a time: the columns in between stay in a core's cache


def causal_pairs(rows: Count, keys: Count) -> Ints:
    """int64: rows x keys less the corner triangle of side min(rows, keys) - 1."""
    rows, keys = np.asarray(rows, np.int64), np.asarray(keys, np.int64)
    side = np.minimum(rows, keys)
    return np.asarray(rows * keys - side * (side - 1) // 2)


class Attention(Protocol):
    """What prices attention, as `CostModel` does."""

    def attention_us(
        self, phase: str, q_rows: Ints, kv_rows: Ints, pairs: Ints, q_heads: Ints, kv_heads: Ints, /
    ) -> Floats: ...


def bands_us(costs: Attention, model: Model, phase: str, bands: Ints) -> Floats:
    """float64 [n]: what each of int64 [n, 6] bands takes as one task with all heads, 0 where it has no pair."""
    q0, q1, k0, k1, _, _ = tighten(bands).T
    pairs, times = area(bands), np.zeros(len(bands))
    some = np.flatnonzero(pairs)
    heads, kv_heads = (np.full(len(some), count) for count in (model.q_heads, model.kv_heads))
    sizes = (q1 - q0)[some], (k1 - k0)[some], pairs[some]
    times[some] = costs.attention_us(phase, *sizes, heads, kv_heads)
    return times


@dataclass(frozen=True, eq=False)
class Axis:
    """Where numbers of rows lie on a grid's axis, by look-up.

    points: int64 [points]; tile: rows are rounded up to it; cell: int64 and offset: float64, for each number of
    tiles up to the axis' end: the cell that holds them and how many rows into it they reach.
    """

    points: Ints
    tile: int
    cell: Ints
    offset: Floats

    @staticmethod
    def of(hardware: Hardware) -> Axis:
        points, tile = np.asarray(hardware.axis, np.int64), hardware.tile
        tiles = np.arange(-(-points[-1] // tile) + 1)
        rows = np.clip(tiles * tile, points[0], points[-1])
        cell = np.minimum(np.searchsorted(points, rows, "right") - 1, len(points) - 2)
        return Axis(points, tile, cell, (rows - points[cell]).astype(np.float64))

    @property
    def last(self) -> int:
        return int(self.points[-1])

    def cells(self, rows: Ints, keys: Ints) -> tuple[Ints, Floats, Floats]:
        """The grid's cells, numbered row after row, that int64 [n] rows and keys lie in, and offsets into them; what
        is beyond the axis is at its end."""
        (i, x), (j, y) = self._find(rows), self._find(keys)
        return i * (len(self.points) - 1) + j, x, y

    def _find(self, rows: Ints) -> tuple[Ints, Floats]:
        tiles = np.minimum(_tiles(rows, self.tile), len(self.cell) - 1)
        return self.cell[tiles], self.offset[tiles]

    def beyond(self, rows: Ints) -> tuple[Ints, Ints]:
        """int64 [n]: rows as the kernel sees them, and cut to the axis."""
        seen = np.maximum(_tiles(rows, self.tile) * self.tile, self.points[0])
        return seen, np.minimum(seen, self.last)


def _tiles(rows: Ints, tile: int) -> Ints:
    return (rows + (tile - 1)) // tile


@dataclass(frozen=True, eq=False)
class Surface:
    """One grid as a patch a cell: time = c0 + c1 x + c2 y + c3 x y + c4 min(x, y), x and y from the cell's corner.

    patches: float64 [5, cells], row of cells after row of cells."""

    patches: Floats
    split: bool

    def time(self, cell: Ints, x: Floats, y: Floats) -> Floats:
        """float64 [n]: microseconds, of int64 [n] cells and float64 [n] offsets into them."""
        c = self.patches
        time: Floats = c[0][cell] + c[1][cell] * x + (c[2][cell] + c[3][cell] * x) * y
        return time + c[4][cell] * np.minimum(x, y) if self.split else time


def _surface(points: Ints, times: Floats, split: bool) -> Surface:
    low, right, up, far = times[:-1, :-1], times[1:, :-1], times[:-1, 1:], times[1:, 1:]
    x, y = np.diff(points)[:, None], np.diff(points)[None, :]
    twist = far - right - up + low
    diagonal = np.eye(len(points) - 1, dtype=bool) & split
    bilinear, bend = np.where(diagonal, 0.0, twist / (x * y)), np.where(diagonal, twist / x, 0.0)
    return Surface(np.stack([low, (right - low) / x, (up - low) / y, bilinear, bend]).reshape(5, -1), split)


@dataclass(frozen=True, eq=False)
class PhaseCost:
    """The grids of one phase, at the hardware's heads and head dim."""

    axis: Axis
    full: Surface
    causal: Surface
    pair_us: float  # the least time a pair of any grid point: saturated throughput
    most_causal: float = 1.0  # times the full time, where causal ones are above it; at least 1
    window_us: float = 0.0  # a query row, of what dmax cuts

    @staticmethod
    def of(axis: Axis, grid: Grid) -> PhaseCost:
        full, causal = np.asarray(grid.full, np.float64), np.asarray(grid.causal, np.float64)
        rows, keys = axis.points[:, None], axis.points[None, :]
        best = min((full / (rows * keys)).min(), (causal / causal_pairs(rows, keys)).min())
        return PhaseCost(
            axis,
            _surface(axis.points, full, False),
            _surface(axis.points, causal, True),
            float(best),
            max(1.0, float((causal / full).max())),
            grid.window_us,
        )

    def task_us(self, rows: Ints, keys: Ints, pairs: Ints) -> Floats:
        """float64 [n]: of int64 [n] columns."""
        time = self._full_us(rows, keys)
        # one row or key is full and causal at once, and priced as the cheaper
        part = np.flatnonzero((pairs < rows * keys) | (np.minimum(rows, keys) == 1))
        if len(part):
            time[part] = self._part_us(time[part], rows[part], keys[part], pairs[part])
        priced: Floats = np.maximum(time, pairs * self.pair_us)
        return priced

    def _part_us(self, full: Floats, rows: Ints, keys: Ints, pairs: Ints) -> Floats:
        corner = causal_pairs(rows, keys)
        most = full
        if self.most_causal > 1.0:
            most = full * np.where(np.minimum(rows, keys) == 1, 1.0, self.most_causal)
        causal = np.minimum(self._causal_us(rows, keys), most)
        above = (pairs - corner) / np.maximum(rows * keys - corner, 1)
        time: Floats = causal + (full - causal) * np.clip(above, 0.0, 1.0)
        few = np.flatnonzero(pairs < corner)
        if len(few):
            time[few] = self._sparse_us(causal[few], rows[few], keys[few], pairs[few], corner[few])
        return time

    def _sparse_us(self, causal: Floats, rows: Ints, keys: Ints, pairs: Ints, corner: Ints) -> Floats:
        """Between a band one tile wide, which every row and key of a task needs, and the causal band; and what kernels
        take longer for windows."""
        one = np.ones_like(rows)
        least = np.minimum(np.maximum(self._full_us(rows, one), self._full_us(one, keys)), causal)
        narrowest = np.maximum(rows, keys)
        share = (pairs - narrowest) / np.maximum(corner - narrowest, 1)
        sparse: Floats = least + (causal - least) * np.clip(share, 0.0, 1.0)
        return sparse + rows * self.window_us

    def _full_us(self, rows: Ints, keys: Ints) -> Floats:
        time = self.full.time(*self.axis.cells(rows, keys))
        if max(rows.max(), keys.max()) > self.axis.last:
            (m, m_in), (n, n_in) = self.axis.beyond(rows), self.axis.beyond(keys)
            time *= (m * n) / (m_in * n_in)
        return time

    def _causal_us(self, rows: Ints, keys: Ints) -> Floats:
        time = self.causal.time(*self.axis.cells(rows, keys))
        if max(rows.max(), keys.max()) > self.axis.last:
            (m, m_in), (n, n_in) = self.axis.beyond(rows), self.axis.beyond(keys)
            time *= causal_pairs(m, n) / causal_pairs(m_in, n_in)
        return time


class CostModel:
    """Times of a model's layers on a hardware, one rank of speed 1; callers divide by a rank's speed.

    Heads scale attention: time is proportional to query heads and to the FLOPs of the head dims, and never less
    than reading and writing every row once, where KV heads count (GQA). The grids' dtype is taken for the model's.
    """

    def __init__(self, hardware: Hardware, model: Model) -> None:
        self.hardware, self.model = hardware, model
        self._phases: dict[str, PhaseCost] = {}

    def attention_us(
        self, phase: str, q_rows: Count, kv_rows: Count, pairs: Count, q_heads: Count, kv_heads: Count
    ) -> Floats:
        """float64 [n]: each task's share of its instruction, besides `launch_us`.

        q_rows, kv_rows, pairs: int64 [n] or int, at least 1, the task's rectangle and the pairs allowed in it.
        q_heads, kv_heads: int, or int64 [n]: the heads of its operands. phase: forward or backward; another raises
        UnknownNameError.
        """
        sizes = (q_rows, kv_rows, pairs, q_heads, kv_heads)
        columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(size, np.int64)) for size in sizes))
        cost = self._phase(phase)
        times = np.empty(len(columns[0]), np.float64)
        for start in range(0, len(times), CHUNK):
            part = slice(start, start + CHUNK)
            times[part] = self._tasks_us(phase, cost, *(column[part] for column in columns))
        return times

    def _tasks_us(
        self, phase: str, cost: PhaseCost, rows: Ints, keys: Ints, pairs: Ints, heads: Ints, kv_heads: Ints
    ) -> Floats:
        time = cost.task_us(rows, keys, pairs) * self._scale(phase) * heads
        q_row, kv_row = self._row_us(phase)
        return np.maximum(time, rows * heads * q_row + keys * kv_heads * kv_row)

    def ideal_us(self, phase: str, pairs: Count, q_heads: Count) -> Floats:
        """float64: the same pairs at saturated throughput, without launches."""
        a_pair = self._phase(phase).pair_us * self._scale(phase)
        return np.asarray(np.asarray(pairs, np.float64) * q_heads * a_pair)

    def launch_us(self, phase: str) -> float:
        """Once a kernel of an attend or attend_grad instruction: its tasks are one launch, as in varlen kernels."""
        return self.hardware.grid(phase).launch_us

    def chain_us(self, phase: str, q_rows: Count, kv_rows: Count, diagonals: Count) -> Floats:
        """float64 [n]: the least time of an instruction that holds the task, however many multiprocessors are idle:
        a tile of its queries walks over the keys that it sees (backward: of its keys over its queries) one after the
        other. diagonals: of the task's band."""
        walked = np.minimum(kv_rows if phase == "forward" else q_rows, diagonals + (self.hardware.tile - 1))
        tiles = -(-walked // self.hardware.tile)
        return np.asarray(tiles * (self.hardware.grid(phase).tile_us * self._dims(phase)))

    def moved_us(self, moved_bytes: Count) -> Floats:
        """float64: reading and writing that many bytes in all."""
        return np.asarray(np.asarray(moved_bytes) / (self.hardware.memory_gbs.value * 1e3))

    def rowop_us(self, moved_bytes: Count) -> Floats:
        """float64: a kernel on rows (copy, merge, add, clear, delta, finish, pack, unpack, cast) that reads and writes
        that many bytes in all: bound by memory."""
        return np.asarray(self.hardware.rowop_us.value + self.moved_us(moved_bytes))

    @property
    def post_us(self) -> float:
        """Of each message of a round, before any of its transfers is complete."""
        return self.hardware.post_us.value

    @property
    def contention(self) -> float:
        """By how much longer kernels take while a transfer of their rank is on the wire."""
        return self.hardware.contention.value

    def linear_us(self, tokens: Count) -> Floats:
        """float64: the linear layers of one layer, forward, of that many tokens: 2 FLOPs a parameter and token."""
        flops = 2 * self.linear_parameters
        return np.asarray(np.asarray(tokens) * (flops / (self.hardware.linear_tflops.value * 1e6)))

    @property
    def linear_parameters(self) -> int:
        """Of one layer: projections of Q, K, V and O, and a gated FFN (three matrices)."""
        return linear_parameters(self.model)

    def _phase(self, phase: str) -> PhaseCost:
        """The grids of a phase, made when they are first asked for."""
        if phase not in self._phases:
            grid = self.hardware.grid(choice("phase", phase, PHASES))
            self._phases[phase] = PhaseCost.of(Axis.of(self.hardware), grid)
        return self._phases[phase]

    def _dims(self, phase: str) -> float:
        """FLOPs of a pair and head, relative to the grid's: products as wide as QK and as V in a phase."""
        qk, v = _PRODUCTS[phase]
        return (qk * self.model.head_dim + v * self.model.value_dim) / ((qk + v) * self.hardware.head_dim)

    def _scale(self, phase: str) -> float:
        return self._dims(phase) / self.hardware.q_heads

    def _row_us(self, phase: str) -> tuple[float, float]:
        """Reading and writing one row of one head once: of queries, and of keys."""
        qk, v = self.model.head_dim, self.model.value_dim
        numbers = (qk + v, qk + v) if phase == "forward" else (2 * qk + v, 2 * (qk + v))
        a_number = self.model.element_bytes / (self.hardware.memory_gbs.value * 1e3)
        return numbers[0] * a_number, numbers[1] * a_number
