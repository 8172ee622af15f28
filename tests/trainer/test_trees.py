"""Losses and gradients of folded samples equal those of independent ones, for any placement of rows."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

import apportion as ap
from apportion import Communicator, ConfigError, ExecutionError, PlannedLoader, trees
from tests.ranks import jobs_trees
from tests.ranks.loading import job, planning
from tests.ranks.rank_pool import Pool
from tests.support.programs import run_python
from tests.support.sparse import sparse_rows

ROOT = Path(__file__).resolve().parents[2]
GRADIENTS = {"fp32": 1e-6, "fp64": 1e-14}  # of the largest
OPTIONS = ({}, {"groups": [0] * 5 + [1] * 2}, {"min_length": 6}, {"min_length": 1000})


def agree(found: tuple[float, NDArray[Any]], expected: tuple[float, NDArray[Any]], dtype: str) -> None:
    loss, gradients = found
    assert loss == pytest.approx(expected[0], rel=10 * GRADIENTS[dtype])
    largest = np.abs(expected[1]).max()
    assert largest > 1e-3
    assert np.abs(gradients - expected[1]).max() <= GRADIENTS[dtype] * largest


def together(found: list[Any]) -> tuple[float, NDArray[Any]]:
    """The sums of the losses and gradients of all ranks."""
    losses, gradients, *_ = zip(*found, strict=True)
    return sum(losses), sum(gradients)


# ---- against independent samples


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("options", OPTIONS)
def test_folded_grpo_equals_grpo_on_independent_samples(dtype: str, options: dict[str, Any]) -> None:
    agree(jobs_trees.folded(dtype, **options), jobs_trees.independent(dtype), dtype)


@pytest.mark.parametrize(
    ("ranks", "dtype"), sparse_rows([(4, "fp64"), (1, "fp64"), (2, "fp32"), (4, "fp32")], 4)
)
def test_shares_of_ranks_add_up_to_the_whole(pool: Pool, ranks: int, dtype: str) -> None:
    found = pool.run(jobs_trees.on_ranks, ranks, dtype, OPTIONS[1])
    assert {microbatches for *_, microbatches in found} == {1}
    agree(together(found), jobs_trees.independent(dtype), dtype)


def test_trees_train_in_several_microbatches_and_with_padding(pool: Pool) -> None:
    found = pool.run(jobs_trees.on_ranks, 3, "fp64", OPTIONS[1], 75, 8)
    assert {microbatches for *_, microbatches in found} == {2}
    agree(together(found), jobs_trees.independent("fp64"), "fp64")


@pytest.mark.parametrize("ranks", [1, 3])
def test_objectives_on_whole_samples_gather_their_tokens(pool: Pool, ranks: int) -> None:
    found = pool.run(jobs_trees.sequence_ratios, ranks, "fp64")
    agree(together(found), jobs_trees.independent_sequences("fp64"), "fp64")


# ---- worked examples


def test_a_loss_that_all_ranks_compute_without_share_is_refused(pool: Pool) -> None:
    message = r"ConfigError: loss = .* computed identically on every rank.*predictions\.share\(loss\)"
    for found in pool.errors(jobs_trees.sequence_ratios, 2, "fp64", False):
        assert re.match(message, found), found


@pytest.mark.parametrize("shares", [False, True])
def test_a_loss_of_trees_under_averages_is_refused(pool: Pool, shares: bool) -> None:
    for found in pool.errors(jobs_trees.averaged, 2, shares):
        assert re.match(r"ConfigError: model = 'DistributedDataParallel': averages gradients", found), found


@pytest.mark.parametrize("over", ["predictions", "rows", "sample"])
def test_a_mean_over_values_of_a_rank_causes_a_warning(pool: Pool, over: str) -> None:
    warning = r"the loss has a mean over \d+ rows or predictions of this rank: "
    for found in pool.run(jobs_trees.mean_of_rank, 2, over):
        assert re.match(warning, "".join(found)), found


def test_a_mean_over_all_samples_causes_no_warning(pool: Pool) -> None:
    assert pool.run(jobs_trees.mean_of_rank, 2, "samples") == [[], []]


def batch_of(forest: ap.trees.Forest, samples: list[int], places: list[int]) -> SimpleNamespace:
    """A batch with rows of the forest; rows of sample -1 are padding."""
    alone = SimpleNamespace(communicator=Communicator())
    sample_ids, local_to_sample = torch.tensor([samples, places], dtype=torch.int64).view(2, -1)
    rows = forest.trees[sample_ids.clamp(0, len(forest) - 1).numpy()] + local_to_sample.numpy()
    tokens = torch.from_numpy(forest.tokens[np.clip(rows, 0, len(forest.tokens) - 1)])
    position_ids = torch.from_numpy(forest.position_ids[np.clip(rows, 0, len(forest.tokens) - 1)])
    columns = {"local_to_sample": local_to_sample, "tokens": tokens, "position_ids": position_ids}
    return SimpleNamespace(sample_ids=sample_ids, **columns, samples=np.arange(len(forest)), handle=alone)


PICTURE = ([5, 6, 7, 8, 9], [5, 6, 7, 3], [5, 6, 4])


def test_a_row_where_samples_diverge_predicts_the_next_token_of_each() -> None:
    found = ap.trees.unfold(ap.trees.fold(PICTURE))
    assert found.row.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    assert found.target.tolist() == [6, 7, 8, 9, 6, 7, 3, 6, 4]
    assert found.sample.tolist() == [0] * 4 + [1] * 3 + [2] * 2
    assert found.token.tolist() == [1, 2, 3, 4, 1, 2, 3, 1, 2]
    logits = torch.randn(7, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = logits.log_softmax(-1)[found.row, found.target]
    torch.testing.assert_close(found.log_probs(logits), expected)
    torch.testing.assert_close(found.log_probs(logits[None]), expected)
    assert found.log_probs(logits.bfloat16()).dtype == torch.float32


def test_values_are_taken_by_sample_or_token_and_returned() -> None:
    found = trees.unfold(trees.fold(PICTURE))
    assert found.take(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1] * 4 + [2] * 3 + [3] * 2
    padded = torch.tensor([[0, 1, 2, 3, 4], [10, 11, 12, 13, 0], [20, 21, 22, 0, 0]])
    ragged = [row[: len(ids)] for row, ids in zip(padded, PICTURE, strict=True)]
    assert found.take(padded).tolist() == found.take(ragged).tolist() == [1, 2, 3, 4, 11, 12, 13, 21, 22]
    back = found.gather(found.take(padded))
    assert [x.tolist() for x in back] == [[0, *x.tolist()[1:]] for x in ragged]


def test_a_loss_mask_excludes_predictions() -> None:
    forest = trees.fold(PICTURE)
    found = trees.unfold(forest, loss_mask=[torch.arange(len(ids)) >= 3 for ids in PICTURE])
    assert (found.token.tolist(), found.row.tolist()) == ([3, 4, 3], [2, 3, 2])
    assert found.predicting.tolist() == [2, 3]
    nothing = trees.unfold(forest, loss_mask=torch.zeros(3))
    assert len(nothing) == 0
    logits = torch.randn(7, 10, requires_grad=True)
    nothing.log_probs(logits).sum().backward()
    assert logits.grad.abs().sum() == 0


def test_rows_may_be_anywhere_and_padding_predicts_nothing() -> None:
    forest = trees.fold([*PICTURE, [1, 2, 3]])

    found = trees.unfold(forest, batch_of(forest, [1, 0, 0, -1], [1, 5, 2, -1]))
    assert found.row.tolist() == [2, 2, 0]
    assert found.target.tolist() == [8, 3, 3]
    assert (found.sample.tolist(), found.token.tolist()) == ([0, 1, 3], [3, 3, 2])
    values = [torch.arange(n) for n in (5, 4, 3, 3)]
    for held in (found, trees.unfold(forest, batch_of(forest, [1, 1], [1, 0]))):
        assert held.take(values).tolist() == held.token.tolist()
    assert trees.unfold(forest, batch_of(forest, [-1], [-1])).take(values).tolist() == []


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=7), st.randoms())
def test_every_token_of_every_sample_is_predicted_once(samples: list[list[int]], random: Any) -> None:
    forest = trees.fold(samples)
    owner, seen = [random.randrange(3) for _ in forest.tokens], []
    for rank in range(3):
        flat = [row for row, of in enumerate(owner) if of == rank]
        random.shuffle(flat)
        tree = [int(np.searchsorted(forest.trees, row, side="right")) - 1 for row in flat]
        place = [row - int(forest.trees[of]) for row, of in zip(flat, tree, strict=True)]
        found = trees.unfold(forest, batch_of(forest, tree, place))
        for row, *prediction in zip(found.row, found.target, found.sample, found.token, strict=True):
            sample, token = int(prediction[1]), int(prediction[2])
            assert flat[row] == forest.rows[forest.starts[sample] + token - 1]
            seen.append((sample, token, int(prediction[0])))
    assert sorted(seen) == [(i, t, ids[t]) for i, ids in enumerate(samples) for t in range(1, len(ids))]


@pytest.mark.slow
def test_the_example_counts_and_agrees() -> None:
    """The example's table equals a count of lengths; the example exits with an error if gradients differ."""
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    lines = run_python("examples/grpo_tree.py", env=env).splitlines()
    for path in sorted((ROOT / "examples/rollouts").glob("*.json")):
        groups = json.loads(path.read_text())["groups"]
        alone = sum(prompt + answer for prompt, answers in groups for answer in answers)
        folded = sum(prompt + sum(answers) for prompt, answers in groups)
        (row,) = (line.split() for line in lines if line.startswith(path.stem))
        assert row[1:3] == [f"{alone:,}", f"{folded:,}"]
    differences = [float(line.split()[-4]) for line in lines if line.startswith("step")]
    assert len(differences) == 3
    assert max(differences) < 1e-6


