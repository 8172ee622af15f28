"""Attention of one task, forward and backward, on the device's kernel.

Shape suffixes: T query rows, S key rows, H query heads, K KV heads, G query heads per KV head, D width of Q
and K, E width of V. Tasks come as q_THD, k_SKD, v_SKE (slices of arenas); kernels see q_KGTD, k_KGSD with
stride 0 over G, so that GQA costs no copy.

    attend       calls of the band ──kernel──► (o, lse) ──merge──► accumulator rows
    attend_grad  calls of the band ──kernel──► dq, dk, dv, added into accumulator rows

A kernel is three functions: `cut` cuts a band into calls it accepts, `forward` and `backward` compute one. Backward
takes the merged LSE and delta = rowsum(dO * O), so the gradients of a row's calls simply add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apportion.backends.torch.kernels.checks import is_checking, require_finite, require_numbers
from apportion.backends.torch.kernels.cuts import Call, cut_squares, cut_strips, cut_windows
from apportion.backends.torch.memory.arrays import accumulator_dtype
from apportion.backends.torch.memory.head_columns import HeadGroup, head_groups, pick, put

_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda = torch.ops.aten._flash_attention_forward
_cuda_backward = torch.ops.aten._flash_attention_backward

NEG_INF = float("-inf")
CUDA_WIDEST = 256  # FlashAttention-2's largest head
CUDA_MULTIPLE = 8  # head dims must be a multiple of this
DELTA_COLUMNS = 2  # columns that carry delta: rounded to the kernel's dtype, and the rounding error


@dataclass(frozen=True, slots=True)
class Score:
    """score = q . k * scale, then softcap * tanh(score / softcap) if there is a softcap.

    any_delta: for backward, whether delta may be any number because LSE has a gradient too (delta = rowsum(dO * O) -
    dLSE), on this rank's rows or others'."""

    scale: float
    softcap: float | None = None
    any_delta: bool = False


Forward = Callable[[Call, Tensor, Tensor, Tensor, Score], tuple[Tensor, Tensor]]
Backward = Callable[
    [Call, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Score], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True)
class Kernel:
    """forward(call, q, k, v, score) -> o, lse; backward(call, q, k, v, do, lse, delta, score) -> dq, dk, dv.

    `halves`: whether it computes in float16 and bfloat16; if not, these are widened to float32 first."""

    cut: Callable[[Call], Iterator[Call]]
    forward: Forward
    backward: Backward
    halves: bool = False


def choose_kernel(q: Tensor, v: Tensor, score: Score) -> Kernel:
    """The flash kernel of the device if it supports the dtype, widths and score, else plain
    strips."""
    if score.softcap is not None:
        return PLAIN
    if q.device.type == "cpu":
        return FLASH_CPU
    half = q.dtype in (torch.float16, torch.bfloat16)
    width = v.shape[-1] + (DELTA_COLUMNS if score.any_delta else 0)
    if q.device.type == "cuda" and half and max(q.shape[-1], width) <= CUDA_WIDEST:
        return FLASH_CUDA
    return PLAIN


@dataclass(frozen=True, slots=True)
class Band:
    """The band of pairs that a task attends to: dmin <= query row - key row <= dmax."""

    dmin: int
    dmax: int
    kv_of: tuple[int, ...]  # KV column of each query column

    def calls(self, kernel: Kernel, q: Tensor, k: Tensor) -> tuple[Call, ...]:
        return tuple(kernel.cut(Call(0, q.shape[0], 0, k.shape[0], self.dmin, self.dmax)))


def attend(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    o_THE: Tensor,
    lse_TH: Tensor,
    band: Band,
    score: Score,
    kernel: Kernel | None = None,
) -> None:
    """Merges the task's attention into the accumulators o and lse, in place. kernel: the best one by default."""
    kernel = choose_kernel(q_THD, v_SKE, score) if kernel is None else kernel
    q_THD, k_SKD, v_SKE = _in_kernel_dtype(kernel, q_THD, k_SKD, v_SKE)
    calls = band.calls(kernel, q_THD, k_SKD)
    for group in head_groups(band.kv_of):
        q, k, v = _group_heads(q_THD, k_SKD, v_SKE, group)
        o, lse = pick(o_THE, group.q), pick(lse_TH, group.q)
        for call in calls:
            part = kernel.forward(call, _rows(q, call), _keys(k, call), _keys(v, call), score)
            part_o, part_lse = map(_ungroup_heads, part)
            if is_checking():
                require_finite(_describe(kernel.forward, call), part_o, part_lse)
            merge(o[call.q0 : call.q1], lse[call.q0 : call.q1], part_o, part_lse)
        put(o_THE, group.q, o)
        put(lse_TH, group.q, lse)


