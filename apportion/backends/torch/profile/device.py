"""Measures the inputs of time predictions: this backend's kernels, memory, and layers other than attention.

    profile()               one process, CPU or CUDA ──► Hardware (links, posting and contention assumed)
    links.profile_links()   one process per rank, gloo or NCCL ──► Links ──with_links──► Hardware

Times are the best of several runs. Grids hold the full cost of one task in the executor: kernel calls and merging into
the accumulator rows, so separate launch and tile times are 0. Engine `flash` also runs task by task in training;
`stage` does not, and a short task on its own leaves most of a GPU idle, which other tasks would use.
"""

from __future__ import annotations

import datetime
import itertools
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from apportion.backends.torch.kernels.attention import Band, Score, attend, attend_grad
from apportion.backends.torch.memory.arrays import DTYPES, accumulator_dtype
from apportion.backends.torch.profile.clock import Runs, Work, best_us
from apportion.backends.torch.profile.layers import TimedLayer
from apportion.backends.torch.stage import device_obstacle
from apportion.ir.errors import ConfigError
from apportion.ir.fields import choice
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.figures import MOST_CAUSAL, Figure, Grid
from apportion.ir.request.hardware import Hardware, ProfileOrigin
from apportion.ir.request.model import Model
from apportion.ir.version import __version__

Progress = Callable[[int, int], None]
Times = NDArray[np.float64]

CPU_BYTES, CUDA_BYTES = 2**26, 2**30  # size of the copy: larger than any cache
ARENA_BYTES = 2**27  # minimum size: more than a last-level cache, on GPUs too
PLACES = 8  # arena positions at which a short task runs in one measurement
DIGITS = 3  # decimals of a grid's microseconds
FLASH_TILE = 128  # rows that a CUDA flash kernel pads to

LAYER_FIGURES = 6  # memory, row operations, products, row work, loss, optimizer
#: window sizes, as fractions of the longest length of the axis
WINDOWS = (16, 8, 4, 2)


@dataclass(frozen=True)
class ProfileScope:
    """The scope of a profile: the grids' axis, the model whose heads and layers are timed, the number of sweeps, and
    the seconds after which no new sweep starts. tokens: per rank, for layers; vocab: logits per token, for the loss."""

    axis: tuple[int, ...]
    model: Model
    sweeps: int = 3
    seconds: float = 300.0
    runs: Runs = field(default_factory=Runs)
    tokens: int = 1024
    vocab: int = 4096

    @staticmethod
    def of(
        device: torch.device, quick: bool, model: Model | None = None, tokens: int | None = None
    ) -> ProfileScope:
        """The default scope, smaller on CPUs. quick: well under a minute on two CPU cores. model, tokens: the
        heads, layers and number of tokens to measure."""
        seconds = 25.0 if quick else 300.0
        if device.type == "cuda":
            axis = _doubled_sizes(128, 8192) if quick else _sizes_with_midpoints(128, 32768)
            effort = ProfileScope(axis, Model(), seconds=seconds, tokens=8192, vocab=32768)
        else:
            axis = _doubled_sizes(64, 2048) if quick else _sizes_with_midpoints(32, 8192)
            small = Model(4, 2, 64, dtype="fp32", hidden=512, ffn=1408)
            effort = ProfileScope(axis, small, seconds=seconds)
        return replace(effort, model=(model or effort.model).expanded, tokens=tokens or effort.tokens)


class Steps:
    """Reports steps done, and their total, to `progress`."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def count(self, measured: Any) -> Any:
        """Counts one step; returns its measurement."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)
        return measured

    def finish(self) -> None:
        """Reports completion, even after fewer steps than planned."""
        if self._done < self._total:
            self._done = self._total - 1
            self.count(None)