# ---- mistakes


def test_a_microbatch_must_contain_both_samples_of_a_pair() -> None:
    samples = [[1, 2], [1, 3], [4, 5], [6, 7]]  # the second pair begins with two tokens
    forest = trees.fold(samples, groups=[0, 0, 1, 1])
    values = torch.arange(4.0)
    assert [list(map(float, one)) for one in trees.unfold(forest).pairs(values)] == [[0, 2], [1, 3]]
    (batch,) = PlannedLoader(forest, **planning(job()), sampler=[[0]])
    assert [list(map(float, one)) for one in trees.unfold(forest, batch).pairs(values)] == [[0], [1]]
    (batch,) = PlannedLoader(forest, **planning(job()), sampler=[[0, 2]])
    with pytest.raises(ExecutionError, match="only one sample of pair 1 is in this microbatch"):
        trees.unfold(forest, batch).pairs(values)
    with pytest.raises(ExecutionError, match="even number of samples, 4, got 3"):
        trees.unfold(forest).pairs(values[:3])


def test_values_of_wrong_shapes_are_named() -> None:
    found = trees.unfold(trees.fold(PICTURE))
    for values in (torch.zeros(2), [torch.zeros(5)] * 2):
        with pytest.raises(ConfigError, match="each of the 3 samples"):
            found.take(values)
    with pytest.raises(ConfigError, match=r"values\[1\].*4 tokens"):
        found.take([torch.zeros(5), torch.zeros(3), torch.zeros(3)])
    rows = len(found.forest.tokens)
    for shape in ((rows - 1, 9), (2, rows, 9), (rows,)):
        with pytest.raises(ExecutionError, match=f"this rank's {rows} rows"):
            found.log_probs(torch.zeros(shape))


