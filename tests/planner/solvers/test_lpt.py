"""LPT: feasible, within its guarantee, and its bound below the optimum."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from apportion import Batch, Cluster, Model, Recipe, plan
from apportion.ir.request.workload import lognormal_lengths
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.solvers.contracts import Partition, PartitionProblem
from apportion.planner.solvers.partition.lpt import makespan_bound, solve, solve_near
from apportion.planner.solvers.status import Budget, Status
from apportion.testing import PROBLEMS


def lpt(*problem: Any) -> Partition:
    return solve(PartitionProblem(*problem), Budget())


def sums(result: Partition, values: NDArray[Any], bins: int) -> NDArray[Any]:
    """The sum of values in each bin."""
    placed = result.bin >= 0
    return np.bincount(result.bin[placed], values[placed], bins)


def array(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    items=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 5)), min_size=1, max_size=6),
    bins=st.integers(1, 3),
    rooms=st.lists(st.integers(-4, 20), min_size=3, max_size=3),
    speeds=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=3, max_size=3),
)
def test_bound_is_never_above_the_optimum_and_each_cap_holds(
    items: list[tuple[int, int]], bins: int, rooms: list[int], speeds: list[float]
) -> None:
    weights, sizes = map(list, zip(*items, strict=True))
    caps = [max(0, max(sizes) + room) for room in rooms[:bins]]
    columns = array(weights), array(sizes), array(caps), np.array(speeds[:bins])
    best = PROBLEMS["partition"].optimum(PartitionProblem(*columns))
    result = lpt(*columns)
    assert (sums(result, array(sizes), bins) <= caps).all()
    assert best is None or result.termination.bound <= best + 1e-9
    placed = result.bin >= 0
    assert result.termination.solved == bool(placed.all())
    if placed.all():
        load = sums(result, array(weights), bins)
        assert result.termination.value == (load / np.array(speeds[:bins])).max() >= best - 1e-9


@settings(max_examples=60, deadline=None, derandomize=True)
@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=7), bins=st.integers(1, 3))
def test_grahams_guarantee_on_equal_bins(weights: list[int], bins: int) -> None:
    problem = PartitionProblem(array(weights), np.ones(len(weights), np.int64), np.full(bins, len(weights)))
    result, best = solve(problem, Budget()), PROBLEMS["partition"].optimum(problem)
    assert result.termination.value <= (4 / 3 - 1 / (3 * bins)) * best + 1e-9


def test_a_slow_bin_gets_less() -> None:
    weights = np.full(300, 10)
    result = lpt(weights, np.ones(300, np.int64), np.full(3, 300), np.array([1.0, 1.0, 0.5]))
    assert sums(result, weights, 3).tolist() == [1200, 1200, 600]


def test_a_full_bin_does_not_limit_other_bins() -> None:
    result = lpt(array([1] * 9), array([1] * 9), array([1, 3, 5]), np.array([2.0, 1.0, 1.0]))
    assert sums(result, array([1] * 9), 3).tolist() == [1, 3, 5]


BOUNDS = [([6, 6, 6, 6], 2, 12), ([10, 1, 1], 3, 10), ([5, 5, 5, 5], 3, 10), ([], 3, 0)]


@pytest.mark.parametrize(("weights", "bins", "bound"), [*BOUNDS, ([4, 4, 4, 3, 3, 3, 3], 3, 9)])
def test_makespan_bound_by_hand(weights: list[int], bins: int, bound: int) -> None:
    assert makespan_bound(array(weights), np.ones(bins)) == bound


def test_families_stay_in_few_zones_and_bins_stay_as_even() -> None:
    # four equal items of each of eight families, mixed, onto two zones of four bins
    families, zones = np.array([0, 1, 2, 3, 4, 5, 6, 7] * 4), np.array([0, 0, 0, 0, 1, 1, 1, 1])
    columns = np.full(32, 10), np.ones(32, np.int64), np.full(8, 99)
    problem = PartitionProblem(*columns, families=families, zones=zones)
    spread, near = solve(problem, Budget()), solve_near(problem, Budget())
    assert [len({int(b) // 4 for b in near.bin[families == family]}) for family in range(8)] == [1] * 8
    assert near.termination.value == spread.termination.value == 40
    assert near.termination.status is Status.OPTIMAL


def test_a_near_bin_must_not_end_heavier_than_the_lightest() -> None:
    def solved(weights: list[int]) -> tuple[list[int], list[int]]:
        near = {"families": array([0, 1, 0, 1]), "zones": array([0, 1])}
        problem = PartitionProblem(array(weights), np.ones(4, np.int64), array([9, 9]), **near)
        return solve_near(problem, Budget()).bin.tolist(), solve(problem, Budget()).bin.tolist()

    # the third item joins the first, if that stays lighter than the second would be with it
    assert solved([10, 9, 8, 1]) == ([0, 1, 0, 1], [0, 1, 1, 0])
    assert solved([30, 9, 8, 1]) == ([0, 1, 1, 1], [0, 1, 1, 1])


def test_near_bins_respect_caps_and_restrictions() -> None:
    near = {"families": array([5, 5, 5, 5]), "zones": array([0, 0, 1, 1])}
    columns = array([9, 8, 7, 6]), array([3, 3, 3, 3]), array([3, 3, 3, 3])
    problem = PartitionProblem(*columns, allowed=[None, (3,), None, None], **near)
    found = solve_near(problem, Budget())
    assert found.termination.solved
    assert found.bin[1] == 3
    assert sorted(found.bin.tolist()) == [0, 1, 2, 3]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_near_bins_exceed_the_lightest_by_at_most_one_item(data: st.DataObject) -> None:
    """Without caps a bin never gets heavier than the lightest bin at that time plus the item."""
    items, bins = data.draw(st.integers(2, 40)), data.draw(st.integers(2, 9))
    weights = array(data.draw(st.lists(st.integers(1, 50), min_size=items, max_size=items)))
    families = array(data.draw(st.lists(st.integers(0, 5), min_size=items, max_size=items)))
    speeds = np.array(data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=bins, max_size=bins)))
    problem = PartitionProblem(
        weights, np.ones(items, np.int64), np.full(bins, items), speeds, None, families, np.arange(bins) // 3
    )
    found = solve_near(problem, Budget())
    load = np.zeros(bins)
    _, kin, count = np.unique(families, return_inverse=True, return_counts=True)
    relatives = np.where(count[kin] > 1, kin, -1) * (bins > 3)  # in one zone all are near
    for item in np.lexsort((np.arange(items), relatives, -weights)).tolist():
        target = found.bin[item]
        lightest = int((load / speeds).argmin())
        limit = (load[lightest] + weights[item]) / speeds[lightest]
        assert target == lightest or load[target] / speeds[target] < limit
        load[target] += weights[item]


def test_fcp_keeps_documents_on_few_nodes() -> None:
    cluster, model = Cluster(nodes=4, ranks_per_node=4), Model(8, 2, 64)
    lengths = lognormal_lengths(0, 16 * 8192)
    batch, near = Batch.from_lengths(lengths), find_recipe("fcp")
    steps = near.to_data()["steps"] | {"place": {"lpt": {}}}
    plans = [plan(batch, cluster, model, recipe) for recipe in (near, Recipe("anywhere", steps))]
    moved, anywhere = (found.report["bytes"]["inter_node"] for found in plans)
    assert moved < 0.75 * anywhere
    assert all(found.report["imbalance"]["compute"] <= 0.01 for found in plans)


def test_an_infinite_load_does_not_block_a_bin() -> None:
    speeds = np.array([1e-300, 1.0])
    found = lpt(array([2**61, 2**60, 2**40, 7]), np.ones(4, np.int64), array([4, 1]), speeds)
    assert found.bin.tolist() == [0, 1, 0, 0]
