"""Benchmark of planned attention calls: launches, messages and host time of a rank, and GPU time.

    real      a plan for as many ranks as the job has: every rank runs its part. Exposed communication is the extra
              time over a run whose messages are only recorded.
    recorded  a plan for any other number of ranks: only the busiest rank, whose host does the same work as in a job
              except posting messages. A GPU, if there is one, runs the kernels on uninitialised rows.

Without a GPU every plan is recorded, by the stage engine, and its kernels are counted but not started. With
TRITON_INTERPRET=1 the CPU takes the GPU's place.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from apportion.backends.torch.engines import ENGINES, Engine
from apportion.backends.torch.memory.arrays import DTYPES
from apportion.backends.torch.recording import RecordingDevice
from apportion.backends.torch.stage import device_obstacle
from apportion.backends.torch.transport import Transport
from apportion.ir.bytes.codec import Plan
from apportion.ir.bytes.slices import Slice
from apportion.ir.errors import ConfigError
from apportion.ir.isa import Op
from apportion.ir.plan.tables import Header
from apportion.ir.request.hardware import Hardware
from apportion.ir.tensors import PHASES
from apportion.planner.simulate import simulate
from apportion.trainer.step.attention import Communicator, PlanHandle, planned_attention

#: work -> (its result, the measurement)
Meter = Callable[[Callable[[], Any]], tuple[Any, Any]]
#: q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] -> out [T, Hq, Dv]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class CallTimes(NamedTuple):
    """Milliseconds until a call returns, and until its device is done."""

    host: float
    device: float


class Counts(NamedTuple):
    """A rank's counts in one call. launches: of kernels; rounds: batches and all-to-alls; messages: in and out."""

    launches: int
    rounds: int
    messages: int


def on_host(work: Callable[[], Any]) -> tuple[Any, CallTimes]:
    """Times work for which the host is also the device."""
    start = time.perf_counter()
    result = work()
    elapsed = (time.perf_counter() - start) * 1e3
    return result, CallTimes(elapsed, elapsed)


def on_gpu(work: Callable[[], Any]) -> tuple[Any, CallTimes]:
    """Times work on the current GPU and stream, which are idle before and after."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    result, times = on_host(work)
    end.record()
    torch.cuda.synchronize()
    return result, CallTimes(times.host, start.elapsed_time(end))


@dataclass(frozen=True)
class RankTensors:
    """q, k, v and dO of a rank."""

    qkv: tuple[Tensor, Tensor, Tensor]
    do: Tensor

    @staticmethod
    def of(header: Header, rows: int, device: torch.device, is_random: bool) -> RankTensors:
        """Allocates the tensors. is_random: True for normally distributed values; otherwise they are uninitialised."""
        make = partial(torch.randn if is_random else torch.empty, device=device, dtype=DTYPES[header.dtype])
        q = make(rows, header.q_heads, header.head_dim, requires_grad=True)
        k = make(rows, header.kv_heads, header.head_dim, requires_grad=True)
        v = make(rows, header.kv_heads, header.v_head_dim, requires_grad=True)
        return RankTensors((q, k, v), make(rows, header.q_heads, header.v_head_dim))


def measure_phases(attention: Attention, tensors: RankTensors, meter: Meter) -> dict[str, Any]:
    """Measures each phase."""
    out, forward = meter(lambda: attention(*tensors.qkv))
    _, backward = meter(lambda: torch.autograd.grad(out, tensors.qkv, tensors.do))
    return {"forward": forward, "backward": backward}


def best(attention: Attention, tensors: RankTensors, clock: Meter, repeats: int) -> dict[str, CallTimes]:
    """The shortest times of each phase, after a warm-up call."""
    measure_phases(attention, tensors, clock)
    runs = [measure_phases(attention, tensors, clock) for _ in range(repeats)]
    return {phase: CallTimes(*map(min, zip(*(run[phase] for run in runs), strict=True))) for phase in PHASES}


def planned_call(handle: PlanHandle) -> Attention:
    """Attention under a plan of one attention kind."""
    return lambda q, k, v: planned_attention(q, k, v, handle)


def prepare_handle(
    piece: Slice, transport: Transport, engine: str | Engine, device: torch.device
) -> tuple[PlanHandle, dict[str, float]]:
    """A handle, and the milliseconds to build the work lists and tables of each phase, without imports."""
    (kind,) = piece.header.kinds
    for _ in range(2):
        handle = PlanHandle(piece, transport, engine)
        times = {phase: on_host(partial(handle.executable, kind, phase, device))[1].host for phase in PHASES}
    return handle, times


def count_calls(piece: Slice, device: torch.device) -> dict[str, Counts]:
    """The stage engine's counts for a rank. Rounds and messages are the same for every engine."""
    recorder = RecordingDevice(piece.rank, piece.ranks)
    handle = PlanHandle(piece, recorder, recorder.engine)

    def count(work: Callable[[], Any]) -> tuple[Any, Counts]:
        recorder.reset()
        return work(), Counts(recorder.launches.total(), recorder.rounds, recorder.posts)

    tensors = RankTensors.of(piece.header, handle.rows, device, is_random=False)
    return measure_phases(planned_call(handle), tensors, count)


