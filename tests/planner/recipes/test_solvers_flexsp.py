"""The place pass flexsp: valid groups, under the cap, never slower than the greedy mix."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import apportion as ap
from apportion.planner.place.flexsp import FlexSp, feasible_degrees, grouping_problem
from apportion.planner.problem import Placement
from apportion.planner.solvers.grouping import ilp
from tests.support import placements
from tests.support.placements import place

MODEL = ap.Model(q_heads=8)
LENGTHS = np.rint(2000 * np.exp(1.2 * np.random.default_rng(0).standard_normal(24))).astype(int).tolist()
problem = partial(placements.problem, LENGTHS, 16, nodes=2, model=MODEL)


def used(found: Placement) -> Any:
    """Tokens of each group for each of its ranks."""
    return np.bincount(found.home, found.lengths, len(found.groups) - 1) / np.diff(found.groups)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (2, 8), (3, 6), (5, 1), (1, 7)])
def test_groups_are_aligned_powers_of_two_and_small_ones_stay_in_a_node(nodes: int, per_node: int) -> None:
    case = placements.problem(LENGTHS, nodes * per_node, nodes=nodes, model=MODEL)
    found = place(FlexSp(), case)
    first, size = found.groups[:-1], np.diff(found.groups)
    assert found.groups[-1] == case.ranks
    assert (np.bitwise_count(size) == 1).all()
    assert (first % size == 0).all()
    assert (8 % size == 0).all()
    inside = size <= per_node
    assert (first // per_node == (first + size - 1) // per_node)[inside].all()


def test_every_group_holds_its_share_of_the_cap() -> None:
    assert used(place(FlexSp(capacity=4500), problem())).max() <= 4500


def test_the_cap_of_the_policy_is_obeyed_or_refused_with_numbers() -> None:
    longest = max(LENGTHS)
    cap = max(-(-longest // 8), int(1.3 * sum(LENGTHS) / 16))
    assert used(place(FlexSp(), problem(token_cap=cap))).max() <= cap
    message = f"a sequence of {20 * cap} tokens: the largest group, 8 of 16 ranks"
    with pytest.raises(ap.CapacityError, match=message):
        place(FlexSp(), placements.problem([20 * cap], 16, nodes=2, token_cap=cap, model=MODEL))


def test_one_document_of_the_whole_batch_takes_the_largest_group() -> None:
    found = place(FlexSp(), placements.problem([5000], 16, nodes=2, model=MODEL))
    assert found.groups.tolist() == [0, *range(8, 17)]
    assert found.home.tolist() == [0]


def test_more_ranks_for_a_sequence_cost_less_time_but_more_rank_time() -> None:
    case = grouping_problem(problem())
    assert case.degrees.tolist() == [1, 2, 4, 8]
    assert (np.diff(case.times[case.sizes.argmax()]) < 0).all()
    assert (np.diff(case.times * case.degrees, axis=1) > 0).all()


def test_linear_layers_are_counted_on_request() -> None:
    """A sequence's linear layers take three forwards, shared by the ranks of its group."""
    case = problem()
    attention, whole = grouping_problem(case), grouping_problem(case, linear=True)
    token_us = 3 * float(case.cost.linear_us(1)) * case.layers["default"]
    expected = token_us * case.batch.lengths[:, None] / feasible_degrees(case)
    np.testing.assert_allclose(whole.times - attention.times, expected)
    assert whole.cap == attention.cap


def test_with_linear_layers_the_fullest_rank_has_fewer_tokens() -> None:
    case = problem()
    assert used(place(FlexSp(linear=True), case)).max() < used(place(FlexSp(), case)).max()


def test_the_steps_capacity_is_at_most_the_policys_cap() -> None:
    case = problem(token_cap=4500)
    assert [grouping_problem(case, capacity).cap for capacity in (None, 4000, 9000)] == [4500, 4000, 4500]


def test_degrees_divide_the_heads_and_the_node() -> None:
    assert feasible_degrees(placements.problem(LENGTHS, 18, nodes=3, model=MODEL)).tolist() == [1, 2, 8]


def test_groups_are_never_slower_than_the_greedy_mix() -> None:
    case = grouping_problem(problem())
    found = place(FlexSp(), problem())
    column = np.log2(np.diff(found.groups)).astype(int)[found.home]
    time = np.bincount(found.home, case.times[np.arange(len(column)), column])
    assert time.max() <= ilp.greedy(case).termination.value * (1 + 1e-9)


def test_a_slow_rank_gets_one_of_the_quicker_groups() -> None:
    case = problem(speeds=(1.0,) * 15 + (0.5,))
    found = place(FlexSp(), case)
    weight = np.bincount(found.home, found.weight, len(found.groups) - 1) / np.diff(found.groups)
    same_size = np.diff(found.groups) == np.diff(found.groups)[-1]
    assert weight[-1] <= weight[same_size].max()
    assert found.bound <= (weight / np.minimum.reduceat(case.speeds, found.groups[:-1])).max()
