"""Arguments of kernel launches, with a fake Triton driver: kernels are really compiled, for sm_90."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from apportion import Batch, Cluster, Model, PlanHandle, planned_attention
from apportion.backends.torch.engines import StageEngine
from apportion.backends.torch.recording import RecordingDevice
from apportion.backends.torch.stage.launcher import KERNELS, DeviceLauncher
from apportion.planner import api


class NoGpu:
    """Like Triton's CUDA driver, but nothing is loaded or launched: `started` records the launches."""

    utils = SimpleNamespace(
        load_binary=lambda *binary: (1, 1, 1, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )

    def __init__(self) -> None:
        self.started = []

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., Any]:
        return lambda *arguments: self.started.append((source.fn, arguments[:3], arguments[9:]))

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> NoGpu:
    monkeypatch.setattr(driver, "_active", NoGpu())
    return driver.active


def launches() -> list[tuple[str, int, tuple[Any, ...], dict[Any, Any]]]:
    """(kernel, programs, arguments, constants) of a layer, forward and backward. `dcp` moves queries, and leaves some
    home rows incomplete after attention."""
    plan = api.plan(Batch.from_lengths([700, 300, 24]), Cluster(1, 2), Model(4, 2, 64), "dcp")
    recorded, device = [], RecordingDevice(1, 2)
    handle = PlanHandle(plan.for_rank(1), device, engine=StageEngine(lambda *launch: recorded.append(launch)))
    heads = (4, 2, 2)
    rows = [torch.zeros(handle.rows, n, 64, dtype=torch.bfloat16, requires_grad=True) for n in heads]
    planned_attention(*rows, handle).backward(torch.zeros(handle.rows, 4, 64, dtype=torch.bfloat16))
    return recorded


def test_kernels_get_the_arguments_triton_would_pass_and_compile_once(gpu: NoGpu) -> None:
    recorded = [launch for launch in launches() if launch[0] in ("move", "add", "finish", "delta")]
    assert {kernel for kernel, *_ in recorded} == {"move", "add", "finish", "delta"}
    launcher = DeviceLauncher()
    for launch in recorded:
        launcher(*launch)
    own_launches, gpu.started = gpu.started, []
    for kernel, programs, args, constants in recorded:
        KERNELS[kernel][(programs,)](*args, **constants)
    assert len(own_launches) == len(gpu.started) == len(recorded)
    for own_launch, triton_launch in zip(own_launches, gpu.started, strict=True):
        assert own_launch[:2] == triton_launch[:2]
        assert len(own_launch[2]) == len(triton_launch[2])
        assert all(a is b or a == b for a, b in zip(own_launch[2], triton_launch[2], strict=True))
    compiled = len(launcher._compiled)
    for kernel, programs, args, constants in recorded:
        larger = [arg + 1 if isinstance(arg, int) and arg < 2**31 else arg for arg in args]
        launcher(kernel, programs, larger, constants)
    assert len(launcher._compiled) == compiled
