"""Passes in any combination: a plan that the verifier accepts, or an error that states what to change."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest

import apportion as ap
from apportion.ir.masks import specs as masks
from apportion.planner.recipe import registry

RANKS = 4
INNER: tuple[dict[str, Any] | None, ...] = (
    None,
    {"ulysses": {"degree": 2}},
    {"ulysses": {"degree": 2, "lone": "auto"}},
    {"ulysses": {"degree": 2, "kinds": "auto", "overlap": True}},
    {"upipe": {"degree": 2}},
    {"upipe": {"degree": 2, "project": True}},
)
SPEEDS = (None, (1.0, 0.5, 1.0, 1.0), (1.0, 0.1, 0.3, 1.0))
LENGTHS = ([400, 300, 20], [97], [1], [64] * 8, [200, 3, 7, 90, 1, 44, 13], [2, 2, 2])
#: caps per rank, as multiples of the mean
CAPS = (None, 1.0, 1.5, 4.0)
KINDS = {"g": masks.causal(), "l": masks.sliding_window(16)}
CASES = tuple(product(INNER, (False, True), SPEEDS))


def optional(step: str) -> list[dict[str, Any] | None]:
    return [None, *({name: {}} for name in registry.names(step))]


def drawn(rng: np.random.Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def steps_of(rng: np.random.Generator, place: str, inner: Any, reshuffle: bool) -> dict[str, Any]:
    steps = {
        "inner": inner,
        "pods": drawn(rng, (None, None, {"documents": {"ranks": 2}})),
        "shard": drawn(rng, ({"blocks": {}}, {"blocks": {"block": 16}}, {"chunks": {"size": 16}})),
        "place": {place: {}},
        "route": drawn(rng, (None, None, *optional("route"))),
        "schedule": drawn(rng, optional("schedule")[1:]),
        "remap": drawn(rng, optional("remap")),
    }
    return {step: args for step, args in steps.items() if args is not None} | {"reshuffle": reshuffle}


@pytest.mark.parametrize("place", registry.names("place"))
def test_random_requests_give_valid_plans_or_typed_refusals(place: str) -> None:
    rng, outcomes = np.random.default_rng(len(place)), Counter[str]()
    for inner, reshuffle, speeds in CASES:
        lengths, cap, kinds = drawn(rng, LENGTHS), drawn(rng, CAPS), bool(rng.integers(2))
        recipe = ap.Recipe("any", steps_of(rng, place, inner, reshuffle))
        nodes = int(drawn(rng, (1, 2)))
        token_cap = None if cap is None else int(-(-sum(lengths) // RANKS) * cap)
        batch = ap.Batch.from_lengths(lengths, KINDS if kinds else None)
        cluster, layers = ap.Cluster(nodes, RANKS // nodes, speeds=speeds), {"g": 1, "l": 2} if kinds else 1
        model = ap.Model(4, 2, 16, hidden=64, ffn=64, layers=layers, dtype="fp32")
        try:  # VerifyError passes through
            ap.plan(batch, cluster, model, policy=ap.Policy(recipe, token_cap=token_cap))
            outcomes["planned"] += 1
        except (ap.ConfigError, ap.CapacityError):
            outcomes["refused"] += 1
    assert outcomes["planned"], outcomes
