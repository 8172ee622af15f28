"""What the ranks of the pool do: functions `job(comm, ...)` of plain data, importable by the workers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from apportion.ir.codec import Slice
from apportion.trainer.attention import PlanHandle, planned_attention

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Shard(NamedTuple):
    """One rank's rows of a problem, float64, and its encoded slice."""

    piece: bytes
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray


def handle_of(comm, piece):
    return PlanHandle(Slice.decode(piece), comm)


def leaf(array, dtype):
    return torch.from_numpy(array).to(dtype).requires_grad_()


def attention(comm, kind, sinks, options, shard):
    """out, dq, dk, dv, dsinks of one layer, as float64 arrays."""
    handle = handle_of(comm, shard.piece)
    q, k, v = (leaf(x, handle.dtype) for x in (shard.q, shard.k, shard.v))
    logits = None if sinks is None else leaf(sinks, handle.dtype)
    out = planned_attention(q, k, v, handle, kind, sinks=logits, **options)
    out.backward(torch.from_numpy(shard.do).to(handle.dtype))
    grads = [t if t is None else t.grad for t in (q, k, v, logits)]
    return [None if t is None else t.detach().double().numpy() for t in (out, *grads)]
