"""Workload files and the batches drawn from them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion import Batch, CapacityError, ConfigError, Sequence, masks
from apportion.ir.request.workload import (
    lognormal_lengths,
    read_lengths,
    read_workload,
    sample,
    workload_from_data,
)
from tests.support.hostile import check_refusal, junk

DATA = Path(__file__).parent.parent / "data"
EMPTY_NODES = [[-1, 4], [0, 0], [1, 3], [1, 2], [-1, 0], [4, 1]]


@pytest.mark.parametrize(
    ("data", "lengths"),
    [
        ({"lengths": [7, 3]}, [7, 3]),
        ({"format": "[bytes,tokens]", "rows": [[100, 20], [9, 3]]}, [20, 3]),
        ({"format": "[words,bytes,est_tokens]", "rows": [[70, 100, 93]]}, [93]),
        ({"format": "[tokens_cl100k,bytes]", "rows": [[20, 100]]}, [20]),
        ({"pairs": [[5, 6], [1, 0]]}, [11, 1]),
        ({"turns": [[5, 6, 7], [2]]}, [18, 2]),
        ({"rows": [[5, [], 2]]}, [7]),
        ({"groups": [[5, [0, 0]]]}, [5]),
    ],
)
def test_plain_documents_are_drawn_from_lengths(data: dict, lengths: list[int]) -> None:
    workload = workload_from_data(data)
    assert workload.lengths.tolist() == lengths
    assert set(workload.masks) == {None}


@pytest.mark.parametrize(
    ("data", "length", "spec"),
    [
        ({"groups": [[5, [3, 0, 2]]]}, 10, masks.shared_question(5, [3, 2])),
        ({"trees": [{"nodes": [[-1, 4], [0, 2], [0, 3]]}]}, 9, masks.tree([[-1, 4], [0, 2], [0, 3]])),
        ({"trees": [{"nodes": EMPTY_NODES}]}, 10, masks.tree([[-1, 4], [0, 3], [0, 2], [-1, 1]])),
        ({"rows": [[79, [432], 96]]}, 607, masks.image_spans([[39, 471]])),
        ({"rows": [[4, [3, 2], 1]]}, 10, masks.image_spans([[2, 5], [5, 7]])),
    ],
)
def test_structured_samples_have_their_masks(data: dict, length: int, spec: masks.Mask) -> None:
    workload = workload_from_data(data)
    assert (workload.lengths.tolist(), workload.masks) == ([length], (spec,))


def test_image_rows_have_the_pairs_of_the_real_instance() -> None:
    with gzip.open(DATA / "mask_instances.jsonl.gz", "rt") as lines:
        instance = next(item for line in lines if (item := json.loads(line))["name"].startswith("multimodal"))
    workload = workload_from_data({"rows": instance["parts"]})
    batch = Batch.from_sequences(map(Sequence, workload.lengths.tolist(), workload.masks))
    assert (batch.tokens, batch.area("default")) == (instance["tokens"], instance["pairs"])


@pytest.mark.parametrize(
    ("data", "field", "hint"),
    [
        ({"documents": [3]}, "workload", "write one of lengths, rows, pairs, groups, trees, turns"),
        ({"lengths": [3], "pairs": [[1, 2]]}, "workload", "one key that holds samples"),
        ([3], "workload", "mapping"),
        ({"lengths": []}, "workload.lengths", "must not be empty"),
        ({"lengths": 7}, "workload.lengths", "list"),
        ({"lengths": [3, 0]}, "workload.lengths[1]", "[1,"),
        ({"rows": [[3, 4]]}, "workload.format", "tokens or est_tokens"),
        ({"rows": [[3, 4]], "format": "[bytes,words]"}, "workload.format", "tokens or est_tokens"),
        ({"rows": [[3, 4], [3]], "format": "[bytes,tokens]"}, "workload.rows[1]", "2 columns"),
        ({"rows": [[3, [4], 5], [3, 4]]}, "workload.rows[1]", "three columns"),
        ({"rows": [[3, [0], 5]]}, "workload.rows[0] images[0]", "[1,"),
        ({"pairs": [[0, 0]]}, "workload.pairs[0]", "[1,"),
        ({"pairs": [[5, -1]]}, "workload.pairs[0][1]", "[0,"),
        ({"groups": [[5]]}, "workload.groups[0]", "[prompt, [answers]]"),
        ({"groups": [[0, [1]]]}, "workload.groups[0] prompt", "[1,"),
        ({"trees": [{"nodes": [[1, 4], [-1, 2]]}]}, "workload.trees[0].nodes[0] parent", "[-1, -1]"),
        ({"trees": [[[-1, 4]]]}, "workload.trees[0]", "mapping"),
        ({"trees": [{}]}, "workload.trees[0].nodes", "list"),
    ],
)
def test_errors_of_workloads_name_the_field(data: Any, field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        workload_from_data(data)
    assert caught.value.field == field
    assert hint in str(caught.value)


def test_workloads_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "w.json").write_text('{"name": "x", "pairs": [[1, 2]]}')
    assert read_workload(tmp_path / "w.json").lengths.tolist() == [3]
    (tmp_path / "l.jsonl").write_text("8\n\n 12 \n")
    assert read_lengths(tmp_path / "l.jsonl").lengths.tolist() == [8, 12]
    (tmp_path / "l.jsonl").write_text("8\n1.5\n")
    with pytest.raises(ConfigError, match=r"l\.jsonl:2.*must be an integer"):
        read_lengths(tmp_path / "l.jsonl")


@pytest.mark.parametrize(
    ("name", "text", "column"),
    [
        ("l.txt", "3\n5\n", None),
        ("l.json", "[3, 5]", None),
        ("l.json", '[[7, 7, 7], {"input_ids": [1, 2, 3, 4, 5]}]', None),
        ("l.jsonl", '{"length": 3, "input_ids": [1]}\n{"input_ids": [1, 2, 3, 4, 5]}\n', None),
        ("l.jsonl", '{"n": 3}\n{"n": 5}\n', "n"),
        ("l.csv", "name,tokens\na,3\nb,5\n", "tokens"),
        ("l.csv", 'id,length\n1," 3 "\n2,5\n', None),
    ],
)
def test_lengths_are_read_from_formats(tmp_path: Path, name: str, text: str, column: str | None) -> None:
    (tmp_path / name).write_text(text)
    assert read_lengths(tmp_path / name, column).lengths.tolist() == [3, 5]


@pytest.mark.parametrize(
    ("name", "text", "column", "message"),
    [
        ("l.jsonl", '{"text": "a"}', None, "None: .*l.jsonl:1 has no length or input_ids, only text"),
        ("l.csv", "a,b\n1,2\n", "c", "column = 'c': .*l.csv:2 has no c, only a, b"),
        ("l.csv", "a\nx\n", "a", "l.csv:2 = 'x': must be an integer"),
        ("l.jsonl", "3", "n", "column = 'n': .*l.jsonl:1 is not a record; leave it out"),
        ("l.jsonl", "0", None, r"l.jsonl:1 = 0: must be in \[1, "),
        ("l.json", '{"lengths": [3]}', None, "must be a list"),
        ("l.json", "[]", None, "must not be empty"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, name: str, text: str, column: str | None, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_lengths(tmp_path / name, column)


def test_lengths_are_read_from_arrow_columns(tmp_path: Path) -> None:
    """Parquet files, and folders written by Hugging Face's `Dataset.save_to_disk`."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"input_ids": [[1, 2, 3], [1, 2, 3, 4, 5]], "text": ["a", "b"]})
    (tmp_path / "split").mkdir()
    parquet.write_table(table, tmp_path / "split" / "l.parquet")
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text('{"_data_files": [{"filename": "d.arrow"}], "_indices_files": null}')
    with pyarrow.ipc.new_stream(str(saved / "d.arrow"), table.schema) as stream:
        stream.write_table(table)
    for path in (tmp_path / "split" / "l.parquet", tmp_path / "split", saved):
        assert read_lengths(path).lengths.tolist() == [3, 5]
    with pytest.raises(ConfigError, match="has no tokens, only input_ids, text"):
        read_lengths(saved, "tokens")
    with pytest.raises(ConfigError, match="text"):
        read_lengths(saved, "text")
    (saved / "state.json").write_text('{"_data_files": [], "_indices_files": [{"filename": "i.arrow"}]}')
    with pytest.raises(ConfigError, match="flatten_indices"):
        read_lengths(saved)


