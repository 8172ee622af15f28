"""Planned attention on real ranks over gloo, against dense float64 attention."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from apportion import Batch, Cluster, ExecutionError, Plan, Sequence, masks, plan as make_plan
from apportion.backends.interp import Operand
from apportion.backends.torch import autograd, executor
from apportion.backends.torch.autograd import attend_op
from apportion.backends.torch.memory.arenas import Memory
from apportion.ir.tensors import Space, Tensor as Name
from apportion.trainer.step.attention import PlanHandle, planned_attention
from tests.ranks import cases, jobs
from tests.ranks.cases import batch_of
from tests.ranks.rank_pool import Pool
from tests.support import oracle
from tests.support.oracle import Problem
from tests.support.parse import parse

Array = NDArray[Any]
BY_HAND = {path.stem: path for path in sorted((Path(__file__).parent.parent / "plans").glob("*.txt"))}


@pytest.mark.parametrize("extra", ["", "sinks"])
@pytest.mark.parametrize("name", [name for name in BY_HAND if name != "heads"])
def test_plans_written_by_hand(pool: Pool, name: str, extra: str) -> None:
    plan = parse(BY_HAND[name].read_text())
    problem = cases.problem_of(plan, 2, sinks=extra == "sinks")
    for kind in plan.header.kinds:
        got = cases.run(pool, plan, problem, kind)
        cases.assert_good(got, problem, cases.allowed(plan.request.batch, kind))


def projected(plan: Plan) -> tuple[list[Array], Array, Array, Array]:
    """Weights, hidden states [T, E], position ids and dO for a plan's model."""
    rng, m, batch = np.random.default_rng(3), plan.request.model, plan.request.batch
    shapes = [(m.q_heads, m.head_dim), (m.kv_heads, m.head_dim), (m.kv_heads, m.value_dim)]
    weights = [rng.standard_normal((heads, m.hidden, width)) for heads, width in shapes]
    hidden = rng.standard_normal((batch.tokens, m.hidden))
    return weights, hidden, batch.positions(), rng.standard_normal((batch.tokens, m.q_heads, m.value_dim))


def plain_block(weights: list[Array], hidden: Array, positions: Array, do: Array, mask: Array) -> list[Array]:
    project, x = jobs.Weights(*weights), jobs.leaf(hidden, torch.float64)
    heads = tuple(range(weights[0].shape[0])), tuple(range(weights[1].shape[0]))
    q, k, v = project(x, torch.from_numpy(positions), *heads)
    out = cases.sdpa(q, k, v, None, torch.from_numpy(mask))
    out.backward(torch.from_numpy(do))
    return [out.detach().numpy(), x.grad.numpy(), *(w.grad.numpy() for w in project.params)]


def run_block(
    pool: Pool, plan: Plan, weights: Any, hidden: Array, positions: Array, do: Array
) -> list[Array]:
    home = plan.layout(plan.header.home_layout)
    each = [
        (plan.for_rank(rank).encode(), *(x[home.tokens(rank)] for x in (hidden, positions, do)))
        for rank in range(plan.header.ranks)
    ]
    columns = list(zip(*pool.run(jobs.block, plan.header.ranks, weights, each=each), strict=True))
    rows = [cases.in_token_order(plan, parts) for parts in columns[:2]]
    return [*rows, *(np.sum(parts, axis=0) for parts in columns[2:])]