def attend_grad(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKE: Tensor,
    do_THE: Tensor,
    lse_TH: Tensor,
    delta_TH: Tensor,
    dq_THD: Tensor,
    dk_SKD: Tensor,
    dv_SKE: Tensor,
    band: Band,
    score: Score,
    kernel: Kernel | None = None,
) -> None:
    """Adds the task's gradients into the accumulators dq, dk and dv, in place. kernel: see `attend`."""
    kernel = choose_kernel(q_THD, v_SKE, score) if kernel is None else kernel
    q_THD, k_SKD, v_SKE, do_THE = _in_kernel_dtype(kernel, q_THD, k_SKD, v_SKE, do_THE)
    calls = band.calls(kernel, q_THD, k_SKD)
    for group in head_groups(band.kv_of):
        q, k, v = _group_heads(q_THD, k_SKD, v_SKE, group)
        do, lse, delta = (_split_heads(pick(t, group.q), group.kv_heads) for t in (do_THE, lse_TH, delta_TH))
        dq, dk, dv = pick(dq_THD, group.q), pick(dk_SKD, group.kv), pick(dv_SKE, group.kv)
        for call in calls:
            inputs = (_rows(q, call), _keys(k, call), _keys(v, call))
            upstream = (_rows(do, call), _rows(lse, call), _rows(delta, call))
            parts = kernel.backward(call, *inputs, *upstream, score)
            part_q, part_k, part_v = _ungroup_heads(parts[0]), *map(_sum_query_heads, parts[1:])
            if is_checking():
                require_numbers(_describe(kernel.backward, call), dq=part_q, dk=part_k, dv=part_v)
            dq[call.q0 : call.q1].add_(part_q)
            dk[call.k0 : call.k1].add_(part_k)
            dv[call.k0 : call.k1].add_(part_v)
        put(dq_THD, group.q, dq)
        put(dk_SKD, group.kv, dk)
        put(dv_SKE, group.kv, dv)


def _describe(function: Forward | Backward, call: Call) -> str:
    """Describes a kernel and its part of the task, for messages."""
    return (
        f"kernel {function.__name__.lstrip('_')} on query rows [{call.q0}, {call.q1}) x key rows "
        f"[{call.k0}, {call.k1}) of its task, diagonals {call.dmin} to {call.dmax}"
    )


def merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Log-sum-exp merge of a partial result into o [T, H, E] and lse [T, H], in place. LSE -inf: no keys so far.

    The two weights add up to exactly one, so that rounding of the merged LSE does not reach o."""
    part_lse = part_lse.to(lse.dtype)
    weight = torch.sigmoid(part_lse - lse).masked_fill_(part_lse == NEG_INF, 0.0)
    o.lerp_(part.to(o.dtype), weight.to(o.dtype).unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, part_lse))


def _in_kernel_dtype(kernel: Kernel, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, widened to the accumulator dtype unless `kernel.halves`: half precision on CPUs is no faster, only
    coarser."""
    return tensors if kernel.halves else tuple(t.to(accumulator_dtype(t.dtype)) for t in tensors)


def _group_heads(q: Tensor, k: Tensor, v: Tensor, group: HeadGroup) -> tuple[Tensor, Tensor, Tensor]:
    q_KGTD = _split_heads(pick(q, group.q), group.kv_heads)
    ratio = q_KGTD.shape[1]
    k_KGSD, v_KGSE = (
        pick(t, group.kv).transpose(0, 1).unsqueeze(1).expand(-1, ratio, -1, -1) for t in (k, v)
    )
    return q_KGTD, k_KGSD, v_KGSE


