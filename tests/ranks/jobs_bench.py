"""Rank pool jobs with the attention benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch

from apportion import Communicator, Plan
from apportion.trainer.measure import bench
from apportion.trainer.measure.bench import Bench, CallTimes


def two_ms(work: Callable[..., Any]) -> tuple[tuple[torch.Tensor, ...] | torch.Tensor, CallTimes] | None:
    """A constant clock: one millisecond on the host, two on the device."""
    return work(), CallTimes(1.0, 2.0)


def bench_of(comm: Communicator, engines: tuple[str, ...], skip: Any = lambda why: None) -> Bench:
    return Bench(torch.device("cpu"), comm, two_ms, engines, 1, skip)


def rows(comm: Communicator, plan: Plan, engines: tuple[str, ...], computes: bool = True) -> list[Any]:
    """Rows of the benchmark as plain data. computes: whether the CPU counts as a GPU."""
    with mock.patch.object(bench, "device_obstacle", return_value=None) if computes else mock.MagicMock():
        return [asdict(row) for row in bench_of(comm, engines).measure(plan)]
