"""Lightning on loaders: losses of every step, validation, and resuming after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apportion.ir.errors import ConfigError
from apportion.trainer import hf
from apportion.trainer.lightning import PlannedBatches
from tests.adapters import jobs_hf as hf_jobs, jobs_lightning as jobs
from tests.ranks.rank_pool import RankError

LOSS = 5e-7


def test_losses_equal_lightning_in_one_process(pool: Any, alone: Any, tmp_path: Path) -> None:
    (recorded, samples), *others = pool.run(jobs.fit, 4, tmp_path / "planned")
    (expected,) = alone.run(jobs.fit_alone, 1, tmp_path / "alone", samples)
    for own, other in zip(recorded[:2], expected[:2], strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=LOSS)
    np.testing.assert_allclose(recorded[2], expected[2], rtol=1e-5)
    assert all(other[0] == recorded for other in others)


@pytest.mark.parametrize(
    ("kind", "accumulation"),
    [
        (jobs.ManualNet, 1),
        (jobs.TermsNet, 2),
        (jobs.EvaluatedByGroupNet, 2),
        (jobs.FinderNet, 2),
        (jobs.ShardedNet, 2),
    ],
)
def test_other_steps_of_the_same_loss_train_equally(
    pool: Any, tmp_path: Path, kind: Any, accumulation: int
) -> None:
    (expected, _), *_ = pool.run(jobs.fit, 4, tmp_path / "own")
    (recorded, _), *_ = pool.run(jobs.fit, 4, tmp_path / "other", False, None, None, accumulation, kind)
    for own, other, close in zip(recorded, expected, (LOSS, LOSS, 1e-6), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=close)


def test_a_killed_run_resumes(pool: Any, tmp_path: Path) -> None:
    (whole, _), *_ = pool.run(jobs.fit, 4, tmp_path / "whole", True)
    with pytest.raises(RankError, match="died"):
        pool.run(jobs.fit, 4, tmp_path / "killed", True, None, 5)
    for name, steps in (("step-4.ckpt", 2), ("epoch-0.ckpt", 3)):
        resume = tmp_path / "killed", True, tmp_path / "killed" / name
        (rest, _), *_ = pool.run(jobs.fit, 4, *resume)
        assert len(rest[0]) == steps < len(whole[0])
        for own, other in zip(rest, whole, strict=True):
            # MKL rounds by the alignment of memory
            np.testing.assert_allclose(own, other[-len(own) :], rtol=1e-6)
    for error in pool.run(jobs.fit, 4, *resume, None, 2, jobs.OverriddenNet):
        assert "call super().on_train_start() there" in error


def test_steps_that_are_not_whole_iterations_are_refused(pool: Any, tmp_path: Path) -> None:
    for error in pool.run(jobs.fit, 4, tmp_path, False, None, None, 1):
        assert "accumulate_grad_batches" in error


def test_overfitting_batches_is_refused(pool: Any, tmp_path: Path) -> None:
    for error in pool.run(jobs.fit, 4, tmp_path, False, None, None, 2, jobs.Net, 2):
        assert "overfit_batches = 2: would train on new batches" in error


def test_a_step_that_does_not_pass_the_plan_to_its_model_is_refused(pool: Any, tmp_path: Path) -> None:
    for error in pool.run(jobs.fit, 4, tmp_path, False, None, None, 2, jobs.PlanDroppingNet):
        assert "input_ids = 'batch.tokens': are only this rank's rows" in error
        assert "call model(**hf.inputs(batch))" in error


def test_extra_attention_without_the_plan_is_refused(pool: Any, tmp_path: Path) -> None:
    for error in pool.run(jobs.fit, 4, tmp_path, False, None, None, 2, jobs.ExtraAttentionNet):
        assert "looked only at the" in error
        assert "rows of this rank, without the plan" in error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (jobs.LocalMeanNet, "is a mean over the"),
        (jobs.DoublyScaledNet, "is a result of shared_loss"),
        (jobs.AveragedNet, "or has averaged_over"),
    ],
)
def test_losses_that_are_not_shares_of_the_mean_are_refused(
    pool: Any, tmp_path: Path, kind: Any, message: str
) -> None:
    for error in pool.run(jobs.fit, 4, tmp_path, False, None, None, 2, kind):
        assert message in error


@pytest.mark.parametrize("value", [[1], None, lambda: [1]])
def test_values_other_than_a_loader_or_factory_are_refused(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"loader = '(list|NoneType)': must be a PlannedLoader, or a function"
    ):
        len(PlannedBatches(value))


def test_evaluation_that_has_begun_keeps_the_place_in_training() -> None:
    loader = hf_jobs.loader(hf.enable(hf_jobs.new_model("llama")), 1, tokens=240)
    trained, evaluated = iter(PlannedBatches(loader)), iter(PlannedBatches(loader, training=False))
    next(trained), next(trained)
    place = loader.state_dict()
    next(evaluated)
    assert loader.state_dict() == place
