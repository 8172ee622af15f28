"""Measures what the planner's times are predicted from: this backend's own kernels, memory, linear layers, links.

    profile()               one process, CPU or CUDA ──► Hardware (links assumed)
    profile_links(group)    a process a rank, gloo or NCCL ──► Links, the same on every rank
    with_links(hardware, links)

Times are the best of several runs. Grids hold what one task costs where the executor runs it: calls of the kernel
and merging into the accumulator rows, so launch and tile times of their own are 0. Engine `flash` runs task by task in
training too; `stage` does not, and a short task alone leaves most of a GPU idle that others would fill.
"""

from __future__ import annotations

import datetime
import itertools
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from apportion.backends.torch.arrays import accumulator_dtype
from apportion.backends.torch.kernels import Band, Score, attend, attend_grad
from apportion.backends.torch.stage import device_obstacle
from apportion.backends.torch.transport import Communicator
from apportion.ir.chips import CHIPS, CONTENTION, POST
from apportion.ir.cluster import Cluster
from apportion.ir.errors import ConfigError, ExecutionError
from apportion.ir.fields import choice
from apportion.ir.figures import Figure, Grid
from apportion.ir.hardware import Hardware, Measured
from apportion.ir.version import __version__

Work = Callable[[], object]
Progress = Callable[[int, int], None]
Times = NDArray[np.float64]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU_LINEAR, CUDA_LINEAR = 1024, 8192  # side of the square matrix product: large enough for full speed
CPU_BYTES, CUDA_BYTES = 2**26, 2**30  # of the copy: more than any cache
MESSAGES = tuple(2**i for i in range(10, 25, 2))  # bytes, 1 KiB to 16 MiB
FLASH_TILE = 128  # rows a CUDA flash kernel pads to


@dataclass(frozen=True)
class Effort:
    """What is measured: the grids' axis and heads; over how many sweeps, none begun after so many
    seconds; the best of how many runs (more than
    `least` of short ones: up to `most` as long as they fit `budget_us`)."""

    axis: tuple[int, ...]
    q_heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    sweeps: int = 3
    seconds: float = 300.0
    least: int = 2
    most: int = 10
    budget_us: float = 10_000.0

    @staticmethod
    def of(device: torch.device, quick: bool) -> Effort:
        """The CPU's tasks are smaller: `quick` takes well under a minute on two cores."""
        if device.type == "cuda":
            axis = _doubling(128, 8192) if quick else _halfway(128, 32768)
            return Effort(axis, 32, 8, 128, "bf16", seconds=25.0 if quick else 300.0)
        axis = _doubling(64, 2048) if quick else _halfway(32, 8192)
        return Effort(axis, 4, 2, 64, "fp32", seconds=25.0 if quick else 300.0)


@dataclass(frozen=True)
class Line:
    """alpha + bytes / rate: latency in microseconds, 1e9 bytes/s."""

    latency_us: float
    gbs: float


@dataclass(frozen=True)
class Links:
    """Between two ranks of a node and of different nodes; None where the group has no such pair."""

    intra: Line | None
    inter: Line | None
    backend: str
    ranks_per_node: int