# ---- plans

#: matrix products of QK width, and of V width, per pair and query head; backward recomputes the scores
PRODUCTS: Mapping[str, tuple[int, int]] = MappingProxyType({"forward": (1, 1), "backward": (3, 2)})


@dataclass(frozen=True)
class AttentionRow:
    """One phase of a plan on one engine; None: not measured. docs/benchmarks.md explains the fields."""

    recipe: str
    ranks: int
    rank: int
    phase: str
    engine: str
    instructions: int
    launches: int | None
    rounds: int
    messages: int
    simulated_ms: float
    host_ms: float | None = None
    prepare_ms: float | None = None
    ms: float | None = None
    exposed_ms: float | None = None
    tflops: float | None = None

    def record(self) -> dict[str, Any]:
        """The row as plain data, rounded to four decimals."""
        values = asdict(self).items()
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in values}


#: phase -> an engine's fields of a row, by name
Times = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Bench:
    """Measures plans on the ranks of a job. skip: called with what is not measured, and the reason."""

    device: torch.device
    communicator: Transport
    clock: Meter
    engines: tuple[str, ...]
    repeats: int
    skip: Callable[[str], object]

    def measure(self, plan: Plan, hardware: Hardware | None = None) -> list[AttentionRow]:
        """A row for each engine and phase of a plan of one attention kind; all ranks of the job call it.

        hardware: for simulated times, by default the built-in H100. Raises ConfigError for float64.
        """
        (kind,), recipe = plan.header.kinds, plan.request.policy.recipe.name
        if plan.header.dtype == "fp64":
            rule = "the stage kernels compute in float16, bfloat16 and float32"
            raise ConfigError("model.dtype", "fp64", rule, "write bf16")
        if Op.PROJECT in plan.programs[kind, "forward"]["instructions"]["op"]:
            self.skip(f"{recipe}: its plans project hidden states themselves; bench measures q, k and v")
            return []
        rows = untimed_rows(plan, hardware, self.device)
        timed = {name: self._time_device(plan, rows["forward"].rank, name) for name in self.engines}
        return [
            with_rates(replace(row, engine=name, **timed[name].get(phase, {})), plan)
            for name in self.engines
            for phase, row in rows.items()
        ]

    @property
    def _computes(self) -> bool:
        """True if kernels are executed."""
        return self.device.type == "cuda" or device_obstacle(self.device) is None

    def _time_device(self, plan: Plan, rank: int, engine: str) -> Times:
        reason = None if engine == "stage" else "it computes on the CPU: its calls have no separate host time"
        if self._computes:
            reason = ENGINES[engine].obstacle(plan.header, self.device)
        if reason is not None:
            self.skip(f"{engine}: {reason}")
            return {}
        if self._computes and plan.header.ranks == self.communicator.ranks:
            return self._time_job(plan, rank, engine)
        return self._time_on_recorder(plan.for_rank(rank), engine)

    # --- recorded

    def _time_on_recorder(self, piece: Slice, name: str) -> Times:
        message = "ms, tflops, exposed_ms: there is no GPU, so only a rank's host is measured"
        if self._computes:
            scope = f"{piece.ranks} ranks: the job has {self.communicator.ranks}, so kernels are launched and messages"
            message = f"{scope} are not sent: this gives a host time but no device time"
        self.skip(message)
        recorder = RecordingDevice(piece.rank, piece.ranks)
        engine = name if self._computes else recorder.engine
        handle, prepare_ms = prepare_handle(piece, recorder, engine, self.device)
        times = self._best(handle, self.clock)
        return {phase: {"host_ms": times[phase].host, "prepare_ms": prepare_ms[phase]} for phase in PHASES}

    def _best(self, handle: PlanHandle, clock: Meter) -> dict[str, CallTimes]:
        header = handle.slice.header
        tensors = RankTensors.of(header, handle.rows, self.device, self._computes)
        return best(planned_call(handle), tensors, clock, self.repeats)

    # --- real

    def _time_job(self, plan: Plan, busiest: int, engine: str) -> Times:
        """The times of the busiest rank's host, and of the slowest device."""
        rank, ranks = self.communicator.rank, plan.header.ranks
        piece = plan.for_rank(rank)
        handle, prepare_ms = prepare_handle(piece, self.communicator, engine, self.device)
        total = self._best(handle, self._run_together)
        recorded = total
        if ranks > 1:
            recorded = self._best(PlanHandle(piece, RecordingDevice(rank, ranks), engine), self.clock)
        numbers = [[*total[phase], prepare_ms[phase], recorded[phase].device] for phase in PHASES]
        nanoseconds = np.rint(np.array(numbers) * 1e6).astype(np.int64)
        gathered = self.communicator.all_gather(nanoseconds.ravel().tolist(), "durations")
        times = np.array(gathered).reshape(-1, *nanoseconds.shape) / 1e6
        result = {}
        for phase, values, slowest in zip(
            PHASES, times[busiest].tolist(), times.max(axis=0).tolist(), strict=True
        ):
            exposed_ms = slowest[1] - slowest[3] if ranks > 1 else None
            result[phase] = {
                "host_ms": values[0],
                "prepare_ms": values[2],
                "ms": slowest[1],
                "exposed_ms": exposed_ms,
            }
        return result

    def _run_together(self, work: Callable[[], Any]) -> tuple[Any, CallTimes]:
        """Runs work on all ranks of the job, started together."""
        self.communicator.all_gather([0], "a measurement")
        return self.clock(work)


