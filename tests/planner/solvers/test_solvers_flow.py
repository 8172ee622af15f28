"""Flow: sums of rows are exact, and both sides are priced. `apportion.testing` checks optimality."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from apportion.planner.solvers.contracts import Transport, TransportProblem, TwoLevelCost
from apportion.planner.solvers.status import Budget, Status
from apportion.planner.solvers.transport import flow_value, solve


def net_rows(problem: TransportProblem, flows: Transport) -> list[int]:
    moved = np.zeros(len(problem.surplus), np.int64)
    np.add.at(moved, flows.src, flows.rows)
    np.subtract.at(moved, flows.dst, flows.rows)
    return moved.tolist()


def drawn(seed: int, objective: str) -> TransportProblem:
    draw = np.random.default_rng(seed)
    per_node = int(draw.integers(1, 6))
    surplus = draw.integers(-40, 41, per_node * int(draw.integers(1, 5)))
    surplus[0] -= surplus.sum()
    return TransportProblem(surplus, TwoLevelCost(per_node, 1.0, float(draw.choice([1, 2.5, 9]))), objective)


def test_rows_stay_in_their_node_and_the_cheap_part_levels_the_senders() -> None:
    # the first node's receiver takes 6 rows from its node: of senders with 9 and 5, all from the one that pays more
    problem = TransportProblem(np.array([9, 5, -6, 0, -8, 0]), TwoLevelCost(3, 1.0, 3.0), "minmax")
    flows = solve(problem, Budget())
    sent = {(s, d): r for s, d, r in zip(flows.src, flows.dst, flows.rows, strict=True)}
    assert sent == {(0, 2): 6, (0, 4): 3, (1, 4): 5}
    assert flows.termination.status is Status.OPTIMAL
    assert flows.termination.value == 24.0  # the receiver on another node: 8 rows at 3


def test_both_sides_are_priced() -> None:
    """The receivers pay the most here; pricing only senders would give 10."""
    problem = TransportProblem(np.array([10, 10, 10, -30]), TwoLevelCost(1, 1.0, 1.0), "minmax")
    assert solve(problem, Budget()).termination.value == 30.0


@pytest.mark.parametrize("seed", range(30))
def test_the_best_for_both_sides_is_also_the_best_for_senders(seed: int) -> None:
    """So formula (2), which prices only senders, loses nothing compared with pricing receivers too."""
    problem = drawn(seed, "senders")
    both = solve(replace(problem, objective="minmax"), Budget())
    printed = solve(problem, Budget())
    assert flow_value(problem, both.src, both.dst, both.rows) == pytest.approx(printed.termination.value)
    value = flow_value(replace(problem, objective="minmax"), printed.src, printed.dst, printed.rows)
    assert value >= both.termination.value - 1e-9


def test_huge_rows_stay_exact() -> None:
    surplus = np.array([2**40 + 1, -(2**39), -(2**39) - 1, 0])
    problem = TransportProblem(surplus, TwoLevelCost(2, 1.0, 3.0), "minmax")
    assert net_rows(problem, solve(problem, Budget())) == surplus.tolist()


def test_even_rows_need_no_moves() -> None:
    flows = solve(TransportProblem(np.zeros(4, np.int64), TwoLevelCost(2, 1.0, 3.0)), Budget())
    assert len(flows.rows) == 0
    assert flows.termination.value == flows.termination.bound == 0.0