def _split_heads(tensor: Tensor, kv_heads: int) -> Tensor:
    """[T, H, ...] -> [K, G, T, ...]."""
    rows, heads, *rest = tensor.shape
    return tensor.view(rows, kv_heads, heads // kv_heads, *rest).movedim(0, 2)


def _ungroup_heads(tensor: Tensor) -> Tensor:
    """[K, G, T, ...] -> [T, H, ...]."""
    return tensor.movedim(2, 0).flatten(1, 2)


def _sum_query_heads(tensor: Tensor) -> Tensor:
    """[K, G, S, ...] -> [S, K, ...]: the gradient of a KV head is the sum over its query heads."""
    return tensor.sum(1, dtype=accumulator_dtype(tensor.dtype)).transpose(0, 1)


def _rows(tensor: Tensor, call: Call) -> Tensor:
    return tensor[:, :, call.q0 : call.q1]


def _keys(tensor: Tensor, call: Call) -> Tensor:
    return tensor[:, :, call.k0 : call.k1]


def _band_mask(call: Call, device: torch.device) -> Tensor:
    """[T, S] bool: the pairs of the call's band."""
    i = torch.arange(call.q0, call.q1, device=device)
    j = torch.arange(call.k0, call.k1, device=device)
    diagonal = i[:, None] - j
    return (diagonal >= call.dmin) & (diagonal <= call.dmax)


# --- CPU flash: `is_causal` is aligned at the top left; masks must be float; QK and V must be equally wide


def _cpu_mode(call: Call, dtype: torch.dtype, device: torch.device) -> tuple[bool, Tensor | None]:
    """(is_causal, mask) of a call."""
    if call.is_plain or call.is_causal_square:
        return call.is_causal_square and not call.is_plain, None
    mask = torch.zeros(call.q1 - call.q0, call.k1 - call.k0, dtype=dtype, device=device)
    return False, mask.masked_fill_(~_band_mask(call, device), NEG_INF)


def _flash_cpu(call: Call, q: Tensor, k: Tensor, v: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    width = v.shape[-1]
    q, k, v = _equal_widths(q, k, v)
    causal, mask = _cpu_mode(call, q.dtype, q.device)
    o, lse = _cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=score.scale)
    return o[..., :width], lse


def _flash_cpu_backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, score: Score
) -> tuple[Tensor, Tensor, Tensor]:
    qk_width, v_width = q.shape[-1], v.shape[-1]
    q, k, v, do, out = _equal_widths(q, k, v, *_do_and_out(do, delta, score))
    causal, mask = _cpu_mode(call, q.dtype, q.device)
    dq, dk, dv = _cpu_backward(do, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=score.scale)
    return dq[..., :qk_width], dk[..., :qk_width], dv[..., :v_width]


