"""One call of attention and its gradients, as a meter sees it: times of host and device, or what was launched.

meter: work ──► (its result, what was seen)        on_host, on_gpu
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from apportion.backends.torch.engines import Engine
from apportion.backends.torch.memory.arrays import DTYPES
from apportion.backends.torch.recording import RecordingDevice
from apportion.backends.torch.transport import Transport
from apportion.ir.bytes.slices import Slice
from apportion.ir.plan.tables import Header
from apportion.ir.tensors import PHASES
from apportion.trainer.step.attention import PlanHandle, planned_attention

#: work -> (its result, what was seen)
Meter = Callable[[Callable[[], Any]], tuple[Any, Any]]
#: q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] -> out [T, Hq, Dv]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Took(NamedTuple):
    """Milliseconds until a call returned, and until its device was done."""

    host: float
    device: float


class Counts(NamedTuple):
    """What a rank is told to do in a call: kernels; batches and all-to-alls; messages in either direction."""

    launches: int
    rounds: int
    messages: int


def on_host(work: Callable[[], Any]) -> tuple[Any, Took]:
    """Where the host is the device too."""
    start = time.perf_counter()
    result = work()
    took = (time.perf_counter() - start) * 1e3
    return result, Took(took, took)


def on_gpu(work: Callable[[], Any]) -> tuple[Any, Took]:
    """On the current GPU and stream, which are idle before and after."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    result, took = on_host(work)
    end.record()
    torch.cuda.synchronize()
    return result, Took(took.host, begin.elapsed_time(end))


@dataclass(frozen=True)
class RankTensors:
    """q, k, v and dO of a rank."""

    qkv: tuple[Tensor, Tensor, Tensor]
    do: Tensor

    @staticmethod
    def of(header: Header, rows: int, device: torch.device, drawn: bool) -> RankTensors:
        """drawn: normal numbers; otherwise uninitialised."""
        make = partial(torch.randn if drawn else torch.empty, device=device, dtype=DTYPES[header.dtype])
        q = make(rows, header.q_heads, header.head_dim, requires_grad=True)
        k = make(rows, header.kv_heads, header.head_dim, requires_grad=True)
        v = make(rows, header.kv_heads, header.v_head_dim, requires_grad=True)
        return RankTensors((q, k, v), make(rows, header.q_heads, header.v_head_dim))


def metered(attention: Attention, rows: RankTensors, meter: Meter) -> dict[str, Any]:
    """What is seen of each phase."""
    out, forward = meter(lambda: attention(*rows.qkv))
    _, backward = meter(lambda: torch.autograd.grad(out, rows.qkv, rows.do))
    return {"forward": forward, "backward": backward}


def best(attention: Attention, rows: RankTensors, clock: Meter, repeats: int) -> dict[str, Took]:
    """The least of each phase, after a call to warm up."""
    metered(attention, rows, clock)
    runs = [metered(attention, rows, clock) for _ in range(repeats)]
    return {phase: Took(*map(min, zip(*(run[phase] for run in runs), strict=True))) for phase in PHASES}


def planned(handle: PlanHandle) -> Attention:
    """Attention under a plan of one attention kind."""
    return lambda q, k, v: planned_attention(q, k, v, handle)


def prepared(
    piece: Slice, transport: Transport, engine: str | Engine, device: torch.device
) -> tuple[PlanHandle, dict[str, float]]:
    """A handle, and the milliseconds that the work lists and tables of each phase took, when all is imported."""
    (kind,) = piece.header.kinds
    for _ in range(2):
        handle = PlanHandle(piece, transport, engine)
        took = {phase: on_host(partial(handle.loaded, kind, phase, device))[1].host for phase in PHASES}
    return handle, took


def counted(piece: Slice, device: torch.device) -> dict[str, Counts]:
    """What the stage engine does for a rank. Rounds and messages are those of every engine."""
    recorder = RecordingDevice(piece.rank, piece.ranks)
    handle = PlanHandle(piece, recorder, recorder.engine)

    def count(work: Callable[[], Any]) -> tuple[Any, Counts]:
        recorder.reset()
        return work(), Counts(recorder.launches.total(), recorder.rounds, recorder.posts)

    return metered(planned(handle), RankTensors.of(piece.header, handle.rows, device, drawn=False), count)
