"""Cost model: microseconds of attention tasks, row operations and linear layers on given hardware.

A task of `pairs` allowed pairs in a rectangle of rows x keys is priced from the two grids of its phase, by the fraction
of the rectangle that it computes:

    pairs   max(rows, keys)      causal(rows, keys)          rows x keys
            one tile per row ──►  the causal grid  ─────────►  the full grid        linear in between

Grids are interpolated bilinearly in rows and keys (DistCA, section 4.2), not in their logarithms: time is a sum of
terms in rows x keys, rows, keys and 1, which linear interpolation reproduces. The causal time bends at rows = keys, so
a cell on the diagonal of the causal grid is split along it. Beyond the grid, the time per pair of the nearest edge is
used (saturation). Both rules preserve monotonicity: no time falls when rows or keys are added, and the ratio of causal
to full times never exceeds its maximum over the grids (above 1 for kernels that split causal tasks into several calls).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from apportion._core import cost as core
from apportion.ir.arrays import Floats, Ints
from apportion.ir.fields import choice
from apportion.ir.layer_work import linear_parameters
from apportion.ir.masks.bands import area, tighten
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.figures import Grid
from apportion.ir.request.hardware import Hardware
from apportion.ir.request.model import Model
from apportion.ir.tensors import Tensor
from apportion.planner.congestion import Congestion, Network

Count = int | Ints

PHASES = ("forward", "backward")
_PRODUCTS = {"forward": (1, 1), "backward": (3, 2)}  # of widths QK and V: (QK; PV), (QK, dQ, dK; dP, dV)


def causal_pairs(rows: Count, keys: Count) -> Ints:
    """int64: rows x keys less the corner triangle of side min(rows, keys) - 1."""
    rows, keys = np.asarray(rows, np.int64), np.asarray(keys, np.int64)
    side = np.minimum(rows, keys)
    return np.asarray(rows * keys - side * (side - 1) // 2)


class Attention(Protocol):
    """A cost model of attention, such as `CostModel`."""

    def attention_us(
        self, phase: str, q_rows: Ints, kv_rows: Ints, pairs: Ints, q_heads: Ints, kv_heads: Ints, /
    ) -> Floats: ...


def bands_us(costs: Attention, model: Model, phase: str, bands: Ints) -> Floats:
    """float64 [n]: time of each band of `bands`, int64 [n, 6], as one task with all heads; 0 if it has no pair."""
    q0, q1, k0, k1, _, _ = tighten(bands).T
    pairs, times = area(bands), np.zeros(len(bands))
    nonempty = np.flatnonzero(pairs)
    heads, kv_heads = (np.full(len(nonempty), count) for count in (model.q_heads, model.kv_heads))
    sizes = (q1 - q0)[nonempty], (k1 - k0)[nonempty], pairs[nonempty]
    times[nonempty] = costs.attention_us(phase, *sizes, heads, kv_heads)
    return times


class _PhaseCost(NamedTuple):
    """Costs of one phase, at the hardware's heads and head dim, as the core reads them.

    points: int64 [points], the grid's axis. cell, offset: int64, float64 [tiles + 1]; for each number of tiles up to
    the axis' end, the interval between points that its rows fall in, and their offset in it. full, causal: float64
    [5, cells], row-major, coefficients of time = c0 + c1 x + c2 y + c3 x y + c4 min(x, y), x and y from the cell's
    corner. pair_us: lowest time per pair of any grid point (saturated throughput). most_causal: largest ratio of causal
    to full times, at least 1. window_us: extra time per query row cut by dmax.
    """

    points: Ints
    cell: Ints
    offset: Floats
    full: Floats
    causal: Floats
    tile: int
    pair_us: float
    most_causal: float
    window_us: float

    @staticmethod
    def of(hardware: Hardware, grid: Grid) -> _PhaseCost:
        points, tile = np.asarray(hardware.axis, np.int64), hardware.tile
        tiles = np.arange(-(-points[-1] // tile) + 1)
        rows = np.clip(tiles * tile, points[0], points[-1])
        cell = np.minimum(np.searchsorted(points, rows, "right") - 1, len(points) - 2)
        full, causal = np.asarray(grid.full, np.float64), np.asarray(grid.causal, np.float64)
        corners = causal_pairs(points[:, None], points[None, :])
        best = min((full / (points[:, None] * points[None, :])).min(), (causal / corners).min())
        patches = _patches(points, full, False), _patches(points, causal, True)
        grids = points, cell, (rows - points[cell]).astype(np.float64), *patches
        return _PhaseCost(*grids, tile, float(best), max(1.0, float((causal / full).max())), grid.window_us)


def _patches(points: Ints, times: Floats, split: bool) -> Floats:
    low, right, up, far = times[:-1, :-1], times[1:, :-1], times[:-1, 1:], times[1:, 1:]
    x, y = np.diff(points)[:, None], np.diff(points)[None, :]
    twist = far - right - up + low
    diagonal = np.eye(len(points) - 1, dtype=bool) & split
    bilinear, bend = np.where(diagonal, 0.0, twist / (x * y)), np.where(diagonal, twist / x, 0.0)
    return np.stack([low, (right - low) / x, (up - low) / y, bilinear, bend]).reshape(5, -1)


class CostModel:
    """Times of a model's layers on given hardware, for one rank of speed 1; callers divide by a rank's speed.

    Heads scale attention: time is proportional to query heads and to the FLOPs of the head dims, but at least the time
    to read and write every row once, which depends on KV heads (GQA). Grids are assumed to be of the model's dtype.
    """

    def __init__(self, hardware: Hardware, model: Model) -> None:
        self.hardware, self.model = hardware, model
        self._phases: dict[str, _PhaseCost] = {}

    def attention_us(
        self, phase: str, q_rows: Count, kv_rows: Count, pairs: Count, q_heads: Count, kv_heads: Count
    ) -> Floats:
        """float64 [n]: each task's share of its instruction's time, without `launch_us`.

        q_rows, kv_rows, pairs: int64 [n] or int, at least 1, the task's rectangle and the pairs allowed in it. q_heads,
        kv_heads: int, or int64 [n]: the heads of its operands; kernels read an expanded latent row once per query head
        (`expansion_us` is the cost of expanding). phase: forward or backward. Raises UnknownNameError for an unknown
        phase.
        """
        keys = kv_heads if self.model.latent is None else q_heads
        sizes = (q_rows, kv_rows, pairs, q_heads, keys)
        columns = [np.ascontiguousarray(size, np.int64) for size in sizes]
        return core.task_us(self._phase(phase), self._scale(phase), *self._row_us(phase), columns)

    def expansion_us(self, phase: str, rows: Count, heads: Count) -> Floats:
        """float64 [n]: time to expand the latent rows of an instruction. rows: summed over heads; heads: those whose
        weights are used. Forward: a product, and a pass that copies the rotary part of k next to each head's own
        part. Backward: both again, the products for the gradients of rows and weights, and the sum of the latter."""
        model, rate = self.model, self.hardware.linear_tflops.value * 1e6
        assert model.latent is not None
        backward = phase == "backward"
        flops = 2.0 * model.expansion * (3 if backward else 1) * np.asarray(rows)
        moved_bytes = (2 * model.head_dim - model.latent.rope) * model.element_bytes * np.asarray(rows)
        if backward:  # weight gradients: written, then read and added to a sum, which is read and written
            sum_bytes = 2 * (model.element_bytes + model.accumulator_bytes)
            moved_bytes = moved_bytes + sum_bytes * model.expansion * np.asarray(heads)
        kernels = 5 if backward else 2
        return np.asarray(flops / rate + self.moved_us(moved_bytes) + kernels * self.hardware.rowop_us.value)

    def ideal_us(self, phase: str, pairs: Count, q_heads: Count) -> Floats:
        """float64: time of the pairs at saturated throughput, without launches."""
        pair_us = self._phase(phase).pair_us * self._scale(phase)
        return np.asarray(np.asarray(pairs, np.float64) * q_heads * pair_us)

    def launch_us(self, phase: str) -> float:
        """Launch cost per kernel of an attend or attend_grad instruction, whose tasks share a launch, as in varlen
        kernels."""
        return self.hardware.grid(phase).launch_us

    def chain_us(self, phase: str, q_rows: Count, kv_rows: Count, diagonals: Count) -> Floats:
        """float64 [n]: minimum time of an instruction with this task on unlimited multiprocessors: one tile of queries
        iterates over its visible keys (backward: a tile of keys over its queries). diagonals: number of diagonals
        in the task's band."""
        rows = np.minimum(kv_rows if phase == "forward" else q_rows, diagonals + (self.hardware.tile - 1))
        tiles = -(-rows // self.hardware.tile)
        return np.asarray(tiles * (self.hardware.grid(phase).tile_us * self._dims(phase)))

    def moved_us(self, moved_bytes: Count) -> Floats:
        """float64: time to read and write that many bytes in total."""
        return np.asarray(np.asarray(moved_bytes) / (self.hardware.memory_gbs.value * 1e3))

    def rowop_us(self, moved_bytes: Count) -> Floats:
        """float64: time of a row kernel (copy, merge, add, clear, delta, finish, pack, unpack, cast) that reads and
        writes that many bytes in total: memory-bound."""
        return np.asarray(self.hardware.rowop_us.value + self.moved_us(moved_bytes))

    @property
    def kernels(self) -> tuple[object, ...]:
        """Key of all inputs that determine the price of a rank's work: equal for hardware that differs only in links,
        NICs and congestion."""
        hardware = self.hardware
        rates = (hardware.memory_gbs, hardware.rowop_us, hardware.linear_tflops)
        return self.model, hardware.axis, hardware.forward, hardware.backward, *(rate.value for rate in rates)

    @property
    def post_us(self) -> float:
        """Cost of posting a message, which is added to the latency of its round's transfers on the rank."""
        return self.hardware.post_us.value

    @property
    def contention(self) -> float:
        """Relative slowdown of kernels during a transfer of their rank."""
        return self.hardware.contention.value

    @property
    def congestion(self) -> Congestion | None:
        """Slowdown of transfers between nodes, or None."""
        return Congestion.of(self.hardware)

    def network(self, cluster: Cluster) -> Network | None:
        """The network figures for splitting rounds with incast; None if splitting gains nothing."""
        congestion = self.congestion
        if congestion is None or not congestion.incast or cluster.nodes == 1:
            return None
        sent = np.array([self.model.sent_bytes(tensor, 1) for tensor in Tensor], np.int64)
        shape = (0, cluster.ranks_per_node, cluster.nics_per_node)
        # latency, and a kernel on either side
        round_us = cluster.inter_latency_us + 2 * float(self.rowop_us(0))
        figures = (congestion.incast, congestion.peers, congestion.one_peer)
        return Network(sent, *shape, 1 / (cluster.inter_gbs * 1e3), round_us, *figures)

    def linear_us(self, tokens: Count) -> Floats:
        """float64: forward time of one layer's linear operations for that many tokens: 2 FLOPs per parameter and
        token."""
        flops = 2 * self.linear_parameters
        return np.asarray(np.asarray(tokens) * (flops / (self.hardware.linear_tflops.value * 1e6)))

    @property
    def linear_parameters(self) -> int:
        """Parameters of one layer: projections of Q, K, V and O, and a gated FFN (three matrices)."""
        return linear_parameters(self.model)

    def _phase(self, phase: str) -> _PhaseCost:
        """The costs of a phase, built on first use."""
        if phase not in self._phases:
            grid = self.hardware.grid(choice("phase", phase, PHASES))
            self._phases[phase] = _PhaseCost.of(self.hardware, grid)
        return self._phases[phase]

    def _dims(self, phase: str) -> float:
        """FLOPs per pair and head in a phase, relative to the grid's, by the widths of QK and V."""
        qk, v = _PRODUCTS[phase]
        return (qk * self.model.head_dim + v * self.model.value_dim) / ((qk + v) * self.hardware.head_dim)

    def _scale(self, phase: str) -> float:
        return self._dims(phase) / self.hardware.q_heads

    def _row_us(self, phase: str) -> tuple[float, float]:
        """Times to read and write one row of one head once: a query row, and a key row."""
        qk, v = self.model.head_dim, self.model.value_dim
        numbers = (qk + v, qk + v) if phase == "forward" else (2 * qk + v, 2 * (qk + v))
        number_us = self.model.element_bytes / (self.hardware.memory_gbs.value * 1e3)
        return numbers[0] * number_us, numbers[1] * number_us
