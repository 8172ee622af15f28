"""Lets torchtitan 0.3.0, which assumes CUDA if there is no accelerator, run on CPUs; import it first."""

import types

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda *_: "cpu"
torch.cpu.get_device_properties = lambda *_: types.SimpleNamespace(total_memory=2**34, name="cpu")
torch.cpu.reset_peak_memory_stats = lambda *_: None
torch.cpu.empty_cache = lambda *_: None
torch.cpu.memory_stats = lambda *_: {}
torch.cpu.current_device = lambda: 0
if not hasattr(dist, "set_timeout"):  # torch 2.13.0 has none
    dist.set_timeout = lambda *_, **__: None

_set_factor = FSDPModule.set_gradient_divide_factor


def _set_factor_by_sums(self, factor):
    self.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    _set_factor(self, factor)


FSDPModule.set_gradient_divide_factor = _set_factor_by_sums
