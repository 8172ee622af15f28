"""Kernels of one task against dense float64 attention, over random band grids."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from apportion.backends.interp import columns_of
from apportion.backends.torch.kernels import attention
from apportion.backends.torch.kernels.attention import (  # type: ignore[attr-defined]
    Band,
    Score,
    accumulator_dtype,
    attend,
    attend_grad,
    merge,
)
from apportion.backends.torch.kernels.checks import is_checking
from apportion.backends.torch.kernels.cuts import Call, cut_strips
from apportion.backends.torch.memory.head_columns import head_groups
from apportion.ir.errors import ExecutionError
from apportion.trainer.step.attention import check_kernels
from tests.ranks import flash_rule

INF = 2**62
Bands = list[tuple[int, int]]
Heads = tuple[int, ...]


def dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, kv_of: Any, score: Score) -> tuple[Tensor, ...]:
    """o and lse for float64 tensors [T, H, D], differentiable; rows without keys have 0 and -inf."""
    s = torch.einsum("thd,shd->hts", q, k[:, kv_of]) * score.scale
    if score.softcap is not None:
        s = score.softcap * torch.tanh(s / score.softcap)
    s = s.masked_fill(~allowed, float("-inf"))
    p = torch.nan_to_num(torch.softmax(s, -1))
    return torch.einsum("hts,shd->thd", p, v[:, kv_of]), s.logsumexp(-1).T


def inputs(
    rows: int, keys: int, heads: int, kv_heads: int, widths: tuple[int, int], dtype: torch.dtype, seed: int
) -> list[Tensor]:
    gen = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads, widths[0]), (keys, kv_heads, widths[0]), (keys, kv_heads, widths[1])]
    shapes.append((rows, heads, widths[1]))
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


def run_task(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, bands: Bands, kv_of: Heads, score: Score, dlse: Any = None
) -> tuple[Tensor, ...]:
    """Runs forward over the bands into one accumulator, then backward of each band with the merged statistics."""
    wide = accumulator_dtype(q.dtype)
    o = torch.zeros(*q.shape[:2], v.shape[-1], dtype=wide)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=wide)
    for dmin, dmax in bands:
        attend(q, k, v, o, lse, Band(dmin, dmax, kv_of), score)
    delta = (do.to(wide) * o).sum(-1)
    if dlse is not None:
        delta, score = delta - dlse, replace(score, any_delta=True)
    dq, dk, dv = (torch.zeros(t.shape, dtype=wide) for t in (q, k, v))
    for dmin, dmax in bands:
        attend_grad(q, k, v, do, lse, delta, dq, dk, dv, Band(dmin, dmax, kv_of), score)
    return o, lse, dq, dk, dv


def oracle(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, bands: Bands, kv_of: Heads, score: Score, dlse: Any = None
) -> tuple[Tensor, ...]:
    i, j = np.indices((q.shape[0], k.shape[0]))
    allowed = torch.from_numpy(np.any([(i - j >= low) & (i - j <= high) for low, high in bands], axis=0))
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    o, lse = dense(*leaves, allowed, list(kv_of), score)
    # rows without keys would turn 0 * nan in the oracle's own softmax gradient
    alive = allowed.any(1)
    parts = dense(leaves[0][alive], *leaves[1:], allowed[alive], list(kv_of), score)
    dparts = do.double()[alive], torch.zeros_like(parts[1]) if dlse is None else dlse[alive]
    return o.detach(), lse.detach(), *torch.autograd.grad(parts, leaves, dparts)


def split_band(rng: Any, rows: int, keys: int) -> list[tuple[int, int]]:
    """A random band, cut in two at a diagonal, so that rows merge several partial results."""
    low, high = sorted(rng.integers(-keys + 1, rows, 2).tolist())
    low, high = (-INF if rng.random() < 0.3 else low), (INF if rng.random() < 0.3 else high)
    middle = int(rng.integers(max(low, -keys), min(high, rows) + 1))
    return [(low, middle - 1), (middle, high)]


def check(*task: Any) -> None:
    """Compares a task in float64 with the oracle. task: arguments of both."""
    for actual, expected in zip(run_task(*task), oracle(*task), strict=True):
        assert not torch.isnan(actual).any()
        torch.testing.assert_close(actual.double(), expected, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["flash", "softcap"])
def test_random_bands_match_dense_float64(softcap: float | None) -> None:
    rng = np.random.default_rng(7)
    for seed in range(25):
        rows, keys = rng.integers(1, 90, 2).tolist()
        kv_heads, group = [(1, 1), (2, 2), (1, 4)][seed % 3]
        kv_of = tuple(i // group for i in range(kv_heads * group))
        args = inputs(rows, keys, kv_heads * group, kv_heads, (8, [8, 5, 16][seed % 3]), torch.float64, seed)
        bands = split_band(rng, rows, keys)
        check(*args, bands, kv_of, Score(0.3, softcap))


def test_strips_and_squares_longer_than_one_call() -> None:
    for bands in ([(0, INF)], [(0, 299)], [(-INF, 40)], [(5, INF), (-30, 4)]):
        args = inputs(600, 700, 2, 1, (8, 8), torch.float64, 3)
        check(*args, bands, (0, 0), Score(0.3))


@pytest.mark.parametrize("kv_of", [(1, 0), (0, 1, 0, 1), (0, 0, 2), (2, 0, 0, 2, 1), (0, 0, 0)])
def test_heads_in_any_order_and_number(kv_of: tuple[int, ...]) -> None:
    args = inputs(20, 24, len(kv_of), 3, (4, 4), torch.float64, 5)
    check(*args, [(0, INF)], kv_of, Score(0.5))


def test_head_groups_are_slices_where_heads_are_regular() -> None:
    assert head_groups((0, 0, 1, 1)) == (head_groups((0, 0, 1, 1))[0],)
    group = head_groups((0, 0, 1, 1))[0]
    assert (group.q, group.kv, group.kv_heads) == (slice(0, 4, 1), slice(0, 2, 1), 2)
    assert columns_of((1, 3, 5)) == slice(1, 6, 2)
    assert columns_of((3, 1)) == (3, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_within_twice_the_error_of_plain_attention(dtype: torch.dtype) -> None:
    args = inputs(200, 200, 4, 2, (16, 16), dtype, 6)
    bands, kv_of, score = [(0, 60), (61, INF)], (0, 0, 1, 1), Score(0.25)
    got = run_task(*args, bands, kv_of, score)
    expected = oracle(*args, bands, kv_of, score)
    plain = plain_attention(*args, kv_of, score)
    results = (got[0], *got[2:]), plain, (expected[0], *expected[2:])
    for name, a, b, c in zip(("o", "dq", "dk", "dv"), *results, strict=True):
        assert (a.to(dtype) - c).abs().max() <= 2 * (b - c).abs().max(), name


def plain_attention(q: Tensor, k: Tensor, v: Tensor, do: Tensor, kv_of: Heads, score: Score) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    rows, *kv = (t.transpose(0, 1) for t in (leaves[0], leaves[1][:, kv_of], leaves[2][:, kv_of]))
    o = torch.nn.functional.scaled_dot_product_attention(rows, *kv, is_causal=True, scale=score.scale)
    return [o.transpose(0, 1), *torch.autograd.grad(o, leaves, do.transpose(0, 1))]


def test_out_with_delta_keeps_delta_and_survives_tiny_and_zero_gradients() -> None:
    gen = torch.Generator().manual_seed(8)
    do = torch.randn(5, 16, generator=gen, dtype=torch.float64)
    out = torch.randn(5, 16, generator=gen, dtype=torch.float64)
    do[1] = 0
    do[2] *= 1e-200
    delta = (do * out).sum(-1)
    stand_in = attention.out_with_delta(do, delta)
    torch.testing.assert_close((do * stand_in).sum(-1), delta, rtol=1e-14, atol=0)
    assert (stand_in.norm(dim=-1) <= out.norm(dim=-1) * (1 + 1e-14)).all()


@pytest.mark.parametrize("size", [0.0, 1e-200, 1.0])
@pytest.mark.parametrize("kernel", ["FLASH_CPU", "FLASH_CUDA", "PLAIN"])
def test_a_gradient_of_lse_needs_none_of_the_output(monkeypatch: Any, kernel: str, size: float) -> None:
    emulate_cuda(monkeypatch)
    monkeypatch.setattr(attention, "choose_kernel", lambda *_: getattr(attention, kernel))
    *qkv, do = inputs(30, 25, 4, 2, (8, 5), torch.float64, 14)
    dlse = torch.randn(30, 4, generator=torch.Generator().manual_seed(15), dtype=torch.float64)
    args = *qkv, do * size, [(-3, 4), (5, 20)], (0, 0, 1, 1), Score(0.3)
    check(*args, dlse)


def test_delta_columns_keep_twice_the_precision_of_bfloat16() -> None:
    do, delta = torch.zeros(4, 8, dtype=torch.bfloat16), torch.tensor([1.2345678, -300.7, 1e-6, 0.0])
    do, out = attention.with_delta_columns(do, delta)
    assert (do.dtype, out.dtype) == (torch.bfloat16, torch.bfloat16)
    torch.testing.assert_close((do.float() * out.float()).sum(-1), delta, rtol=2**-16, atol=0)


def test_merging_an_empty_partial_changes_nothing() -> None:
    o, lse = torch.zeros(2, 1, 3), torch.full((2, 1), float("-inf"))
    merge(o, lse, torch.zeros(2, 1, 3), torch.full((2, 1), float("-inf")))
    assert o.eq(0).all()
    assert lse.eq(float("-inf")).all()


# --- the check for debugging

BAD = {"an LSE of +inf": (1, float("inf")), "NaN in LSE": (1, float("nan")), "NaN in o": (0, float("nan"))}


def with_wrong_entry(function: Any, part: int, value: float, row: int, head: int) -> Callable[..., Any]:
    """Wraps a kernel's function to replace one entry of one of its results."""

    def wrapped(*args: Call | Score | Tensor) -> tuple[Tensor, ...]:
        parts = [t.clone() for t in function(*args)]
        parts[part][head, 0, row] = value
        return tuple(parts)

    wrapped.__name__ = function.__name__
    return wrapped


