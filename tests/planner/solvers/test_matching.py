"""Matchings: every slot is a matching, and there are exactly as many slots as the largest degree."""

from __future__ import annotations

import numpy as np

from apportion.planner.solvers.colouring.matching import matchings, max_degree
from apportion.planner.solvers.contracts import Colouring, ColouringProblem
from apportion.planner.solvers.status import Status, Termination
from apportion.testing import PROBLEMS


def test_a_regular_graph_is_coloured_without_slack() -> None:
    """Every vertex has the largest degree, so colours run out and paths must be swapped."""
    rng = np.random.default_rng(1)
    ranks, degree = 40, 30
    src = np.tile(np.arange(ranks), degree)
    dst = np.concatenate([rng.permutation(ranks) for _ in range(degree)])
    order = rng.permutation(len(src))
    problem = ColouringProblem(src[order], dst[order], ranks)
    slot, colours = matchings(problem.src, problem.dst, ranks), PROBLEMS["colouring"]
    found = Colouring(slot, Termination(Status.OPTIMAL, degree, degree))
    assert list(colours.faults(problem, found)) == []
    assert sorted(set(slot.tolist())) == list(range(degree))


def test_a_graph_without_edges_has_no_matchings() -> None:
    none = np.zeros(0, np.int64)
    assert len(matchings(none, none, 4)) == 0
    assert max_degree(none, none, 4) == 0
