"""What a call of planned attention costs: launches, messages and host time of a rank, and the time of GPUs.

    real      a plan for as many ranks as the job has: every rank runs its part. Exposed communication is what that
              takes longer than with messages that are only recorded.
    recorded  a plan for any other number of ranks: the busiest rank alone, whose host does all that it does in a job
              but to post messages. Where there is a GPU it gets the kernels, on rows that never came.

Without a GPU every plan is recorded, by the stage engine, and its kernels are counted but not started. With
TRITON_INTERPRET=1 the CPU takes the GPU's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from apportion.backends.torch.engines import ENGINES
from apportion.backends.torch.recording import RecordingDevice
from apportion.backends.torch.stage import device_obstacle
from apportion.backends.torch.transport import Transport
from apportion.ir.bytes.codec import Plan
from apportion.ir.bytes.slices import Slice
from apportion.ir.errors import ConfigError
from apportion.ir.isa import Op
from apportion.ir.request.hardware import Hardware
from apportion.ir.tensors import PHASES
from apportion.planner.simulate import simulate
from apportion.trainer.measure import timing
from apportion.trainer.measure.selftest import process_group
from apportion.trainer.step.attention import Communicator, PlanHandle

#: products as wide as QK, and as wide as V, of each pair and query head; backward computes the scores anew
PRODUCTS: Mapping[str, tuple[int, int]] = MappingProxyType({"forward": (1, 1), "backward": (3, 2)})


@dataclass(frozen=True)
class AttentionRow:
    """One phase of a plan on one engine; None: not measured. docs/performance.md explains the fields."""

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
        """Plain data, four digits after the point."""
        return {
            name: round(value, 4) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


#: phase -> what a row has of an engine, by the names of fields
Times = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Bench:
    """Measures plans on the ranks of a job. skip: is told what is not measured, and why."""

    device: torch.device
    communicator: Transport
    clock: timing.Meter
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
            self.skip(
                f"{recipe}: its plans project hidden states themselves, and q, k and v are measured here"
            )
            return []
        found = facts(plan, hardware, self.device)
        timed = {name: self._timed(plan, found["forward"].rank, name) for name in self.engines}
        return [
            rated(replace(row, engine=name, **timed[name].get(phase, {})), plan)
            for name in self.engines
            for phase, row in found.items()
        ]

    @property
    def _computes(self) -> bool:
        """Whether kernels are executed."""
        return self.device.type == "cuda" or device_obstacle(self.device) is None

    def _timed(self, plan: Plan, rank: int, engine: str) -> Times:
        why = (
            None if engine == "stage" else "it computes on the CPU: its calls have no host time of their own"
        )
        if self._computes:
            why = ENGINES[engine].obstacle(plan.header, self.device)
        if why is not None:
            self.skip(f"{engine}: {why}")
            return {}
        if self._computes and plan.header.ranks == self.communicator.ranks:
            return self._real(plan, rank, engine)
        return self._recorded(plan.for_rank(rank), engine)

    # --- recorded

    def _recorded(self, piece: Slice, name: str) -> Times:
        why = "ms, tflops, exposed_ms: there is no GPU, a rank's host alone is measured"
        if self._computes:
            here = f"{piece.ranks} ranks: the job has {self.communicator.ranks}, so kernels are launched and messages"
            why = f"{here} are not: a host time and none of the device"
        self.skip(why)
        recorder = RecordingDevice(piece.rank, piece.ranks)
        engine = name if self._computes else recorder.engine
        handle, prepare_ms = timing.prepared(piece, recorder, engine, self.device)
        took = self._best(handle, self.clock)
        return {phase: {"host_ms": took[phase].host, "prepare_ms": prepare_ms[phase]} for phase in PHASES}

    def _best(self, handle: PlanHandle, clock: timing.Meter) -> dict[str, timing.Took]:
        header = handle.slice.header
        rows = timing.RankTensors.of(header, handle.rows, self.device, self._computes)
        return timing.best(timing.planned(handle), rows, clock, self.repeats)

    # --- real

    def _real(self, plan: Plan, busiest: int, engine: str) -> Times:
        """The busiest rank's host, and the slowest device."""
        rank, ranks = self.communicator.rank, plan.header.ranks
        piece = plan.for_rank(rank)
        handle, prepare_ms = timing.prepared(piece, self.communicator, engine, self.device)
        whole = self._best(handle, self._together)
        alone = whole
        if ranks > 1:
            alone = self._best(PlanHandle(piece, RecordingDevice(rank, ranks), engine), self.clock)
        mine = [[*whole[phase], prepare_ms[phase], alone[phase].device] for phase in PHASES]
        nanoseconds = np.rint(np.array(mine) * 1e6).astype(np.int64)
        gathered = self.communicator.all_gather(nanoseconds.ravel().tolist(), "durations")
        times = np.array(gathered).reshape(-1, *nanoseconds.shape) / 1e6
        found = {}
        for phase, own, most in zip(PHASES, times[busiest].tolist(), times.max(axis=0).tolist(), strict=True):
            exposed = most[1] - most[3] if ranks > 1 else None
            found[phase] = {"host_ms": own[0], "prepare_ms": own[2], "ms": most[1], "exposed_ms": exposed}
        return found

    def _together(self, work: Callable[[], Any]) -> tuple[Any, timing.Took]:
        """All ranks of the job begin at once."""
        self.communicator.all_gather([0], "a measurement")
        return self.clock(work)


def facts(plan: Plan, hardware: Hardware | None, device: torch.device) -> dict[str, AttentionRow]:
    """Rows of the busiest rank on the stage engine, without times."""
    (kind,), ranks = plan.header.kinds, plan.header.ranks
    by_rank = np.stack([np.diff(plan.programs[kind, phase]["instructions"].ptr) for phase in PHASES])
    rank = int(by_rank.sum(axis=0).argmax())
    counts, simulated = timing.counted(plan.for_rank(rank), device), simulate(plan, hardware)
    return {
        phase: AttentionRow(
            plan.request.policy.recipe.name, ranks, rank, phase, "stage", int(count), *counts[phase],
            simulated.runs[kind, phase].makespan_us / 1e3,
        )
        for phase, count in zip(PHASES, by_rank[:, rank], strict=True)
    }  # fmt: skip


def rated(row: AttentionRow, plan: Plan) -> AttentionRow:
    """With what follows from the device's time."""
    launches = row.launches if row.engine == "stage" else None
    tflops = None if row.ms is None else flops(plan, row.phase) / row.ranks / row.ms / 1e9
    return replace(row, launches=launches, tflops=tflops)


def flops(plan: Plan, phase: str) -> int:
    """Of all ranks: a product and its sum count as two."""
    (kind,), model, (qk, v) = plan.header.kinds, plan.request.model, PRODUCTS[phase]
    return 2 * plan.request.batch.area(kind) * model.q_heads * (qk * model.head_dim + v * model.value_dim)


@contextmanager
def job(engines: tuple[str, ...], repeats: int, skip: Callable[[str], object]) -> Iterator[Bench]:
    """The bench of this process: of torchrun's ranks, or alone."""
    with process_group() as device:
        clock = timing.on_gpu if device.type == "cuda" else timing.on_host
        yield Bench(device, Communicator(), clock, engines, repeats, skip)
