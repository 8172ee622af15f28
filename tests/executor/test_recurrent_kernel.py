"""The chunked kernel of linear recurrences against the formula, token by token."""

from __future__ import annotations

import sys
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from apportion.backends.torch.kernels.recurrent import choose_kernel, chunk_recurrence
from tests.support.recurrence import rows_of, token_by_token

LENGTHS = [130, 1, 64, 0, 17]


@pytest.mark.parametrize(("gate", "delta"), [*product(("scalar", "diagonal"), (True, False))])
def test_the_chunked_kernel_equals_the_formula_forward_and_backward(gate: str, delta: bool) -> None:
    inputs = rows_of(sum(LENGTHS), 4, 2, 5, 7, gate, delta)
    torch.manual_seed(1)
    start = torch.randn(len(LENGTHS), 4, 5, 7, dtype=torch.float64)
    weights = torch.randn(sum(LENGTHS), 4, 7, dtype=torch.float64), torch.randn_like(start)
    results = []
    for kernel in (chunk_recurrence, token_by_token):
        arguments = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        ends, state = torch.tensor([0, *LENGTHS]).cumsum(0), start.clone().requires_grad_()
        rows = {name: x[None] for name, x in arguments.items()}
        o, last = kernel(**rows, scale=0.3, initial_state=state, output_final_state=True, cu_seqlens=ends)
        ((o[0] * weights[0]).sum() + (last * weights[1]).sum()).backward()
        results.append([o, last, state.grad, *(x.grad for x in arguments.values())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_one_sequence_without_a_state_is_the_default() -> None:
    arguments = {name: x[None] for name, x in rows_of(70, 2, 2, 4, 4, "scalar", True).items()}
    ends = torch.tensor([0, 70])
    actual, expected = chunk_recurrence(**arguments), token_by_token(**arguments, scale=0.5, cu_seqlens=ends)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("gate", ["scalar", "diagonal"])
def test_low_dtypes_are_computed_in_float32_and_strong_decays_do_not_overflow(gate: str) -> None:
    arguments = rows_of(200, 2, 1, 8, 8, gate, True)
    arguments["g"] *= 40
    dtypes = {name: torch.bfloat16 if name in "qkv" else torch.float32 for name in arguments}
    low = {name: x[None].to(dtypes[name]) for name, x in arguments.items()}
    actual, state = chunk_recurrence(**low)
    expected, last = token_by_token(**{name: x.double() for name, x in low.items()}, scale=8**-0.5)
    assert actual.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(state.double(), last, rtol=1e-4, atol=1e-5)


def test_zero_rows_give_empty_results() -> None:
    arguments = {name: x[None, :0] for name, x in rows_of(1, 2, 2, 4, 3, "scalar", True).items()}
    o, state = chunk_recurrence(**arguments, cu_seqlens=torch.tensor([0]))
    assert (o.shape, state.shape) == ((1, 0, 2, 3), (0, 2, 4, 3))


def test_key_heads_are_repeated_for_kernels_that_need_equal_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of flash-linear-attention, used if it is installed and rows are on a GPU."""
    module = SimpleNamespace(chunk_simple_gla=chunk_recurrence)
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(ops=SimpleNamespace(simple_gla=module)))
    for name in ("fla.ops", "fla.ops.simple_gla"):
        monkeypatch.setitem(sys.modules, name, module)
    arguments = {name: x[None] for name, x in rows_of(9, 4, 2, 3, 5, "scalar", False).items()}
    kernel = choose_kernel("scalar", False, torch.device("cuda"))
    assert choose_kernel("scalar", False, torch.device("cpu")) is chunk_recurrence is not kernel
    torch.testing.assert_close(kernel(**arguments), chunk_recurrence(**arguments))