@pytest.mark.parametrize("problem", BAD)
def test_the_check_names_the_wrong_result_of_forward(monkeypatch: pytest.MonkeyPatch, problem: str) -> None:
    bad = attention.Kernel(
        cut_strips, with_wrong_entry(attention._plain, *BAD[problem], 3, 1), attention._plain_backward
    )
    monkeypatch.setattr(attention, "FLASH_CPU", bad)
    args = inputs(12, 9, 2, 2, (4, 4), torch.float64, 11)
    message = rf"kernel plain .*rows \[0, 12\).*: {re.escape(problem)}.* row 3, head 1"
    with check_kernels(True), pytest.raises(ExecutionError, match=message):
        run_task(*args, [(-INF, INF)], (0, 1), Score(0.4))


@pytest.mark.parametrize(("part", "name", "row"), [(0, "dq", 7), (1, "dk", 2), (2, "dv", 8)])
def test_the_check_names_the_wrong_result_of_backward(
    monkeypatch: pytest.MonkeyPatch, part: int, name: str, row: int
) -> None:
    spoil = with_wrong_entry(attention._plain_backward, part, float("nan"), row, 1)
    monkeypatch.setattr(attention, "FLASH_CPU", attention.Kernel(cut_strips, attention._plain, spoil))
    args = inputs(12, 9, 2, 2, (4, 4), torch.float64, 12)
    message = rf"NaN in {name}, first in row {row}, head 1"
    with check_kernels(True), pytest.raises(ExecutionError, match=message):
        run_task(*args, [(-INF, INF)], (0, 1), Score(0.4))