@pytest.mark.parametrize(("sample", "token"), [(1, 0), (0, 7)])
def test_a_batch_of_another_dataset_is_refused(sample: int, token: int) -> None:
    forest = trees.fold(PICTURE)
    with pytest.raises(ExecutionError, match=f"row 1 is token {token} of item {sample}"):
        trees.unfold(forest, batch_of(forest, [0, sample], [0, token]))


def test_a_batch_of_a_forest_of_equal_lengths_is_refused() -> None:
    other = trees.fold([[ids[0] + 1, *ids[1:]] for ids in PICTURE])
    with pytest.raises(ExecutionError, match="row 0 is token 0 of item 0"):
        trees.unfold(trees.fold(PICTURE), batch_of(other, [0, 0], [0, 1]))


def test_trees_without_their_masks_and_repeated_trees_are_refused() -> None:
    forest = trees.fold(PICTURE)
    given: Any = {"lengths": forest.lengths, "masks": [ap.masks.causal()]}
    (causal,) = PlannedLoader([forest[0]], **planning(job(1, 20)), **given)
    with pytest.raises(ExecutionError, match="not planned with the masks of the forest"):
        trees.unfold(forest, causal)
    (repeated,) = PlannedLoader(forest, **planning(job(1, 20)), sampler=[[0, 0]])
    with pytest.raises(ExecutionError, match="tree 0 is in the microbatch more than once"):
        trees.unfold(forest, repeated)
