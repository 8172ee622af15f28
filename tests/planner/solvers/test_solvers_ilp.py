"""FlexSP's problem: never slower than the greedy mix, a bound below the optimum, and an oracle for LPT."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from apportion.ir.errors import CapacityError
from apportion.planner.solvers.contracts import GroupingProblem
from apportion.planner.solvers.grouping import ilp, mixing, programs as mixed_programs
from apportion.planner.solvers.highs import SolverRun
from apportion.planner.solvers.status import Budget, Limit, Status
from apportion.testing import PROBLEMS


def drawn(seed: int, sequences: int, ranks: int, room: float = 2.0) -> GroupingProblem:
    """Quadratic work, an all-to-all that costs more in larger groups, degrees that are powers of two."""
    draw = np.random.default_rng(seed)
    degrees = 2 ** np.arange(int(np.log2(ranks)) + 1)
    sizes = np.rint(1000 * np.exp(1.2 * draw.standard_normal(sequences))).astype(np.int64)
    times = sizes[:, None] ** 2 / 1e3 / degrees + sizes[:, None] / degrees * 0.2 * (degrees - 1) / degrees
    cap = int(max(room * sizes.sum() / ranks, sizes.max() / degrees[-1] + 1))
    return GroupingProblem(times, sizes, degrees, ranks, cap)


@pytest.mark.parametrize("seed", range(12))
def test_small_problems_are_solved_to_proven_optimality(seed: int) -> None:
    problem = PROBLEMS["grouping"].random_problem(np.random.default_rng(100 + seed))
    found = ilp.solve(problem, Budget())
    best = PROBLEMS["grouping"].optimum(problem)
    assert found.termination.status is Status.OPTIMAL
    assert found.termination.value == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("seed", range(6))
def test_the_value_is_between_its_bound_and_the_greedy_mix(seed: int) -> None:
    problem = drawn(seed, 24, 16)
    start, found = ilp.greedy(problem), ilp.solve(problem, Budget(gap=0.01, steps=20))
    assert found.termination.bound <= found.termination.value <= start.termination.value
    assert start.termination.bound <= found.termination.bound
    assert not list(PROBLEMS["grouping"].faults(problem, found))
    if found.termination.limit is Limit.GAP:
        assert found.termination.gap <= 1.01 + 1e-5


def test_degrees_need_not_be_powers_of_two() -> None:
    times = np.array([[9.0, 3.0, 1.8], [9.0, 3.0, 1.8], [1.0, 0.4, 0.2]])
    problem = GroupingProblem(times, np.ones(3, np.int64), np.array([1, 3, 5]), 7, 9)
    found = ilp.solve(problem, Budget())
    assert found.termination.status is Status.OPTIMAL
    assert sorted(found.degree.tolist()) == [1, 3, 3]
    assert found.termination.value == 3.0


def test_groups_come_largest_first_and_none_is_empty() -> None:
    found = ilp.solve(drawn(3, 24, 16), Budget(gap=0.05))
    assert all(a >= b for a, b in pairwise(found.degree.tolist()))
    assert set(found.group.tolist()) == set(range(len(found.degree)))


@pytest.mark.parametrize(
    ("sizes", "fault"),
    [
        ([10, 41], "a sequence of 41 tokens: the largest group, 4 of 5 ranks at 10 tokens each, holds 40"),
        ([20, 20, 11], "51 tokens: 5 ranks at 10 tokens each hold 50"),
    ],
)
def test_sequences_too_large_for_the_cluster_are_refused_at_once(sizes: list[int], fault: str) -> None:
    times = np.ones((len(sizes), 4))
    problem = GroupingProblem(times, np.array(sizes), np.array([1, 2, 4, 8]), 5, 10)
    for solve in (lambda: ilp.solve(problem, Budget()), lambda: ilp.greedy(problem)):
        with pytest.raises(CapacityError, match=fault):
            solve()


def test_a_sequence_without_an_allowed_group_is_infeasible() -> None:
    times = np.array([[np.inf, np.inf], [1.0, 1.0]])
    problem = GroupingProblem(times, np.array([1, 1]), np.array([1, 2]), 4, 9)
    assert ilp.solve(problem, Budget()).termination.status is Status.INFEASIBLE


def test_sequences_that_no_packing_holds_are_infeasible() -> None:
    """Three sequences of 6 tokens on two ranks of 10: enough in total, but no two fit together."""
    problem = GroupingProblem(np.ones((3, 1)), np.array([6, 6, 6]), np.array([1]), 2, 10)
    assert ilp.solve(problem, Budget()).termination.status is Status.INFEASIBLE


def test_thousands_of_sequences_are_solved_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of programs does not grow with the sequences, and few programs are solved."""
    programs, spreads = [], []
    solve_model, spread = mixed_programs.solve_model, mixing.spread  # type: ignore[attr-defined]

    def counted(model: Any, *args: float, **options: float) -> SolverRun:
        programs.append(model.numVariables())
        return solve_model(model, *args, **options)

    monkeypatch.setattr(mixed_programs, "solve_model", counted)
    monkeypatch.setattr(mixing, "spread", lambda *args: spreads.append(1) or spread(*args))
    problem = drawn(4, 2000, 128)
    found = ilp.solve(problem, Budget(gap=0.001, steps=5))
    columns = len(problem.degrees)
    assert 1 <= len(programs) <= 16 + 6
    assert max(programs) <= (mixed_programs._MOST_KINDS + 2 * mixed_programs._MOST_HEAVY + 2) * columns
    assert len(spreads) <= 20 * (len(programs) + 2)
    assert found.termination.bound <= found.termination.value <= ilp.greedy(problem).termination.value
    assert not list(PROBLEMS["grouping"].faults(problem, found))


@pytest.mark.parametrize("seed", range(4))
def test_kinds_of_sequences_never_refute_a_feasible_time(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = drawn(seed, 60, 16)
    start = ilp.greedy(problem).termination
    best = ilp.solve(problem, Budget(gap=0.02, steps=5)).termination.value
    for kinds in (1, 4, 12, 40):
        monkeypatch.setattr(mixed_programs, "_MOST_KINDS", kinds)
        assert not mixed_programs.mix_for(problem, best * (1 + 1e-9), 20).refuted
    assert mixed_programs.mix_for(problem, 0.9 * start.bound, 20).refuted


def test_refuted_times_raise_the_bound() -> None:
    problem = drawn(2, 24, 16)
    assert ilp.solve(problem, Budget(steps=20)).termination.bound > ilp.greedy(problem).termination.bound