def profile(
    quick: bool = False,
    progress: Progress | None = None,
    *,
    name: str = "profile",
    device: torch.device | str | None = None,
    effort: ProfileScope | None = None,
    engine: str = "flash",
) -> Hardware:
    """This machine's hardware, measured in one process.

    quick: a coarse grid. progress: called with (steps done, total). device: by default the current CUDA device, else
    the CPU. effort: overrides `quick`. engine: the engine whose tasks are timed, one of `TASKS`. Figures that need two
    ranks are assumed until `with_links`. Raises ConfigError for an implausible measurement, UnknownNameError for an
    unknown engine.
    """
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    effort = effort or ProfileScope.of(target, quick)
    obstacle = device_obstacle(target) if choice("engine", engine, TASKS) == "stage" else None
    if obstacle is not None:
        raise ConfigError("engine", engine, obstacle, "use flash")
    model, steps = effort.model, Steps(progress, 2 * effort.sweeps * len(effort.axis) ** 2 + LAYER_FIGURES)
    forward, backward = _grids(_Arena.of(target, effort), engine, steps)
    layer = TimedLayer(model, effort.tokens, effort.vocab, target, effort.runs)
    memory, linear = steps.count(_memory_gbs(target, effort)), steps.count(layer.linear_tflops())
    defaults = Hardware.load("h100")
    hardware = Hardware(
        name, device_name(target), engine, model.dtype, effort.axis, FLASH_TILE if target.type == "cuda" else 1,
        model.q_heads, model.kv_heads, model.head_dim, forward, backward, _memory_gib(target),
        memory, _peak_tflops(device_name(target), model.dtype, linear), linear,
        steps.count(_rowop_us(target, effort)), defaults.post_us, defaults.contention, **_assumed_links(),
        measured=ProfileOrigin(device_name(target), _versions(), datetime.date.today().isoformat()),
        rows_gbs=steps.count(layer.rows_gbs()), loss_gbs=steps.count(layer.loss_gbs()),
        optimizer_gbs=steps.count(layer.optimizer_gbs()),
    )  # fmt: skip
    steps.finish()
    return Hardware.from_data(hardware.to_data())


# --- grids


class TimedTask(NamedTuple):
    """One attention task. causal: all pairs but a corner, see `Grid`; window: maximum keys per row."""

    rows: int
    keys: int
    causal: bool
    window: int | None = None


