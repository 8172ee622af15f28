"""Folding samples: rows, positions and masks match the samples, and shared tokens occur once."""

from __future__ import annotations

import json
from collections import Counter
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from apportion import Batch, ConfigError, Sequence
from apportion.ir.masks import bands, specs as masks
from apportion.ir.masks.forest import Forest, Saving, fold

ROLLOUTS = Path(__file__).resolve().parents[2] / "examples/rollouts"
property_test = settings(max_examples=150, derandomize=True, deadline=None, database=None)
samples = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


def rows_of(forest: Forest, sample: int) -> list[int]:
    return forest.rows[forest.starts[sample] : forest.starts[sample + 1]].tolist()


def visible_rows(forest: Forest) -> list[list[int]]:
    """The flat rows that each flat row sees, from the masks of the trees."""
    found = []
    for tree, (mask, length) in enumerate(zip(forest.masks, forest.lengths.tolist(), strict=True)):
        allowed = bands.dense(mask.bands(length), length, length)
        found += [(np.flatnonzero(row) + forest.trees[tree]).tolist() for row in allowed]
    return found


def check(forest: Forest, texts: list[list[int]]) -> None:
    """Checks that every sample is present at its own positions, and sees itself causally and nothing else."""
    seen, weights = visible_rows(forest), Counter[int]()
    for sample, ids in enumerate(texts):
        rows = rows_of(forest, sample)
        assert forest.tokens[rows].tolist() == ids
        assert forest.position_ids[rows].tolist() == list(range(len(ids)))
        assert [seen[row] for row in rows] == [sorted(rows[: i + 1]) for i in range(len(rows))]
        begin, end = forest.trees[forest.tree_of[sample]], forest.trees[forest.tree_of[sample] + 1]
        assert all(begin <= row < end for row in rows)
        weights.update(rows)
    assert forest.weights.tolist() == [weights[row] for row in range(len(forest.tokens))]
    assert forest.weights.min() >= 1


# ---- properties of all samples


@property_test
@given(samples)
def test_a_row_is_a_distinct_prefix(texts: list[list[int]]) -> None:
    forest = fold(texts)
    check(forest, texts)
    prefixes = Counter(tuple(ids[: i + 1]) for ids in texts for i in range(len(ids)))
    assert len(forest.tokens) == len(prefixes)
    assert sorted(forest.weights.tolist()) == sorted(prefixes.values())
    assert len(forest) == len({ids[0] for ids in texts})


@property_test
@given(samples)
def test_nodes_are_cut_only_where_samples_diverge_or_end(texts: list[list[int]]) -> None:
    forest = fold(texts)
    ends = {rows_of(forest, sample)[-1] for sample in range(len(texts))}
    for tree, mask in enumerate(forest.masks):
        stops = forest.trees[tree] + np.cumsum([length for _, length in mask.nodes])
        children = Counter(parent for parent, _ in mask.nodes)
        assert all(children[i] > 1 or int(stop) - 1 in ends for i, stop in enumerate(stops))


@property_test
@given(samples, st.integers(1, 5))
def test_shared_nodes_have_at_least_the_minimum_length(texts: list[list[int]], minimum: int) -> None:
    forest = fold(texts, min_length=minimum)
    check(forest, texts)
    for tree, mask in enumerate(forest.masks):
        starts = forest.trees[tree] + np.cumsum([0, *(length for _, length in mask.nodes)])
        for start, (_, length) in zip(starts[:-1], mask.nodes, strict=True):
            assert forest.weights[start] == 1 or length >= minimum
    assert fold(texts).saving.folded_tokens <= len(forest.tokens) <= sum(map(len, texts))


@property_test
@given(samples, st.lists(st.integers(-1, 1), min_size=9, max_size=9))
def test_samples_of_different_groups_share_no_rows(texts: list[list[int]], groups: list[int]) -> None:
    forest = fold(texts, groups[: len(texts)])
    check(forest, texts)
    for a, b in permutations(range(len(texts)), 2):
        if groups[a] != groups[b]:
            assert not set(rows_of(forest, a)) & set(rows_of(forest, b))
    of_group = (
        [ids for ids, of in zip(texts, groups, strict=False) if of == g] for g in set(groups[: len(texts)])
    )
    forests = [*map(fold, of_group)]
    assert len(forest.tokens) == sum(len(forest.tokens) for forest in forests)


