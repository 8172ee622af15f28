"""Plans of random recipes."""

from __future__ import annotations

import random
from typing import Any

import apportion as ap
from apportion import Batch, Cluster, Model, Policy, Recipe, Sequence, masks
from tests.support.matrix import LAYERS, SEQUENCES

#: also heads that divide unevenly: six query heads on three or two KV heads
HEADS = [*LAYERS, (6, 3, 4, 4, True, None), (4, 4, 4, 2, False, None), (6, 2, 2, 4, False, None)]


PLACES: list[dict[str, Any]] = [
    *(
        {"lpt": {}},
        {"zigzag": {"chunk": 1}},
        {"zigzag": {"chunk": 3}},
        {"zigzag": {"chunk": 1, "over": "batch"}},
    ),
    *({"contiguous": {}}, {"whole": {}}, {"hybrid_dp": {}}, {"megatron_hybrid": {}}, {"wlb": {"chunk": 1}}),
    *({"blend": {}}, {"blend": {"grain": 5, "head": 0}}, {"distca": {}}, {"distca": {"kv_ranges": True}}),
    *({"zeppelin": {"inter_tokens": 30, "parts": 2}}, {"dcp": {"divisions": 3}}),
    {"dcp": {"divisions": 3, "head_groups": 2}},
]


ROUTES: list[dict[str, Any]] = [
    *({"star": {}}, {"node": {"proxies": True}}, {"node": {"proxies": False}}, {"tree": {"fanout": 1}}),
    *({"tree": {"fanout": 3}}, {"ring": {"over": "ranks"}}, {"ring": {"over": "holders"}}),
]


def random_recipe(draw: random.Random) -> Recipe:
    place = draw.choice([PLACES[0], *PLACES])
    local = draw.choice(["first", "last", "even"])
    matchings = {
        "coalesce": draw.choice([1, 2, "auto"]),
        "buffers": draw.choice([1, 2, 3]),
        "local": local,
        "order": draw.choice(["any", "longest", "shortest"]),
    }
    schedules: list[dict[str, Any]] = [
        {"matchings": matchings},
        {"ring": {"over": draw.choice(["ranks", "holders"]), "turns": draw.random() < 0.5}},
        {"gather": {"local": local, "whole": draw.random() < 0.5}},
        {"divisions": {"count": 3, "buffers": draw.choice([1, 2, 3])}},
        {"queues": {"proxies": draw.choice([1, 2]), "local": local}},
    ]
    schedule = draw.choice(schedules)
    steps: dict[str, Any] = {"shard": {"sequences": {}}, "place": place, "schedule": schedule}
    if "lpt" in place or "dcp" in place:
        steps["shard"] = {"blocks": {"block": draw.choice([1, 3, 5, 16])}}
    if "ring" not in schedule and "queues" not in schedule:
        steps["route"] = draw.choice(ROUTES)
    if draw.random() < 0.4:
        overlap = draw.random() < 0.5
        steps["inner"] = {"ulysses": {"degree": draw.choice(["auto", "node", 2, 3]), "overlap": overlap}}
    return Recipe("mix", {**steps, "reshuffle": draw.random() < 0.3})


def with_lone(draw: random.Random, recipe: Recipe) -> Recipe:
    """The recipe; if groups split heads, sometimes with `lone`: sequences that a single rank computes."""
    lone, steps = draw.choice([None, "auto", 0.3, 1.0]), recipe.to_data()["steps"]
    if lone is None or "inner" not in steps:
        return recipe
    inner = {"ulysses": {**steps["inner"]["ulysses"], "lone": lone}}
    return Recipe(recipe.name, {**steps, "inner": inner, "reshuffle": False})


def random_batch(draw: random.Random) -> Batch:
    causal = [(length, masks.causal()) for length in (1, 2, 7, 20, 33, 64)]
    chosen = draw.choices([*causal, *causal, *SEQUENCES.values()], k=draw.randint(1, 4))
    return Batch.from_sequences([Sequence(*length_and_mask) for length_and_mask in chosen])


def plan_of(seed: int) -> tuple[ap.Plan, tuple] | None:
    """A plan with its layer, or None if the mixture is refused."""
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 3, 4, 6, 8, 12])
    per_node = draw.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
    recipe, batch, layer = random_recipe(draw), random_batch(draw), draw.choice(HEADS)
    recipe = with_lone(draw, recipe) if seed % 2 else recipe
    cap = batch.tokens if recipe.step("place").name in ("lpt", "dcp") else None
    model = Model(*layer[:4], dtype="fp64", layers=1)
    cluster, policy = Cluster(ranks // per_node, per_node), Policy(recipe, token_cap=cap)
    try:
        return ap.plan(batch, cluster, model, policy=policy), layer
    except (ap.ConfigError, ap.CapacityError):
        return None
