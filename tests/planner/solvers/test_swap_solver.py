"""The partition solver `swap`: never worse than LPT, within the caps, and near the optimum where LPT is not."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion.planner.solvers.contracts import Partition, PartitionProblem
from apportion.planner.solvers.partition import lpt, swap
from apportion.planner.solvers.status import Budget, Status


def array(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


def bin_sums(problem: PartitionProblem, found: Partition, values: np.ndarray) -> np.ndarray:
    placed = found.bin >= 0
    return np.bincount(found.bin[placed], values[placed], problem.bins)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    items=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=30),
    rooms=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_swap_is_never_worse_than_lpt_and_keeps_the_caps(items: list, rooms: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights, sizes = (array(list(column)) for column in zip(*items, strict=True))
    bins = len(rooms)
    caps = array(rooms) + int(sizes.sum()) // bins
    speeds = rng.choice([0.5, 1.0, 2.0], bins)
    allowed = None
    if rng.random() < 0.5:
        allowed = [
            tuple(rng.permutation(bins)[: rng.integers(1, bins + 1)].tolist()) if rng.random() < 0.4 else None
            for _ in items
        ]
    problem = PartitionProblem(weights, sizes, caps, speeds, allowed)
    usual, found = lpt.solve(problem, Budget()), swap.solve(problem, Budget())
    assert (bin_sums(problem, found, sizes) <= caps).all()
    for item, bin_ in enumerate(found.bin.tolist()):
        assert bin_ < 0 or allowed is None or allowed[item] is None or bin_ in allowed[item]
    if usual.termination.solved:
        assert found.termination.solved
        assert found.termination.value <= usual.termination.value
        assert found.termination.value == pytest.approx((bin_sums(problem, found, weights) / speeds).max())
    if not found.termination.solved:
        assert np.array_equal(found.bin >= 0, usual.bin >= 0)


def test_documents_are_balanced_under_a_tight_cap() -> None:
    """Documents on 64 ranks. Work grows with the square of the size: one item is swapped for two."""
    rng = np.random.default_rng(0)
    sizes = np.maximum(np.rint(rng.lognormal(np.log(300), 1.0, 5000)), 16).astype(np.int64)
    weights, caps = sizes * (sizes + 500), np.full(64, int(1.02 * sizes.sum() / 64))
    problem = PartitionProblem(weights, sizes, caps)
    usual, found = lpt.solve(problem, Budget()), swap.solve(problem, Budget())
    mean = weights.sum() / 64
    assert found.termination.value <= 1.001 * mean
    assert usual.termination.value > 1.01 * mean
    assert (bin_sums(problem, found, sizes) <= caps).all()


def test_items_that_lpt_cannot_place_are_placed() -> None:
    """LPT fills bins by weight, so large, light items are left over."""
    tight = PartitionProblem(array([9, 8, 1, 1]), array([3, 3, 4, 2]), array([6, 6]))
    assert lpt.solve(tight, Budget()).termination.status is Status.NO_SOLUTION
    found = swap.solve(tight, Budget())
    assert found.termination.solved
    assert (bin_sums(tight, found, tight.sizes) <= 6).all()


def test_items_that_fit_nowhere_stay_unassigned() -> None:
    problem = PartitionProblem(array([5, 5, 5]), array([2, 2, 2]), array([2, 2]))
    found = swap.solve(problem, Budget())
    assert found.termination.status is Status.INFEASIBLE
    assert (found.bin >= 0).sum() == 2


@pytest.mark.parametrize("seed", range(200))
def test_the_value_does_not_depend_on_the_order_of_the_items(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, bins = int(rng.integers(3, 9)), int(rng.integers(2, 4))
    weights, sizes = rng.integers(1, 20, count), rng.integers(1, 6, count)
    caps = rng.integers(sizes.sum() // bins, sizes.sum() // bins + 3, bins)
    order = rng.permutation(count)
    one = swap.solve(PartitionProblem(weights, sizes, caps), Budget()).termination
    other = swap.solve(PartitionProblem(weights[order], sizes[order], caps), Budget()).termination
    assert one == other


def test_bins_without_room_get_nothing() -> None:
    problem = PartitionProblem(array([9, 8, 1, 1]), array([3, 3, 4, 2]), array([6, 6, 0]))
    found = swap.solve(problem, Budget())
    assert found.termination.solved
    assert (bin_sums(problem, found, problem.sizes) <= problem.caps).all()
