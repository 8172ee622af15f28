"""Kernels of linear recurrences: a chunked one in plain torch, and flash-linear-attention's on GPUs.

    h = decay(g) h  (+ k ⊗ β (v − kᵀ h) with the delta rule, + k ⊗ v without)        o = scale · qᵀ h

g is one log decay per head (Gated DeltaNet, Mamba-2, lightning attention) or one for each of the K key channels (Kimi
Delta Attention). Kernels are called like flash-linear-attention's `chunk_*` functions: a batch of 1, sequences joined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from apportion.backends.torch.memory.arrays import accumulator_dtype

_CHUNK = 64  # rows; 16 with a decay per channel, since each pair of rows then has a decay [K]
_CHANNEL_CHUNK = 16

#: (gate, delta) -> function of `fla.ops`
_FLA = {
    ("scalar", True): ("gated_delta_rule", "chunk_gated_delta_rule"),
    ("diagonal", True): ("kda", "chunk_kda"),
    ("scalar", False): ("simple_gla", "chunk_simple_gla"),
    ("diagonal", False): ("gla", "chunk_gla"),
}


#: q, k [1, rows, key heads, K], v [1, rows, heads, V], g [1, rows, heads] or [1, rows, heads, K], with the delta rule
#: beta [1, rows, heads], scale of q, initial_state [sequences, heads, K, V] or None for zeros, output_final_state=True,
#: cu_seqlens [sequences + 1] int64, all by name -> o [1, rows, heads, V], final state [sequences, heads, K, V].
#: Jointly linear in v and the state, as the formula implies.
Kernel = Callable[..., tuple[Tensor, Tensor]]


def choose_kernel(gate: str, delta: bool, device: torch.device) -> Kernel:
    """flash-linear-attention's kernel if it is installed and rows are on a GPU, else `chunk_recurrence`."""
    if device.type == "cuda":
        module, function = _FLA[gate, delta]
        with suppress(ImportError):
            return partial(_with_equal_heads, getattr(import_module(f"fla.ops.{module}"), function))
    return chunk_recurrence