@dataclass(frozen=True)
class _Arena:
    """Tensors that tasks take slices of, as in the executor. cursor: the end of the last task, where the next one
    begins, so that no task's rows are in cache."""

    effort: ProfileScope
    queries: tuple[Tensor, Tensor, Tensor]  # q, do, dq
    keys: tuple[Tensor, Tensor, Tensor, Tensor]  # k, v, dk, dv
    rows: tuple[Tensor, Tensor, Tensor]  # o, lse, delta
    cursor: list[int]

    @staticmethod
    def of(device: torch.device, effort: ProfileScope) -> _Arena:
        model = effort.model
        dtype, h, kv = DTYPES[model.dtype], model.q_heads, model.kv_heads
        row_bytes = 2 * (h + kv) * model.head_dim * (dtype.itemsize + accumulator_dtype(dtype).itemsize)
        length = max(effort.axis[-1], ARENA_BYTES // row_bytes)
        generator = torch.Generator(device).manual_seed(0)

        def random_rows(heads: int, wide: bool = False) -> Tensor:
            shape = (length, heads, model.head_dim)
            numbers = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            return numbers.to(accumulator_dtype(dtype) if wide else dtype)

        statistics = torch.zeros(2, length, h, device=device, dtype=accumulator_dtype(dtype))
        return _Arena(
            effort,
            (random_rows(h), random_rows(h), random_rows(h, wide=True)),
            (random_rows(kv), random_rows(kv), random_rows(kv, wide=True), random_rows(kv, wide=True)),
            (random_rows(h, wide=True), statistics[0], statistics[1]),
            [0],
        )

    @property
    def device(self) -> torch.device:
        return self.queries[0].device

    def places(self, task: TimedTask) -> list[list[int]]:
        """The first rows of a task in each run: a short task runs at several places, one after another."""
        longest = max(task.rows, task.keys)
        count = min(PLACES, self.effort.axis[-1] // longest)
        runs = min(self.effort.runs.most + 1, len(self.queries[0]) // (count * longest))
        return [[self._next(longest) for _ in range(count)] for _ in range(runs)]

    def _next(self, longest: int) -> int:
        start = self.cursor[0] if self.cursor[0] + longest <= len(self.queries[0]) else 0
        self.cursor[0] = start + longest
        return start

    def flash_task(self, task: TimedTask, start: int) -> tuple[Work, Work]:
        """A task's forward and backward on engine flash; backward reads the statistics of earlier tasks."""
        q, do, dq = (tensor[start : start + task.rows] for tensor in self.queries)
        k, v, dk, dv = (tensor[start : start + task.keys] for tensor in self.keys)
        o, lse, delta = (tensor[start : start + task.rows] for tensor in self.rows)
        lse.zero_()
        band, score = self._band(task), Score(self.effort.model.head_dim**-0.5)
        return (
            lambda: attend(q, k, v, o, lse, band, score),
            lambda: attend_grad(q, k, v, do, lse, delta, dq, dk, dv, band, score),
        )

    def stage_task(self, task: TimedTask, start: int) -> tuple[Work, Work]:
        """A task's forward (one launch) and backward (two launches) on engine stage."""
        from apportion.backends.torch.profile.lone_task import lone_task

        band = self._band(task)
        q, do = (tensor[start : start + task.rows] for tensor in self.queries[:2])
        k, v = (tensor[start : start + task.keys] for tensor in self.keys[:2])
        return lone_task(q, k, v, do, band.dmin, band.dmax)

    def _band(self, task: TimedTask) -> Band:
        """All pairs, or all but the corner triangle of side min(rows, keys) - 1, as in `Grid`; with a window, at most
        `window` keys per row."""
        model = self.effort.model
        ratio = model.q_heads // model.kv_heads
        kv_of = tuple(head // ratio for head in range(model.q_heads))
        dmin = min(0, task.rows - task.keys) if task.causal else -task.keys
        return Band(dmin, task.rows if task.window is None else task.window - 1, kv_of)


#: engine -> (arena, task, the task's first row) -> the task's forward and backward
TASKS: Mapping[str, Callable[[_Arena, TimedTask, int], tuple[Work, Work]]] = MappingProxyType(
    {"flash": _Arena.flash_task, "stage": _Arena.stage_task}
)


def _grids(arena: _Arena, engine: str, steps: Steps) -> tuple[Grid, Grid]:
    """The best of several sweeps over all tasks, since a disturbance rarely affects the same task in two sweeps."""
    axis = arena.effort.axis
    times = np.full((2, 2, len(axis), len(axis)), np.inf)  # phase, causal, rows, keys
    start = time.monotonic()
    for sweep in range(arena.effort.sweeps):
        if sweep and time.monotonic() - start > arena.effort.seconds:
            break
        for causal, (i, rows), (j, keys) in itertools.product((0, 1), enumerate(axis), enumerate(axis)):
            elapsed = steps.count(_task_us(arena, engine, TimedTask(rows, keys, bool(causal))))
            times[:, causal, i, j] = np.minimum(times[:, causal, i, j], elapsed)
    grids = _grid(engine, *times[0]), _grid(engine, *times[1])
    return _with_windows(arena, engine, *grids)


def _task_us(arena: _Arena, engine: str, task: TimedTask) -> list[float]:
    """The microseconds of a task forward and backward, at a new place in the arenas each time, as in programs."""
    times = []
    for phase in (0, 1):
        runs = [[TASKS[engine](arena, task, row)[phase] for row in rows] for rows in arena.places(task)]
        work = partial(lambda cycle: [task() for task in next(cycle)], itertools.cycle(runs))
        times.append(best_us(work, arena.device, arena.effort.runs) / len(runs[0]))
    return times


def _with_windows(arena: _Arena, engine: str, forward: Grid, backward: Grid) -> tuple[Grid, Grid]:
    """Adds to the grids the time per row that a window takes beyond interpolation between a band of one tile and the
    causal square: the median over `WINDOWS` and the longer half of the axis. Long tasks need up to twice that."""
    axis, extra = arena.effort.axis, []
    for index, part in itertools.product(range(len(axis) // 2, len(axis)), WINDOWS):
        rows, window = axis[index], max(axis[index] // part, 2)
        measured_us = _task_us(arena, engine, TimedTask(rows, rows, True, window))
        interpolated = [_estimate_us(grid, index, rows, window) for grid in (forward, backward)]
        extra.append(np.subtract(measured_us, interpolated) / rows)
    first, second = np.median(extra, axis=0).clip(min=0.0).round(5).tolist()
    return replace(forward, window_us=first), replace(backward, window_us=second)


def _estimate_us(grid: Grid, index: int, rows: int, window: int) -> float:
    """The microseconds of a window according to the grid, for `rows` rows at point `index` of the axis: the time of
    its rows and keys alone, plus its share of the causal square's pairs times the rest of the square's time."""
    causal = grid.causal[index][index]
    lower = min(max(grid.full[index][0], grid.full[0][index]), causal)
    pairs, corner = window * rows - window * (window - 1) / 2, rows * (rows + 1) / 2
    return lower + (causal - lower) * (pairs - rows) / (corner - rows)


def _grid(engine: str, full: Times, causal: Times) -> Grid:
    """The grid of measured times. Causal times are capped: CPUs need several calls, often slower than a full task."""
    full = np.round(_made_monotonic(full), DIGITS)
    causal = np.minimum(_made_monotonic(causal), MOST_CAUSAL * full)
    source = f"measured: engine {engine} of the torch backend, one task per call"
    return Grid(_plain(full), _plain(causal), 0.0, 0.0, source)


def _made_monotonic(times: Times) -> Times:
    """Caps each time at the times of tasks with more rows or keys, since noise only adds time."""
    monotonic: Times = np.minimum.accumulate(np.minimum.accumulate(times[::-1, ::-1], 0), 1)
    return monotonic[::-1, ::-1]


def _plain(times: Times) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, np.round(times, DIGITS).tolist()))


def _doubled_sizes(low: int, high: int) -> tuple[int, ...]:
    return tuple(low << i for i in range((high // low).bit_length()))


def _sizes_with_midpoints(low: int, high: int) -> tuple[int, ...]:
    """Doubling sizes and the midpoints between them."""
    doubling = _doubled_sizes(low, high)
    return tuple(sorted({*doubling, *(3 * rows // 2 for rows in doubling[:-1])}))


# --- memory, linear layers, the machine


def _memory_gbs(device: torch.device, effort: ProfileScope) -> Figure:
    size = CUDA_BYTES if device.type == "cuda" else CPU_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    us = best_us(lambda: target.copy_(source), device, effort.runs)
    return Figure(round(2 * size / us / 1e3, 3), f"measured: copy of {size >> 20} MiB, read and written")


def _rowop_us(device: torch.device, effort: ProfileScope) -> Figure:
    row = torch.zeros(effort.model.q_heads, effort.model.head_dim, device=device)
    target = torch.empty_like(row)
    us = best_us(lambda: target.copy_(row), device, effort.runs)
    return Figure(round(us, 3), "measured: copy of one row")


def _peak_tflops(device: str, dtype: str, linear: Figure) -> Figure:
    """The peak of the data sheet if the device's name matches a built-in chip (and none of its slower variants); else
    the measured rate of linear layers."""
    words = device.upper().replace("-", " ").split()
    slower = {"PCIE", "NVL", "MIG"} & set(words)
    for chip in map(Hardware.load, Hardware.builtin()):
        if dtype in ("bf16", "fp16") and chip.name.upper() in words and not slower:
            source = f"peak of {chip.name}, matched by device name: {chip.peak_tflops.source}"
            return Figure(chip.peak_tflops.value, source, chip.peak_tflops.assumed)
    return Figure(linear.value, "no data sheet: the measured rate of linear layers", True)


def _memory_gib(device: torch.device) -> Figure:
    if device.type == "cuda":
        size = torch.cuda.get_device_properties(device).total_memory
    else:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Figure(round(size / 2**30, 3), "reported by the machine")


def _assumed_links() -> dict[str, Any]:
    links = ("intra_gbs", "inter_gbs", "nics_per_node", "intra_latency_us", "inter_latency_us")
    source = "default of Cluster: no links were measured"
    return {field: Figure(getattr(Cluster(), field), source, True) for field in links}


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    versions = {
        "apportion": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    return versions | ({"cuda": str(torch.version.cuda)} if torch.version.cuda else {})
