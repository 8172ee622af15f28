"""Latent attention: ranks exchange latent rows, and results are unchanged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import apportion as ap
from apportion import ConfigError, DecodeError, ExecutionError, Hardware, Latent
from apportion.backends.interp import Program, compile_program
from apportion.backends.torch.memory.latent_rows import latent_runs
from apportion.backends.torch.stage import obstacle
from apportion.ir.plan import plain
from apportion.ir.tensors import Tensor
from apportion.planner.cost import CostModel
from apportion.planner.simulate import prepare_program
from apportion.planner.simulate.durations import Work
from apportion.planner.simulate.latent import expanded_rows
from apportion.planner.simulate.program import View
from apportion.trainer.step import wiring
from tests.ranks import jobs_latent as jobs
from tests.support.sparse import sparse_rows

DEEPSEEK = ap.Model(128, 1, 192, 128, hidden=7168, ffn=18432, layers=61, latent=Latent(512, 64))
EXPANDED = DEEPSEEK.expanded


def planned(recipe: str, ranks: int) -> ap.Plan:
    return ap.plan(ap.Batch.from_lengths(jobs.LENGTHS), ap.Cluster(1, ranks), jobs.MODEL, recipe=recipe)


def program_of(plan: ap.Plan, rank: int, phase: str) -> Program:
    return compile_program(plan.program(rank, "default", phase), plan.header)


@pytest.mark.parametrize(
    ("recipe", "ranks", "wrap", "checkpointed", "max_elements"),
    sparse_rows(
        [
            ("fcp", 4, "ddp", True, 400),  # one head at a time
            ("fcp", 2, "plain", False, None),
            ("usp", 4, "ddp", False, None),
            ("ring", 4, "plain", False, None),
            ("ulysses", 4, "plain", True, None),
            ("distca", 4, "plain", False, None),
            ("mixed", 2, "plain", False, None),
            ("hybrid_dp", 4, "plain", False, None),  # ranks without rows to expand
        ],
        4,
    ),
)
def test_outputs_and_gradients_equal_one_process(
    pool: Any, recipe: str, ranks: int, wrap: str, checkpointed: bool, max_elements: int | None
) -> None:
    plan = planned(recipe, ranks).encode()
    for errors in pool.run(jobs.difference, ranks, plan, wrap, checkpointed, max_elements):
        assert max(errors) < 1e-10


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 8), (2, 4)])
def test_latent_rows_have_a_seventieth_of_the_size_of_expanded_ones(nodes: int, ranks: int) -> None:
    batch = ap.Batch.from_lengths([40_000, 14_000, 8_000, 3_536])
    cluster = ap.Cluster(nodes, ranks)
    narrow, wide = (ap.plan(batch, cluster, model, recipe="fcp") for model in (DEEPSEEK, EXPANDED))
    assert narrow.report["bytes"]["total"] * 70 < wide.report["bytes"]["total"]
    # per key: its latent row in the model's dtype, sent twice, and its gradient in float32
    sent = sum(DEEPSEEK.sent_bytes(t) for t in (Tensor.KV, Tensor.KV, Tensor.DKV))
    assert sent == (512 + 64) * (2 + 2 + 4)


def test_the_plan_of_auto_is_faster_with_latent_rows_than_with_expanded_ones() -> None:
    batch, cluster = ap.Batch.from_lengths([16_000, 9_000, 5_000, 2_768]), ap.Cluster(2, 4)
    times = []
    for model in (DEEPSEEK, EXPANDED):
        plan = ap.plan(batch, cluster, model)
        simulated = ap.simulate(plan, "h100")
        times.append(simulated.forward_ms + simulated.backward_ms)
    assert times[0] < times[1]


def test_each_latent_row_is_in_one_run() -> None:
    program = program_of(planned("fcp", 2), 0, "backward")
    for step in program.steps:
        runs = latent_runs(program.operands, step.grads)
        assert sorted(map(id, step.grads)) == sorted(id(task) for run in runs for task in run.tasks)
        for run in runs:
            assert run.dkv is not None
            assert run.dkv.rows == run.kv.rows
            for task in run.tasks:
                kv, dkv = program.operands[task.kv], program.operands[task.dkv]
                rows = run.rows_of(kv)
                assert (rows.start, rows.stop) == (dkv.row - run.dkv.row, dkv.row - run.dkv.row + dkv.rows)
                assert 0 <= rows.start < rows.stop <= run.kv.rows
        rows_of = {id(run): range(*run.kv.row_slice.indices(10**6)) for run in runs}
        places = {(run.kv.space, run.heads, row) for run in runs for row in rows_of[id(run)]}
        assert len(places) == sum(run.kv.rows for run in runs)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("recipe", ["fcp", "usp", "mixed"])
def test_the_cost_model_prices_exactly_the_expanded_rows(recipe: str, phase: str) -> None:
    plan = planned(recipe, 4)
    view = View(plan, phase, plan.programs["default", phase], plan.request.cluster)
    expected = []
    for rank in range(4):
        program = program_of(plan, rank, phase)
        for step in program.steps:
            tasks: Any = step.tasks or step.grads
            runs = latent_runs(program.operands, tasks)
            expected.append(sum(run.kv.rows * len(run.heads) for run in runs))
    np.testing.assert_array_equal(expanded_rows(view).rows, expected)


def test_an_expansion_is_priced_by_products_memory_passes_and_launches() -> None:
    hardware = Hardware.load("h100")
    cost, products = CostModel(hardware, DEEPSEEK), 512 * (128 + 128)
    rate, memory = hardware.linear_tflops.value * 1e6, hardware.memory_gbs.value * 1e3
    launch = hardware.rowop_us.value
    forward = 1000 * (2 * products / rate + (128 + 192) * 2 / memory) + 2 * launch
    assert float(cost.expansion_us("forward", 1000, 16)) == pytest.approx(forward)
    backward = 1000 * (6 * products / rate + (128 + 192) * 2 / memory) + 5 * launch
    backward += 16 * products * (2 * 2 + 2 * 4) / memory
    assert float(cost.expansion_us("backward", 1000, 16)) == pytest.approx(backward)
    # kernels read expanded keys of each head
    tasks = 512, 2048, 512 * 2048
    attention_us = cost.attention_us("forward", *tasks, 128, 1)
    assert attention_us == CostModel(hardware, EXPANDED).attention_us("forward", *tasks, 128, 128)


def test_the_work_of_a_plan_includes_expansions() -> None:
    plan, cost = planned("fcp", 2), CostModel(Hardware.load("h100"), jobs.MODEL)
    prepared = prepare_program(plan, "default", "forward", cost)
    rows = expanded_rows(prepared.view)
    used = np.flatnonzero(rows.rows)
    expansions = float(cost.expansion_us("forward", rows.rows[used], rows.heads[used]).sum())
    assert isinstance(prepared.work, Work)
    assert prepared.work.tasks > expansions > 0


def test_single_heads_can_be_expanded_by_any_projection() -> None:
    layer = jobs.LatentLayer().double()
    rows = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    k, v = layer.expand(*rows, (0, 1, 2, 3))
    wrapped = ap.LatentExpansion(torch.nn.Sequential(layer.up), layer.expand.own, layer.expand.width)
    for expand in (layer.expand, wrapped):
        for heads in ((2,), (3, 0), (3, 2, 1, 0)):
            expanded = expand(*rows, heads)
            torch.testing.assert_close(expanded, (k[:, list(heads)], v[:, list(heads)]))
        no_rows = expand(*(one[:0] for one in rows), (0, 1, 2, 3))
        assert [one.shape for one in no_rows] == [(0, *k.shape[1:]), (0, *v.shape[1:])]


# --- plans and models


def test_only_latent_models_write_the_latent_field() -> None:
    plan = planned("fcp", 2)
    decoded = ap.Plan.decode(plan.encode())
    assert decoded.header.latent == decoded.request.model.latent == Latent(7, 2)
    assert plain.header_data(plan.header)["latent"] == {"rank": 7, "rope": 2}
    assert ap.Model.from_data(jobs.MODEL.to_data()) == jobs.MODEL
    assert "latent" not in EXPANDED.to_data()
    assert "latent" not in plain.header_data(replace(plan.header, latent=None))
    with pytest.raises(DecodeError, match="header: latent"):
        plain.check_facts(replace(plan.header, latent=Latent(8, 2)), plan.request)
    ap.verify(plan)
    assert (EXPANDED.kv_heads, EXPANDED.latent) == (128, None)
    assert EXPANDED.expanded is EXPANDED


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"kv_heads": 4}, "model.kv_heads"),
        ({"latent": {"rank": 7, "rope": 6}}, "model.latent.rope"),
        ({"latent": {"rank": 0, "rope": 2}}, "model.latent.rank"),
        ({"latent": {"rank": 7}}, "model.latent"),
    ],
)
def test_inconsistent_latent_models_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}"):
        ap.Model.from_data(jobs.MODEL.to_data() | changes)


class Expanding(torch.nn.Module):
    """Changes the result of a layer's expansion. params: the parameters that it declares."""

    def __init__(self, change: Any) -> None:
        super().__init__()
        self.layer, self.also = jobs.LatentLayer().double(), change
        self.params = self.layer.expand.params

    def forward(self, compressed: Any, rotated: Any, heads: tuple[int, ...]) -> Any:
        k, v = self.layer.expand(compressed, rotated, heads)
        return k, self.also(v)