def test_the_check_accepts_correct_results_and_is_off_outside_its_block() -> None:
    args = inputs(30, 30, 2, 1, (8, 8), torch.float64, 13)
    with check_kernels(True):
        assert is_checking()
        with check_kernels(False):
            assert not is_checking()
        check(*args, [(4, 9)], (0, 0), Score(0.3))
    assert not is_checking()


# --- the CUDA code path, with the kernel's two ops emulated in plain torch


def _visible(q: Tensor, k: Tensor, options: dict[str, float]) -> Tensor:
    window = options["window_size_left"], options["window_size_right"]
    return torch.from_numpy(flash_rule.visible(len(q), len(k), *window))


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *others: Any, scale: float, **window: int
) -> tuple[Tensor | None, ...]:
    assert (cu_q.tolist(), cu_k.tolist()) == ([0, len(q)], [0, len(k)])
    assert others[:4] == (len(q), len(k), 0.0, False)  # longest rows, dropout, causal
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    kv_of = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    o, lse = dense(q, k, v, _visible(q, k, window), kv_of, Score(scale))
    # the kernel's LSE of a row without keys is +inf
    return o, lse.T.contiguous().masked_fill_(lse.T == attention.NEG_INF, float("inf")), None, None, None


def _flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Any, **options: float
) -> tuple[Tensor, ...]:
    assert lse.shape == (q.shape[1], q.shape[0])
    assert do.is_contiguous()
    scale = options["scale"]
    kv_of = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
    s = torch.einsum("thd,shd->hts", q, k[:, kv_of]) * scale
    p = (s.masked_fill(~_visible(q, k, options), attention.NEG_INF) - lse[..., None]).exp()
    delta = (do * out).sum(-1).T
    ds = p * (torch.einsum("thd,shd->hts", do, v[:, kv_of]) - delta[..., None]) * scale
    dq = torch.einsum("hts,shd->thd", ds, k[:, kv_of])
    dk = torch.zeros_like(k).index_add_(1, kv_of, torch.einsum("hts,thd->shd", ds, q))
    dv = torch.zeros_like(v).index_add_(1, kv_of, torch.einsum("hts,thd->shd", p, do))
    return dq, dk, dv