class Steps:
    """Tells `progress` how many steps are done, of how many."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def after(self, measured: Any) -> Any:
        """Counts one step; returns what it measured."""
        self._tell(self._done + 1)
        return measured

    def finish(self) -> None:
        """All steps that were to be done are, fewer than planned or not."""
        if self._done < self._total:
            self._tell(self._total)

    def _tell(self, done: int) -> None:
        self._done = done
        if self._progress is not None:
            self._progress(done, self._total)


def profile(
    quick: bool = False,
    progress: Progress | None = None,
    *,
    name: str = "profile",
    device: torch.device | str | None = None,
    effort: Effort | None = None,
    engine: str = "flash",
) -> Hardware:
    """This machine's hardware, measured in one process.

    quick: a coarse grid. progress: called with (steps done, of how many). device: CUDA's current one where there is
    one, else the CPU. effort: instead of `quick`. engine: whose tasks are timed, one of `TASKS`. Links are assumed
    until `with_links`. Raises ConfigError where a measurement makes no sense, UnknownNameError for another engine.
    """
    on = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    effort = effort or Effort.of(on, quick)
    _check_engine(engine, on)
    steps = Steps(progress, 2 * effort.sweeps * len(effort.axis) ** 2 + 3)
    forward, backward = _grids(_Arena.of(on, effort), engine, steps)
    memory, linear = steps.after(_memory_gbs(on, effort)), steps.after(_linear_tflops(on, effort))
    measured = Hardware(
        name, device_name(on), engine, effort.dtype, effort.axis, FLASH_TILE if on.type == "cuda" else 1,
        effort.q_heads, effort.kv_heads, effort.head_dim, forward, backward, _memory_gib(on),
        memory, _peak_tflops(device_name(on), effort.dtype, linear), linear,
        steps.after(_rowop_us(on, effort)), POST, CONTENTION, **_assumed_links(),
        measured=Measured(device_name(on), _versions(), datetime.date.today().isoformat()),
    )  # fmt: skip
    steps.finish()
    return Hardware.from_data(measured.to_data())


# --- grids


@dataclass(frozen=True)
class _Arena:
    """Tensors of the longest task: shorter ones are slices, as in the executor."""

    effort: Effort
    queries: tuple[Tensor, Tensor, Tensor]  # q, do, dq
    keys: tuple[Tensor, Tensor, Tensor, Tensor]  # k, v, dk, dv
    rows: tuple[Tensor, Tensor, Tensor]  # o, lse, delta

    @staticmethod
    def of(device: torch.device, effort: Effort) -> _Arena:
        dtype, longest = DTYPES[effort.dtype], effort.axis[-1]
        generator = torch.Generator(device).manual_seed(0)

        def drawn(heads: int, wide: bool = False) -> Tensor:
            shape = (longest, heads, effort.head_dim)
            numbers = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            return numbers.to(accumulator_dtype(dtype) if wide else dtype)

        h, kv = effort.q_heads, effort.kv_heads
        statistics = torch.zeros(2, longest, h, device=device, dtype=accumulator_dtype(dtype))
        return _Arena(
            effort,
            (drawn(h), drawn(h), drawn(h, wide=True)),
            (drawn(kv), drawn(kv), drawn(kv, wide=True), drawn(kv, wide=True)),
            (drawn(h, wide=True), statistics[0], statistics[1]),
        )

    @property
    def device(self) -> torch.device:
        return self.queries[0].device

    def flash_task(self, rows: int, keys: int, causal: bool) -> tuple[Work, Work]:
        """Its forward and its backward, over fresh statistics."""
        q, do, dq = (tensor[:rows] for tensor in self.queries)
        k, v, dk, dv = (tensor[:keys] for tensor in self.keys)
        o, lse, delta = (tensor[:rows] for tensor in self.rows)
        lse.fill_(float("-inf"))
        band, score = self._band(rows, keys, causal), Score(self.effort.head_dim**-0.5)
        return (
            lambda: attend(q, k, v, o, lse, band, score),
            lambda: attend_grad(q, k, v, do, lse, delta, dq, dk, dv, band, score),
        )

    def stage_task(self, rows: int, keys: int, causal: bool) -> tuple[Work, Work]:
        """Its forward and its backward, one launch and two."""
        from apportion.backends.torch.lone import Shape, lone_task

        (q, do, _), (k, v, *_), band = self.queries, self.keys, self._band(rows, keys, causal)
        return lone_task(q[:rows], k[:keys], v[:keys], do[:rows], Shape(rows, keys, band.dmin, band.dmax))

    def _band(self, rows: int, keys: int, causal: bool) -> Band:
        """All pairs, or all but the corner triangle of side min(rows, keys) - 1, as `Grid` says."""
        ratio = self.effort.q_heads // self.effort.kv_heads
        kv_of = tuple(head // ratio for head in range(self.effort.q_heads))
        return Band(min(0, rows - keys) if causal else -keys, rows, kv_of)


#: engine -> (arena, query rows, key rows, causal) -> forward and backward of one task
TASKS: Mapping[str, Callable[[_Arena, int, int, bool], tuple[Work, Work]]] = MappingProxyType(
    {"flash": _Arena.flash_task, "stage": _Arena.stage_task}
)


def _check_engine(name: str, device: torch.device) -> None:
    why_not = device_obstacle(device) if choice("engine", name, TASKS) == "stage" else None
    if why_not is not None:
        raise ConfigError("engine", name, why_not, "take flash")


def _grids(arena: _Arena, engine: str, steps: Steps) -> tuple[Grid, Grid]:
    """The best of several sweeps over all tasks: what disturbs one sweep at a place seldom disturbs the next."""
    axis = arena.effort.axis
    times = np.full((2, 2, len(axis), len(axis)), np.inf)  # phase, causal, rows, keys
    begun = time.monotonic()
    for sweep in range(arena.effort.sweeps):
        if sweep and time.monotonic() - begun > arena.effort.seconds:
            break
        for causal, (i, rows), (j, keys) in itertools.product((0, 1), enumerate(axis), enumerate(axis)):
            works = TASKS[engine](arena, rows, keys, bool(causal))
            took = steps.after([_best_us(work, arena.device, arena.effort) for work in works])
            times[:, causal, i, j] = np.minimum(times[:, causal, i, j], took)
    return _grid(engine, *times[0]), _grid(engine, *times[1])


def _grid(engine: str, full: Times, causal: Times) -> Grid:
    full, causal = _rising(full), _rising(np.minimum(causal, full))
    source = f"measured: engine {engine} of the torch backend, one task a call"
    return Grid(_plain(full), _plain(causal), 0.0, 0.0, source)


def _rising(times: Times) -> Times:
    """No time above that of more rows or keys: noise only ever adds."""
    rising: Times = np.minimum.accumulate(np.minimum.accumulate(times[::-1, ::-1], 0), 1)
    return rising[::-1, ::-1]


def _plain(times: Times) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, np.round(times, 3).tolist()))


def _doubling(low: int, high: int) -> tuple[int, ...]:
    return tuple(low << i for i in range((high // low).bit_length()))


def _halfway(low: int, high: int) -> tuple[int, ...]:
    """Doubling, with a point halfway between each two."""
    doubling = _doubling(low, high)
    return tuple(sorted({*doubling, *(3 * rows // 2 for rows in doubling[:-1])}))


# --- clocks


def _best_us(work: Work, device: torch.device, effort: Effort) -> float:
    """After a run to warm up: the least of at least `least` runs, of up to `most` within the budget."""
    work()
    best, spent = float("inf"), 0.0
    for run in range(effort.most):
        if run >= effort.least and spent > effort.budget_us:
            break
        took = _once_us(work, device)
        best, spent = min(best, took), spent + took
    return max(best, 1e-3)


def _once_us(work: Work, device: torch.device) -> float:
    if device.type == "cuda":
        return _once_cuda_us(work)
    # the time of the one thread that works, which neighbours on the machine do not stretch
    now = time.process_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    start = now()
    work()
    return (now() - start) / 1e3


def _once_cuda_us(work: Work) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end) * 1e3)


# --- memory, linear layers, the machine


def _memory_gbs(device: torch.device, effort: Effort) -> Figure:
    size = CUDA_BYTES if device.type == "cuda" else CPU_BYTES
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = _best_us(lambda: target.copy_(source), device, effort)
    return Figure(round(2 * size / took / 1e3, 3), f"measured: copy of {size >> 20} MiB, read and written")


def _rowop_us(device: torch.device, effort: Effort) -> Figure:
    row = torch.zeros(effort.q_heads, effort.head_dim, device=device)
    target = torch.empty_like(row)
    took = _best_us(lambda: target.copy_(row), device, effort)
    return Figure(round(took, 3), "measured: copy of one row")


def _linear_tflops(device: torch.device, effort: Effort) -> Figure:
    side = CUDA_LINEAR if device.type == "cuda" else CPU_LINEAR
    x, weight = (torch.randn(side, side, device=device).to(DTYPES[effort.dtype]) for _ in range(2))
    took = _best_us(lambda: torch.nn.functional.linear(x, weight), device, effort)
    return Figure(
        round(2 * side**3 / took / 1e6, 6), f"measured: linear layer of {side} x {side}, {side} tokens"
    )


def _peak_tflops(device: str, dtype: str, linear: Figure) -> Figure:
    """Of the data sheet, where the device's name has that of a built-in chip, which is none of the slower cards of that
    name; else what linear layers reach."""
    words = device.upper().replace("-", " ").split()
    slower = {"PCIE", "NVL", "MIG"} & set(words)
    for chip in CHIPS.values():
        if dtype in ("bf16", "fp16") and chip.name.upper() in words and not slower:
            source = f"of {chip.name}, by the device's name: {chip.peak_tflops.source}"
            return Figure(chip.peak_tflops.value, source, chip.peak_tflops.assumed)
    return Figure(linear.value, "no data sheet: what linear layers reach", True)


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


# --- links


def profile_links(
    group: Any = None, node: int | None = None, messages: Sequence[int] = MESSAGES, runs: int = 10
) -> Links:
    """Latency and bandwidth of the group's links, from ping-pong between the first pair of ranks that share a node
    and the first that do not. A collective of `group` (None: the default one); all ranks get the same numbers.

    node: a number of this rank's node, the same on all its ranks; None: from the host's name. messages: bytes.
    Raises ExecutionError for a single rank.
    """
    comm = Communicator(*([] if group is None else [group]))
    if comm.ranks < 2:
        raise ExecutionError(
            "links are measured between ranks: start two or more, as in torchrun --nproc-per-node 2"
        )
    group = dist.group.WORLD if group is None else group
    nodes = _nodes(comm, group, _host() if node is None else node)
    pairs = list(itertools.combinations(range(comm.ranks), 2))
    intra, inter = (
        _line(
            comm,
            group,
            next((pair for pair in pairs if (nodes[pair[0]] == nodes[pair[1]]) is same), None),
            messages,
            runs,
        )
        for same in (True, False)
    )
    return Links(intra, inter, str(dist.get_backend(group)), max(map(nodes.count, nodes)))


def with_links(hardware: Hardware, links: Links) -> Hardware:
    """The hardware with measured links; those that were not measured stay as they are."""
    source = f"measured: ping-pong over {links.backend}, latency and bandwidth fitted"
    measured = [(scope, line) for scope, line in (("intra", links.intra), ("inter", links.inter)) if line]
    changed: dict[str, Any] = {
        "nics_per_node": Figure(links.ranks_per_node, "one NIC a rank, as profiled", True)
    }
    for scope, line in measured:
        changed[f"{scope}_gbs"] = Figure(line.gbs, source)
        changed[f"{scope}_latency_us"] = Figure(line.latency_us, source)
    return replace(hardware, **changed)


def fit(message_bytes: Sequence[int], times_us: Sequence[float]) -> Line:
    """The line of least relative squares through one-way times; latency at least 0."""
    size, took = np.asarray(message_bytes, np.float64), np.asarray(times_us, np.float64)
    design = np.stack([1 / took, size / took], axis=1)
    (latency, a_byte), *_ = np.linalg.lstsq(design, np.ones(len(took)), rcond=None)
    if latency < 0 or a_byte <= 0:
        latency, a_byte = max(latency, 0.0), took[-1] / size[-1]
    return Line(round(float(latency), 3), round(1 / float(a_byte) / 1e3, 4))


def _line(
    comm: Communicator, group: Any, pair: tuple[int, int] | None, messages: Sequence[int], runs: int
) -> Line | None:
    if pair is None:
        return None
    a, b = (dist.get_global_rank(group, rank) for rank in pair)
    mine = [0.0] * len(messages)
    if comm.rank in pair:
        peer = b if comm.rank == pair[0] else a
        mine = [_ping_pong_us(comm, group, peer, comm.rank == pair[0], size, runs) for size in messages]
    times = torch.tensor(mine, dtype=torch.float64, device=comm.device)
    dist.broadcast(times, a, group=group)
    return fit(messages, times.tolist())


def _ping_pong_us(comm: Communicator, group: Any, peer: int, first: bool, size: int, runs: int) -> float:
    """One way, the best of `runs` after one to warm up."""
    buffer = torch.zeros(size, dtype=torch.uint8, device=comm.device)
    turns = (dist.send, dist.recv) if first else (dist.recv, dist.send)
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter_ns()
        for turn in turns:
            turn(buffer, peer, group=group)
        if buffer.is_cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter_ns() - start) / 2e3)
    return min(times[1:])


def _nodes(comm: Communicator, group: Any, node: int) -> list[int]:
    mine = torch.tensor([node], dtype=torch.int64, device=comm.device)
    everyone = [torch.empty_like(mine) for _ in range(comm.ranks)]
    dist.all_gather(everyone, mine, group=group)
    return [int(other) for other in everyone]


def _host() -> int:
    return int.from_bytes(blake2b(platform.node().encode(), digest_size=7).digest(), "little")