def test_overlong_samples_are_dropped_cut_or_refused() -> None:
    workload = workload_from_data({"lengths": [300, 70, 5]})
    assert workload.drop_overlong(100, "drop").lengths.tolist() == [70, 5]
    assert workload.drop_overlong(100, "cut").lengths.tolist() == [100, 70, 5]
    assert workload.drop_overlong(300, "refuse").lengths.tolist() == [300, 70, 5]
    with pytest.raises(CapacityError, match="sample 0 has 300 tokens; the limit is 299"):
        workload.drop_overlong(299, "refuse")
    batch, skipped = sample(workload, 1000, 100, 0, "cut")
    assert (batch.tokens, skipped, int(batch.lengths.max())) == (1000, 0, 100)
    with pytest.raises(ConfigError, match="cannot be cut"):
        workload_from_data({"groups": [[300, [5]]]}).cut_overlong(100, "cut")


def test_documents_fill_the_tokens_exactly_and_the_last_one_is_cut() -> None:
    workload = workload_from_data({"lengths": [300, 70, 5]})
    batch, skipped = sample(workload, 10_000, 10_000, seed=3)
    draws = np.random.Generator(np.random.PCG64(3)).integers(0, 3, 1024)
    assert (batch.tokens, skipped) == (10_000, 0)
    lengths = workload.lengths[draws[: len(batch.lengths)]]
    assert batch.lengths[:-1].tolist() == lengths[:-1].tolist()
    assert 0 < batch.lengths[-1] <= lengths[-1]
    assert sample(workload, 10_000, 10_000, seed=3)[0] == batch
    assert sample(workload, 10_000, 10_000, seed=4)[0] != batch