def _with_equal_heads(
    kernel: Kernel, *, q: Tensor, k: Tensor, v: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Calls a kernel that may require equal numbers of heads in q, k and v."""
    q, k = _repeat_heads(q, v), _repeat_heads(k, v)
    return kernel(q=q, k=k, v=v, **options)


def _repeat_heads(x: Tensor, v: Tensor) -> Tensor:
    """Repeats the heads of q or k to match v: each serves consecutive heads of v."""
    ratio = v.shape[2] // x.shape[2]
    return x.repeat_interleave(ratio, 2) if ratio > 1 else x


def normalised(x: Tensor) -> Tensor:
    """Normalises x [..., width] to length 1, in float32 or wider, as delta-rule kernels expect q and k."""
    values = x.to(accumulator_dtype(x.dtype))
    return (values * torch.rsqrt((values * values).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def chunk_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Implements `Kernel` for any floating dtype and device, differentiable; computes in float32 or wider. beta: None
    without the delta rule. scale: K^-1/2 by default. The k-th chunks of all sequences are computed together."""
    rows, heads, dtype, sum_dtype = v.shape[1], v.shape[2], v.dtype, accumulator_dtype(v.dtype)
    lengths = [rows] if cu_seqlens is None else cu_seqlens.diff().tolist()
    size = _CHUNK if g.dim() == 3 else _CHANNEL_CHUNK
    chunks = _Chunks.of(lengths, size, v.device)
    q, k = _repeat_heads(q, v), _repeat_heads(k, v)
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    g = (g if g.dim() == 4 else g[..., None]).to(sum_dtype)
    Q, K, V, G = (chunks.cut(x[0].to(sum_dtype)) for x in (q, k, v, g))  # [chunks, heads, size, width]
    B = None if beta is None else chunks.cut(beta[0].to(sum_dtype)[..., None])
    G = G.cumsum(2)
    weights, system = _products(Q * scale, K, B, G)
    from_state, into_state, decay = Q * scale * G.exp(), K * (G[:, :, -1:] - G).exp(), G[:, :, -1].exp()
    if B is not None:
        solution = torch.linalg.solve_triangular(
            system, torch.cat([B * V, B * G.exp() * K], -1), upper=False, unitriangular=True
        )
        V, read = solution.split([V.shape[-1], K.shape[-1]], -1)
    state = v.new_zeros(len(lengths), heads, k.shape[-1], v.shape[-1], dtype=sum_dtype)
    if initial_state is not None:
        state = initial_state.to(sum_dtype)
    state, outs = state[chunks.order], []
    for first, last in chunks.steps:
        span, h = slice(first, last), state[: last - first]
        update = V[span] if B is None else V[span] - read[span] @ h
        outs.append(from_state[span] @ h + weights[span] @ update)
        h = decay[span][..., None] * h + into_state[span].mT @ update
        state = torch.cat([h, state[last - first :]])
    out = chunks.join(outs, V)
    return out.to(dtype)[None], state[chunks.order.argsort()]


def _products(Q: Tensor, K: Tensor, B: Tensor | None, G: Tensor) -> tuple[Tensor, Tensor]:
    """Decayed products of each row of a chunk with its earlier rows: with queries (for o), and with keys (for the rows'
    updates of the state). Exponents are never positive."""
    size = Q.shape[2]
    is_later = torch.ones(size, size, dtype=torch.bool, device=Q.device).triu(1)
    ratios = (G[:, :, :, None] - G[:, :, None]).masked_fill(is_later[..., None], float("-inf")).exp()
    if G.shape[-1] == 1:
        decay = ratios[..., 0]
        weights, writes = (Q @ K.mT) * decay, None if B is None else (B * K @ K.mT) * decay
    else:
        decayed_keys = K[:, :, None] * ratios  # [chunks, heads, size, size, K]
        weights = (Q[:, :, :, None] * decayed_keys).sum(-1)
        writes = None if B is None else (B * K)[:, :, :, None].mul(decayed_keys).sum(-1)
    return weights, weights if writes is None else writes


@dataclass(frozen=True)
class _Chunks:
    """Sequences cut into chunks of `size` rows, the last chunks padded with rows that change no state.

    order: int64 [sequences], the longest first; steps: chunks [first, last) of each step: the n-th chunk of every
    sequence long enough, in that order; source: int64 [chunks * size], each position's row, or `rows` for padding;
    place: int64 [rows], the position of each row in `source`."""

    size: int
    order: Tensor
    steps: list[tuple[int, int]]
    source: Tensor
    place: Tensor

    @staticmethod
    def of(lengths: Sequence[int], size: int, device: torch.device) -> _Chunks:
        length = torch.tensor(lengths, dtype=torch.int64, device="cpu").reshape(-1)
        rows, start = int(length.sum()), length.cumsum(0) - length
        order = length.argsort(descending=True, stable=True)
        counts = (length[order] + size - 1) // size
        chunk = torch.arange(int(counts.max()) if len(counts) else 0)
        is_active = chunk[:, None] < counts  # [steps, sequences]
        ends = is_active.sum(1).cumsum(0).tolist()
        step, sequence = is_active.nonzero(as_tuple=True)
        offsets = step[:, None] * size + torch.arange(size)
        source = torch.where(
            offsets < length[order][sequence][:, None], start[order][sequence][:, None] + offsets, rows
        )
        source = source.flatten()
        position = torch.empty(rows + 1, dtype=torch.int64)
        position[source] = torch.arange(len(source))
        steps = list(zip([0, *ends], ends, strict=False))
        return _Chunks(size, order.to(device), steps, source.to(device), position[:rows].to(device))

    def cut(self, x: Tensor) -> Tensor:
        """x [rows, heads, width] -> [chunks, heads, size, width]."""
        padded = pad(x, (0, 0, 0, 0, 0, 1))[self.source]
        return padded.view(len(padded) // self.size, self.size, *x.shape[1:]).transpose(1, 2)

    def join(self, parts: Sequence[Tensor], like: Tensor) -> Tensor:
        """Joins the chunks of each step into rows, the inverse of `cut`."""
        rows = torch.cat(tuple(parts)) if parts else like.new_zeros(like.shape)
        return rows.transpose(1, 2).flatten(0, 1)[self.place]
