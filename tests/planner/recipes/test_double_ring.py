"""Rings of rings: transfers and their order, and results equal to dense attention."""

from __future__ import annotations

import random

import numpy as np
import pytest

import apportion as ap
from apportion.ir import verify
from apportion.ir.bytes.codec import Plan
from apportion.ir.isa import Op
from apportion.ir.masks import specs as masks
from apportion.ir.request.batch import Batch
from apportion.ir.request.cluster import Cluster
from apportion.ir.request.model import Model
from apportion.ir.request.policy import Policy, Recipe
from apportion.ir.tensors import PHASES, Tensor
from tests.planner.recipes.test_recipes import model_of, pairs
from tests.support.matrix import LAYERS, compare
from tests.support.strategies import BLOCKS, SHORT, steps

ZIGZAG = {"shard": {"sequences": {}}, "place": {"zigzag": {"chunk": 1}}}
LONG = Batch.from_lengths([96])


def double_ring(window: int | str | None, over: str = "ranks", **inner: dict) -> Recipe:
    return Recipe("mine", {**ZIGZAG, **inner, "schedule": {"ring": {"over": over, "window": window}}})


def planned(batch: Batch, nodes: int, per_node: int, recipe: Recipe, layer: tuple = LAYERS[1]) -> Plan:
    return ap.plan(batch, Cluster(nodes, per_node), model_of(layer), recipe)


@pytest.mark.parametrize("seed", range(24))
def test_tiles_that_few_ranks_need_travel_part_of_the_ring(seed: int) -> None:
    """Random masks, placements and windows, with and without groups that split heads, on one or more nodes."""
    draw = random.Random(seed)
    nodes, per_node = draw.choice([(2, 4), (3, 4), (4, 2), (2, 6), (1, 8), (6, 2)])
    degree = draw.choice([degree for degree in (1, 2) if per_node % degree == 0])
    ring = nodes * per_node // degree
    window = draw.choice(["node", *(size for size in range(1, ring + 1) if ring % size == 0)])
    mask = draw.choice([masks.sliding_window(3), masks.sliding_window(20), masks.chunked(16), masks.causal()])
    batch = Batch.from_lengths(draw.choices([1, 5, 17, 40, 90], k=draw.randint(1, 5)), mask)
    place = draw.choice([ZIGZAG, BLOCKS, {**ZIGZAG, "place": {"contiguous": {}}}])
    data = {**place, "schedule": {"ring": {"over": "ranks", "window": window}}}
    if degree > 1:
        data["inner"] = {"ulysses": {"degree": degree, "overlap": draw.random() < 0.5}}
    if draw.random() < 0.3:
        data["schedule"] = {"ring": {"over": "holders", "window": "node"}}
    layer = (4, 2, 4, 6, False, None)
    cap = batch.tokens if place is BLOCKS else None
    policy = Policy(Recipe("mine", data), token_cap=cap)
    plan = ap.plan(batch, Cluster(nodes, per_node), model_of(layer), policy=policy)
    # zeros are sent too, and sums are added to them
    assert verify.check(plan) == verify.check(plan, threads=2) == ()
    compare(plan, "default", layer, seed)
    assert ap.simulate(plan).forward_ms > 0


def test_the_stages_of_upipe_go_around_both_rings() -> None:
    layer = (8, 4, 4, 6, False, None)
    for hold in (False, True):
        inner = {"inner": {"upipe": {"degree": 2, "hold": hold}}}
        compare(planned(LONG, 2, 4, double_ring("node", **inner), layer), "default", layer, 1)


def test_inner_hops_stay_in_a_window_and_outer_hops_keep_the_index() -> None:
    plan = planned(LONG, 3, 4, double_ring("node"))
    inside = {(4 * node + at, 4 * node + (at + 1) % 4) for node in range(3) for at in range(4)}
    across = {(rank, (rank + 4) % 12) for rank in range(12)}
    assert pairs(plan, "forward") == inside | across
    # the sum of the last window goes home, from the rank before home's counterpart
    home = {(4 * ((node + 2) % 3) + (at + 3) % 4, 4 * node + at) for node in range(3) for at in range(4)}
    assert pairs(plan, "backward") == inside | across | home


def crossings(plan: Plan, phase: str, tensor: Tensor) -> int:
    """The number of times that tiles of a tensor go from one node to another."""
    programs, node = plan.programs["default", phase], plan.request.cluster.node_of
    table, operands = programs["transfers"], programs["operands"]
    rank = table.rank_of_row()
    of = operands["tensor"][operands.ptr[rank] + table["operand"]]
    return int(((table["send"] == 1) & (of == tensor) & (node(rank) != node(table["peer"]))).sum())


def test_a_tile_enters_every_node_once_and_so_do_its_gradients() -> None:
    """With a full mask. On a single ring, tiles of all ranks but the last of a node would enter one node twice."""
    batch = Batch.from_lengths([96], masks.full())
    double, single = (planned(batch, 3, 4, double_ring(window)) for window in ("node", None))
    assert crossings(double, "forward", Tensor.KV) == 12 * 2
    assert crossings(single, "forward", Tensor.KV) == 12 * 3 - 3
    # gradients enter home's node, too; on a single ring those of a node's last rank begin in the next node
    assert crossings(double, "backward", Tensor.DKV) == 12 * 3
    assert crossings(single, "backward", Tensor.DKV) == 12 * 3 - 3
    assert double.report["bytes"]["total"] == single.report["bytes"]["total"]
    assert double.report["bytes"]["inter_node"] < single.report["bytes"]["inter_node"]