def emulate_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_cuda", _flash_forward)
    monkeypatch.setattr(attention, "_cuda_backward", _flash_backward)


def test_cuda_calls_windows_widths_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_cuda(monkeypatch)
    monkeypatch.setattr(attention, "choose_kernel", lambda *_: attention.FLASH_CUDA)
    rng = np.random.default_rng(9)
    for seed in range(60):
        rows, keys = rng.integers(1, 60, 2).tolist()
        kv_of = [(0,), (0, 0, 1, 1), (1, 0, 1, 0), (0, 0, 2)][seed % 4]
        widths = [(8, 8), (12, 8), (6, 10)][seed % 3]
        args = inputs(rows, keys, len(kv_of), 3, widths, torch.float64, seed)
        check(*args, split_band(rng, rows, keys), kv_of, Score(0.4))


def test_kernels_are_chosen_by_device_dtype_width_and_score() -> None:
    half, wide = (torch.zeros(1, 1, width, dtype=torch.bfloat16, device="meta") for width in (128, 512))
    cuda = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=half.shape)
    cpu, widest = torch.zeros(1, 1, 8), wide[..., : attention.CUDA_WIDEST]
    for q, v, score, kernel in (
        (cpu, cpu, Score(1.0), attention.FLASH_CPU),
        (cpu, cpu, Score(1.0, 2.0), attention.PLAIN),
        (half, half, Score(1.0), attention.PLAIN),
        (cuda, half, Score(1.0), attention.FLASH_CUDA),
        (cuda, wide, Score(1.0), attention.PLAIN),
        (cuda, widest, Score(1.0), attention.FLASH_CUDA),
        (cuda, widest, Score(1.0, any_delta=True), attention.PLAIN),
    ):
        assert attention.choose_kernel(q, v, score) is kernel
