"""The place pass flexsp: valid groups, under the cap, never slower than the greedy mix."""

from __future__ import annotations

import numpy as np
import pytest

import apportion as ap
from apportion.ir.request.policy import Step
from apportion.planner.place.flexsp import FlexSp, feasible_degrees, grouping_problem
from apportion.planner.problem import Placement, Problem, Shards
from apportion.planner.recipe.recipes import find_recipe
from apportion.planner.recipe.registry import build
from apportion.planner.solvers.grouping import ilp

LENGTHS = np.rint(2000 * np.exp(1.2 * np.random.default_rng(0).standard_normal(24))).astype(int).tolist()


def problem(
    lengths: list[int] = LENGTHS,
    nodes: int = 2,
    per_node: int = 8,
    token_cap: int | None = None,
    **cluster: tuple[float, ...],
) -> Problem:
    batch = ap.Batch.from_lengths(lengths)
    policy = ap.Policy(find_recipe("flexsp"), token_cap=token_cap)
    return Problem(
        batch, ap.Cluster(nodes=nodes, ranks_per_node=per_node, **cluster), ap.Model(q_heads=8), policy
    )


def place(case: Problem, **parameters: int) -> Placement:
    axis = case.batch.starts
    shards = Shards(axis, np.arange(len(axis) - 1), np.ones(len(axis) - 1, np.int64), 1)
    return FlexSp(**parameters)(case, shards)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (2, 8), (3, 6), (5, 1), (1, 7)])
def test_groups_are_aligned_powers_of_two_and_small_ones_stay_in_a_node(nodes: int, per_node: int) -> None:
    case = problem(nodes=nodes, per_node=per_node)
    found = place(case)
    first, size = found.groups[:-1], np.diff(found.groups)
    assert found.groups[-1] == case.ranks
    assert (np.bitwise_count(size) == 1).all()
    assert (first % size == 0).all()
    assert (8 % size == 0).all()
    inside = size <= per_node
    assert (first // per_node == (first + size - 1) // per_node)[inside].all()


def test_every_group_holds_its_share_of_the_cap() -> None:
    case = problem()
    found = place(case, capacity=4500)
    used = np.bincount(found.home, case.batch.lengths, len(found.groups) - 1)
    assert (used <= 4500 * np.diff(found.groups)).all()


def test_the_cap_of_the_policy_is_obeyed_or_refused_with_numbers() -> None:
    longest = max(LENGTHS)
    cap = max(-(-longest // 8), int(1.3 * sum(LENGTHS) / 16))
    found = place(problem(token_cap=cap))
    used = np.bincount(found.home, LENGTHS, len(found.groups) - 1)
    assert (used <= cap * np.diff(found.groups)).all()
    with pytest.raises(
        ap.CapacityError, match=f"a sequence of {20 * cap} tokens: the largest group, 8 of 16 ranks"
    ):
        place(problem([20 * cap], token_cap=cap))


def test_one_document_of_the_whole_batch_takes_the_largest_group() -> None:
    found = place(problem([5000]))
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
    fullest = [
        float((np.bincount(found.home, LENGTHS, len(found.groups) - 1) / np.diff(found.groups)).max())
        for found in (place(case), place(case, linear=True))
    ]
    assert fullest[1] < fullest[0]


def test_the_steps_capacity_is_at_most_the_policys_cap() -> None:
    case = problem(token_cap=4500)
    assert [grouping_problem(case, capacity).cap for capacity in (None, 4000, 9000)] == [4500, 4000, 4500]


def test_degrees_divide_the_heads_and_the_node() -> None:
    assert feasible_degrees(problem(nodes=3, per_node=6)).tolist() == [1, 2, 8]


def test_groups_are_never_slower_than_the_greedy_mix() -> None:
    case = grouping_problem(problem())
    found = place(problem())
    column = np.log2(np.diff(found.groups)).astype(int)[found.home]
    time = np.bincount(found.home, case.times[np.arange(len(column)), column])
    assert time.max() <= ilp.greedy(case).termination.value * (1 + 1e-9)


def test_a_slow_rank_gets_one_of_the_quicker_groups() -> None:
    speeds = (1.0,) * 15 + (0.5,)
    case, found = problem(speeds=speeds), place(problem(speeds=speeds))
    weight = np.bincount(found.home, found.weight, len(found.groups) - 1) / np.diff(found.groups)
    same_size = np.diff(found.groups) == np.diff(found.groups)[-1]
    assert weight[-1] <= weight[same_size].max()
    assert found.bound <= (weight / np.minimum.reduceat(case.speeds, found.groups[:-1])).max()


def test_equal_requests_have_equal_plans() -> None:
    request = (ap.Batch.from_lengths(LENGTHS), ap.Cluster(nodes=1, ranks_per_node=8), ap.Model())
    assert ap.plan(*request, recipe="flexsp").id == ap.plan(*request, recipe="flexsp").id


@pytest.mark.parametrize("name", ["gap", "steps"])
def test_wrong_parameters_are_named(name: str) -> None:
    with pytest.raises(ap.ConfigError, match=rf"recipe\.place\.flexsp\.solver\.ilp\.{name} = -1: must be"):
        build(Step("place", "flexsp", {"solver": {"ilp": {name: -1}}}))
    with pytest.raises(ap.ConfigError, match=r"recipe\.place\.flexsp\.capacity = -1: must be"):
        build(Step("place", "flexsp", {"capacity": -1}))


def test_an_unknown_solver_is_named() -> None:
    with pytest.raises(ap.ConfigError, match="write one of ilp"):
        build(Step("place", "flexsp", {"solver": "nope"}))


def test_home_ranks_are_refused() -> None:
    batch = ap.Batch.from_sequences(
        [ap.Sequence(100, ap.masks.causal(), home_ranks=(1,)), ap.Sequence(50, ap.masks.causal())]
    )
    case = Problem(batch, ap.Cluster(nodes=1, ranks_per_node=8), ap.Model(), ap.Policy(find_recipe("flexsp")))
    with pytest.raises(ap.ConfigError, match=r"batch\.home_ranks"):
        place(case)
