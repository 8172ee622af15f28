"""Engine `stage`: Triton kernels over work lists that are built once per plan, one launch per instruction."""

from __future__ import annotations

import importlib.util
import os

import torch

from apportion.ir.plan.tables import Header

#: compute capability that the kernels need: bfloat16 and asynchronous copies
MIN_CAPABILITY = (8, 0)
#: largest head dim
MAX_WIDTH = 256


def obstacle(header: Header, device: torch.device) -> str | None:
    """The reason why these kernels cannot run plans with this header on a device; None if they can."""
    if header.dtype == "fp64":
        return "the stage kernels compute in float16, bfloat16 and float32"
    if max(header.head_dim, header.v_head_dim) > MAX_WIDTH:
        return f"head dims are limited to {MAX_WIDTH}, and the plan has {header.head_dim} and {header.v_head_dim}"
    if header.latent is not None:
        return "the stage kernels do not expand latent rows"
    return device_obstacle(device)


def device_obstacle(device: torch.device) -> str | None:
    """The reason why these kernels do not run on a device; None if they do."""
    if importlib.util.find_spec("triton") is None:
        return "the stage kernels need Triton: pip install '.[triton]'"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return (
            None
            if capability >= MIN_CAPABILITY
            else f"the stage kernels need a GPU of capability 8.0, but this one has {capability}"
        )
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"the stage kernels run on GPUs, and this is {device.type} (TRITON_INTERPRET=1 interprets them, slowly)"
