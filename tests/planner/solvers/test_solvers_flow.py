"""Flow: sums of rows are exact, the closed form agrees with the linear program, and neither side is forgotten."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from apportion.planner.solvers.contracts import Transport, TransportProblem, TwoLevelCost
from apportion.planner.solvers.status import Budget, Status
from apportion.planner.solvers.transport import flow_value, solve


def net(problem: TransportProblem, flows: Transport) -> list[int]:
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


@pytest.mark.parametrize("objective", ["sum", "minmax", "senders"])
@pytest.mark.parametrize("seed", range(150))
def test_closed_form_and_linear_program_agree(seed: int, objective: str) -> None:
    problem = drawn(seed, objective)
    other = TransportProblem(problem.surplus, problem.matrix, objective)
    closed, program = solve(problem, Budget()), solve(other, Budget())
    for flows in (closed, program):
        assert net(problem, flows) == problem.surplus.tolist()
        assert (flows.rows > 0).all()
    value, bound = closed.termination.value, program.termination.bound
    # the program splits rows, which for the worst rank may save up to the price of moving one of them afar
    step = 0.0 if objective == "sum" else problem.cost.inter - problem.cost.intra  # type: ignore[union-attr]
    assert bound - 1e-6 <= value <= bound + step + 1e-6


def test_rows_stay_in_their_node_and_the_cheap_part_levels_the_senders() -> None:
    # the first node's receiver takes 6 rows from inside: of senders with 9 and 5, most from the one that pays more
    problem = TransportProblem(np.array([9, 5, -6, 0, -8, 0]), TwoLevelCost(3, 1.0, 3.0), "minmax")
    flows = solve(problem, Budget())
    sent = {(s, d): r for s, d, r in zip(flows.src, flows.dst, flows.rows, strict=True)}
    assert sent == {(0, 2): 6, (0, 4): 3, (1, 4): 5}
    assert flows.termination.status is Status.OPTIMAL
    assert flows.termination.value == 24.0  # the receiver afar: 8 rows at 3


def test_both_sides_are_priced() -> None:
    """The receivers are the ones who pay most here; a price for senders alone would call it 10."""
    problem = TransportProblem(np.array([10, 10, 10, -30]), TwoLevelCost(1, 1.0, 1.0), "minmax")
    assert solve(problem, Budget()).termination.value == 30.0


@pytest.mark.parametrize("seed", range(30))
def test_the_best_for_both_sides_is_also_the_best_for_senders(seed: int) -> None:
    """So formula (2), which prices senders only, gives up nothing where it prices receivers too."""
    problem = drawn(seed, "senders")
    both = solve(replace(problem, objective="minmax"), Budget())
    printed = solve(problem, Budget())
    assert flow_value(problem, both.src, both.dst, both.rows) == pytest.approx(printed.termination.value)
    value = flow_value(replace(problem, objective="minmax"), printed.src, printed.dst, printed.rows)
    assert value >= both.termination.value - 1e-9


def test_a_matrix_is_rounded_with_exact_sums() -> None:
    draw = np.random.default_rng(5)
    surplus = draw.integers(-1000, 1001, 60)
    surplus[0] -= surplus.sum()
    problem = TransportProblem(surplus, draw.uniform(1, 9, (60, 60)), "minmax")
    flows = solve(problem, Budget())
    assert net(problem, flows) == surplus.tolist()
    assert flows.termination.gap < 1.01


def test_huge_rows_stay_exact() -> None:
    surplus = np.array([2**40 + 1, -(2**39), -(2**39) - 1, 0])
    for cost in (TwoLevelCost(2, 1.0, 3.0), np.random.default_rng(0).uniform(1, 2, (4, 4))):
        problem = TransportProblem(surplus, cost, "minmax")
        assert net(problem, solve(problem, Budget())) == surplus.tolist()


def test_nothing_to_move() -> None:
    for cost in (TwoLevelCost(2, 1.0, 3.0), np.ones((4, 4))):
        flows = solve(TransportProblem(np.zeros(4, np.int64), cost), Budget())
        assert len(flows.rows) == 0
        assert flows.termination.value == flows.termination.bound == 0.0