def _do_and_out(do: Tensor, delta: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    """dO and an `out` with rowsum(dO * out) = delta, for kernels that take the output but use only that sum."""
    return with_delta_columns(do, delta) if score.any_delta else (do, out_with_delta(do, delta))


def with_delta_columns(do: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """dO, and a stand-in for out, with extra columns that yield delta (zeros in V): correct even where dO is 0."""
    rounded = delta.to(do.dtype)
    columns = torch.stack([rounded, (delta - rounded).to(do.dtype)], -1)
    return torch.cat([do, torch.ones_like(columns)], -1), torch.cat([torch.zeros_like(do), columns], -1)


def out_with_delta(do: Tensor, delta: Tensor) -> Tensor:
    """An `out` of dO's width with rowsum(dO * out) = delta, for delta = rowsum(dO * O).

    dO * delta / rowsum(dO^2), with rows scaled by their largest entry first so that tiny gradients do not
    underflow; its norm never exceeds the true output's (Cauchy-Schwarz), so it fits the same dtype."""
    values = do.to(delta.dtype)
    largest = values.abs().amax(-1, keepdim=True)
    unit = values / largest.masked_fill(largest == 0, 1.0)
    square = unit.square().sum(-1, keepdim=True)
    factor = delta.unsqueeze(-1) / (largest * square)
    return (unit * factor.masked_fill(square == 0, 0.0)).to(do.dtype)


def _equal_widths(*tensors: Tensor, multiple: int = 1) -> tuple[Tensor, ...]:
    """Zero-pads to the largest width, rounded up: zeros change neither scores nor sums."""
    width = -(-max(t.shape[-1] for t in tensors) // multiple) * multiple
    return tuple(
        t if t.shape[-1] == width else torch.nn.functional.pad(t, (0, width - t.shape[-1])) for t in tensors
    )


# --- CUDA flash: one sequence in varlen form; windows are aligned at the bottom right; half dtypes only


def _kv_tokens_first(tensor: Tensor) -> Tensor:
    """[K, G, S, D], equal over G, -> [S, K, D]: the kernel does GQA itself."""
    return tensor[:, 0].transpose(0, 1)


def _varlen(call: Call, device: torch.device) -> tuple[Any, ...]:
    """Cumulative lengths [0, n] of queries and keys, int32, made on the device (no copy from the host), and lengths."""
    sizes = call.q1 - call.q0, call.k1 - call.k0
    ends = (torch.arange(0, size + 1, size, dtype=torch.int32, device=device) for size in sizes)
    return *ends, *sizes


def _flash_cuda(call: Call, q: Tensor, k: Tensor, v: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    kv_heads, width = q.shape[0], v.shape[-1]
    q, k, v = _equal_widths(
        _ungroup_heads(q), _kv_tokens_first(k), _kv_tokens_first(v), multiple=CUDA_MULTIPLE
    )
    left, right = call.window
    o, lse, *_ = _cuda(
        q, k, v, *_varlen(call, q.device), 0.0, False, False,
        scale=score.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return _split_heads(o[..., :width], kv_heads), lse.view(kv_heads, -1, lse.shape[-1])


def _flash_cuda_backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, score: Score
) -> tuple[Tensor, Tensor, Tensor]:
    kv_heads, qk_width, v_width = q.shape[0], q.shape[-1], v.shape[-1]
    do, out = map(_ungroup_heads, _do_and_out(do, delta, score))
    q, k, v, do, out = _equal_widths(
        _ungroup_heads(q), _kv_tokens_first(k), _kv_tokens_first(v), do, out, multiple=CUDA_MULTIPLE
    )
    left, right = call.window
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = _cuda_backward(
        do.contiguous(), q, k, v, out.contiguous(), lse.flatten(0, 1).contiguous(), *_varlen(call, q.device),
        0.0, False, no_dropout, torch.empty(0, device=q.device),
        scale=score.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    pairs = (dq, qk_width), (dk, qk_width), (dv, v_width)
    dq, dk, dv = (_split_heads(part[..., :width], kv_heads) for part, width in pairs)
    return dq, dk, dv  # dk and dv are summed over query heads: [K, 1, S, D]


# --- Plain strips: any device, dtype and softcap


def _scores(q: Tensor, k: Tensor, score: Score) -> Tensor:
    """[K, G, T, S] before the mask."""
    s = q @ k.mT * score.scale
    return s if score.softcap is None else score.softcap * torch.tanh(s / score.softcap)


def _mask_scores(call: Call, s: Tensor) -> Tensor:
    return s if call.is_plain else s.masked_fill(~_band_mask(call, s.device), NEG_INF)


def _plain(call: Call, q: Tensor, k: Tensor, v: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    s = _mask_scores(call, _scores(q, k, score))
    lse = s.logsumexp(-1)
    return (s - lse.unsqueeze(-1)).exp_() @ v, lse


def _plain_backward(
    call: Call, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, score: Score
) -> tuple[Tensor, Tensor, Tensor]:
    s = _scores(q, k, score)
    p = (_mask_scores(call, s) - lse.unsqueeze(-1)).exp_()
    ds = p * (do @ v.mT - delta.unsqueeze(-1)) * score.scale
    if score.softcap is not None:
        ds = ds * (1 - (s / score.softcap).square())
    return ds @ k, ds.mT @ q, p.mT @ do


FLASH_CPU = Kernel(cut_squares, _flash_cpu, _flash_cpu_backward)
FLASH_CUDA = Kernel(cut_windows, _flash_cuda, _flash_cuda_backward, halves=True)
PLAIN = Kernel(cut_strips, _plain, _plain_backward)
