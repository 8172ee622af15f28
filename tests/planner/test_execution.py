"""Tasks on any rank: queries, keys or both are sent, with some of the heads, in any division."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import gcd

import numpy as np
import pytest

from apportion import Cluster, ConfigError, Model, Policy, Recipe, plan as make_plan, simulate
from apportion.ir.tensors import PHASES
from apportion.planner.place.lpt import Lpt
from apportion.planner.problem import Execution, Placement, PlacePass, Problem, Shards
from apportion.planner.recipe import registry
from apportion.planner.tasks.cells import cut_cells
from tests.support.matrix import LAYERS, compare
from tests.support.mixtures import HEADS, random_batch
from tests.support.sparse import sparse


@dataclass(frozen=True)
class Scattered(PlacePass):
    """Computes each cell at home or on a random rank, possibly one of a few, independently in each phase."""

    seed: int = 0
    head_groups: int = 1
    servers: int = 100

    def __call__(self, problem: Problem, shards: Shards) -> Placement:
        placement, draw = Lpt()(problem, shards), np.random.default_rng(self.seed)
        execution = {}
        for kind, bands in problem.bands.items():
            cells = cut_cells(bands, placement.starts)
            for phase in PHASES:
                shape = (self.head_groups, len(cells))
                rank = draw.integers(0, min(self.servers, problem.ranks), shape)
                home = draw.random(shape) < 0.4
                rank = np.where(home, placement.home[cells.q], rank).astype(np.int32)
                execution[kind, phase] = Execution(rank, draw.integers(0, 4, shape).astype(np.int32))
        # LPT's bound holds only for blocks that stay whole
        return replace(placement, bound=0.0, execution=execution, head_groups=self.head_groups)


@pytest.fixture(autouse=True)
def scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    find = registry.find_pass
    monkeypatch.setattr(
        registry, "find_pass", lambda step, name: Scattered if name == "scattered" else find(step, name)
    )


def steps(draw: random.Random) -> dict:
    local = draw.choice(["first", "last", "even"])
    matchings = {"coalesce": draw.choice([1, 2, 5]), "buffers": draw.choice([1, 2, 3]), "local": local}
    gather = {"local": local, "whole": draw.random() < 0.3}
    divisions = {"count": 4, "buffers": draw.choice([1, 2, 4])}
    schedule = draw.choice([{"matchings": matchings}, {"gather": gather}, {"divisions": divisions}])
    place = {"seed": draw.randint(0, 9), "head_groups": draw.choice([1, 1, 2, 4])}
    place["servers"] = draw.choice([1, 2, 100])
    shard = {"blocks": {"block": draw.choice([1, 3, 5, 16])}}
    found = {"shard": shard, "place": {"scattered": place}, "schedule": schedule}
    relays = {"node": {"proxies": draw.random() < 0.5}}, {"tree": {"fanout": 1}}
    found["route"] = draw.choice([{"star": {}}, *relays])
    if place["head_groups"] == 1 and draw.random() < 0.4:
        found["inner"] = {"ulysses": {"degree": draw.choice(["node", 2]), "overlap": draw.random() < 0.5}}
    if place["head_groups"] == 1 and draw.random() < 0.3:
        found["reshuffle"] = True
    return found


def divides(recipe: Recipe, model: Model, cluster: Cluster) -> bool:
    """True if heads divide among head groups and members of groups, and ranks among groups."""
    inner, groups = recipe.step("inner"), recipe.step("place").params["head_groups"]
    degree = 1 if inner is None else inner.params["degree"]
    degree = gcd(cluster.ranks_per_node, model.q_heads) if degree == "node" else degree
    return not (model.q_heads % groups or model.q_heads % degree or cluster.ranks % degree)


@pytest.mark.parametrize("seed", sparse(range(60), 4))
def test_any_execution_equals_dense_attention(seed: int) -> None:
    draw = random.Random(seed)
    ranks, layer, batch = draw.choice([1, 2, 3, 4, 6, 8]), draw.choice(HEADS), random_batch(draw)
    recipe = Recipe("scattered", steps(draw))
    model = Model(*layer[:4], dtype="fp64", layers=1)
    per_node = 2 if ranks % 2 == 0 else 1
    cluster = Cluster(nodes=ranks // per_node, ranks_per_node=per_node)
    policy = Policy(recipe, token_cap=batch.tokens)
    if not divides(recipe, model, cluster):
        with pytest.raises(ConfigError, match="divide"):
            make_plan(batch, cluster, model, policy=policy)
        return
    plan = make_plan(batch, cluster, model, policy=policy)
    compare(plan, "default", layer, seed)
    assert simulate(plan).forward_ms > 0


def test_queries_that_travel_on_rings_are_refused() -> None:
    draw = random.Random(5)
    steps_ = {"shard": {"blocks": {"block": 5}}, "place": {"scattered": {}}, "schedule": {"ring": {}}}
    layer, batch = LAYERS[1], random_batch(draw)
    model = Model(*layer[:4], dtype="fp64", layers=1)
    policy = Policy(Recipe("x", steps_), token_cap=batch.tokens)
    with pytest.raises(ConfigError, match="assigns computation to ranks"):
        make_plan(batch, Cluster(ranks_per_node=4), model, policy=policy)
