"""Hugging Face's Trainer on loaders: losses of every step, evaluation, and resuming after a kill."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets

from apportion import Samples, masks
from apportion.ir.errors import ConfigError
from tests.adapters import jobs_hf_trainer as jobs
from tests.ranks.rank_pool import RankError

LOSS = 5e-7


def test_losses_equal_trainer_in_one_process(pool: Any, alone: Any, tmp_path: Path) -> None:
    (logged, samples), *others = pool.run(jobs.train, 4, tmp_path / "planned")
    (expected,) = alone.run(jobs.train_alone, 1, tmp_path / "alone", samples[: len(samples) // 2])
    np.testing.assert_allclose(logged["loss"], expected["loss"], rtol=0, atol=LOSS)
    np.testing.assert_allclose(logged["grad_norm"], expected["grad_norm"], rtol=1e-5)
    assert logged["epoch"] == expected["epoch"]
    assert all(other[0]["loss"] == logged["loss"] for other in others)


def test_mixed_precision(pool: Any, alone: Any, tmp_path: Path) -> None:
    """accelerate converts the logits to float32 only after the loss."""
    options = {"bf16": True}
    (logged, samples), *_ = pool.run(jobs.train, 4, tmp_path / "planned", options)
    (expected,) = alone.run(jobs.train_alone, 1, tmp_path / "alone", samples[: len(samples) // 2], options)
    np.testing.assert_allclose(logged["loss"], expected["loss"], rtol=0, atol=2e-3)
    np.testing.assert_allclose(logged["grad_norm"], expected["grad_norm"], rtol=2e-2)


@pytest.mark.parametrize(("groups", "microbatches"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_evaluation_is_the_mean_over_tokens(
    groups: int, microbatches: int, pool: Any, alone: Any, tmp_path: Path
) -> None:
    ((first, second), count), *_ = pool.run(jobs.evaluate, 4, tmp_path, groups, microbatches)
    (expected,) = alone.run(jobs.mean_alone, 1)
    assert count > 1  # batches of different numbers of tokens
    assert first == second
    assert abs(first - expected) <= LOSS


def test_an_evaluation_before_training_changes_nothing(pool: Any, tmp_path: Path) -> None:
    """Trainer itself then trains without DDP (transformers 5.23)."""
    (expected, _), *_ = pool.run(jobs.train, 4, tmp_path)
    (logged, _), *_ = pool.run(jobs.train, 4, tmp_path, (), "before")
    assert logged == expected | {"eval_loss": logged["eval_loss"]}


def test_a_killed_run_resumes_within_an_epoch(pool: Any, tmp_path: Path) -> None:
    name = "qwen3_moe"  # saved under other names
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    (whole, _), *_ = pool.run(jobs.train, 4, tmp_path / "whole", saving, True, None, None, True, name)
    with pytest.raises(RankError, match="died"):
        pool.run(jobs.train, 4, tmp_path / "killed", saving, True, None, 5, True, name)
    folder = tmp_path / "killed" / "checkpoint-4"
    assert json.loads((folder / "planned.json").read_text())["iteration"] == 1  # of epoch 1
    (rest, _), *_ = pool.run(jobs.train, 4, tmp_path / "killed", saving, True, folder, None, True, name)
    for name in ("loss", "eval_loss", "epoch"):
        assert rest[name] == whole[name]  # earlier logs are in the checkpoint


def test_evaluation_on_the_training_loader_does_not_move_it(pool: Any, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    evaluated = tmp_path, saving, "training"
    (whole, _), *_ = pool.run(jobs.train, 4, *evaluated, None, None, True)
    (rest, _), *_ = pool.run(jobs.train, 4, *evaluated, tmp_path / "checkpoint-2", None, True)
    assert rest == whole


def test_a_loss_of_ones_own_is_checked(pool: Any, tmp_path: Path) -> None:
    for kind, words in (
        ("mean", "is a mean over the .* labels of this rank"),
        ("share", "averages gradients"),
    ):
        with pytest.raises(RankError, match=words):
            pool.run(jobs.own_loss, 4, tmp_path, kind)
    for messages in pool.run(jobs.own_loss, 4, tmp_path, "focal"):
        assert "the loss cannot be checked" in messages
    assert not any(pool.run(jobs.own_loss, 4, tmp_path, "sum"))


def test_options_that_change_the_loss_are_refused(pool: Any, tmp_path: Path) -> None:
    for options, words in (
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor.*shift"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha.*a rank's rows"),
        ({"compute_metrics": True}, "compute_metrics.*plan's order"),
        ({"predict": True}, "test_dataset.*plan's order"),
        ({"compute_loss_func": True}, "compute_loss_func.*shifted labels"),
        ({"kind": jobs.OwnSampler}, "_get_train_sampler.*sampler="),
        ({"plain": True}, "train_dataset.*without plans"),
        ({"weighted": True, "accumulation": 1}, "loss_weights.*own loss has no weights"),
        ({"data_collator": True}, "data_collator.*not collated.*labels into the samples"),
    ):
        (error,) = pool.run(jobs.refusal, 1, tmp_path, options)
        assert re.search(words, error)


@pytest.mark.parametrize("column", ["loss_mask", "completion_mask", "loss_weights"])
def test_columns_that_trainer_would_drop_are_refused(pool: Any, tmp_path: Path, column: str) -> None:
    (error,) = pool.run(jobs.with_column, 1, tmp_path, column)
    assert re.search(f"{column}.*ignores", error)


def test_evaluation_on_training_samples_has_a_loader_of_its_own(pool: Any, tmp_path: Path) -> None:
    assert pool.run(jobs.on_training_samples, 1, tmp_path) == [[(2, [1, 1]), (1, [0, 1])]]


def test_packed_and_unpacked_datasets_are_concatenated() -> None:
    packed = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]], "seq_lengths": [[1, 3]]})
    dataset = concatenate_datasets([packed, Dataset.from_dict({"input_ids": [[5, 6]]})])
    assert Samples(dataset).masks == [masks.documents([1, 3]), None]
    with pytest.raises(ConfigError, match=r"sample 1 = \[\]: must have input_ids"):
        Samples(Dataset.from_dict({"input_ids": [[1], None]}))


def test_a_transform_of_the_dataset_decides_lengths() -> None:
    dataset = Dataset.from_dict({"text": ["a b c", "d"]})
    dataset.set_transform(lambda rows: {"input_ids": [[*map(ord, text[::2]), 0] for text in rows["text"]]})
    samples = Samples(dataset)
    assert samples.lengths.tolist() == [4, 2]
    assert samples[0]["input_ids"] == [97, 98, 99, 0]
