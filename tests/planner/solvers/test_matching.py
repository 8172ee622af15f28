"""Matchings: every slot is a matching, and there are exactly as many slots as the largest degree."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies as st

from apportion.planner.solvers.colouring.matching import matchings, max_degree


def check(src: np.ndarray, dst: np.ndarray, ranks: int) -> None:
    slot, degree = matchings(src, dst, ranks), max_degree(src, dst, ranks)
    assert len(set(zip(src.tolist(), slot.tolist(), strict=True))) == len(src)
    assert len(set(zip(dst.tolist(), slot.tolist(), strict=True))) == len(dst)
    assert sorted(set(slot.tolist())) == list(range(degree))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=60)
    )
)
def test_any_multigraph_is_coloured_with_its_largest_degree(edges: list[tuple[int, int]]) -> None:
    src = np.array([a for a, _ in edges], np.int64)
    dst = np.array([b for _, b in edges], np.int64)
    check(src, dst, 6)


def test_a_regular_graph_is_coloured_without_slack() -> None:
    """Every vertex has the largest degree, so colours run out and paths must be swapped."""
    rng = np.random.default_rng(1)
    ranks, degree = 40, 30
    src = np.tile(np.arange(ranks), degree)
    dst = np.concatenate([rng.permutation(ranks) for _ in range(degree)])
    order = rng.permutation(len(src))
    check(src[order], dst[order], ranks)


def test_a_graph_without_edges_has_no_matchings() -> None:
    none = np.zeros(0, np.int64)
    assert len(matchings(none, none, 4)) == 0
    assert max_degree(none, none, 4) == 0
