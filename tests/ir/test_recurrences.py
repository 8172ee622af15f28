"""Tables of recurrent layers: their rows for small batches, the faults that the verifier finds, and mutants, of which
it accepts only harmless ones. `python -m tests.checks.fuzz_judge` tries more mutants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import apportion as ap
from apportion import ConfigError, DecodeError, Recurrent
from apportion.ir.arrays import Ints
from apportion.ir.bytes import codec
from apportion.ir.isa import SPAN_COLUMNS
from apportion.ir.masks.predecessors import lower_links
from apportion.ir.plan import plain
from apportion.ir.plan.tables import Layout, Recurrence, Table
from apportion.ir.verify import check
from apportion.planner.recurrent import recurrence
from apportion.report.diff import diff
from tests.checks import fuzz_judge
from tests.support.parse import parse
from tests.support.recurrences import Edit, changed, setting
from tests.support.sparse import sparse

KINDS = {"delta": Recurrent(heads=3, key_dim=2, value_dim=2, conv=4)}
MODEL = ap.Model(q_heads=4, kv_heads=4, head_dim=8, recurrent=KINDS)
CLUSTER = ap.Cluster(nodes=1, ranks_per_node=2)
Columns = dict[str, Ints]

# two ranks: a document of 8 tokens in three runs, and one of 2 tokens in one run
SPANS = [[(0, 0, 3, 0, 0), (3, 6, 2, 0, 6)], [(0, 3, 3, 0, 3), (3, 8, 2, 1, 0)]]


def layout() -> Layout:
    rows = [row for rank in SPANS for row in rank]
    return Layout("attention", Table(np.array([0, 2, 4]), SPAN_COLUMNS, np.array(rows, np.int64).T.copy()))


def rows_of(tables: Recurrence, name: str) -> list[list[list[int]]]:
    return [tables[name].rank(rank).values.T.tolist() for rank in range(tables[name].ranks)]


def test_tables_of_two_documents_on_two_ranks() -> None:
    tables = recurrence(layout(), ap.Batch.from_lengths([8, 2]), KINDS)
    assert rows_of(tables, "runs") == [
        [[0, 3, 0, 0, 0, -1, 1], [3, 2, 0, 6, 1, 0, 0]],
        [[0, 3, 0, 3, 0, 0, 1], [3, 2, 1, 0, 0, -1, 0]],
    ]
    # rank 0 folds the first head, rank 1 the others
    assert rows_of(tables, "folds") == [
        [[0, 0, 1, 0, 0, -1], [0, 0, 1, 1, 0, 0], [0, 0, 1, 0, 1, 1]],
        [[0, 1, 2, 0, 0, -1], [0, 1, 2, 1, 0, 0], [0, 1, 2, 0, 1, 1]],
    ]
    assert rows_of(tables, "states") == [
        [[0, 0, 1, 0, 0], [0, 0, 1, 0, 1], [0, 1, 2, 1, 0], [0, 1, 2, 1, 1]],
        [[0, 0, 1, 0, 0], [0, 1, 2, 1, 0]],
    ]
    assert rows_of(tables, "halo") == [[[1, 1, 0, 3], [0, 1, 3, 3]], [[1, 0, 0, 3], [0, 0, 0, 3]]]


def test_a_branch_continues_from_its_trunk() -> None:
    tree = ap.Batch.from_lengths([9], ap.masks.tree([[-1, 3], [0, 2], [0, 2], [2, 1], [2, 1]]))
    branches = tree.branches()
    assert branches.starts.tolist() == [0, 3, 5, 7, 8]
    assert branches.parent.tolist() == [-1, 0, 0, 2, 2]
    assert branches.position.tolist() == [0, 3, 3, 5, 5]
    assert branches.roots().tolist() == [0] * 5


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_predecessors_agree_with_the_positions_of_the_mask(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=7))
    nodes = [[data.draw(st.integers(-1, n - 1)), size] for n, size in enumerate(sizes)]
    specs = [ap.masks.tree(nodes), ap.masks.shared_question(2, sizes), ap.masks.documents(sizes)]
    spec = data.draw(st.sampled_from(specs))
    length = sum(sizes) + 2 * (spec is specs[1])
    batch = ap.Batch.from_sequences([ap.Sequence(3), ap.Sequence(length, spec)])
    tokens, before = lower_links(spec, np.array([length]), np.array([3]))
    path = np.arange(batch.tokens) - 1
    path[tokens], path[0] = before, -1
    seen = [0] * batch.tokens
    for token in range(batch.tokens):
        assert path[token] < token
        seen[token] = seen[path[token]] + 1 if path[token] >= 0 else 0
    assert seen == batch.positions().tolist()
    branches = batch.branches()
    assert branches.position.tolist() == [seen[token] for token in branches.starts]


# ---- faults that the verifier finds


@pytest.fixture(scope="module")
def good() -> ap.Plan:
    plan = ap.plan(ap.Batch.from_lengths([48, 11, 5]), CLUSTER, MODEL, recipe="blend")
    assert check(plan) == ()
    return plan


def swap_edit(column: str, at: int, other: int) -> Edit:
    def edit(columns: Columns) -> None:
        columns[column][[at, other]] = columns[column][[other, at]]

    return edit


def without_past(columns: Columns) -> None:
    run = columns["past"].argmax()
    columns["past"][run], columns["peer"][run] = -1, 0


CASES = {
    "a run that is short": ("runs", setting("rows", -1, 1), "recurrences", "its runs end at row"),
    "runs with a gap": (
        "runs",
        setting("row", 1, 1),
        "structure",
        "not begin at the end of the previous run",
    ),
    "another sequence": (
        "runs",
        setting("sequence", 0, 1),
        "recurrences",
        "not belong to its stated sequence",
    ),
    "another position": ("runs", setting("position", 0, 1), "recurrences", "tokens before it"),
    "no past": ("runs", without_past, "recurrences", "a past other than"),
    "leads nobody": ("runs", lambda c: c["leads"].fill(0), "recurrences", "a wrong `leads` flag"),
    "a run that is not there": ("folds", setting("run", 0, 99), "recurrences", "a missing run"),
    "a slot behind another": ("folds", setting("parent", 1, -1), "recurrences", "not come after the past"),
    "a slot before its parent": ("folds", setting("parent", 0, 0), "structure", "not an earlier slot"),
    "a head twice": ("folds", setting("head", -1, 0), "recurrences", "head"),
    "heads that are not there": (
        "folds",
        setting("heads", -1, 4),
        "structure",
        "exceed the heads of its kind",
    ),
    "a state for others": ("states", lambda c: c["peer"].fill(0), "recurrences", "do not match the slots"),
    "states in another order": ("states", swap_edit("run", 0, 1), "recurrences", "do not match the slots"),
    "a state of no run": ("states", setting("run", 0, 99), "structure", "not among the rank's"),
    "halo of other tokens": ("halo", setting("row", 0, 0), "recurrences", "not the tokens before the runs"),
    "halo without a sender": ("halo", setting("rows", 0, 1), "recurrences", "do not match one by one"),
    "halo of no run": ("halo", setting("row", -1, 400), "structure", "not before a run"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_broken_in_one_place_is_refused_there(good: ap.Plan, case: str) -> None:
    name, edit, rule, words = CASES[case]
    first = check(changed(good, name, edit))[0]
    assert first.rule == rule
    assert words in first.message
    assert first.rank is not None or rule == "structure" or "halo:" in first.message


@pytest.mark.parametrize("seed", sparse(range(10), 10))
def test_an_accepted_mutant_computes_the_same(seed: int) -> None:
    result = fuzz_judge.fuzz(list(fuzz_judge.recurrent_plans(("fcp", "blend", "zeppelin"))), 200, seed)
    assert result.missed == []
    assert result.accepted > 4
    assert result.refused["recurrences"] > 40


def test_the_diff_names_differing_tables(good: ap.Plan) -> None:
    other = codec.seal(changed(good, "halo", setting("row", 0, 0)))
    assert diff(good, other).lines()[-1] == "recurrent halo differ"
    assert diff(good, codec.seal(replace(good, report={}))).recurrent == ()


# ---- bytes, text, header


def test_recurrences_round_trip_through_bytes_and_text(good: ap.Plan) -> None:
    again = ap.Plan.decode(good.encode())
    assert again == good == parse(good.text())
    piece = ap.Slice.decode(good.for_rank(1).encode())
    assert piece.header.recurrent == KINDS
    for own in (piece.recurrence, good.for_rank(1).recurrence):
        assert own is not None
        assert good.recurrence is not None
        assert all(own[name].equal(table) for name, table in good.recurrence.rank(1).tables.items())


def test_models_without_recurrent_layers_do_not_encode_them() -> None:
    model = replace(MODEL, recurrent={})
    assert "recurrent" not in model.to_data()
    plan = ap.plan(ap.Batch.from_lengths([48]), CLUSTER, model, recipe="blend")
    assert plan.recurrence is None
    assert "recurrent" not in plain.header_data(plan.header)
    assert "recurrent" not in plan.text()


def test_tables_must_match_the_header(good: ap.Plan) -> None:
    with pytest.raises(ConfigError, match="must be set if the header has recurrent kinds"):
        codec.seal(replace(good, recurrence=None))
    other = replace(good.header, recurrent={"delta": replace(KINDS["delta"], heads=6)})
    with pytest.raises(DecodeError, match="header: recurrent"):
        codec.decode(codec.seal(replace(good, header=other)).encode())
    twice = replace(good.header, recurrent={good.header.kinds[0]: KINDS["delta"]})
    with pytest.raises(DecodeError, match="distinct names"):
        codec.decode(codec.seal(replace(good, header=twice)).encode())


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("heads", 3, "a multiple of key_heads"),
        ("heads", 0, "must be"),
        ("gate", "none", "scalar, diagonal"),
        ("conv", -1, "must be"),
        ("delta", 2, "must be"),
    ],
)
def test_invalid_recurrent_kinds_are_refused(field: str, value: object, words: str) -> None:
    data = {"heads": 4, "key_heads": 2, "key_dim": 2, "value_dim": 2, field: value}
    with pytest.raises(ConfigError, match=words):
        ap.Model.from_data({"recurrent": {"delta": data}})


@pytest.mark.parametrize(
    "mask",
    [
        ap.masks.full(),
        ap.masks.prefix_lm(4),
        ap.masks.image_spans([], ap.masks.documents([8, 8])),
        ap.masks.documents([16], ap.masks.image_spans([(2, 4)])),
    ],
)
def test_masks_without_an_order_are_refused(mask: ap.masks.Mask) -> None:
    with pytest.raises(ConfigError, match="defines no token order for the model's recurrent layers"):
        ap.plan(ap.Batch.from_lengths([16], mask=mask), CLUSTER, MODEL, recipe="blend")
