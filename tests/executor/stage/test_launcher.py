"""Arguments of kernel launches, with a Triton driver without a GPU: kernels are really compiled, for sm_90."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from apportion.backends.torch.engines import StageEngine
from apportion.backends.torch.recording import RecordingDevice
from apportion.backends.torch.stage.launcher import KERNELS, DeviceLauncher
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.planner import api
from apportion.trainer.step.attention import PlanHandle, planned_attention


class NoGpu:
    """Like Triton's CUDA driver, but nothing is loaded or launched: `started` records the launches."""

    utils = SimpleNamespace(
        load_binary=lambda *binary: (1, 1, 1, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 232448},
    )

    def __init__(self) -> None:
        self.started = []

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., Any]:
        return lambda *given: self.started.append((source.fn, given[:3], given[9:]))

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
    """(kernel, programs, arguments, constants) of a layer, forward and backward. With `dcp` queries travel, and not all
    home rows are complete when attention has run."""
    plan = api.plan(Batch.from_lengths([700, 300, 24]), Cluster(1, 2), Model(4, 2, 64), "dcp")
    found, device = [], RecordingDevice(1, 2)
    handle = PlanHandle(plan.for_rank(1), device, engine=StageEngine(lambda *launch: found.append(launch)))
    heads = (4, 2, 2)
    rows = [torch.zeros(handle.rows, n, 64, dtype=torch.bfloat16, requires_grad=True) for n in heads]
    planned_attention(*rows, handle).backward(torch.zeros(handle.rows, 4, 64, dtype=torch.bfloat16))
    return found


def test_kernels_get_the_arguments_triton_would_pass_and_compile_once(gpu: NoGpu) -> None:
    found = [launch for launch in launches() if launch[0] in ("move", "add", "finish", "delta")]
    assert {kernel for kernel, *_ in found} == {"move", "add", "finish", "delta"}
    launcher = DeviceLauncher()
    for launch in found:
        launcher(*launch)
    ours, gpu.started = gpu.started, []
    for kernel, programs, args, constants in found:
        KERNELS[kernel][(programs,)](*args, **constants)
    assert len(ours) == len(gpu.started) == len(found)
    for mine, theirs in zip(ours, gpu.started, strict=True):
        assert mine[:2] == theirs[:2]
        assert len(mine[2]) == len(theirs[2])
        assert all(a is b or a == b for a, b in zip(mine[2], theirs[2], strict=True))
    compiled = len(launcher._compiled)
    for kernel, programs, args, constants in found:
        larger = [arg + 1 if isinstance(arg, int) and arg < 2**31 else arg for arg in args]
        launcher(kernel, programs, larger, constants)
    assert len(launcher._compiled) == compiled
