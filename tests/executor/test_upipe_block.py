"""Head stages with the projection inside, on gloo ranks: outputs and every gradient against plain attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from apportion import Batch, Cluster, Model, Plan, plan as make_plan
from apportion.backends.torch.handle import PlanHandle
from apportion.backends.torch.recording import RecordingDevice
from apportion.planner.inner.upipe import UPipe
from tests.ranks import cases, jobs, jobs_upipe
from tests.ranks.jobs_upipe import Sizes
from tests.ranks.rank_pool import Pool
from tests.support.sparse import sparse_product
from tests.support.upipe_memory import Member, peak_rows

WHOLE = {"shard": {"sequences": {}}, "place": {"whole": {}}, "schedule": {"gather": {}}}
RING = {"shard": {"sequences": {}}, "place": {"zigzag": {"chunk": 1}}, "schedule": {"ring": {}}}


def planned(batch: Batch, sizes: Sizes, nodes: int, per_node: int, steps: Any, **inner: Any) -> Plan:
    rows = torch.bfloat16 if sizes.autocast else sizes.dtype
    dtype = next(name for name, each in jobs.DTYPES.items() if each is rows)
    heads, widths = (sizes.q_heads, sizes.kv_heads), (sizes.head_dim, sizes.v_head_dim)
    model = Model(*heads, *widths, dtype=dtype, hidden=sizes.hidden, layers=1)
    recipe = {"name": "upipe", "steps": {"inner": {"upipe": {"degree": "node", **inner}}, **steps}}
    return make_plan(batch, Cluster(nodes, per_node), model, recipe)


def inputs(plan: Plan, sizes: Sizes) -> NDArray[Any]:
    """Hidden states and loss weights [T, E], exact in bfloat16."""
    rng = np.random.default_rng(1)
    drawn = torch.from_numpy(rng.standard_normal((2, plan.request.batch.tokens, sizes.hidden)))
    return drawn.to(torch.bfloat16).double().numpy()


def plain(plan: Plan, sizes: Sizes) -> dict[str, NDArray[Any]]:
    """out, dx and the gradients of all parameters, by name, from plain attention under a dense mask."""
    batch = plan.request.batch
    mask, positions = torch.from_numpy(cases.allowed(batch)), torch.from_numpy(batch.positions())
    stack = jobs_upipe.Stack(sizes)
    out, dx, grads = jobs_upipe.results(stack, sizes.autocast, *inputs(plan, sizes), positions, None, mask)
    return {"out": out, "dx": dx, **grads}


def planned_results(pool: Pool, plan: Plan, sizes: Sizes, sharded: Any = None) -> dict[str, NDArray[Any]]:
    """The combined results of all ranks."""
    home, ranks = plan.layout(plan.header.home_layout), plan.header.ranks
    rows = [[x[home.tokens(rank)] for x in inputs(plan, sizes)] for rank in range(ranks)]
    each = [(plan.for_rank(rank).encode(), *rows[rank]) for rank in range(ranks)]
    got = pool.run(jobs_upipe.run_planned, ranks, sizes, sharded, each=each)
    out, dx, grads = zip(*got, strict=True)
    summed = {name: sum(each[name] for each in grads) for name in grads[0]}
    whole = summed if sharded is None else {name: grad * ranks for name, grad in grads[0].items()}
    return {"out": cases.in_token_order(plan, out), "dx": cases.in_token_order(plan, dx), **whole}


def assert_equal(pool: Pool, plan: Plan, sizes: Sizes, sharded: bool | None = None) -> None:
    expected, got = plain(plan, sizes), planned_results(pool, plan, sizes, sharded)
    assert got.keys() == expected.keys()
    assert len(got) == 2 + 10 * sizes.depth
    for name, reference in expected.items():
        np.testing.assert_allclose(got[name], reference, rtol=1e-9, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("order", ["gqa", "natural"])
@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "each"),
    [
        (1, 4, 2, 2),
        (2, 8, 2, 2),
        (2, 8, 2, 4),
        (4, 8, 2, 4),
        (4, 8, 1, 4),
        (3, 12, 4, 6),
        (2, 12, 3, 6),
        (2, 4, 2, 4),
    ],
)
def test_gradients_of_a_layer(
    pool: Pool, ranks: int, heads: int, kv_heads: int, each: int, order: str
) -> None:
    sizes = Sizes(heads, kv_heads)
    plan = planned(cases.batch_of("causal"), sizes, 1, ranks, WHOLE, heads=each, order=order, project=True)
    assert_equal(pool, plan, sizes)


@pytest.mark.parametrize("name", ["full", "window", "shared", "tree", "bands"])
@pytest.mark.parametrize("ahead", [0, 1])
def test_masks_and_widths_on_a_ring_of_nodes(pool: Pool, name: str, ahead: int) -> None:
    sizes = Sizes(8, 2, 8, 4)
    plan = planned(cases.batch_of(name), sizes, 2, 2, RING, heads=4, ahead=ahead, project=True)
    assert_equal(pool, plan, sizes)


def test_ranks_without_rows(pool: Pool) -> None:
    sizes = Sizes(8, 2)
    plan = planned(Batch.from_lengths([1, 2]), sizes, 2, 4, RING, heads=4, project=True)
    assert (plan.layout(plan.header.home_layout).rows_per_rank == 0).any()
    assert_equal(pool, plan, sizes)


def test_unevenly_spaced_heads_are_exchanged_correctly(pool: Pool) -> None:
    """One rank has query heads 0, 1, 4 and 5, two of each of two KV heads."""
    sizes = Sizes(16, 4)
    plan = planned(cases.batch_of("causal"), sizes, 1, 2, WHOLE, heads=8, project=False)
    assert (0, 1, 4, 5) in plan.header.head_sets
    assert_equal(pool, plan, sizes)


@pytest.mark.parametrize(("project", "reshard"), sparse_product(3, (False, True), (False, True)))
def test_two_layers_under_fsdp2(pool: Pool, project: bool, reshard: bool) -> None:
    sizes = Sizes(8, 2, depth=2)
    plan = planned(cases.batch_of("causal"), sizes, 2, 2, RING, heads=2, project=project)
    assert_equal(pool, plan, sizes, reshard)


@pytest.fixture
def handle() -> PlanHandle:
    """A handle of a rank without peers, on a device that computes nothing."""
    sizes = Sizes(8, 2, hidden=64, dtype=torch.float32)
    plan = planned(cases.batch_of("causal"), sizes, 1, 2, WHOLE, heads=4, project=True)
    device = RecordingDevice(0, 2)
    return PlanHandle(plan.for_rank(0), device, device.engine)


def test_layers_under_one_plan_may_differ_in_width(handle: PlanHandle) -> None:
    for hidden in (64, 128):
        rows = torch.zeros(handle.rows, hidden, requires_grad=True)
        layer = jobs_upipe.Layer(Sizes(8, 2, hidden=hidden, dtype=torch.float32))
        layer(rows, handle.position_ids, handle, None).sum().backward()
        assert rows.grad is not None
        assert rows.grad.shape == rows.shape


def test_hooks_of_a_parameter_run_once_on_the_gradient_of_all_stages(handle: PlanHandle) -> None:
    layer, hooks_run = jobs_upipe.Layer(Sizes(8, 2, hidden=64, dtype=torch.float32)), list[str]()
    for name, param in layer.named_parameters():
        param.register_hook(lambda _, name=name: hooks_run.append(name))
    rows = torch.zeros(handle.rows, 64, requires_grad=True)
    layer(rows, handle.position_ids, handle, None).sum().backward()
    assert sorted(hooks_run) == sorted(name for name, _ in layer.named_parameters())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of an RMSNorm under autocast
@pytest.mark.parametrize(("autocast", "project"), [(False, True), (True, True), (True, False)])
def test_the_bf16_error_is_at_most_twice_that_of_plain_attention(
    pool: Pool, autocast: bool, project: bool
) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    sizes = Sizes(8, 2, 16, 16, hidden=32, dtype=dtype, autocast=autocast)
    plan = planned(cases.batch_of("causal"), sizes, 1, 2, WHOLE, heads=4, project=project)
    exact = plain(plan, replace(sizes, dtype=torch.float64, autocast=False))
    rough, got = plain(plan, sizes), planned_results(pool, plan, sizes)
    for name, reference in exact.items():
        error, plain_error = (np.linalg.norm(results[name] - reference) for results in (got, rough))
        assert error <= 2 * plain_error, name


@pytest.mark.parametrize("at_a_time", [2, 4, 8])
@pytest.mark.parametrize("order", ["gqa", "natural"])
def test_arenas_match_the_memory_model(pool: Pool, order: str, at_a_time: int) -> None:
    sizes, ranks = Sizes(16, 4), 2
    plan = planned(Batch.from_lengths([25]), sizes, 1, 2, WHOLE, heads=at_a_time, order=order, project=True)
    each = [(plan.for_rank(rank).encode(), sizes.hidden) for rank in range(ranks)]
    home = plan.layout(plan.header.home_layout).rows_per_rank
    upipe = UPipe(heads=at_a_time, order=order, project=True)
    for rank, phases in enumerate(pool.run(jobs_upipe.arena_rows, ranks, each=each)):
        for phase, rows in zip(("forward", "backward"), phases, strict=True):
            assert rows == peak_rows(plan.request.model, ranks, upipe, Member(25, int(home[rank])), phase)
