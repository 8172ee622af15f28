"""Strategies as data, with parameters for short sequences, and clusters of two ranks per node."""

from __future__ import annotations

import numpy as np

from apportion import Batch, Cluster, Model, Plan, Policy, Recipe
from apportion.planner import api
from apportion.planner.recipe.recipes import find_recipe, passes_of

BLOCKS = {"shard": {"blocks": {"block": 5}}, "place": {"lpt": {}}}
MATCHINGS = {"schedule": {"matchings": {"coalesce": 2, "buffers": 2}}}
INNER = {"inner": {"ulysses": {"degree": 2}}}
LAST = {"schedule": {"matchings": {"coalesce": 1, "local": "last"}}}
BY_TIME = {"place": {"lpt": {"weigh": "time", "solver": "swap"}}}
NATURAL = {"degree": "node", "order": "natural", "hold": True}
PROXIES = {
    "place": {"zeppelin": {"cap": "paper", "inter_tokens": 30, "parts": 2}},
    "schedule": {"queues": {"proxies": 2, "local": "even"}},
}


def steps(recipe: str, **changes: dict) -> dict:
    """The steps of a recipe, with the parameters of some passes changed."""
    data = find_recipe(recipe).to_data()["steps"]
    for step, params in changes.items():
        ((name, old_params),) = data[step].items()
        data[step] = {name: {**old_params, **params}}
    return data


#: chunks of the smallest size, for short sequences
SHORT = {"place": {"chunk": 1}}
#: every built-in recipe by its name, and others; those with `upipe` take q, k and v here
STRATEGIES: dict[str, dict] = {
    "fcp": steps("fcp", shard={"block": 5}),
    "ring": steps("ring", **SHORT),
    "allgather": steps("allgather", **SHORT),
    "ulysses": steps("ulysses"),
    "usp": steps("usp", **SHORT),
    "hybrid_dp": steps("hybrid_dp"),
    "megatron_hybrid": steps("megatron_hybrid"),
    "wlb": steps("wlb", **SHORT),
    "flexsp": steps("flexsp"),
    "flexsp_reshuffled": steps("flexsp") | {"reshuffle": True},
    "contiguous": steps("contiguous"),
    "ring_reshuffled": steps("ring", **SHORT) | {"reshuffle": True},
    "node": BLOCKS | MATCHINGS | {"route": {"node": {}}},
    "tree": BLOCKS | MATCHINGS | {"route": {"tree": {"fanout": 2}}},
    "relays": BLOCKS | MATCHINGS | {"route": {"ring": {"over": "holders"}}},
    "relays_of_ranks": steps("megatron_hybrid") | LAST | {"route": {"ring": {"over": "ranks"}}},
    "ring_of_blocks": BLOCKS | {"schedule": {"ring": {}}},
    "ring_of_holders": BLOCKS | {"schedule": {"ring": {"over": "holders", "turns": True}}},
    "gather_by_node": BLOCKS | {"schedule": {"gather": {"local": "first"}}, "route": {"node": {}}},
    "inner": BLOCKS | MATCHINGS | INNER,
    "inner_overlapped": BLOCKS | MATCHINGS | {"inner": {"ulysses": {"degree": 2, "overlap": True}}},
    "inner_reshuffled": BLOCKS | MATCHINGS | INNER | {"reshuffle": True},
    "inner_node": BLOCKS | MATCHINGS | INNER | {"route": {"node": {}}},
    "distca": steps("distca"),
    "distca_paper": steps("distca_paper"),
    "distca_relayed": steps("distca") | {"route": {"node": {}}},
    "dcp": steps("dcp", shard={"block": 5}),
    "dcp_heads": {
        "shard": {"blocks": {"block": 5, "zigzag": False}},
        "place": {"dcp": {"head_groups": "kv", "divisions": 2}},
        "schedule": {"divisions": {"count": 2}},
    },
    "upipe": steps("upipe", inner={"project": False}),
    "upipe_ring": steps("upipe_ring", inner={"project": False}, **SHORT),
    "upipe_ahead": steps("upipe_ring", inner={"project": False, "ahead": 1}, **SHORT),
    "upipe_held": steps("upipe_ring", inner={"project": False, "hold": True}, **SHORT),
    "upipe_natural": BLOCKS | MATCHINGS | {"inner": {"upipe": NATURAL}},
    "blend": steps("blend"),
    "auto": steps("auto"),
    "blend_of_blocks": steps("blend", place={"grain": 5}),
    "blend_by_node": steps("blend") | {"route": {"node": {}}},
    "zeppelin": steps("zeppelin", remap={"when": "always"}),
    "zeppelin_proxies": steps("zeppelin", remap={"when": "always"}) | PROXIES,
    "mixed": steps("mixed"),
    "mixed_overlapped": steps("mixed", inner={"overlap": True, "lone": 0.9}) | {"route": {"node": {}}},
    "mixed_blocks": BLOCKS | MATCHINGS | {"inner": {"ulysses": {"degree": "node", "lone": 0.9}}},
    "mixed_cells": steps("distca") | {"inner": {"ulysses": {"degree": "node", "lone": 0.5}}},
    "fcp_paper": steps("fcp_paper", shard={"block": 5}),
    "magi": steps("magi", shard={"size": 7}),
    "mixed_kinds": steps("mixed", inner={"lone": 0.5, "kinds": "auto", "overlap": True}),
    "whole_even": {"shard": {"sequences": {}}, **BY_TIME, "schedule": {"matchings": {"coalesce": 1}}},
    "loongtrain": steps("loongtrain", **SHORT),
    "double_ring_of_blocks": BLOCKS | {"schedule": {"ring": {"window": "node"}}},
    "double_ring_of_holders": BLOCKS | {"schedule": {"ring": {"over": "holders", "window": "node"}}},
}
#: stages with twice as many heads as ranks; they need at least four query heads
WIDE = {"upipe_wide": steps("upipe_ring", inner={"heads": 4, "project": False, "ahead": 1}, **SHORT)}


def cluster(ranks: int) -> Cluster:
    per_node = 2 if ranks % 2 == 0 else 1
    return Cluster(nodes=ranks // per_node, ranks_per_node=per_node)


def is_uncapped(recipe: Recipe) -> bool:
    """Whether the recipe's placement keeps only its own token cap."""
    return recipe.step("search") is None and passes_of(recipe).place.is_uncapped


def plan_of(batch: Batch, name: str, ranks: int, model: Model, steps: dict | None = None) -> Plan:
    """The plan of a strategy on `cluster(ranks)`, which need not balance tokens."""
    recipe = Recipe(name, steps or (STRATEGIES | WIDE)[name])
    cap = None if is_uncapped(recipe) else batch.tokens
    return api.plan(batch, cluster(ranks), model, policy=Policy(recipe, token_cap=cap))


def alternating(batch: Batch) -> tuple[Batch, Batch]:
    """Two batches, of the sequences with even and with odd numbers."""
    return batch.take(np.arange(0, len(batch.lengths), 2)), batch.take(np.arange(1, len(batch.lengths), 2))
