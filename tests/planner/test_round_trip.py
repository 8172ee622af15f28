"""Plans verify after a round trip through bytes and text, for any names and order of kinds."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

import apportion as ap
from apportion.ir.masks.spec import Mask
from apportion.planner.recipe.recipes import entries
from tests.support.parse import parse

CLUSTER = ap.Cluster(2, 2)
MASKS = {"causal": ap.masks.causal(), "window": ap.masks.sliding_window(8), "full": ap.masks.full()}
MASKS["nothing"] = ap.masks.bands([])
#: recipes that plan the masks above on four ranks
RECIPES = [name for name, entry in entries().items() if name not in ("auto", "flexsp", "megatron_hybrid")]
NAMES = st.text("azAZ09_-.", min_size=1, max_size=4)


def batch_of(masks: dict[str, Mask]) -> ap.Batch:
    return ap.Batch.from_lengths([64, 40, 17], masks)


def planned(masks: dict[str, Mask], recipe: str | ap.Recipe) -> ap.Plan:
    """A plan of these kinds, each with its own number of layers."""
    layers = {kind: 1 + number for number, kind in enumerate(masks)}
    return ap.plan(batch_of(masks), CLUSTER, ap.Model(4, 4, 8, layers=layers), recipe)


def check_round_trip(plan: ap.Plan) -> None:
    for restored in (ap.Plan.decode(plan.encode()), parse(plan.text())):
        ap.verify(restored)
        assert restored == plan
        assert restored.request == plan.request
        assert restored.header == plan.header
        assert list(restored.programs) == list(plan.programs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_kinds_in_any_order_make_the_same_plan(recipe: str) -> None:
    kinds, layers = {"local": MASKS["window"], "global": MASKS["causal"]}, {"local": 3, "global": 1}
    model, turned = (ap.Model(4, 4, 8, layers=counts) for counts in (layers, dict(reversed(layers.items()))))
    plan = ap.plan(batch_of(kinds), CLUSTER, model, recipe)
    other = ap.plan(batch_of(dict(reversed(kinds.items()))), CLUSTER, turned, recipe)
    assert plan.header.kinds == ("global", "local")
    check_round_trip(plan)
    assert other.encode() == plan.encode()


@given(st.dictionaries(NAMES, st.sampled_from(sorted(MASKS)), min_size=1, max_size=4), st.data())
@settings(max_examples=40)
def test_plans_of_any_kinds_verify_again(masks: dict[str, str], data: st.DataObject) -> None:
    recipe = data.draw(st.sampled_from(["fcp", "ring", "distca", "usp"]))
    check_round_trip(planned({kind: MASKS[mask] for kind, mask in masks.items()}, recipe))


def test_the_order_of_kinds_in_a_sequence_does_not_matter() -> None:
    first: dict[str, Any] = {"b": MASKS["causal"], "a": MASKS["window"]}
    batch = ap.Batch.from_sequences([ap.Sequence(8, first), ap.Sequence(9, dict(reversed(first.items())))])
    assert batch.kinds == ("a", "b")
    specs = [spec for kind in batch.masks.values() for spec in kind.specs]
    assert [type(spec).__name__ for spec in specs] == ["SlidingWindow", "Causal"]
    assert ap.Batch.from_data(batch.to_data()) == batch
    assert batch.take([1]).kinds == ("a", "b")


def test_steps_in_any_order_are_the_same_recipe() -> None:
    steps = {"shard": {"blocks": {"block": 16}}, "place": {"lpt": {}}, "schedule": {"matchings": {}}}
    steps["reshuffle"] = True
    recipes = [ap.Recipe("mine", dict(order)) for order in permutations(steps.items())]
    assert len(set(recipes)) == 1
    assert all(recipe == recipes[0] for recipe in recipes)
    plans = [planned({"b": MASKS["causal"], "a": MASKS["window"]}, recipe) for recipe in recipes[::7]]
    assert len({plan.id for plan in plans}) == 1
    check_round_trip(plans[0])
    assert recipes[0] != ap.Recipe("mine", {**steps, "reshuffle": False})


def test_an_iteration_of_unsorted_kinds_verifies_again() -> None:
    kinds = {"local": MASKS["window"], "global": MASKS["causal"]}
    made = ap.plan_iteration(batch_of(kinds), CLUSTER, ap.Model(4, 4, 8), "ring")
    restored = ap.IterationPlan.decode(made.encode())
    assert restored.id == made.id
    for plan in restored.plans:
        ap.verify(plan)
