"""Lightning on loaders: losses of every step, validation, and resuming after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apportion.ir.errors import ConfigError
from apportion.trainer.lightning import PlannedBatches
from tests.adapters import jobs_lightning as jobs
from tests.ranks.rank_pool import RankError

LOSS = 5e-7


def test_losses_equal_lightning_in_one_process(pool: Any, alone: Any, tmp_path: Path) -> None:
    (seen, samples), *others = pool.run(jobs.fit, 4, tmp_path / "planned")
    (wanted,) = alone.run(jobs.fit_alone, 1, tmp_path / "alone", samples)
    for own, other in zip(seen[:2], wanted[:2], strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=LOSS)
    np.testing.assert_allclose(seen[2], wanted[2], rtol=1e-5)
    assert all(other[0] == seen for other in others)


def test_manual_optimization_equals_lightning(pool: Any, tmp_path: Path) -> None:
    (wanted, _), *_ = pool.run(jobs.fit, 4, tmp_path / "own")
    (seen, _), *_ = pool.run(jobs.fit, 4, tmp_path / "manual", False, None, None, 1, jobs.Manual)
    for own, other, close in zip(seen, wanted, (LOSS, LOSS, 1e-6), strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=close)


def test_a_killed_run_resumes_within_an_epoch(pool: Any, tmp_path: Path) -> None:
    (whole, _), *_ = pool.run(jobs.fit, 4, tmp_path / "whole", True)
    with pytest.raises(RankError, match="died"):
        pool.run(jobs.fit, 4, tmp_path / "killed", True, None, 5)
    (rest, _), *_ = pool.run(jobs.fit, 4, tmp_path / "killed", True, tmp_path / "killed" / "step-4.ckpt")
    assert len(rest[0]) == 2 < len(whole[0])
    for own, other in zip(rest, whole, strict=True):
        assert own == other[-len(own) :]


def test_steps_that_are_not_whole_iterations_are_refused(pool: Any, tmp_path: Path) -> None:
    for why in pool.run(jobs.fit, 4, tmp_path, False, None, None, 1):
        assert "accumulate_grad_batches" in why


def test_overfitting_batches_is_refused(pool: Any, tmp_path: Path) -> None:
    for why in pool.run(jobs.fit, 4, tmp_path, False, None, None, 2, jobs.Net, 2):
        assert "overfit_batches = 2: would train on new batches" in why


def test_a_step_that_does_not_pass_the_plan_to_its_model_is_refused(pool: Any, tmp_path: Path) -> None:
    for why in pool.run(jobs.fit, 4, tmp_path, False, None, None, 2, jobs.Deaf):
        assert "input_ids = 'batch.tokens': are only this rank's rows" in why
        assert "call model(**hf.inputs(batch))" in why


def test_extra_attention_without_the_plan_is_refused(pool: Any, tmp_path: Path) -> None:
    for why in pool.run(jobs.fit, 4, tmp_path, False, None, None, 2, jobs.Half):
        assert "looked only at the" in why
        assert "rows of this rank, without the plan" in why


@pytest.mark.parametrize(
    ("kind", "says"), [(jobs.Mean, "is a mean over the"), (jobs.Twice, "is a result of shared_loss")]
)
def test_losses_that_are_not_shares_of_the_mean_are_refused(
    pool: Any, tmp_path: Path, kind: Any, says: str
) -> None:
    for why in pool.run(jobs.fit, 4, tmp_path, False, None, None, 2, kind):
        assert says in why


@pytest.mark.parametrize("given", [[1], None, lambda: [1]])
def test_values_other_than_a_loader_or_factory_are_refused(given: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"loader = '(list|NoneType)': must be a PlannedLoader, or a function"
    ):
        len(PlannedBatches(given))
