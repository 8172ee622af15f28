"""The registry, descriptions of results, and the contract of every built-in solver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from apportion import ConfigError, MissingDependencyError, UnknownNameError, testing
from apportion.planner.recipe.registry import users_of
from apportion.planner.solvers import highs, registry
from apportion.planner.solvers.contracts import (
    KINDS,
    Partition,
    PartitionProblem,
    TransportProblem,
    TwoLevelCost,
)
from apportion.planner.solvers.partition import ilp, swap
from apportion.planner.solvers.partition.lpt import solve as lpt_solve
from apportion.planner.solvers.registry import SOLVERS, Entry, find_solver
from apportion.planner.solvers.status import Budget, Limit, Status, Termination
from tests.support.programs import run_python
from tests.support.sparse import marked

#: the slowest contract tests: engines of other packages
LONG = [("partition", "ilp"), ("hypergraph", "mtkahypar")]


@pytest.mark.parametrize(
    "key", marked(list(SOLVERS), [at for at, key in enumerate(SOLVERS) if key not in LONG]), ids="-".join
)
def test_every_solver_keeps_its_contract(key: tuple[str, str]) -> None:
    testing.check(SOLVERS[key])


def test_listing_and_planning_import_no_engine() -> None:
    code = (
        "import sys, apportion.planner.solvers.registry as r; [e.installed for e in r.SOLVERS.values()]\n"
        "import apportion.planner.solvers.hypergraph.mtkahypar, apportion.planner.place.dcp\n"
        "print([m for m in ('scipy', 'pulp', 'highspy', 'mtkahypar') if m in sys.modules])"
    )
    assert run_python("-c", code) == "[]\n"


def test_every_kind_has_solvers_and_passes_that_take_them() -> None:
    assert list(dict.fromkeys(entry.kind for entry in SOLVERS.values())) == list(KINDS)
    assert all(users_of(kind) for kind in KINDS)


@pytest.mark.parametrize(("kind", "name"), [("partition", "nope"), ("partition", "greedy"), ("nope", "lpt")])
def test_an_unknown_name_lists_the_known_names(kind: str, name: str) -> None:
    with pytest.raises(UnknownNameError, match=r"write one of (lpt|partition)"):
        find_solver(kind, name)


@pytest.mark.parametrize("key", [("grouping", "ilp"), ("hypergraph", "mtkahypar")], ids="-".join)
def test_a_missing_engine_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, key: Any) -> None:
    monkeypatch.setattr(registry, "find_spec", lambda package: None)
    assert not SOLVERS[key].installed
    message = rf"solver {key[1]} needs \w+: pip install '\.\[solvers\]'"
    with pytest.raises(MissingDependencyError, match=message):
        SOLVERS[key].load()


@pytest.mark.parametrize(
    ("status", "bound", "value", "limit", "text", "gap"),
    [
        (Status.OPTIMAL, 4.0, 4.0, None, "OPTIMAL", 1.0),
        (Status.FEASIBLE, 4.0, 5.0, Limit.STEPS, "FEASIBLE(steps)", 1.25),
        (Status.FEASIBLE, 0.0, 5.0, None, "FEASIBLE", None),
        (Status.OPTIMAL, 0.0, 0.0, None, "OPTIMAL", 1.0),
        (Status.NO_SOLUTION, 4.0, None, Limit.STEPS, "NO_SOLUTION(steps)", None),
        (Status.INFEASIBLE, float("inf"), None, None, "INFEASIBLE", None),
    ],
)
def test_terminations_have_a_description(
    status: Status, bound: float, value: float | None, limit: Limit | None, text: str, gap: float | None
) -> None:
    end = Termination(status, bound, value, limit)
    assert (str(end), end.gap, end.solved) == (text, gap, value is not None)


@pytest.mark.parametrize("field", ["steps", "gap"])
def test_a_budget_is_not_negative(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"budget\.{field} = -1: must be a non-negative number"):
        Budget(**{field: -1})


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (
            lambda: PartitionProblem(*map(np.ones, (2, 3, 2))),
            "weights = 2: must have as many entries as sizes",
        ),
        (lambda: PartitionProblem(np.ones(2), np.ones(2), 9), "caps = 9: must have one cap per bin"),
        (lambda: PartitionProblem(*map(np.ones, (2, 2, 2)), families=np.ones(1)), "families"),
        (lambda: PartitionProblem(*map(np.ones, (2, 2, 2)), zones=np.ones(1)), "zones"),
        (lambda: TransportProblem(np.array([1]), TwoLevelCost(1, 0.0, 1.0)), "surplus = 1: must add up to 0"),
        (lambda: TwoLevelCost(8, 2.0, 1.0), "0 <= intra <= inter"),
        (
            lambda: Entry("mine", "knapsack", "a:b", "", ""),
            "must be partition, colouring, transport, grouping",
        ),
        (lambda: Entry("mine", "partition", "a.b", "", ""), "must be module:function"),
    ],
)
def test_inconsistent_problems_are_refused(make: Callable[..., Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        make()


# ---- the contract check detects faulty solvers


def ignoring_caps(problem: PartitionProblem, budget: Budget) -> Partition:
    found = lpt_solve(problem, budget)
    return Partition(np.zeros_like(found.bin), found.termination)


def claiming_optimality(problem: PartitionProblem, budget: Budget) -> Partition:
    found = lpt_solve(problem, budget)
    end = found.termination
    return Partition(found.bin, replace(end, status=Status.OPTIMAL, bound=end.value) if end.solved else end)


def depending_on_order(problem: PartitionProblem, budget: Budget) -> Partition:
    """Assigns each item to the next bin in turn, or to the first that it may use."""
    bins = np.arange(len(problem.sizes)) % problem.bins
    for item, only in enumerate(problem.allowed or []):
        bins[item] = bins[item] if only is None or bins[item] in only else only[0]
    if (np.bincount(bins, problem.sizes, problem.bins) > problem.caps).any():
        return Partition(np.full(len(bins), -1), Termination(Status.NO_SOLUTION, 0.0))
    speeds = np.ones(problem.bins) if problem.speeds is None else problem.speeds
    value = float((np.bincount(bins, problem.weights, problem.bins) / speeds).max())
    return Partition(bins, Termination(Status.FEASIBLE, 0.0, value))


def claiming_feasibility(problem: PartitionProblem, budget: Budget) -> Partition:
    found = lpt_solve(problem, budget)
    return found if found.termination.solved else Partition(found.bin, Termination(Status.FEASIBLE, 0.0, 1.0))


@pytest.mark.parametrize(
    ("solver", "fault"),
    [
        (ignoring_caps, "the cap is|claims the value"),
        (claiming_optimality, "bound .* above the optimum"),
        (depending_on_order, "with the items reordered"),
        (claiming_feasibility, "there is no answer|must be one per item"),
    ],
)
def test_the_check_detects_solvers_that_break_the_contract(solver: Callable[..., Any], fault: str) -> None:
    entry = Entry("bad", "partition", f"{__name__}:{solver.__name__}", "", "")
    with pytest.raises(testing.ConformanceError, match=fault):
        testing.check(entry)


def test_the_exact_partition_is_exact_where_sizes_are_large() -> None:
    weights = np.array([92945263581024, 53627188461169, 41787542623086, 37258533772903, 23082868630713])
    sizes = np.array([710570006, 857650229, 106308065, 605479149, 741195911])
    problem = PartitionProblem(weights, sizes, np.full(4, 857650229), np.array([1000.0, 1.0, 0.5, 1000.0]))
    found = find_solver("partition", "ilp").load()(problem, Budget())
    assert found.termination.status is Status.OPTIMAL
    assert found.termination.value == pytest.approx(testing.PROBLEMS["partition"].optimum(problem))


def test_the_exact_partition_limits_nodes_and_skips_large_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default number of nodes takes about a second, and is 0 if the root alone takes longer."""
    node_limits: list[int] = []
    run = highs.solve_model
    monkeypatch.setattr(
        highs, "solve_model", lambda model, nodes, gap: node_limits.append(nodes) or run(model, 1, gap)
    )
    draw = np.random.default_rng(0)
    for items, bins in ((20, 4), (60, 8)):
        sizes = draw.integers(1, 12, items)
        caps = np.full(bins, int(1.1 * sizes.sum() / bins))
        problem = PartitionProblem(sizes * draw.integers(3, 40, items), sizes, caps)
        start, found = swap.solve(problem, Budget()).termination, ilp.solve(problem, Budget()).termination
        assert (found.status, found.limit) == (Status.FEASIBLE, Limit.STEPS)
        assert found.bound <= (found.value or 0.0) <= (start.value or 0.0)
    assert len(node_limits) == 1
    assert 80 * node_limits[0] <= 1.1 * ilp.EFFORT
