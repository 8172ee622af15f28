"""The benchmark of attention on the ranks of the pool."""

from dataclasses import asdict
from unittest import mock

import torch

from apportion.trainer.measure import bench
from apportion.trainer.measure.timing import Took


def two_ms(work):
    """A clock that stands still: one millisecond of the host, two of the device."""
    return work(), Took(1.0, 2.0)


def bench_of(comm, engines, kernels=(), skip=lambda why: None, clock=two_ms):
    return bench.Bench(torch.device("cpu"), comm, clock, engines, kernels, 1, skip)


def rows(comm, plan, engines, computes=True):
    """Rows as plain data; computes: as if the CPU were a GPU."""
    with mock.patch.object(bench, "device_obstacle", return_value=None) if computes else mock.MagicMock():
        return [asdict(row) for row in bench_of(comm, engines).measure(plan)]