def attention_with(expand: Expanding) -> torch.Tensor:
    handle, rows = ap.PlanHandle(planned("fcp", 1).for_rank(0)), torch.randn(sum(jobs.LENGTHS), 24).double()
    q, compressed, rotated = rows.view(-1, 4, 6), rows[:, :7], rows[:, :2]
    return ap.planned_latent_attention(q, compressed, rotated, handle, expand, expand.params)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (torch.nn.Dropout(0.5), "in backward, which run it again; remove dropout"),
        (lambda v: v + v.mean(0), "different results on other ranks"),
        (lambda v: v + torch.arange(len(v), dtype=v.dtype)[:, None, None], "results on other ranks"),
        (torch.nn.Linear(5, 5).double(), r"shapes \[\(5,\), \(5, 5\)\].*would get no gradient"),
    ],
)
def test_unrepeatable_expansions_are_refused(
    monkeypatch: pytest.MonkeyPatch, change: Any, message: str
) -> None:
    monkeypatch.setattr(wiring, "watch", wiring.Watch())
    with pytest.raises(ConfigError, match=message):
        attention_with(Expanding(change))


def test_backward_fails_if_weights_were_modified() -> None:
    expand = Expanding(torch.nn.Identity())
    out = attention_with(expand)
    with torch.no_grad():
        expand.layer.up.weight.mul_(2)
    with pytest.raises(ExecutionError, match="changed in place between its forward and backward"):
        out.sum().backward()


