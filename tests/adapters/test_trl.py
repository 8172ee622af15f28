"""trl's trainers on planned batches: their logs match those of one process on the same samples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.adapters import jobs_trl as jobs
from tests.ranks.rank_pool import Pool

LOSS = 2e-6

FORMS = {
    "text": ("text", {"max_length": 40}),
    "packed": ("text", {"packing": True, "max_length": 64}),
    "completions": ("prompt", {"completion_only_loss": True}),
    "prompts too": ("prompt", {"completion_only_loss": False}),
    "packed completions": ("prompt", {"packing": True, "max_length": 64}),
    "assistant": ("chat", {"assistant_only_loss": True, "max_length": 120}),
    "dft": ("prompt", {"loss_type": "dft"}),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[Any]:
    """A pool of only two ranks, since trl waits for all ranks of the world."""
    ranks = Pool(timeout_s=120, size=2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("name", FORMS)
def test_sft_equals_one_process(pair: Any, alone: Any, tmp_path: Path, name: str) -> None:
    form, options = FORMS[name]
    (found, samples), *others = pair.run(jobs.sft, 2, tmp_path / "planned", form, options)
    (expected,) = alone.run(jobs.sft_alone, 1, tmp_path / "alone", form, options, samples)
    assert len(found["loss"]) == len(samples) / 2 > 1
    for figure in ("loss", "entropy", "mean_token_accuracy"):
        np.testing.assert_allclose(found[figure], expected[figure], rtol=0, atol=LOSS)
    np.testing.assert_allclose(found["grad_norm"], expected["grad_norm"], rtol=1e-5)
    assert all(other[0]["loss"] == found["loss"] for other in others)


def test_sft_evaluation_is_the_mean_over_tokens(pair: Any, tmp_path: Path) -> None:
    ((first, again), expected), *_ = pair.run(jobs.evaluation, 2, tmp_path)
    assert first == again
    assert abs(first - expected) <= LOSS


def test_trainers_and_options_that_change_the_loss_are_refused(alone: Any, tmp_path: Path) -> None:
    for setup, words in (
        ("dpo", "compute_loss.*DPOTrainer"),
        ("loader", "train_dataset.*planned="),
        ("collator", "data_collator.*DataCollatorForChatML"),
    ):
        (error,) = alone.run(jobs.refusal, 1, tmp_path, setup)
        assert re.search(words, error)


def test_preference_pairs_on_trees_equal_the_loss_and_gradients_of_trl(
    pair: Any, alone: Any, tmp_path: Path
) -> None:
    ((expected, gradients, samples),) = alone.run(jobs.dpo_alone, 1, tmp_path)
    for found, own in pair.run(jobs.dpo, 2, samples):
        assert abs(found - expected) <= LOSS
        for name, value in gradients.items():
            np.testing.assert_allclose(own[name], value, rtol=0, atol=1e-5 * np.abs(value).max())