def untimed_rows(plan: Plan, hardware: Hardware | None, device: torch.device) -> dict[str, AttentionRow]:
    """The busiest rank's rows on the stage engine, without times."""
    (kind,), ranks = plan.header.kinds, plan.header.ranks
    by_rank = np.stack([np.diff(plan.programs[kind, phase]["instructions"].ptr) for phase in PHASES])
    rank = int(by_rank.sum(axis=0).argmax())
    counts, simulated = count_calls(plan.for_rank(rank), device), simulate(plan, hardware)
    recipe, rows = plan.request.policy.recipe.name, {}
    for phase, count in zip(PHASES, by_rank[:, rank].tolist(), strict=True):
        ms = simulated.runs[kind, phase].makespan_us / 1e3
        rows[phase] = AttentionRow(recipe, ranks, rank, phase, "stage", count, *counts[phase], ms)
    return rows


def with_rates(row: AttentionRow, plan: Plan) -> AttentionRow:
    """Adds the fields that follow from the device's time."""
    launches = row.launches if row.engine == "stage" else None
    tflops = None if row.ms is None else flops(plan, row.phase) / row.ranks / row.ms / 1e9
    return replace(row, launches=launches, tflops=tflops)


def flops(plan: Plan, phase: str) -> int:
    """The FLOPs of all ranks: a multiply-add counts as two."""
    (kind,), model, (qk, v) = plan.header.kinds, plan.request.model, PRODUCTS[phase]
    return 2 * plan.request.batch.area(kind) * model.q_heads * (qk * model.head_dim + v * model.value_dim)


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Sets up torchrun's ranks, or a single process; yields this rank's device."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        yield device
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield device
        dist.barrier()  # no rank leaves during another rank's last collective
    finally:
        dist.destroy_process_group()


@contextmanager
def job(engines: tuple[str, ...], repeats: int, skip: Callable[[str], object]) -> Iterator[Bench]:
    """The bench of torchrun's ranks, or of a single process."""
    with process_group() as device:
        clock = on_gpu if device.type == "cuda" else on_host
        yield Bench(device, Communicator(), clock, engines, repeats, skip)
