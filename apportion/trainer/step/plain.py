"""Plain attention in one process, sequence by sequence: the reference for planned attention."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from apportion.ir.masks import bands as algebra
from apportion.ir.request.batch import Batch


def plain_attention(q: Tensor, k: Tensor, v: Tensor, batch: Batch, kind: str) -> Tensor:
    """q [T, Hq, D], k [T, Hk, D], v [T, Hk, Dv] in token order -> out [T, Hq, Dv]; rows without keys are 0.

    Builds the dense mask of one sequence at a time: for demonstrations and self-tests."""
    bands, parts = batch.bands(kind), []
    for start, end in pairwise(batch.starts.tolist()):
        local_bands = algebra.shift(bands[(bands[:, 0] >= start) & (bands[:, 1] <= end)], -start, -start)
        allowed = torch.from_numpy(algebra.dense(local_bands, end - start, end - start)).to(q.device)
        parts.append(_attend(q[start:end], k[start:end], v[start:end], allowed))
    return torch.cat(parts)


def _attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    alive = allowed.any(-1)
    # a row without keys would be NaN: it sees all keys here, and is set to 0 at the end
    mask = allowed | ~alive[:, None]
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1)
    return out * alive[:, None, None].to(out.dtype)
