"""Every mask spec, compared with its rule pair by pair; worked examples; positions and labels; plain data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion.ir.errors import ConfigError
from apportion.ir.masks import bands as algebra, specs as masks
from apportion.ir.masks.bands import INF
from apportion.ir.masks.spec import MAX_NESTING, Mask
from tests.support.examples import EXAMPLES
from tests.support.hostile import check_refusal, junk

DATA = Path(__file__).parent.parent / "data"
property_test = settings(max_examples=60, derandomize=True, deadline=None, database=None)

Case = tuple[Mask, int, Callable[[int, int], bool]]
sizes = st.integers(1, 6)
lengths = st.integers(1, 26)


def segments(parts: list[int]) -> np.ndarray:
    """The index of the part of each token."""
    return np.repeat(np.arange(len(parts)), parts)


def causal_cases() -> st.SearchStrategy[Case]:
    return lengths.map(lambda n: (masks.causal(), n, lambda i, j: j <= i))


def full_cases() -> st.SearchStrategy[Case]:
    return lengths.map(lambda n: (masks.full(), n, lambda i, j: True))


@st.composite
def window_cases(draw: st.DrawFn) -> Case:
    w, r = draw(sizes), draw(st.integers(0, 4))
    return masks.sliding_window(w, r), draw(lengths), lambda i, j: i - w < j <= i + r


@st.composite
def sink_cases(draw: st.DrawFn) -> Case:
    s, w = draw(st.integers(0, 6)), draw(sizes)
    return masks.sink_window(s, w), draw(lengths), lambda i, j: j <= i and (j < s or j > i - w)


@st.composite
def blockwise_cases(draw: st.DrawFn) -> Case:
    b, n, (k, s, t) = draw(sizes), draw(lengths), draw(st.tuples(*[st.integers(0, 3)] * 3))
    blocks = -(-n // b)

    def rule(i: int, j: int) -> bool:
        return j <= i and (i // b >= blocks - t or j < s * b or j >= i - k * b)

    return masks.causal_blockwise(b, k, s, t), n, rule


@st.composite
def question_cases(draw: st.DrawFn) -> Case:
    prompt, answers = draw(sizes), draw(st.lists(sizes, min_size=1, max_size=4))
    part = segments([prompt, *answers])
    spec = masks.shared_question(prompt, answers)
    return spec, len(part), lambda i, j: j <= i and (j < prompt or part[i] == part[j])


@st.composite
def prefix_cases(draw: st.DrawFn) -> Case:
    p = draw(st.integers(0, 30))
    return masks.prefix_lm(p), draw(lengths), lambda i, j: j < p or j <= i


@st.composite
def video_cases(draw: st.DrawFn) -> Case:
    c, w = draw(sizes), draw(st.none() | st.integers(1, 4))
    spec, wide = masks.block_causal(c, w), w or 99
    return spec, draw(lengths), lambda i, j: i // c - wide < j // c <= i // c


def chunked_cases() -> st.SearchStrategy[Case]:
    return st.builds(
        lambda c, n: (masks.chunked(c), n, lambda i, j: i // c == j // c and j <= i), sizes, lengths
    )


@st.composite
def image_cases(draw: st.DrawFn) -> Case:
    edges = sorted(draw(st.sets(st.integers(0, 20), max_size=6)))
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    image = np.full(40, -1)
    for i, (start, end) in enumerate(spans):
        image[start:end] = i
    spec, _, inner = draw(st.one_of(causal_cases(), window_cases(), full_cases()))
    n = draw(st.integers(max([1, *edges]), 26))

    def rule(i: int, j: int) -> bool:
        return inner(i, j) or (image[i] >= 0 and image[i] == image[j])

    return masks.image_spans(spans, spec), n, rule


@st.composite
def tree_cases(draw: st.DrawFn) -> Case:
    count = draw(st.integers(1, 7))
    nodes = [[draw(st.integers(-1, i - 1)), draw(st.integers(1, 4))] for i in range(count)]
    node = segments([length for _, length in nodes])

    def path_to_root(i: int) -> set[int]:
        return {i} | (path_to_root(nodes[i][0]) if nodes[i][0] >= 0 else set())

    def rule(i: int, j: int) -> bool:
        return node[j] in path_to_root(node[i]) and (node[i] != node[j] or j <= i)

    return masks.tree(nodes), len(node), rule


@st.composite
def document_cases(draw: st.DrawFn) -> Case:
    parts = draw(st.lists(sizes, min_size=1, max_size=5))
    inner_cases = causal_cases(), full_cases(), window_cases(), chunked_cases(), sink_cases()
    spec, _, inner = draw(st.one_of(*inner_cases))
    part, start = segments(parts), np.repeat(np.cumsum(parts) - parts, parts)

    def rule(i: int, j: int) -> bool:
        return part[i] == part[j] and inner(i - start[i], j - start[j])

    return masks.documents(parts, spec), len(part), rule


def raw_cases(notation: str) -> st.SearchStrategy[Case]:
    """Masks of raw bands or slices, taken from another mask."""

    def as_raw(case: Case) -> Case:
        table = case[0].bands(case[1])
        spec = masks.bands(table) if notation == "bands" else masks.slices(algebra.to_slices(table))
        return spec, case[1], case[2]

    return st.one_of(question_cases(), sink_cases(), window_cases()).map(as_raw)


FAMILIES = {
    "causal": causal_cases(),
    "full": full_cases(),
    "sliding_window": window_cases(),
    "sink_window": sink_cases(),
    "causal_blockwise": blockwise_cases(),
    "shared_question": question_cases(),
    "prefix_lm": prefix_cases(),
    "block_causal": video_cases(),
    "chunked": chunked_cases(),
    "image_spans": image_cases(),
    "tree": tree_cases(),
    "documents": document_cases(),
    "bands": raw_cases("bands"),
    "slices": raw_cases("slices"),
}


def test_every_spec_has_a_rule_here() -> None:
    assert set(FAMILIES) == set(masks.SPECS)


@pytest.mark.parametrize("family", FAMILIES)
def test_bands_match_the_rule_and_are_disjoint(family: str) -> None:
    @property_test
    @given(FAMILIES[family])
    def check(case: Case) -> None:
        spec, n, rule = case
        table = spec.bands(n)
        expected = np.array([[rule(i, j) for j in range(n)] for i in range(n)])
        spec.check(n, "mask")
        assert np.array_equal(algebra.dense(table, n, n), expected)
        assert (algebra.area(table) > 0).all()
        assert algebra.area(table).sum() == expected.sum()

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_round_trip_through_data(family: str) -> None:
    @property_test
    @given(FAMILIES[family])
    def check(case: Case) -> None:
        data = masks.to_data(case[0])
        assert masks.is_data(data)
        assert masks.from_data(json.loads(json.dumps(data))) == case[0]

    check()


# ---- worked examples of masks in common use

_RULES = json.loads((DATA / "mask_rules.json").read_text())["masks"]
RULES = {item["name"]: item["example"] for item in _RULES}


@pytest.mark.parametrize("name", RULES)
def test_worked_examples(name: str) -> None:
    example = RULES[name]
    n, table = example["tokens"], algebra.from_slices(example["slices"])
    spec = EXAMPLES.get(name, masks.slices(example["slices"]))
    assert algebra.area(spec.bands(n)).sum() == example["pairs"]
    assert np.array_equal(algebra.dense(spec.bands(n), n, n), algebra.dense(table, n, n))


# ---- positions and labels


@pytest.mark.parametrize(
    ("spec", "positions", "labels"),
    [
        (masks.causal(), [0, 1, 2, 3], [1, 2, 3, -1]),
        (masks.full(), [0, 1, 2, 3], [1, 2, 3, -1]),
        (masks.chunked(2), [0, 1, 2, 3], [1, 2, 3, -1]),
        (masks.image_spans([[1, 3]]), [0, 1, 2, 3], [1, 2, 3, -1]),
        # the last token of a prompt with several answers has no label
        (masks.shared_question(2, [3, 2]), [0, 1, 2, 3, 4, 2, 3], [1, -1, 3, 4, -1, 6, -1]),
        (masks.shared_question(2, [2]), [0, 1, 2, 3], [1, 2, 3, -1]),
        (masks.documents([2, 3], masks.full()), [0, 1, 0, 1, 2], [1, -1, 3, 4, -1]),
        (
            masks.documents([4, 4], masks.shared_question(2, [1, 1])),
            [0, 1, 2, 2, 0, 1, 2, 2],
            [1, -1, -1, -1, 5, -1, -1, -1],
        ),
    ],
)
def test_positions_and_labels_by_hand(spec: Mask, positions: list[int], labels: list[int]) -> None:
    assert spec.positions(len(positions)).tolist() == positions
    assert spec.labels(len(labels)).tolist() == labels


@property_test
@given(tree_cases())
def test_tree_positions_are_depths_and_labels_follow_only_children(case: Case) -> None:
    tree, n, rule = case
    nodes = tree.nodes  # type: ignore[attr-defined]
    node = segments([length for _, length in nodes])
    depth = [sum(rule(i, j) for j in range(i)) for i in range(n)]
    children = [[i for i, (parent, _) in enumerate(nodes) if parent == k] for k in range(len(nodes))]
    labels = []
    for i in range(n):
        ends = i + 1 == n or node[i + 1] != node[i]
        node_children = children[node[i]]
        child = np.flatnonzero(node == node_children[0])[0] if len(node_children) == 1 else -1
        labels.append(child if ends else i + 1)
    assert tree.positions(n).tolist() == depth
    assert tree.labels(n).tolist() == labels


def test_the_largest_parameters_do_not_overflow() -> None:
    big = algebra.MAX_TOKENS
    for spec in (
        masks.sliding_window(big, big),
        masks.sink_window(big, big),
        masks.causal_blockwise(big, big, big, big),
        masks.prefix_lm(big),
        masks.block_causal(big, big),
        masks.chunked(big),
    ):
        mask = algebra.dense(spec.bands(5), 5, 5)
        causal = isinstance(spec, masks.SinkWindow | masks.CausalBlockwise | masks.Chunked)  # type: ignore[attr-defined]
        assert mask.sum() == (15 if causal else 25)


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint64])
@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (masks.sliding_window, (5, 3)),
        (masks.sink_window, (3, 90)),
        (masks.causal_blockwise, (100, 100, 2, 1)),
        (lambda prompt, answer: masks.shared_question(prompt, [answer, 400 - 2 * 100]), (100, 100)),
        (masks.prefix_lm, (100,)),
        (masks.block_causal, (100, 3)),
        (masks.chunked, (100,)),
        (lambda start, end: masks.image_spans([[start, end]]), (5, 100)),
        (lambda length: masks.tree([[-1, length], [0, 400 - 100]]), (100,)),
        (lambda length: masks.documents([length, 400 - 100]), (100,)),
        (lambda stop: masks.bands([[0, stop, 0, stop, 0, stop]]), (100,)),
        (lambda stop: masks.slices([[0, stop, 0, stop, 1]]), (100,)),
    ],
)
def test_numpy_parameters_do_not_overflow(
    make: Callable[..., Mask], numbers: tuple[int, ...], kind: type[np.integer]
) -> None:
    """In 8-bit arithmetic 100 + 100 would overflow."""
    plain, spec = make(*numbers), make(*map(kind, numbers))
    assert np.array_equal(spec.bands(400), plain.bands(400))
    assert spec == plain
    assert json.dumps(masks.to_data(spec)) == json.dumps(masks.to_data(plain))


# ---- errors


@pytest.mark.parametrize(
    ("data", "field", "hint"),
    [
        ({"causl": {}}, "mask", "did you mean causal"),
        ({"zzz": {}}, "mask", "causal, full, sliding_window"),
        ({"causal": {"window": 3}}, "mask.causal.window", "unknown field"),
        ({"sliding_window": {}}, "mask.sliding_window.window", "missing field"),
        ({"sliding_window": {"window": 0}}, "sliding_window.window", "[1,"),
        ({"sliding_window": {"window": 2.0}}, "sliding_window.window", "integer"),
        ({"prefix_lm": {"prefix": -1}}, "prefix_lm.prefix", "[0,"),
        ({"chunked": {"chunk": 2**31}}, "chunked.chunk", "[1,"),
        ({"shared_question": {"prompt": 3, "answers": []}}, "shared_question.answers", "must not be empty"),
        ({"shared_question": {"prompt": 3, "answers": [2, 0]}}, "shared_question.answers[1]", "[1,"),
        ({"shared_question": {"prompt": 3, "answers": 7}}, "shared_question.answers", "list"),
        ({"tree": {"nodes": []}}, "tree.nodes", "must have a node"),
        ({"tree": {"nodes": [[0, 3]]}}, "tree.nodes[0]", "parent must come before"),
        ({"tree": {"nodes": [[-1]]}}, "tree.nodes[0]", "[parent, length]"),
        (
            {"image_spans": {"spans": [[3, 5], [4, 6]]}},
            "image_spans.spans[1]",
            "be ascending and not overlap",
        ),
        ({"documents": {"lengths": [2**31 - 1, 1]}}, "documents.lengths", "add up"),
        ({"documents": {"lengths": [2], "mask": {"tree": 1}}}, "mask.documents.mask.tree", "mapping"),
        ({"bands": {"bands": [[0, 2, 0, 2, 0]]}}, "bands.bands[0]", "6 numbers"),
        ({"bands": {"bands": [[0, 2, 0, 2, 0, "x"]]}}, "bands.bands[0]", "integer"),
        ({"bands": {"bands": [[0, 2, 0, 2, 0, 2**63]]}}, "bands.bands[0]", "[-46"),
        ({"bands": {"bands": [[-1, 2, 0, 2, 0, 5]]}}, "bands.bands[0]", "must lie in [0"),
        ({"bands": {"bands": [[0, 2, 0, 2, 0, 5], [1, 3, 1, 2, 0, 5]]}}, "bands.bands[1]", "shares"),
        ({"slices": {"slices": [[0, 2, 0, 2, 4]]}}, "slices.slices[0] type", "BICAUSAL (3)"),
        ({"slices": {"slices": [[0, 2, 0, 2, "FUL"]]}}, "slices.slices[0] type", "FULL (0)"),
        ({"slices": {"slices": [[0, 0, 0, 2, 0]]}}, "slices.slices[0]", "q0 < q1"),
        ("causal", "mask", "must name one mask"),
        ({"causal": {}, "full": {}}, "mask", "must name one mask"),
        ({7: {}}, "mask", "unknown mask"),
        ([], "mask", "must name one mask"),
    ],
)
def test_errors_of_masks_name_the_parameter(data: Any, field: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        masks.from_data(data)
    assert caught.value.field == field
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        (masks.shared_question(2, [3]), "add up to the sequence's length (9)"),
        (masks.tree([[-1, 3]]), "add up to the sequence's length (9)"),
        (masks.documents([4, 4]), "add up to the sequence's length (9)"),
        (masks.documents([5, 4], masks.tree([[-1, 5]])), "add up to the sequence's length (4)"),
        (masks.image_spans([[2, 10]]), "must end within the sequence (9 tokens)"),
        (masks.bands([[0, 10, 0, 1, -INF, INF]]), "must lie within the sequence (9 tokens)"),
        (masks.slices([[0, 1, 0, 10, 0]]), "must lie within the sequence (9 tokens)"),
    ],
)
def test_specs_that_do_not_fit_the_sequence_are_refused(spec: Mask, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec.check(9, "sequences[3].mask")
    assert hint in str(caught.value)
    assert caught.value.field.startswith("sequences[3].mask")


def test_the_nesting_limit_is_the_same_in_code_and_in_data() -> None:
    mask: Mask = masks.causal()
    for _ in range(MAX_NESTING):
        mask = masks.documents([8], mask)
    assert masks.from_data(masks.to_data(mask)) == mask
    for outer in (lambda: masks.documents([8], mask), lambda: masks.image_spans([[0, 1]], mask)):
        with pytest.raises(ConfigError, match=rf"mask = .*masks may nest at most {MAX_NESTING} deep"):
            outer()
    with pytest.raises(ConfigError, match=f"masks may nest at most {MAX_NESTING} deep"):
        masks.from_data({"documents": {"lengths": [8], "mask": masks.to_data(mask)}})


def test_deep_nesting_is_refused() -> None:
    data: dict = {"causal": {}}
    for _ in range(2000):
        data = {"documents": {"lengths": [4], "mask": data}}
    with pytest.raises(ConfigError, match="nest at most"):
        masks.from_data(data)


PARAMETERS = "window right sink prompt answers prefix chunk spans nodes lengths mask bands slices"


@settings(max_examples=200, derandomize=True, deadline=None, database=None)
@given(st.sampled_from(sorted(masks.SPECS)), st.data())
def test_hostile_data_raises_only_typed_errors(name: str, data: st.DataObject) -> None:
    fields = PARAMETERS.split()
    params = data.draw(st.dictionaries(st.sampled_from(fields), junk, max_size=3) | junk)
    check_refusal(lambda: masks.from_data({name: params}))


@given(st.sampled_from(sorted(masks.SPECS)), st.data())
@property_test
def test_declared_diagonals_equal_the_diagonals_of_bands(name: str, data: st.DataObject) -> None:
    """Except rectangles whose keys all precede their queries: these have no lower diagonal."""
    spec, n, _ = data.draw(FAMILIES[name])
    declared = spec.diagonals()
    assert len(set(declared)) == len(declared) > 0 or name in ("bands", "slices")
    for q0, _, _, k1, dmin, dmax in spec.bands(n).tolist():
        assert (dmin, dmax) in declared or (k1 <= q0 and (dmax in {far for _, far in declared}))


FULL, CAUSAL = (-INF, INF), (0, INF)


@pytest.mark.parametrize(
    ("spec", "diagonals"),
    [
        (masks.causal(), [CAUSAL]),
        (masks.full(), [FULL]),
        (masks.sliding_window(512), [(0, 511)]),
        (masks.sliding_window(4, 2), [(-2, 3)]),
        (masks.sink_window(4, 8), [(0, 7), CAUSAL]),
        (masks.sink_window(0, 8), [(0, 7)]),
        (masks.causal_blockwise(8, 2), [(0, 16), CAUSAL]),
        (masks.causal_blockwise(8, 2, 0, 0), [(0, 16)]),
        (masks.shared_question(3, [2, 2]), [CAUSAL]),
        (masks.prefix_lm(3), [FULL, CAUSAL]),
        (masks.prefix_lm(0), [CAUSAL]),
        (masks.block_causal(4, 2), [FULL]),
        (masks.chunked(4), [CAUSAL]),
        (masks.image_spans([(2, 4)]), [FULL, CAUSAL]),
        (masks.image_spans([(2, 4)], masks.sliding_window(9)), [FULL, (0, 8)]),
        (masks.image_spans([]), [CAUSAL]),
        (masks.image_spans([(2, 4)], masks.full()), [FULL]),
        (masks.tree([(-1, 3), (0, 2), (0, 2)]), [CAUSAL]),
        (masks.documents([3, 4], masks.sliding_window(9)), [(0, 8)]),
        (masks.bands([[0, 4, 0, 4, 0, INF], [4, 8, 0, 4, -INF, INF], [4, 8, 4, 8, 0, INF]]), [CAUSAL]),
        (masks.bands([[0, 4, 0, 4, 9, 10], [4, 8, 4, 8, -1, 2]]), [(-1, 2)]),
        (masks.slices([[0, 4, 0, 4, "CAUSAL"], [4, 8, 0, 4, "FULL"]]), [CAUSAL]),
    ],
)
def test_diagonals_by_hand(spec: Mask, diagonals: list[tuple[int, int]]) -> None:
    assert sorted(spec.diagonals()) == diagonals