@pytest.mark.parametrize("projects", [True, False])
def test_block_projects_head_groups_where_the_plan_says_so_else_all(pool: Pool, projects: bool) -> None:
    if projects:
        plan = parse(BY_HAND["heads"].read_text())
    else:
        plan = make_plan(batch_of("shared"), Cluster(1, 3), cases.model(2), cases.recipe())
    block_inputs = projected(plan)
    expected = plain_block(*block_inputs, cases.allowed(plan.request.batch))
    for a, b in zip(run_block(pool, plan, *block_inputs), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


def run_with_dlse(problem: Problem, seed: int = 9) -> Problem:
    return replace(problem, dlse=np.random.default_rng(seed).standard_normal(problem.q.shape[:2]))


@pytest.mark.parametrize(
    ("name", "ranks", "reshuffle", "extra"),
    [
        ("bands", 3, False, ""),
        ("slices", 4, True, "sinks"),
        ("window", 2, True, "softcap"),
        ("causal", 1, False, "sinks"),
        ("tree", 5, True, ""),
        ("clear", 0, False, "sinks"),
        ("q_moves", 0, False, "sinks"),
    ],
)
def test_lse_and_its_gradient_equal_dense(
    pool: Pool, name: str, ranks: int, reshuffle: Any, extra: str
) -> None:
    """Of planned attention, and of plans written by hand."""
    if name in BY_HAND:
        plan = parse(BY_HAND[name].read_text())
    else:
        model, recipe = cases.model(2, kv_heads=2), cases.recipe(reshuffle=reshuffle)
        plan = make_plan(batch_of(name), Cluster(1, ranks), model, recipe)
    problem = run_with_dlse(cases.problem_of(plan, 6, extra == "sinks", 2.0 if extra == "softcap" else None))
    mask = cases.allowed(plan.request.batch)
    got, lse = cases.run_with_lse(pool, plan, problem)
    cases.assert_good(got, problem, mask)
    expected = oracle.dense(problem, mask).lse
    assert np.isneginf(expected).any() == (name == "bands")
    np.testing.assert_allclose(lse, expected, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_lse_is_read_at_home_head_by_head() -> None:
    dlse, lse = torch.arange(12.0).view(4, 3), torch.zeros(2, 2)
    operand = Operand(1, Name.O, Space.HOME, 1, 2, (2, 0), (2, 0))
    assert executor._lse_gradient(dlse, operand, lse).tolist() == [[5, 3], [8, 6]]
    with pytest.raises(ExecutionError, match=r"O.work\[1:3\).*at home"):
        executor._lse_gradient(dlse, replace(operand, space=Space.WORK), lse)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("uses_out", [True, False], ids=["both", "lse"])
def test_a_loss_of_only_lse_works_eager_and_compiled(pool: Pool, uses_out: bool, compiled: bool) -> None:
    plan = make_plan(batch_of("bands"), Cluster(1, 2), cases.model(2), cases.recipe())
    problem = run_with_dlse(cases.problem_of(plan, 7, sinks=True))
    got, _ = cases.run_with_lse(pool, plan, problem, uses_out, compiled)
    problem_seen = problem if uses_out else replace(problem, do=np.zeros_like(problem.do))
    cases.assert_good(got, problem_seen, cases.allowed(batch_of("bands")))


@pytest.mark.parametrize("lengths", [[3], [1], [2, 1]])
def test_ranks_without_tokens(pool: Pool, lengths: list[int]) -> None:
    batch = Batch.from_lengths(lengths)
    plan = make_plan(batch, Cluster(1, 8), cases.model(4), cases.recipe(block=1))
    assert (plan.layout("attention").rows_per_rank == 0).any()
    problem = cases.problem_of(plan, 3, sinks=True)
    cases.assert_good(cases.run(pool, plan, problem), problem, cases.allowed(batch))


def planned(lengths: list[int], ranks: int = 4, **recipe: Any) -> Plan:
    return make_plan(Batch.from_lengths(lengths), Cluster(1, ranks), cases.model(2), cases.recipe(**recipe))


def small_plans(ranks: int = 4) -> list[Plan]:
    return [planned([50, 9, 1], ranks), planned([33, 40], ranks, reshuffle=True)]


def test_the_same_plan_gives_the_same_bits(pool: Pool) -> None:
    for plan in small_plans():
        for first, second in pool.run(jobs.twice, 4, each=cases.shards(plan, cases.problem_of(plan))):
            assert first == second


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_attention_gives_the_same_gradients(pool: Pool, reentrant: bool) -> None:
    for plan in [*small_plans(), planned([2], block=1)]:
        shards = cases.shards(plan, cases.problem_of(plan))
        plain = pool.run(jobs.checkpointed, 4, None, each=shards)
        for got, expected in zip(pool.run(jobs.checkpointed, 4, reentrant, each=shards), plain, strict=True):
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpointing", [None, "full", "selective"])
def test_saved_attention_is_not_recomputed_or_communicated_again(
    pool: Pool, checkpointing: str | None, compiled: bool
) -> None:
    plan = small_plans(ranks=2)[0]
    shards = cases.shards(plan, cases.problem_of(plan))
    plain = pool.run(jobs.rounds, 2, None, False, each=shards)
    found = pool.run(jobs.rounds, 2, checkpointing, compiled, each=shards)
    for (launched, (forward, backward), numbers), expected in zip(found, plain, strict=True):
        assert forward > 0
        recomputed = forward if checkpointing == "full" else 0
        assert launched == (forward, recomputed + backward)
        for a, b in zip(numbers, expected[-1], strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("order", ["F0F1B0B1", "F0F1B1B0"])
@pytest.mark.parametrize("second", [[33, 40], [2]], ids=["tokens", "ranks_without_tokens"])
def test_two_microbatches_in_flight(pool: Pool, order: str, second: list[int]) -> None:
    plans = [planned(lengths) for lengths in ([50, 9, 1], second)]
    problems = [cases.problem_of(plan, seed) for seed, plan in enumerate(plans)]
    shards = [cases.shards(plan, problem) for plan, problem in zip(plans, problems, strict=True)]
    separate = pool.run(jobs.microbatches, 4, "F0B0F1B1", each=list(zip(*shards, strict=True)))
    both = pool.run(jobs.microbatches, 4, order, each=list(zip(*shards, strict=True)))
    for got, expected in zip(both, separate, strict=True):
        for a, b in zip(chain(*got), chain(*expected), strict=True):
            np.testing.assert_array_equal(a, b)


def test_compiled_layers_take_new_plans_without_new_graphs(pool: Pool) -> None:
    lengths = ([50, 9, 4], [33, 40], [21], [64, 3], [90], [17, 18, 19], [70, 41])
    plans = [planned(each, 2) for each in lengths]
    by_plan = [cases.shards(plan, cases.problem_of(plan)) for plan in plans]
    for graphs, worst in pool.run(jobs.compiled, 2, each=list(zip(*by_plan, strict=True))):
        assert graphs <= 2
        assert worst == 0


def test_different_plans_are_an_error_on_every_rank(pool: Pool) -> None:
    one, other = (cases.shards(plan, cases.problem_of(plan)) for plan in small_plans())
    shards = [one[0], one[1], other[2], one[3]]
    for error in pool.errors(jobs.attention, 4, None, None, {}, each=shards):
        assert error.startswith("ExecutionError: ranks hold different plans")
        assert "on ranks 0, 1, 3" in error


def test_tensors_need_not_be_contiguous(pool: Pool) -> None:
    plan = small_plans()[0]
    assert all(pool.run(jobs.strided, 4, each=cases.shards(plan, cases.problem_of(plan))))


def single_rank_inputs() -> tuple[PlanHandle, list[torch.Tensor]]:
    """A handle for a single rank, with q, k and v."""
    plan = planned([9, 4], 1)
    problem = cases.problem_of(plan)
    return PlanHandle(plan.for_rank(0)), [
        jobs.leaf(x, torch.float64) for x in (problem.q, problem.k, problem.v)
    ]


@pytest.mark.parametrize(
    ("softcap", "sinks", "return_lse"), [(None, False, False), (None, False, True), (3.0, True, True)]
)
def test_the_ops_pass_torch_opcheck(softcap: float | None, sinks: bool, return_lse: bool) -> None:
    handle, qkv = single_rank_inputs()
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True) if sinks else None
    settings = handle.number, "default", 0.5, softcap, return_lse
    torch.library.opcheck(attend_op, (*qkv, logits, *settings))
    saved = [None if x is None else x.detach() for x in (*qkv, logits, *attend_op(*qkv, logits, *settings))]
    do, dlse = torch.ones_like(saved[-2]), torch.ones_like(saved[-1]) if return_lse else None
    torch.library.opcheck(autograd.attend_grad_op, (do, dlse, *saved, *settings))


def test_a_freed_plan_is_an_error() -> None:
    handle, _ = single_rank_inputs()
    number = handle.number
    del handle
    with pytest.raises(ExecutionError, match="keep it until backward has run"):
        PlanHandle.of_number(number)


def test_the_eager_graph_keeps_its_plan_alive() -> None:
    handle, qkv = single_rank_inputs()
    watch = weakref.ref(handle)
    out = planned_attention(*qkv, handle)
    del handle
    out.sum().backward()
    assert all(x.grad is not None for x in qkv)
    assert watch() is not None
    del out
    assert watch() is None


def test_lse_is_float32_for_lower_dtypes_and_finite_gradients_stay_finite() -> None:
    """A row without keys has a constant LSE of -inf, whose NaN gradient must not spread."""
    batch = Batch.from_sequences([Sequence(9, masks.bands([[3, 9, 0, 4, 0, 8]]))])
    plan = make_plan(batch, Cluster(1, 1), cases.model(2, "bf16"), cases.recipe())
    problem = cases.problem_of(plan)
    qkv = [jobs.leaf(x, torch.bfloat16) for x in (problem.q, problem.k, problem.v)]
    out, lse = planned_attention(*qkv, PlanHandle(plan.for_rank(0)), return_lse=True)
    assert (out.dtype, lse.dtype, tuple(lse.shape)) == (torch.bfloat16, torch.float32, (9, 2))
    assert lse[:3].isneginf().all()
    assert lse[3:].isfinite().all()
    (out.sum() + lse.square().sum()).backward()
    assert all(x.grad.isfinite().all() for x in qkv)


def test_attention_is_differentiable_once() -> None:
    handle, qkv = single_rank_inputs()
    out = planned_attention(*qkv, handle)
    (dq,) = torch.autograd.grad(out.square().sum(), qkv[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_arenas_are_freed_when_the_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    memories = []

    class WatchedMemory(Memory):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            memories.append(weakref.ref(self))

    monkeypatch.setattr(autograd, "Memory", WatchedMemory)
    handle, qkv = single_rank_inputs()
    gc.disable()
    try:
        out = planned_attention(*qkv, handle)
        out.sum().backward()
        assert [ref() for ref in memories] == [None, None]
    finally:
        gc.enable()