def test_functions_that_do_not_support_latent_rows_refuse_them() -> None:
    plan = planned("fcp", 1)
    handle = ap.PlanHandle(plan.for_rank(0))
    rows = sum(jobs.LENGTHS)
    q = torch.zeros(rows, 4, 6, dtype=torch.float64)
    with pytest.raises(ExecutionError, match=r"moves latent rows.*planned_latent_attention"):
        ap.planned_attention(q, q, q[..., :5], handle)
    wide = ap.plan(plan.request.batch, ap.Cluster(1, 1), replace(jobs.MODEL, kv_heads=4, latent=None))
    expand, latent = jobs.LatentLayer().double().expand, (q[:, 0, :2].repeat(1, 4)[:, :7], q[:, 0, :2])
    with pytest.raises(ExecutionError, match=r"moves keys and values.*planned_attention"):
        ap.planned_latent_attention(q, *latent, ap.PlanHandle(wide.for_rank(0)), expand, ())
    with pytest.raises(ExecutionError, match="compressed has shape"):
        ap.planned_latent_attention(q, latent[1], latent[1], handle, expand, ())
    with pytest.raises(ConfigError, match=r"recipe\.inner\.project"):
        ap.plan(plan.request.batch, ap.Cluster(1, 2), jobs.MODEL, recipe="upipe")
    with pytest.raises(ConfigError, match="rope_dim 0': must match the model's latent rows"):
        ap.forecast(plan.request.batch, ap.Cluster(1, 2), jobs.MODEL)
    header = replace(plan.header, dtype="bf16")
    assert obstacle(header, torch.device("cuda")) == "the stage kernels do not expand latent rows"
