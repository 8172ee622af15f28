"""Recurrent layers under plans: forward and backward equal those of one process, token by token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

import apportion as ap
from apportion import Batch, ConfigError, ExecutionError, Plan, Sequence, UnknownNameError, masks
from apportion.ir.request.recurrent import EARLY_SHARE, Recurrent
from tests.ranks import jobs_recurrence
from tests.ranks.jobs_recurrence import Layer
from tests.ranks.rank_pool import Pool
from tests.support.recurrence import token_by_token
from tests.support.recurrences import predecessors
from tests.support.sparse import sparse_rows
from tests.support.strategies import STRATEGIES

CONV = 4
BATCHES: dict[str, list[Any]] = {
    "one": [(90, masks.causal())],
    "documents": [
        (40, masks.causal()),
        (1, masks.causal()),
        (44, masks.documents([15, 2, 27])),
        (9, masks.causal()),
    ],
    "trees": [
        (36, masks.tree([[-1, 12], [0, 9], [0, 5], [1, 10]])),
        (60, masks.shared_question(14, [9, 25, 12])),
    ],
    "few": [(3, masks.causal()), (2, masks.causal())],
}
#: recipe, batch, ranks, (gate, delta, heads, key heads), padding, checkpointing
CASES = [
    ("fcp", "documents", 4, ("scalar", True, 4, 2), 0, ""),
    ("fcp", "trees", 3, ("diagonal", False, 2, 1), 3, "full"),
    ("fcp", "few", 6, ("scalar", True, 2, 2), 2, "selective"),
    ("ring", "one", 4, ("scalar", False, 4, 2), 1, "selective"),
    ("ring", "documents", 2, ("diagonal", True, 3, 3), 0, "full"),
    ("ring", "trees", 4, ("scalar", True, 3, 1), 2, ""),
    ("contiguous", "one", 5, ("diagonal", True, 3, 3), 2, "selective"),
    ("contiguous", "documents", 3, ("scalar", False, 4, 4), 3, ""),
    ("contiguous", "trees", 6, ("diagonal", True, 2, 2), 0, "full"),
    ("hybrid_dp", "trees", 4, ("scalar", False, 2, 2), 0, "selective"),
    ("ring_reshuffled", "few", 8, ("diagonal", False, 4, 4), 0, ""),
    ("dcp", "one", 1, ("diagonal", True, 2, 1), 4, "full"),
    ("dcp", "documents", 8, ("scalar", True, 5, 5), 0, "selective"),
]


def plan_of(recipe: str, batch: str, ranks: int, **kinds: Recurrent) -> Plan:
    sequences = [Sequence(length, mask) for length, mask in BATCHES[batch]]
    model = ap.Model(8, 8, 8, dtype="fp64", hidden=16, ffn=16, layers=1, recurrent=kinds)
    steps = {"name": recipe, "steps": STRATEGIES[recipe]}
    return ap.plan(Batch.from_sequences(sequences), ap.Cluster(1, ranks), model, steps)


def problem(layer: Layer, tokens: int, conv: int = CONV) -> list[Any]:
    """x, weight, g, beta, and the gradient of the result, for all tokens."""
    rng = np.random.default_rng(0)
    x, grad = rng.standard_normal((2, tokens, layer.channels))
    weight = rng.standard_normal((layer.channels, conv)) / 2
    g = -np.abs(rng.standard_normal((tokens, layer.heads, *(layer.key,) * (layer.gate == "diagonal")))) / 4
    return [x, weight, g, rng.random((tokens, layer.heads)) if layer.delta else None, grad]


def run_one_process(layer: Layer, batch: Batch, data: list[Any]) -> list[NDArray[Any] | None]:
    previous = torch.tensor(predecessors(batch))
    starts, parents = batch.branches()[:2]
    ends = torch.tensor([*starts.tolist(), batch.tokens])

    def conv(x: Tensor, weight: Tensor) -> Tensor:
        position, out = torch.arange(len(x)), torch.zeros_like(x)
        for column in reversed(weight.unbind(1)):
            out = out + torch.where(position[:, None] >= 0, x[position], 0) * column
            position = torch.where(position >= 0, previous[position], -1)
        return out

    def scan(*rows: Any) -> Tensor:
        batched = (None if x is None else x[None] for x in rows)
        return token_by_token(*batched, scale=0.5, cu_seqlens=ends, parents=parents.tolist())[0][0]

    *inputs, grad = (None if one is None else torch.from_numpy(one).clone() for one in data)
    x, weight, g, beta = (one if one is None else one.requires_grad_() for one in inputs)
    out = layer(conv, scan, x, weight, g, beta)
    out.backward(grad)
    grads = (out, x.grad, weight.grad, g.grad, None if beta is None else beta.grad)
    return [one if one is None else one.detach().numpy() for one in grads]


def run_on_ranks(
    pool: Pool, plan: Plan, layer: Layer, data: list[Any], checkpointing: str = "", **options: Any
) -> tuple[list[NDArray[Any] | None], list[int]]:
    """Results of all tokens, and the number of calls of each rank in backward."""
    home, ranks = plan.layout(plan.header.home_layout), plan.header.ranks
    options = {"padding": 0, "dtype": "float64", "kind": None, **options}
    rows = [home.tokens(rank) for rank in range(ranks)]
    x, weight, *rest = data
    each = [
        (plan.for_rank(i).encode(), [x[one], weight, *(each if each is None else each[one] for each in rest)])
        for i, one in enumerate(rows)
    ]
    results = pool.run(jobs_recurrence.run, ranks, layer, options, checkpointing, each=each)
    combined = list[Any]()
    for number, parts in enumerate(zip(*(tensors for tensors, _ in results), strict=True)):
        if number == 2:
            combined.append(sum(parts))
        elif parts[0] is None:
            combined.append(None)
        else:
            whole = np.zeros((plan.request.batch.tokens, *parts[0].shape[1:]))
            for tokens, part in zip(rows, parts, strict=True):
                whole[tokens] = part
            combined.append(whole)
    return combined, [calls for _, calls in results]


def layer_of(gate: str, delta: bool, heads: int, key_heads: int, conv: int = CONV) -> tuple[Layer, Recurrent]:
    layer = Layer(heads, key_heads, 4, 5, gate, delta)
    return layer, Recurrent(heads, 4, 5, key_heads, gate, delta, conv)


def check(pool: Pool, plan: Plan, layer: Layer, conv: int = CONV, **options: Any) -> list[int]:
    """Compares a layer with one process; returns the number of calls of each rank in backward."""
    data = problem(layer, plan.request.batch.tokens, conv)
    results, calls = run_on_ranks(pool, plan, layer, data, **options)
    for actual, expected in zip(results, run_one_process(layer, plan.request.batch, data), strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
    return calls


@pytest.mark.parametrize(
    ("recipe", "batch", "ranks", "sizes", "padding", "checkpointing"), sparse_rows(CASES, 3)
)
def test_a_layer_equals_one_process(
    pool: Pool,
    recipe: str,
    batch: str,
    ranks: int,
    sizes: tuple[str, bool, int, int],
    padding: int,
    checkpointing: str,
) -> None:
    layer, kind = layer_of(*sizes)
    plan = plan_of(recipe, batch, ranks, linear=kind)
    calls = check(pool, plan, layer, checkpointing=checkpointing, padding=padding)
    recomputed = {"": 0, "full": 3, "selective": 0}[checkpointing]  # halo, to slots, to runs
    assert {*calls} == ({2 * (3 + recomputed)} if ranks > 1 else {0})


def test_cases_have_last_runs_that_wait_for_states_and_others() -> None:
    seen_cases = set()
    for recipe, batch, ranks, sizes, *_ in CASES:
        plan = plan_of(recipe, batch, ranks, linear=layer_of(*sizes)[1])
        assert plan.recurrence is not None
        runs = plan.recurrence["runs"]
        ends = (runs["past"] >= 0) & (runs["leads"] == 0)
        last, rows = (np.bincount(runs.rank_of_row(), runs["rows"] * counted, ranks) for counted in (ends, 1))
        seen_cases |= {(sizes[1], early) for early in (last > EARLY_SHARE * rows)[last > 0].tolist()}
    assert seen_cases == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize("kind", ["delta", "gated", "wide"])
def test_kinds_of_one_plan_may_differ_in_heads_and_widths(pool: Pool, kind: str) -> None:
    layers = {
        "delta": layer_of("diagonal", True, 3, 3, conv=2),
        "gated": layer_of("scalar", False, 4, 2, conv=5),
        "wide": layer_of("scalar", True, 2, 2, conv=3),
    }
    plan = plan_of("fcp", "trees", 4, **{name: recurrent for name, (_, recurrent) in layers.items()})
    layer, recurrent = layers[kind]
    check(pool, plan, layer, recurrent.conv, kind=kind)


def test_low_dtypes_keep_states_in_float32(pool: Pool) -> None:
    layer, kind = layer_of("scalar", True, 2, 2)
    plan = plan_of("ring", "one", 4, linear=kind)
    data = problem(layer, plan.request.batch.tokens)
    references = run_one_process(layer, plan.request.batch, data)
    results, _ = run_on_ranks(pool, plan, layer, data, dtype="bfloat16")
    for actual, expected in zip(results, references, strict=True):
        np.testing.assert_allclose(actual, expected, atol=0.05 * np.abs(expected).max())


# ---- errors


def handle_of(**recurrent: Any) -> ap.PlanHandle:
    sizes = {"heads": 4, "key_heads": 2, "key_dim": 3, "value_dim": 5, "conv": 4, **recurrent}
    model = ap.Model(2, 2, 8, dtype="fp64", recurrent={"linear": Recurrent(**sizes)})
    plan = ap.plan(Batch.from_lengths([6]), ap.Cluster(1, 1), model)
    return ap.PlanHandle(plan.for_rank(0))


def rows_of(**shapes: tuple[int, ...]) -> list[Tensor]:
    all_shapes = {"q": (6, 2, 3), "k": (6, 2, 3), "v": (6, 4, 5), "g": (6, 4), "beta": (6, 4), **shapes}
    return [torch.zeros(shape) for shape in all_shapes.values()]


def test_wrong_shapes_of_rows_are_refused_by_name() -> None:
    handle = handle_of()
    wrong = {"q": (6, 3, 3), "k": (6, 2, 4), "v": (5, 4, 5), "g": (6, 4, 3), "beta": (6,)}
    for name, shape in wrong.items():
        with pytest.raises(ExecutionError, match=rf"^{name} has shape .* this rank's part of the plan is"):
            ap.planned_scan(None, *rows_of(**{name: shape}), handle)
    with pytest.raises(ExecutionError, match="beta is None, and this kind of the plan's model has the delta"):
        ap.planned_scan(None, *rows_of()[:4], None, handle)
    with pytest.raises(ConfigError, match="scale = 'a learnt tensor': is a constant"):
        ap.planned_scan(None, *rows_of(), handle, scale=torch.ones((), requires_grad=True))
    with pytest.raises(ExecutionError, match="a batch dimension must be 1"):
        ap.planned_scan(None, *(x[None].repeat(2, *(1,) * x.dim()) for x in rows_of()), handle)
    with pytest.raises(ExecutionError, match=r"weight has shape \(7, 3\).* of kind linear are of width 4"):
        ap.planned_conv(torch.zeros(6, 7), torch.zeros(7, 3), handle)
    with pytest.raises(ExecutionError, match=r"x has shape \(6, 8\)"):
        ap.planned_conv(torch.zeros(6, 8), torch.zeros(7, 4), handle)
    with pytest.raises(ExecutionError, match="of kind linear are none"):
        ap.planned_conv(torch.zeros(6, 7), torch.zeros(7, 4), handle_of(conv=0))


def test_plans_without_the_kind_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="the plan's recurrent kinds are linear"):
        ap.planned_scan(None, *rows_of(), handle_of(), "kda")
    with pytest.raises(ConfigError, match=r"pass batch\.handle"):
        ap.planned_scan(None, *rows_of(), None)
    plan = ap.plan(Batch.from_lengths([6]), ap.Cluster(1, 1), ap.Model(2, 2, 8))
    with pytest.raises(ConfigError, match="its model has no recurrent layers"):
        ap.planned_conv(torch.zeros(6, 7), torch.zeros(7, 4), ap.PlanHandle(plan.for_rank(0)))


def test_autocast_keeps_states_in_float32() -> None:
    handle, rows = handle_of(), [torch.randn_like(x) for x in rows_of()]
    rows[3] = -rows[3].abs()
    references = ap.planned_scan(None, *rows, handle)
    with torch.autocast("cpu", torch.bfloat16):
        results = ap.planned_scan(None, *rows, handle)
    assert torch.equal(results, references)


def test_a_custom_kernel_and_a_batch_dimension_of_one_are_accepted() -> None:
    handle, rows = handle_of(), [torch.randn(1, *x.shape, dtype=torch.float64) for x in rows_of()]
    rows[3] = -rows[3].abs()
    results = ap.planned_scan(token_by_token, *rows, handle, scale=0.7)
    torch.testing.assert_close(results, token_by_token(*rows, scale=0.7)[0])
    torch.testing.assert_close(ap.planned_scan(None, *rows, handle, scale=0.7), results)


def test_the_documented_layer_equals_one_process() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/hybrid-models.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    out, weights = names["out"], names["weights"]
    grads = torch.autograd.grad(out.square().sum(), [*weights.values()])
    assert out.shape == (64, 64)
    assert all(bool(grad.isfinite().all()) and bool(grad.any()) for grad in grads)
