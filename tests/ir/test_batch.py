"""Batches: the token axis, kinds, positions and labels, plain data, and real mask instances."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion import Batch, ConfigError, Sequence, UnknownNameError
from apportion.ir.masks import bands as algebra, specs as masks
from apportion.ir.masks.bands import INF
from apportion.ir.masks.structures import Tree
from tests.support.hostile import check_refusal, junk

DATA = Path(__file__).parent.parent / "data"
property_test = settings(max_examples=60, derandomize=True, deadline=None, database=None)


def instances() -> list[dict]:
    with gzip.open(DATA / "mask_instances.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


INSTANCES = instances()


# ---- the token axis


def test_several_kinds_share_the_sequences() -> None:
    batch = Batch.from_lengths([4, 2], {"global": masks.causal(), "local": masks.sliding_window(2)})
    assert batch.kinds == ("global", "local")
    assert (batch.area("global"), batch.area("local")) == (13, 10)
    with pytest.raises(UnknownNameError, match="global, local"):
        batch.bands("lokal2")


def test_sequences_with_their_own_masks() -> None:
    question, own = masks.shared_question(2, [2, 1]), {"positions": [7, 9], "labels": [-1, 0]}
    sequences = [Sequence(5, question), Sequence(3), Sequence(5, question, home_ranks=(1, 0))]
    batch = Batch.from_sequences([*sequences, Sequence(2, masks.full(), **own)])
    assert batch.home_ranks == {2: (1, 0)}
    assert batch.bands("default")[4:, 0].tolist() == [8, 12, 12, 13]
    assert batch.positions().tolist() == [0, 1, 2, 3, 2, 0, 1, 2, 0, 1, 2, 3, 2, 7, 9]
    assert batch.labels().tolist() == [1, -1, 3, -1, -1, 6, 7, -1, 9, -1, 11, -1, -1, -1, 13]
    assert batch.position_breaks().tolist() == [0, 4, 5, 8, 12, 13, 14]


def test_positions_come_from_the_kind_with_structure() -> None:
    pack = masks.documents([2, 3])
    batch = Batch.from_lengths([5], {"local": masks.sliding_window(2), "global": pack})
    assert batch.positions().tolist() == [0, 1, 0, 1, 2]
    assert batch.labels().tolist() == [1, -1, 3, 4, -1]
    both = {"local": masks.documents([2, 3], masks.sliding_window(2)), "global": pack}
    assert Batch.from_lengths([5], both).positions().tolist() == [0, 1, 0, 1, 2]
    with pytest.raises(ConfigError, match="disagree on positions"):
        Batch.from_lengths([5], {"local": masks.documents([3, 2]), "global": pack})


def test_kinds_may_disagree_if_a_sequence_has_its_own_positions_and_labels() -> None:
    both = {"local": masks.documents([3, 2]), "global": masks.shared_question(2, [1, 2])}
    own = {"positions": [0, 1, 2, 3, 4], "labels": [1, 2, 3, 4, -1]}
    batch = Batch.from_sequences([Sequence(5, both, **own), Sequence(3, dict.fromkeys(both, masks.causal()))])
    assert batch.positions().tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.labels().tolist() == [1, 2, 3, 4, -1, 6, 7, -1]
    assert Batch.from_data(batch.to_data()) == batch
    for one, other in (("positions", "labels"), ("labels", "positions")):
        with pytest.raises(ConfigError, match=f"disagree on {other}.*give the sequence its own {other}"):
            Batch.from_sequences([Sequence(5, both, **{one: own[one]})])


def test_from_cu_seqlens_and_slices() -> None:
    assert Batch.from_cu_seqlens(np.array([0, 3, 8], np.int32)) == Batch.from_lengths([3, 5])
    batch = Batch.from_slices(6, [(0, 4, 0, 4, 1), (4, 6, 0, 4, 0)])
    assert batch.area("default") == 10 + 8
    with pytest.raises(ConfigError, match=r"slices\[1\].*shares"):
        Batch.from_slices(6, [(0, 4, 0, 4, 1), (2, 6, 0, 4, 0)])


def test_slice_types_have_names() -> None:
    for number, name in enumerate(algebra.SLICE_TYPES):
        batch = Batch.from_slices(6, [(0, 4, 1, 6, name), [4, 6, 0, 4, 0]])
        assert batch == Batch.from_slices(6, [[0, 4, 1, 6, number], (4, 6, 0, 4, 0)])
        assert Batch.from_data(batch.to_data()) == batch
    for wrong in ("causal", 4, -1):
        with pytest.raises(UnknownNameError, match=r"slices\[1\] type.*FULL \(0\), CAUSAL \(1\)") as caught:
            Batch.from_slices(6, [(0, 4, 0, 4, 1), (4, 6, 0, 4, wrong)])
        assert caught.value.value == wrong
        with pytest.raises(UnknownNameError, match="BICAUSAL"):
            algebra.from_slices([(0, 4, 0, 4, wrong)])


def test_a_batch_is_its_slices() -> None:
    windows = {"local": masks.sliding_window(3, 1), "global": masks.sink_window(2, 4)}
    batch = Batch.from_lengths([9, 1, 14], windows)
    for kind in batch.kinds:
        slices = batch.to_slices(kind)
        back = Batch.from_slices(batch.tokens, slices)
        assert back.area("default") == batch.area(kind)
        shape = (batch.tokens, batch.tokens)
        ours, theirs = back.bands("default"), batch.bands(kind)
        assert np.array_equal(algebra.dense(ours, *shape), algebra.dense(theirs, *shape))
        assert all(type(x) is int for piece in slices for x in piece)
    with pytest.raises(UnknownNameError, match="did you mean local"):
        batch.to_slices("locel")


specs = st.sampled_from(
    [
        masks.causal(),
        masks.sliding_window(3, 1),
        masks.chunked(2),
        masks.shared_question(2, [1, 3]),
        masks.tree([[-1, 1], [0, 2], [1, 1], [0, 2]]),
        masks.documents([4, 2], masks.image_spans([[0, 2]])),
        masks.slices([[0, 6, 0, 2, 2]]),
    ]
)


@property_test
@given(st.lists(st.tuples(specs, specs), min_size=1, max_size=5))
def test_a_batch_is_its_sequences_end_to_end(pairs: list[tuple[Any, Any]]) -> None:
    batch = Batch.from_sequences([Sequence(6, spec) for spec, _ in pairs])
    spec_of = [spec for spec, _ in pairs]
    table = batch.bands("default")
    expected = np.concatenate([algebra.shift(spec.bands(6), 6 * i, 6 * i) for i, spec in enumerate(spec_of)])
    assert sorted(map(tuple, table)) == sorted(map(tuple, expected))
    assert table[:, [0, 2]].tolist() == sorted(table[:, [0, 2]].tolist())
    assert (batch.tokens, batch.starts.tolist()) == (6 * len(pairs), [6 * i for i in range(len(pairs) + 1)])
    assert batch.positions().tolist() == np.concatenate([spec.positions(6) for spec in spec_of]).tolist()
    labels = [np.where((own := spec.labels(6)) < 0, -1, own + 6 * i) for i, spec in enumerate(spec_of)]
    assert batch.labels().tolist() == np.concatenate(labels).tolist()


@property_test
@given(
    st.lists(st.tuples(specs, st.booleans()), min_size=1, max_size=5), st.integers(0, 30), st.integers(0, 30)
)
def test_labels_of_a_range_match_all_labels(pairs: list[tuple[Any, bool]], one: int, other: int) -> None:
    own = [2, -1, 0, -1, 5, -1]
    batch = Batch.from_sequences([Sequence(6, spec, labels=own if has else None) for spec, has in pairs])
    first, stop = sorted((min(one, batch.tokens), min(other, batch.tokens)))
    labels = batch.labels()
    assert batch.labels(first, stop).tolist() == labels[first:stop].tolist()
    assert batch.labelled_tokens == (labels >= 0).sum()
    for i, (_, has) in enumerate(pairs):
        if has:
            assert labels[6 * i : 6 * i + 6].tolist() == [-1 if at < 0 else at + 6 * i for at in own]


@property_test
@given(st.lists(specs, min_size=1, max_size=5), st.booleans())
def test_position_breaks_are_where_positions_do_not_continue(mask_specs: list[Any], own: bool) -> None:
    positions = [5, 6, 7, 1, 2, 2] if own else None
    batch = Batch.from_sequences([Sequence(6, spec, positions=positions) for spec in mask_specs])
    dense, breaks = batch.positions(), batch.position_breaks()
    needed = {0, *(np.flatnonzero(np.diff(dense) != 1) + 1).tolist(), *range(0, batch.tokens, 6)}
    assert breaks.tolist() == sorted(needed)
    assert batch.position_at(np.arange(batch.tokens)).tolist() == dense.tolist()


@property_test
@given(st.lists(st.tuples(specs, specs), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_batches_round_trip_through_data(pairs: list[tuple[Any, Any]], several: bool, own: bool) -> None:
    labels, sequences = [-1, 0, 1, 2, 3, 4] if own else None, []
    for i, (one, _) in enumerate(pairs):
        mask, home_ranks = (
            {"a": one, "b": masks.causal()} if several else one,
            (i, 9) if own and i % 2 else None,
        )
        sequences.append(Sequence(6, mask, home_ranks=home_ranks, labels=labels))
    batch = Batch.from_sequences(sequences)
    data = batch.to_data()
    again = Batch.from_data(json.loads(json.dumps(data)))
    assert again == batch
    assert json.dumps(again.to_data()) == json.dumps(data)
    assert again.labels().tolist() == batch.labels().tolist()
    assert hash(again) == hash(batch)


def test_data_may_list_lengths_or_sequences() -> None:
    data = {"sequences": [{"length": 8, "mask": {"causal": {}}}, {"length": 4}]}
    assert Batch.from_data(data) == Batch.from_lengths([8, 4])
    assert Batch.from_data(data).to_data() == {"lengths": [8, 4], "mask": {"causal": {}}}
    kinds = {"lengths": [8], "mask": {"full": {"causal": None}, "local": {"sliding_window": {"window": 2}}}}
    assert Batch.from_data(kinds).kinds == ("full", "local")
    homes = {"lengths": [8, 4], "mask": {"causal": {}}, "home_ranks": [[3], None]}
    assert Batch.from_data(homes).to_data() == homes


def test_batches_are_read_from_files(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text('{"lengths": [8, 4]}')
    (tmp_path / "b.yaml").write_text("sequences:\n- {length: 8, mask: {causal: }}\n- length: 4\n")
    assert Batch.load(tmp_path / "b.json") == Batch.load(tmp_path / "b.yaml") == Batch.from_lengths([8, 4])


# ---- real instances


@pytest.mark.parametrize("instance", INSTANCES, ids=[item["name"] for item in INSTANCES])
def test_real_mask_instances_have_their_pairs(instance: dict) -> None:
    batch = Batch.from_slices(instance["tokens"], instance["slices"])
    assert batch.area("default") == instance["pairs"]
    assert Batch.from_data(batch.to_data()) == batch


DOCUMENTS = {
    "packed_causal_documents": masks.causal(),
    "document_sliding_window_4096": masks.sliding_window(4096),
    "document_sliding_window_1024": masks.sliding_window(1024),
    "gpt_oss_window_128": masks.sliding_window(128),
    "lambda_64_4096": masks.sink_window(64, 4096),
    "causal_blockwise_256_2": masks.causal_blockwise(256, 2),
    "chunked_8192": masks.chunked(8192),
}
SPEC_OF = {
    **{name: lambda parts, mask=mask: [Sequence(n, mask) for n in parts] for name, mask in DOCUMENTS.items()},
    "shared_question": lambda parts: [Sequence(p + sum(a), masks.shared_question(p, a)) for p, a in parts],
    "prefix_lm": lambda parts: [Sequence(n, masks.prefix_lm(p)) for p, n in parts],
    "causal": lambda parts: [Sequence(parts)],
}


@pytest.mark.parametrize(
    "instance", [i for i in INSTANCES if i["mask"] in SPEC_OF], ids=lambda instance: instance["name"]
)
def test_specs_of_real_batches_have_the_pairs_of_their_slices(instance: dict) -> None:
    batch = Batch.from_sequences(SPEC_OF[instance["mask"]](instance["parts"]))
    assert batch.tokens == instance["tokens"]
    assert batch.area("default") == instance["pairs"]
    assert len(algebra.overlaps(batch.bands("default"))) == 0


# ---- errors

FULL: dict[str, Any] = {"full": {}}


@pytest.mark.parametrize(
    ("make", "field", "hint"),
    [
        (lambda: Batch.from_lengths([]), "sequences", "at least one"),
        (lambda: Batch.from_lengths([3, 0]), "lengths[1]", "[1, 2147483647]"),
        (lambda: Batch.from_lengths([3, 2.5]), "lengths[1]", "integer"),
        (lambda: Batch.from_lengths([10**30]), "lengths", "64 bits"),
        (lambda: Batch.from_lengths([2**30, 2**30]), "lengths", "add up"),
        (lambda: Batch.from_lengths(np.array([1.0])), "lengths", "integer dtype"),
        (lambda: Batch.from_lengths(7), "lengths", "must be a list"),
        (lambda: Batch.from_lengths([4], {}), "mask", "{kind: mask}"),
        (lambda: Batch.from_lengths([4], {"a b": masks.full()}), "mask", "must be a name"),
        (lambda: Batch.from_lengths([4], {"a": 3}), "mask.a", "must be a mask"),  # type: ignore[dict-item]
        (lambda: Batch.from_lengths([4, 4], home_ranks=[[0]]), "home_ranks", "one entry per sequence (2)"),
        (lambda: Batch.from_lengths([4], home_ranks=[[65535]]), "home_ranks[0][0]", "65534"),
        (lambda: Batch.from_lengths([4], home_ranks=[[2, 2]]), "home_ranks[0]", "without duplicates"),
        (lambda: Batch.from_lengths([4], home_ranks=[[]]), "home_ranks[0]", "at least one rank"),
        (lambda: Batch.from_cu_seqlens([0, 4, 4]), "cu_seqlens[2]", "more than 4"),
        (lambda: Batch.from_cu_seqlens([1, 4]), "cu_seqlens", "begin with 0"),
        (lambda: Batch.from_slices(0, []), "tokens", "[1,"),
        (lambda: Batch.from_lengths([9], masks.tree([[-1, 8]])), "sequences[0].mask", "(9)"),
        (
            lambda: Batch.from_sequences([Sequence(4, {"a": masks.full()}), Sequence(4)]),
            "sequences[1].mask",
            "kinds of the first sequence, a",
        ),
        (
            lambda: Batch.from_sequences([Sequence(3, positions=[0])]),
            "sequences[0].positions",
            "per token (3)",
        ),
        (lambda: Batch.from_sequences([Sequence(2, labels=[1, 2])]), "sequences[0].labels[1]", "[-1, 1]"),
        (lambda: Batch.from_data({"lengths": [4], "sequence": []}), "batch.sequence", "did you mean"),
        (lambda: Batch.from_data({"lengths": [4], "sequences": []}), "batch.lengths", "unknown field"),
        (lambda: Batch.from_data({}), "batch.lengths", "missing field"),
        (lambda: Batch.from_data([4]), "batch", "mapping"),
        (lambda: Batch.from_data({"sequences": [{"mask": FULL}]}), "sequences[0].length", "missing"),
        (
            lambda: Batch.from_data({"sequences": [{"length": 4, "mask": {"c": {}}}]}),
            "sequences[0].mask",
            "causal",
        ),
        (lambda: Batch.from_data({"lengths": [4], "mask": {"a": FULL, "b": {"c": {}}}}), "batch.mask", ""),
    ],
)
def test_errors_of_batches_name_the_field(make: Callable[..., Any], field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.field == field
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        *(("b.json", text, None) for text in (b"{", b"[1, 2", b'{"lengths": [NaN]}', b"[" * 5000)),
        ("b.yaml", b"a: &a {causal: *a}\n", "aliases are not supported"),
        ("b.json", b"\xff\xfe", "not UTF-8"),
        ("b.toml", b"", r"\.json, \.yaml or \.yml"),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, name: str, data: bytes, message: str | None) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        Batch.load(tmp_path / name)


small = st.lists(st.integers(-1, 9), max_size=3) | junk
sequence_data = st.fixed_dictionaries(
    {"length": st.integers(0, 5) | junk},
    optional={"mask": junk, "home_ranks": small, "positions": small, "labels": small},
)


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(
    st.fixed_dictionaries({"sequences": st.lists(sequence_data, max_size=2) | junk})
    | st.fixed_dictionaries({"lengths": small}, optional={"mask": junk, "home_ranks": small})
    | junk
)
def test_hostile_data_raises_only_typed_errors(data: list[Any] | dict[str, Any] | float | None) -> None:
    check_refusal(lambda: Batch.from_data(data).labels())


def test_diagonals_come_from_the_masks_not_from_their_bands() -> None:
    kinds = {"global": masks.causal(), "local": masks.sliding_window(512)}
    batch = Batch.from_lengths([3, 1], kinds)  # shorter than the window
    assert (batch.diagonals("global"), batch.diagonals("local")) == (((0, INF),), ((0, 511),))
    mixed = Batch.from_sequences([Sequence(4, masks.image_spans([(0, 2)])), Sequence(4), Sequence(4)])
    assert mixed.diagonals("default") == ((-INF, INF), (0, INF))
    assert mixed.take([1, 2]).diagonals("default") == ((0, INF),)
    with pytest.raises(UnknownNameError):
        mixed.diagonals("local")


def test_more_than_eight_diagonals_are_left_out() -> None:
    windows = [Sequence(4, masks.sliding_window(n)) for n in range(1, 10)]
    assert len(Batch.from_sequences(windows[:8]).diagonals("default")) == 8
    assert Batch.from_sequences(windows).diagonals("default") == ()


def test_sequences_with_one_mask_are_checked_once_per_length(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    monkeypatch.setattr(Tree, "check", lambda spec, length, field: checked.append((length, field)))
    Batch.from_lengths([4, 4, 5, 4, 5] * 1000, masks.tree([[-1, 1], [0, 3]]))
    assert checked == [(4, "sequences[0].mask"), (5, "sequences[2].mask")]


def test_the_number_of_parts_is_limited_before_bands_are_built() -> None:
    deep: masks.Mask = masks.causal()
    for level in range(8):
        deep = masks.documents([8**level] * 8, deep)
    assert deep.parts() == 8**8
    with pytest.raises(ConfigError, match="16777216"):
        Batch.from_lengths([8**8], {"one": deep, "two": deep})
    with pytest.raises(ConfigError, match=r"mask.*split the batch"):
        Batch.from_lengths([3] * 2**21, masks.tree([[-1, 1], [0, 1], [1, 1]]))


def test_kinds_are_compared_for_each_length_and_own_positions() -> None:
    two = masks.documents([2, 2])
    kinds = {"one": two, "two": masks.documents([1, 3])}
    own = Sequence(4, kinds, positions=[0, 1, 2, 3], labels=[1, 2, 3, -1])
    Batch.from_sequences([own, own])
    with pytest.raises(ConfigError, match=r"sequences\[1\].mask.*disagree on positions"):
        Batch.from_sequences([own, Sequence(4, kinds), Sequence(4, kinds)])