def test_structured_samples_are_never_cut() -> None:
    workload = workload_from_data({"groups": [[50, [20, 30]], [10, [40]]]})
    batch, _ = sample(workload, 1000, 1000, seed=0)
    assert set(batch.lengths.tolist()) <= {50, 100}
    assert 900 < batch.tokens <= 1000


def test_samples_larger_than_the_cluster_are_skipped_and_counted() -> None:
    workload = workload_from_data({"lengths": [5000, 10]})
    batch, skipped = sample(workload, 200, 200, seed=0)
    assert batch.lengths.tolist() == [10] * 20
    draws = np.random.Generator(np.random.PCG64(0)).integers(0, 2, 1024)
    last = np.flatnonzero(np.cumsum(draws) == 20)[0]
    assert skipped == np.sum(draws[: last + 1] == 0)


def test_a_batch_may_need_several_draws() -> None:
    batch, _ = sample(workload_from_data({"lengths": [1, 3]}), 5000, 5000, seed=0)
    assert batch.tokens == 5000


def test_a_batch_that_no_sample_fits_is_refused() -> None:
    with pytest.raises(CapacityError, match="shortest sample has 50 tokens"):
        sample(workload_from_data({"lengths": [50, 60]}), 40, 40, seed=0)
    with pytest.raises(CapacityError, match="cannot be cut"):
        sample(workload_from_data({"groups": [[30, [20]]]}), 40, 50, seed=0)


def test_lognormal_lengths_fill_the_tokens_and_have_their_median() -> None:
    lengths = lognormal_lengths(seed=0, tokens=2**24)
    assert lengths.sum() == 2**24
    assert 1500 < np.median(lengths) < 2700
    assert lengths.max() <= 524_288
    assert lognormal_lengths(0, 2**18).tolist() == [*lengths[:48], lognormal_lengths(0, 2**18)[-1]]
    assert len(lognormal_lengths(1, 1)) == 1


rows = st.lists(st.lists(st.integers(-1, 9) | junk, max_size=3), max_size=3) | junk


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.sampled_from(["lengths", "rows", "pairs", "groups", "trees", "turns"]), rows, junk)
def test_hostile_data_raises_only_typed_errors(key: str, samples: Any, layout: Any) -> None:
    check_refusal(lambda: workload_from_data({key: samples, "format": layout}))
