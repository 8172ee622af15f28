"""Packing in benchmarks/paper_distca.py; benchmark tables on their pages are current."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import comparison, congestion, papers
from benchmarks.paper_distca import deal_sequences, pack_documents
from benchmarks.tables import PAGES, write_tables


@pytest.mark.parametrize("seed", [0, 1])
def test_sequences_are_full_and_cut_documents(seed: int) -> None:
    sequences = pack_documents(4, 131072, seed)
    assert [sum(one) for one in sequences] == [131072] * 4
    assert all(length > 0 for one in sequences for length in one)


def test_groups_get_the_same_number_of_sequences_and_share_the_heaviest() -> None:
    sequences = [[8], [4, 4], [7, 1], [2] * 4]
    first, second, third, fourth = deal_sequences(sequences, 2)
    groups = [first, third], [second, fourth]
    assert sorted(map(len, groups)) == [2, 2]
    assert [[8], [2] * 4] in groups
    assert sorted([first, second, third, fourth]) == sorted(sequences)


@pytest.mark.parametrize(
    ("benchmark", "prefix"), [(comparison, ""), (papers, "paper-"), (congestion, "congestion-")]
)
def test_pages_have_the_tables_of_the_rows(benchmark: ModuleType, prefix: str) -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for name, row in json.loads(benchmark.RESULTS.read_text()).items():
        assert f"<!-- table: {prefix}{name} -->\n{benchmark.table(row)}\n<!-- end -->" in pages, name


def test_tables_are_written_between_their_markers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: a -->\nold\n<!-- end -->\nafter <!-- table: b -->\n<!-- end -->\n")
    write_tables({"a": "new", "c": "not there"}, [page])
    assert page.read_text() == (
        "before\n<!-- table: a -->\nnew\n<!-- end -->\nafter <!-- table: b -->\n<!-- end -->\n"
    )
