"""A package that adds a solver, a pass and a recipe: `pip install -e tests/plugin --no-deps` registers them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import apportion as ap
from apportion import testing
from apportion.ir.fields import load
from apportion.planner import plugins
from apportion.planner.problem import PlacePass
from apportion.planner.recipe.recipes import entries, find_recipe
from apportion.planner.recipe.registry import STEPS, contract_fault, find_pass, names
from apportion.planner.route.routes import RoutePass
from apportion.planner.solvers.registry import GROUP, SOLVERS, find_solver, list_solvers


def test_the_solver_of_a_plugin_is_listed_and_keeps_the_contract() -> None:
    assert [entry.name for entry in list_solvers()] == [*(name for _, name in SOLVERS), "emptiest"]
    testing.check(find_solver("partition", "emptiest"))


def test_the_solver_of_a_plugin_runs_from_a_recipe_file(tmp_path: Path) -> None:
    """By name, in a placement; the plan differs from LPT's."""
    file = tmp_path / "mine.yaml"
    file.write_text(
        "name: mine\nsteps:\n  shard: {blocks: {block: 64}}\n  place: {lpt: {solver: emptiest}}\n"
        "  schedule: {matchings: {}}\n"
    )
    batch, cluster = ap.Batch.from_lengths([1000, 300, 700]), ap.Cluster(nodes=1, ranks_per_node=4)
    recipe = find_recipe(load(file))
    usual = find_recipe({"name": "mine", "steps": {**recipe.to_data()["steps"], "place": {"lpt": {}}}})
    policies = [ap.Policy(one, token_cap=1000) for one in (recipe, usual)]
    own, other = (ap.plan(batch, cluster, ap.Model(), policy=policy) for policy in policies)
    rows = [next(iter(plan.layouts.values())).rows_per_rank.tolist() for plan in (own, other)]
    assert rows[0] != rows[1]


def test_the_recipe_of_a_plugin_uses_its_pass() -> None:
    assert "round_robin" in names("place")
    assert entries()["round_robin"].summary == "blocks to ranks in turn"
    batch, cluster = ap.Batch.from_lengths([1000, 300, 700]), ap.Cluster(nodes=1, ranks_per_node=4)
    plan = ap.plan(batch, cluster, ap.Model(), recipe="round_robin")
    layout = next(iter(plan.layouts.values()))
    assert layout.rows_per_rank.tolist() == [700, 300, 512, 488]


def test_the_pass_of_a_plugin_accepts_its_parameters_and_refuses_others() -> None:
    steps = {"shard": {"blocks": {}}, "place": {"round_robin": {"first": -1}}, "schedule": {"matchings": {}}}
    batch, cluster = ap.Batch.from_lengths([1000]), ap.Cluster(nodes=1, ranks_per_node=4)
    with pytest.raises(ap.ConfigError, match=r"round_robin\.first = -1: must be an integer of at least 0"):
        ap.plan(batch, cluster, ap.Model(), recipe={"name": "mine", "steps": steps})


@pytest.mark.parametrize(("step", "name"), [(step, name) for step in STEPS for name in names(step)])
def test_all_passes_keep_the_contract_of_their_step(step: str, name: str) -> None:
    assert contract_fault(step, find_pass(step, name)) is None


@pytest.mark.parametrize(
    ("step", "members", "fault"),
    [
        ("place", {"is_uncaped": True}, "whose is_uncaped resembles is_uncapped"),
        ("place", {"__call__": None}, "has no __call__: see PlacePass"),
        ("route", {"by_block": None}, "has no by_block: see RoutePass"),
    ],
)
def test_missing_and_misspelt_attributes_are_named(step: str, members: dict[str, Any], fault: str) -> None:
    contract = {"place": PlacePass, "route": RoutePass}[step]
    kept = {"__call__": lambda self, *given: None}
    made = dataclass(frozen=True)(type("Mine", (contract,), {**kept, **members}))
    if None in members.values():
        ((name, _),) = members.items()
        kept = {k: getattr(made, k) for k in MEMBERS[step] if k != name}
        made = dataclass(frozen=True)(type("Mine", (), kept))
    assert fault in contract_fault(step, made)


MEMBERS = {"place": ("__call__", "is_uncapped"), "route": ("__call__", "rings", "relays", "by_block")}


def test_a_pass_that_declares_everything_needs_no_base_class() -> None:
    kept = {"__call__": lambda self, *given: None, "is_uncapped": False, "others": 3}
    assert contract_fault("place", dataclass(frozen=True)(type("Mine", (), kept))) is None
    assert contract_fault("place", type("Mine", (), kept)) == "which is not a dataclass"


def install(folder: Path, name: str, value: str, module: str = "") -> None:
    """A distribution `broken 2.0` with one solver."""
    info = folder / "broken-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {value}\n")
    (folder / "broken_plugin.py").write_text(module)


@pytest.mark.parametrize(
    ("name", "value", "module", "fault"),
    [
        ("partition.mine", "no_such_module:ENTRY", "", "broken 2.0 cannot be loaded: ModuleNotFoundError"),
        ("partition.mine", "broken_plugin:ENTRY", "ENTRY = 3", "broken 2.0 has the type int, not Entry"),
        ("partition.mine", "broken_plugin:ENTRY", "1 / 0", "broken 2.0 cannot be loaded: ZeroDivisionError"),
        (
            "partition.lpt",
            "broken_plugin:ENTRY",
            "from apportion.planner.solvers.registry import Entry\n"
            "ENTRY = Entry('lpt', 'partition', 'broken_plugin:solve', '', '')",
            "broken 2.0 adds partition solver lpt",
        ),
    ],
)
def test_a_broken_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, module: str, fault: str
) -> None:
    install(tmp_path, name, value, module)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "broken_plugin", raising=False)
    with pytest.raises(ap.ConfigError, match=fault):
        list_solvers()
    assert find_solver("partition", "lpt").name == "lpt"
    assert name in plugins.discover(GROUP)