@property_test
@given(samples)
def test_nodes_follow_the_order_of_the_samples(texts: list[list[int]]) -> None:
    forest = fold(texts)
    first_seen = list(dict.fromkeys(forest.tree_of.tolist()))
    assert first_seen == sorted(first_seen)
    for tree, mask in enumerate(forest.masks):
        starts = forest.trees[tree] + np.cumsum([0, *(length for _, length in mask.nodes)])
        owners = [next(s for s in range(len(texts)) if start in rows_of(forest, s)) for start in starts[:-1]]
        for node, (parent, _) in enumerate(mask.nodes[1:], 1):
            siblings = [owners[i] for i, (other, _) in enumerate(mask.nodes) if other == parent]
            assert siblings == sorted(siblings)
            assert parent == node - 1 or any(other == parent for other, _ in mask.nodes[parent + 1 : node])


# ---- worked examples


def test_the_example_in_the_module_docstring() -> None:
    forest = fold([[5, 6, 7, 8, 9], [5, 6, 7, 3], [5, 6, 4]])
    assert forest.tokens.tolist() == [5, 6, 7, 8, 9, 3, 4]
    assert forest.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 2]
    assert forest.weights.tolist() == [3, 3, 2, 1, 1, 1, 1]
    assert forest.rows.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 0, 1, 6]
    assert forest.masks == (masks.tree([(-1, 2), (0, 1), (1, 2), (1, 1), (0, 1)]),)
    assert forest.saving == Saving(tokens=12, folded_tokens=7, pairs=15 + 10 + 6, folded_pairs=22)


def test_shared_nodes_below_the_minimum_length_are_repeated() -> None:
    assert fold([[1, 2], [1, 2]], min_length=3).lengths.tolist() == [2, 2]
    assert fold([[1, 2, 3, 4], [1, 2, 3, 5], [1, 6]], min_length=2).lengths.tolist() == [5, 2]
    assert fold([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7]], min_length=3).lengths.tolist() == [6, 3]


def test_ids_are_compared_as_numbers_and_arrays_are_samples() -> None:
    texts = [np.array([300, 2**31 - 1]), np.array([300, 255], np.uint16), (300, 256)]
    forest = fold(texts)
    assert forest.tokens.tolist() == [300, 2**31 - 1, 255, 256]


def test_a_forest_is_a_dataset() -> None:
    forest = fold([[1, 2, 3], [4, 5], [1, 2, 6]])
    assert (len(forest), forest.samples, forest.lengths.tolist()) == (2, 3, [4, 2])
    assert [tree.tolist() for tree in forest] == [[1, 2, 3, 6], [4, 5]]  # type: ignore[attr-defined]
    pieces = (Sequence(len(forest[i]), forest.masks[i]) for i in range(len(forest)))
    batch = Batch.from_sequences(pieces)
    assert batch.positions().tolist() == forest.position_ids.tolist()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (([],), "samples"),
        (([[1], []],), "samples[1]"),
        (([[1], [2, -1]],), "samples[1][1]"),
        (([[1.5]],), "samples[0][0]"),
        (([np.ones((2, 2), int)],), "samples[0]"),
        (([[2**31]],), "samples[0][0]"),
        (([[1]], [0, 0]), "groups"),
        (([[1]], None, 0), "min_length"),
    ],
)
def test_samples_that_cannot_be_folded_are_named(arguments: tuple[object, ...], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fold(*arguments)
    assert caught.value.field == field


# ---- savings of real rollouts


@pytest.mark.parametrize(
    ("name", "groups"), [("rollout_math_g8", 50), ("rollout_gsm8k_g4", 659), ("grpo_r1_g8", 60)]
)
def test_savings_of_real_rollouts_equal_a_count_of_lengths(name: str, groups: int) -> None:
    """Only lengths are published: prompts are shared, and responses differ from their first token on."""
    counted = json.loads((ROLLOUTS / f"{name}.json").read_text())["groups"][:groups]
    texts, prompts = [], []
    separate, folded = np.zeros(2, np.int64), np.zeros(2, np.int64)  # tokens and pairs
    for number, (prompt, responses) in enumerate(counted):
        folded += (prompt, prompt * (prompt + 1) // 2)
        for i, response in enumerate(responses):
            texts.append(np.append(np.full(prompt, 1000 + number), np.full(response, i)))
            prompts.append(number)
            whole = prompt + response
            separate += (whole, whole * (whole + 1) // 2)
            folded += (response, prompt * response + response * (response + 1) // 2)
    forest = fold(texts, prompts)
    assert forest.saving == Saving(separate[0], folded[0], separate[1], folded[1])
    assert len(forest) == groups
    prompt, responses = counted[0]
    assert forest.masks[0] == masks.tree([(-1, prompt), *((0, response) for response in responses)])
    if groups < 100:
        pieces = [Sequence(int(n), mask) for n, mask in zip(forest.lengths, forest.masks, strict=True)]
        assert Batch.from_sequences(pieces).area("default") == folded[1]
