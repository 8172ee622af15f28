"""The settings of benchmarks/paper_distca.py: sequences are full, and every group gets as many, evenly. And the page of
benchmarks/congestion.py."""

import json

import pytest

from benchmarks import congestion
from benchmarks.paper_distca import dealt, packed


@pytest.mark.parametrize("seed", [0, 1])
def test_sequences_are_packed_full_and_cut_documents(seed: int) -> None:
    sequences = packed(4, 131072, seed)
    assert [sum(one) for one in sequences] == [131072] * 4
    assert all(length > 0 for one in sequences for length in one)


def test_groups_get_as_many_sequences_and_the_heaviest_apart() -> None:
    sequences = [[8], [4, 4], [7, 1], [2] * 4]
    first, second, third, fourth = dealt(sequences, 2)
    groups = [first, third], [second, fourth]
    assert sorted(map(len, groups)) == [2, 2]
    assert [[8], [2] * 4] in groups
    assert sorted([first, second, third, fourth]) == sorted(sequences)


def test_what_congestion_explains_is_on_the_page() -> None:
    page = congestion.PAGE.read_text(encoding="utf-8")
    measured = json.loads(congestion.RESULTS.read_text())["papers"]
    assert [one["name"] for one in measured] == [one.name for one in congestion.PAPERS]
    assert all(congestion.table(one) in page for one in measured)