def test_the_outer_hop_overlaps_the_inner_ring() -> None:
    plan = planned(LONG, 2, 4, double_ring("node"))
    for phase in PHASES:
        instructions = plan.programs["default", phase].rank(0)["instructions"]
        steps = list(zip(*(instructions[name].tolist() for name in ("op", "round", "channel")), strict=True))
        outer = next(number for op, number, channel in steps if (op, channel) == (Op.LAUNCH, 1))
        launched, arrived = (
            next(at for at, step in enumerate(steps) if step[:2] == (op, outer))
            for op in (Op.LAUNCH, Op.WAIT)
        )
        meanwhile = steps[launched + 1 : arrived]
        # together with the one before, the three hops of the inner ring
        assert sum(op == Op.LAUNCH and channel == 0 for op, _, channel in meanwhile) == 2
        # home keys, and the tile of each hop
        attends = Op.ATTEND if phase == "forward" else Op.ATTEND_GRAD
        assert sum(op == attends for op, _, _ in meanwhile) == 4


@pytest.mark.parametrize("window", [1, 6])
def test_a_window_of_one_rank_or_of_all_is_a_single_ring(window: int) -> None:
    double, single = (planned(LONG, 3, 2, double_ring(size)) for size in (window, None))
    for key, programs in single.programs.items():
        for name, table in programs.tables.items():
            for column, values in table.columns.items():
                assert np.array_equal(double.programs[key][name][column], values), (key, name, column)


def test_small_rings_of_holders_are_single_rings() -> None:
    batch = Batch.from_lengths([40, 40])
    recipe = {"shard": {"sequences": {}}, "place": {"hybrid_dp": {}}}
    double, single = (
        planned(batch, 2, 4, Recipe("mine", {**recipe, "schedule": {"ring": {"over": "holders", **more}}}))
        for more in ({"window": 4}, {})
    )
    assert pairs(double, "backward") == pairs(single, "backward")


def test_short_rings_do_not_make_the_window_narrower() -> None:
    plan = planned(Batch.from_lengths([96, 1]), 2, 4, double_ring("node", "holders"))
    assert "departures" not in plan.report


@pytest.mark.parametrize(
    ("ring", "text"),
    [
        ({"window": 3}, r"window = 3: must divide the 8 ranks of the ring; use 1, or node"),
        ({"window": 16}, r"window = 16: must divide the 8 ranks of the ring; use 8, or node"),
        ({"window": 6, "over": "holders"}, r"window = 6: must divide the 8 ranks of the ring; use 2,"),
        ({"window": 2, "turns": True}, r"window = 2: excludes `turns`"),
    ],
)
def test_refusals_name_the_window(ring: dict, text: str) -> None:
    with pytest.raises(ap.ConfigError, match=text):
        planned(LONG, 2, 4, Recipe("mine", {**ZIGZAG, "schedule": {"ring": ring}}))
    if "divide" in text:  # the suggested remedy works
        assert planned(LONG, 2, 4, double_ring("node"))


def test_half_a_node_splits_heads_and_the_node_has_a_ring() -> None:
    model = Model(8, 4, 8, dtype="fp64", layers=1)
    recipe = Recipe("loongtrain", steps("loongtrain", **SHORT))
    plan = ap.plan(LONG, Cluster(2, 8), model, recipe)
    assert max(map(len, plan.header.head_sets)) == 2  # eight heads on four ranks
    fetch = plan.report["exchanges"]
    assert max(row["rounds"] for row in fetch if row["name"] == "fetch") == 3  # four groups


def test_double_rings_are_faster_if_nics_are_the_bottleneck() -> None:
    batch = Batch.from_lengths([3000] * 20 + [20000])
    model, machine = Model(8, 8, 64, layers=1), Cluster(4, 4)
    recipes = "ring", Recipe("mine", steps("ring") | {"schedule": {"ring": {"window": "node"}}})
    single, double = (ap.plan(batch, machine, model, recipe) for recipe in recipes)
    assert double.report["bytes"]["inter_node"] < single.report["bytes"]["inter_node"]
    times = [ap.simulate(plan, "h100") for plan in (single, double)]
    assert times[1].forward_ms < 0.8 * times[0].forward_ms
    assert times[1].backward_ms < 0.8 * times[0].backward_ms


def test_pods_have_their_own_rings() -> None:
    model = Model(2, 2, 8, dtype="fp64", layers=1)
    data = {"pods": {"documents": {"ranks": 4}}, **double_ring("node").to_data()["steps"]}
    plan = ap.plan(Batch.from_lengths([60, 60, 60, 60]), Cluster(4, 2), model, Recipe("mine", data))
    assert all(a // 4 == b // 4 for a, b in pairs(plan, "backward"))
