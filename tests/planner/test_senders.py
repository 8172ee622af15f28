"""Rounds in which several NICs would send to one, split by sender: the same results in less time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from apportion import Batch, Cluster, Hardware, Model, Plan
from apportion.backends import numpy as executor
from apportion.ir.isa import TABLES, Op
from apportion.ir.request.figures import Figure
from apportion.ir.tensors import PHASES
from apportion.planner import api
from apportion.planner.cost import CostModel
from apportion.planner.simulate import prepare, simulate
from apportion.planner.simulate.scenarios import SCENARIOS, apply
from tests.support.sparse import sparse_product
from tests.support.strategies import steps

H100 = Hardware.load("h100")
MODEL = Model(q_heads=8, kv_heads=4, head_dim=8, dtype="fp64")
#: several senders at a time are so expensive, and rounds so cheap, that every round has one sender
ALONE = replace(H100, incast=Figure(10, "made up"), rowop_us=Figure(0, "made up"))
RECIPES = ("fcp_paper", "fcp", "distca", "dcp", "blend", "ulysses", "usp", "zeppelin", "allgather", "mixed")
UPIPE = {"name": "upipe", "steps": steps("upipe", inner={"project": False})}


def planned(recipe: Any, hardware: Hardware, cluster: Cluster) -> Plan:
    batch = Batch.from_lengths([900, 420, 200, 90, 40, 300, 77, 21])
    return api.plan(batch, replace(cluster, inter_latency_us=0.0), MODEL, recipe=recipe, hardware=hardware)


def most_senders(plan: Plan) -> int:
    """The most NICs that send to one in a round."""
    most, ranks = 0, plan.header.ranks
    for item in prepare(plan, CostModel(H100, MODEL)):
        traffic, script = item.traffic, item.script
        far = np.flatnonzero(traffic.in_port >= 2 * ranks)
        columns = script.round[traffic.receiver], traffic.in_port, traffic.out_port
        pairs = np.unique(np.stack([column[far] for column in columns]), axis=1)
        most = max(most, *np.unique(pairs[:2], axis=1, return_counts=True)[1].tolist(), 0)
    return most


@pytest.mark.parametrize(
    ("recipe", "shape"), sparse_product(8, [*RECIPES, UPIPE], ((4, 2, 2), (4, 2, 1), (8, 1, 1)))
)
def test_splitting_rounds_by_sender_does_not_change_results(recipe: Any, shape: tuple[int, int, int]) -> None:
    cluster = Cluster(shape[0], shape[1], nics_per_node=shape[2])
    before, after = (planned(recipe, hardware, cluster) for hardware in (H100, ALONE))
    assert most_senders(after) <= 1
    draw = np.random.default_rng(0)
    heads = (MODEL.q_heads, MODEL.kv_heads, MODEL.kv_heads, MODEL.q_heads)
    q, k, v, do = (draw.normal(size=(before.request.batch.tokens, count, 8)) for count in heads)
    for one, other in zip(
        *(executor.run(plan, "default", q, k, v, do)[:5] for plan in (before, after)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    for phase in PHASES:  # regardless of their other departures
        tables = [plan.programs["default", phase] for plan in (before, after)]
        for name in ("operands", "transfers", "tasks", "grads", "rowops"):
            assert len(tables[0][name]) == len(tables[1][name])
        ops = [table["instructions"]["op"] for table in tables]
        kept = [op[(op != Op.LAUNCH) & (op != Op.WAIT)].tolist() for op in ops]
        assert kept[0] == kept[1]


@pytest.mark.parametrize("recipe", ["fcp_paper", "distca", "ulysses", "blend"])
def test_plans_made_for_incast_are_faster_under_it(recipe: str) -> None:
    cluster = Cluster(16, 2)
    batch = Batch.from_lengths([40_000, 9000, 20_000, 3000, 30_000, 8000, 11_000] * 4)
    model = Model(32, 8, 128)
    busy, links = apply(next(one for one in SCENARIOS if one.name == "incast"), H100, cluster)
    plans = [
        api.plan(batch, links, model, recipe=recipe, hardware=gpus, verify=False) for gpus in (H100, busy)
    ]
    usual, adapted = (simulate(plan, busy) for plan in plans)
    assert adapted.forward_ms + adapted.backward_ms < usual.forward_ms + usual.backward_ms


def test_rounds_are_not_split_without_a_gain() -> None:
    for cluster, figures in (
        (Cluster(4, 2), {"incast": Figure(1e-6, "made up")}),
        (Cluster(4, 2), {"one_peer": Figure(0.65, "made up")}),
        (Cluster(1, 8), {"incast": Figure(10, "made up")}),
    ):
        before, after = (planned("fcp_paper", gpus, cluster) for gpus in (H100, replace(H100, **figures)))
        for key, tables in before.programs.items():
            for name in TABLES:
                np.testing.assert_array_equal(tables[name].values, after.programs[key][name].values)
