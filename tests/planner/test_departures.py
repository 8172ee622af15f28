"""Departures of passes from a recipe: in the report, and as warnings if users requested the step."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import apportion as ap
from apportion.ir.plan.summary import plan_rows

LONG = [4096, 300, 200, 100]


def reported_departures(recipe: Any, cluster: ap.Cluster, heads: int = 8, lengths: Any = LONG) -> list[Any]:
    model = ap.Model(q_heads=heads, kv_heads=heads, head_dim=8)
    plan = ap.plan(ap.Batch.from_lengths(lengths), cluster, model, recipe)
    departures = plan.report.get("departures", [])
    assert [name for name, _ in plan_rows(plan.report)].count("instead") == len(departures)
    return [(one["field"].removeprefix("recipe."), one["asked"], one["used"]) for one in departures]


def blend(align: int) -> dict[str, Any]:
    steps = {"shard": {"sequences": {}}, "place": {"blend": {"align": align}}, "schedule": {"matchings": {}}}
    return {"name": "blend", "steps": steps}


def pods(ranks: int) -> dict[str, Any]:
    steps = {"shard": {"blocks": {}}, "place": {"lpt": {}}, "schedule": {"matchings": {}}}
    return {"name": "pods", "steps": {"pods": {"documents": {"ranks": ranks}}, **steps}}


def proxies(count: int) -> dict[str, Any]:
    schedule = {"schedule": {"queues": {"proxies": count}}}
    steps = {"shard": {"sequences": {}}, "place": {"zeppelin": {}}, **schedule}
    return {"name": "routed", "steps": steps}


@pytest.mark.parametrize("recipe", ["ulysses", "upipe"])
@pytest.mark.parametrize(("heads", "ranks", "used"), [(7, 4, 1), (6, 4, 2), (12, 8, 4)])
def test_degrees_beyond_the_heads_are_departures(recipe: str, heads: int, ranks: int, used: int) -> None:
    with pytest.warns(UserWarning, match=f"degree: {used} instead of {min(heads, ranks)}"):
        found = reported_departures(recipe, ap.Cluster(1, ranks), heads)
    assert found == [(f"inner.{recipe}.degree", min(heads, ranks), used)]


@pytest.mark.parametrize(
    ("recipe", "cluster", "lengths", "departure"),
    [
        ("distca", ap.Cluster(1, 4), LONG, ("place.distca.granularity", 128, 64)),
        ("mixed", ap.Cluster(1, 2), [4096], ("inner.ulysses.lone", "auto", None)),
        (blend(1024), ap.Cluster(1, 4), LONG, ("place.blend.align", 1024, 64)),
        (pods(2), ap.Cluster(4, 2), LONG, ("pods.documents.ranks", 2, 8)),
        (proxies(4), ap.Cluster(2, 2), [4096], ("schedule.queues.proxies", 4, 2)),
    ],
)
def test_each_pass_records_its_departure(
    recipe: Any, cluster: ap.Cluster, lengths: list[int], departure: tuple[str, Any, Any]
) -> None:
    assert departure in reported_departures(recipe, cluster, lengths=lengths)


@pytest.mark.parametrize(
    ("recipe", "warned"),
    [(blend(1024), True), (blend(1), False), ("distca", False), ("mixed", False), ("auto", False)],
)
def test_only_departures_from_explicit_parameters_are_warnings(recipe: Any, warned: bool) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        reported_departures(recipe, ap.Cluster(1, 4))
    assert bool(found) == warned
