"""torchtitan 0.3.0 thinks of cuda where there is no accelerator. What it asks of a device, for CPUs; import it first."""

import types

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_mask

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


def dense_flex(q_BNLH, k_BNLH, v_BNLH, *, block_mask, scale, enable_gqa, **_):
    """What flex_attention computes of Titan's masks: torch's own has no backward on CPUs. Returns (out, aux)."""
    repeats = q_BNLH.shape[1] // k_BNLH.shape[1]
    k_BNLH, v_BNLH = (x.repeat_interleave(repeats, 1) for x in (k_BNLH, v_BNLH))
    scores = q_BNLH @ k_BNLH.transpose(2, 3) * (q_BNLH.shape[-1] ** -0.5 if scale is None else scale)
    seen = create_mask(block_mask.mask_mod, *scores.shape[:1], None, *scores.shape[2:], device="cpu")
    scores = scores.float().masked_fill(~seen, float("-inf"))
    out = scores.softmax(-1).to(v_BNLH.dtype) @ v_BNLH
    return out, types.SimpleNamespace(lse=scores.logsumexp(-1))


def own_attention():
    """Titan's own, where torch.compile and GPUs are not."""
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention._compiled_flex_attn = staticmethod(dense_flex)
